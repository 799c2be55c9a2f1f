"""Tables as they come: each is read right, or refused with the line and what to do."""

import csv
import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from archives import read_table

from histocoder.data import csv_file, table
from histocoder.data.examples import ExampleFiles
from histocoder.data.key import read_key
from histocoder.data.table import fingerprint, open_table
from histocoder.errors import Notice, UserError
from histocoder.evaluation.review_file import review
from histocoder.formatters import build_formatter

NOTE = '"note (a, b, c, d, e, f, g)"'
"""A column whose name holds more commas than a header has semicolons."""

GOOD = [
    (b"occ1,h\nx,1\n", ["x"]),
    (b"occ1,h\nx,1", ["x"]),
    (b"occ1,h\r\nx,1\r\n\r\ny,2\r\n", ["x", "y"]),
    (b'occ1,h\n"a, b",1\n"say ""x""",2\n"two\nlines",3\n', ["a, b", 'say "x"', "two\nlines"]),
    (b"occ1;h\nx,y;1\n", ["x,y"]),
    (b"occ1\th\nx\t1\n", ["x"]),
    (b"\xef\xbb\xbfocc1,h\nnan,1\nNA,2\nNone,3\n", ["nan", "NA", "None"]),
    (b"h,occ1,other\n1,x,\n2,,z\n", ["x", None]),
    (b"occ1,h\n \t,1\n", [None]),
    ("occ1,h\nvæver,1\n".encode("cp1252"), ["væver"]),
    (b"occ1\nx\n", ["x"]),
    (b'occ1,h\nsix" nails,1\n', ['six" nails']),
    (b"occ1|h\nx,y|1\n", ["x,y"]),
    (b"\n\nocc1,h\nx,1\n", ["x"]),
    (b'Census of 1880\n\n"Copied, 2019","by ""J. S."""\nocc1,h\nx,1\ny,2\n', ["x", "y"]),
    (b"Census of 1880;;\n;;\n Occ1 ;h;note\nx;1;\n", ["x"]),
]

BAD = [
    (b"", "is empty"),
    (b"  \n", "is empty|no column"),
    (b"occ1,h\n", "no rows"),
    (b"occ1,h", "no rows"),
    (b"occ,h\nx,1\n", "no column 'occ1'; it has: occ, h. Did you mean 'occ'"),
    (b"occ1,h\nx,1\ny,2,3\n", r"line 3: 3 fields .* 2 \('y,2,3'\)"),
    (b'occ1,h\n"x\ny",1\nz\n', r"line 4: 1 fields"),
    (b'occ1,h\nx,1\n"y,2\n', "line 3|quotation mark"),
    (b"occ1,h\nx\0y,1\n", "NUL byte in line 2"),
    ("occ1,h\nx,1\n".encode("utf-16"), "UTF-16"),
    (b"PK\x03\x04rest of a spreadsheet", "spreadsheet"),
    (b"occ1,occ1,h\nx,y,1\n", "2 columns named 'occ1'"),
    ("id;Öcc1;OCC1 \nx;1;y\n".encode(), r"several columns like 'occ1' \('Öcc1', 'OCC1 '\); write the one as it is"),
    (b"occ1,h\n\x81,1\n", "neither UTF-8 nor Windows-1252"),
    (b"occ1,h\nv\xc3\xa6ver,1\nkj\xc3\xb8ber,2\nsmed\xe6,3\n", r"line 4: the byte 0xE6 \(byte 31 of the file\)"),
    (b"occ1,h\n\xe2\x82\xac \xc3\xa6,1\nsmed\xc3", r"line 3: the byte 0xC3 \(byte 21 of the file\)"),  # cut off
    (b"\xef\xbb\xbfocc1,h\nv\xe6ver,1\n", r"line 2: the byte 0xE6 \(byte 12 of the file\)"),  # the mark says UTF-8
]


@pytest.mark.parametrize(("content", "texts"), GOOD)
def test_read_right(tmp_path: Path, content: bytes, texts: list[str | None]):
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    assert read_table(path, ["occ1"]).columns["occ1"].to_pylist() == texts


def test_damaged_utf8_is_told_from_cp1252(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "t.csv"
    rows = "occ1,h\nvæver og købmand,1\n€,2\n«CAFÉ»,3\n"  # É» is a character of UTF-8, too
    for num_bytes in range(1, 60):
        monkeypatch.setattr(csv_file, "_CHECK_BYTES", num_bytes)
        path.write_bytes(rows.encode("cp1252"))
        assert read_table(path, ["occ1"]).columns["occ1"].to_pylist() == ["væver og købmand", "€", "«CAFÉ»"]
        path.write_bytes(rows.encode() + b"sm\xf8r,4\n" + rows.encode())
        with pytest.raises(UserError, match=r"line 5: the byte 0xF8 \(byte 49 of the file\)"):
            open_table(path, ["occ1"])


def test_text_that_was_encoded_twice_is_told(tmp_path: Path):
    path = tmp_path / "t.csv"
    path.write_bytes("occ1,h\nfarmer,1\ndräng,2\n".encode().decode("cp1252").encode())
    (notice,) = open_table(path, ["occ1"]).notices
    assert f"{path}, line 3: accented letters are written as 'Ã' and a sign" in notice
    for text in ("dräng", "IRMÃ (freira)", "Ã"):
        path.write_text(f"occ1,h\n{text},1\n", "utf-8")
        assert not open_table(path, ["occ1"]).notices


@pytest.mark.parametrize(("content", "message"), BAD)
def test_refused_in_one_sentence(tmp_path: Path, content: bytes, message: str):
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        read_table(path, ["occ1"])
    assert "\n" not in str(caught.value)


STRAY = {
    "opened in the last column, and not closed": ('a,en,"Smith\nb,en,x\nc,en,y\n', UserError),
    "opened in another column, and not closed": ('a,"en,x\nb,en,y\nc,en,z\n', UserError),
    "the same behind a closed one": ('a,en,"x"\nb,en,"Smith', None),  # nothing is lost
    "opened twice in one column": ('a,"en,x\nb,en,y\nc,"en,z\n', Notice),
    "ditto marks": ('a,",x\nb,",y\n', Notice),
    "text of two lines": ('a,en,"x\ny, z"\nb,en,"one\ntwo"\n', None),
    "at the end, closed": ('a,en,"x\ny"\n\n', None),
}


@pytest.mark.parametrize(("rows", "expected"), STRAY.values(), ids=STRAY)
def test_quotation_marks_too_few_or_too_many(
    tmp_path: Path, rows: str, expected: type[Exception] | None, recwarn: pytest.WarningsRecorder
):
    path = tmp_path / "t.csv"
    path.write_text("occ1,lang,note\n" + rows)
    if expected is UserError:
        with pytest.raises(UserError, match="line 2: a quotation mark is opened and not closed"):
            read_table(path, ["occ1"])
        return
    read_table(path, ["occ1"])
    found = [str(one.message) for one in recwarn if issubclass(one.category, Notice)]
    assert len(found) == (expected is not None) and all("line 2: one cell holds" in text for text in found)


def test_inches_are_not_open_quotes(tmp_path: Path):
    (tmp_path / "t.csv").write_text('occ1,note\nmaker of 5" nails,x,y\nb,z\n')
    with pytest.raises(UserError, match="line 2: 3 fields where the header has 2"):
        read_table(tmp_path / "t.csv", ["occ1"])


@pytest.mark.parametrize("num_bytes", [1 << 22, 64], ids=["in a block", "over blocks"])
def test_open_quotes_are_found_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: int):
    monkeypatch.setattr(csv_file, "_BLOCK_BYTES", num_bytes)
    (tmp_path / "t.csv").write_text("occ1,note\n" + "a,x\n" * 29 + 'a,6" x\nb,"y\n' + "c,z\n" * 60)
    with pytest.raises(UserError, match=r"line 32: a quotation mark is opened and not closed\. Close it"):
        open_table(tmp_path / "t.csv", ["occ1"]).count_rows()


def test_ditto_marks_in_a_single_column_are_told(tmp_path: Path):
    (tmp_path / "t.csv").write_text('occ1\nfarmer\n"\nbaker\n"\nsmith\n')
    with pytest.warns(Notice, match="line 3: one cell holds 2 line breaks"):
        read_table(tmp_path / "t.csv", ["occ1"])


def test_lines_count_quoted_line_breaks_and_blank_lines(tmp_path: Path):
    path = tmp_path / "t.csv"
    path.write_text('occ1,h\n"a\nb",1\n\nc,2\n\n\nd,3\n')
    table = read_table(path, ["occ1"])
    assert table.lines(table.rows * 0 + range(3)).tolist() == [2, 5, 8]


@pytest.mark.parametrize("num_columns", [2, 10_000])
def test_lines_are_found_behind_long_cells_and_headers(tmp_path: Path, num_columns: int):
    path = tmp_path / "t.csv"
    path.write_text(",".join(f"column number {i}" for i in range(num_columns)) + "\n")
    with path.open("a") as file:
        file.write("x" * 200_000 + "," * (num_columns - 1) + "\ny\n")
    limit = csv.field_size_limit()
    with pytest.raises(UserError, match=f"line 3: 1 fields where the header has {num_columns}"):
        read_table(path, ["column number 1"])
    assert csv.field_size_limit() == limit  # which others that use Python's reader have set


def test_backslashes_before_quotation_marks_are_those_of_r(tmp_path: Path):
    path = tmp_path / "t.csv"
    path.write_text('"occ1","h"\n"smith",1\n"the \\"old, weak, or\nlame\\" cook","2"\n"5\\"",3\nx,4\n')
    file = open_table(path, ["occ1"])
    table = file.read(["occ1"])
    assert table.columns["occ1"].to_pylist() == ["smith", 'the "old, weak, or\nlame" cook', '5"', "x"]
    assert table.lines(table.rows * 0 + range(4)).tolist() == [2, 3, 5, 6]
    assert "quotation marks are escaped with backslashes, as R writes them" in file.notices[0]
    path.write_text('occ1,h\n"C:\\",1\n"a \\""b\\"" c",2\n5\\"x,3\n')
    file = open_table(path, ["occ1"])
    assert file.read(["occ1"]).columns["occ1"].to_pylist() == ["C:\\", 'a \\"b\\" c', '5\\"x'] and not file.notices


def test_missing_file_names_the_nearest(tmp_path: Path):
    (tmp_path / "census.csv").write_text("occ1\nx\n")
    with pytest.raises(UserError, match=r"File not found: .*sensus.csv. Did you mean .*census.csv"):
        read_table(tmp_path / "sensus.csv", ["occ1"])
    with pytest.raises(UserError, match="is a folder"):
        read_table(tmp_path, ["occ1"])


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_args: object, **_options: object) -> None:
        raise PermissionError

    (tmp_path / "t.csv").write_text("occ1\nx\n")
    monkeypatch.setattr(Path, "open", refuse)  # who tests as root may read all
    for look in (fingerprint, lambda path: open_table(path, ["occ1"])):
        with pytest.raises(UserError, match="permission denied"):
            look(tmp_path / "t.csv")


def test_no_parquet_file(tmp_path: Path):
    (tmp_path / "t.parquet").write_text("occ1\nx\n")
    with pytest.raises(UserError, match="not a Parquet file"):
        read_table(tmp_path / "t.parquet", ["occ1"])


@pytest.mark.parametrize("kind", [pa.float16(), pa.float32(), pa.float64()])
@pytest.mark.parametrize(
    ("numbers", "texts"),
    [
        ([2000.0, math.nan, None, -1.0], ["2000", None, None, "-1"]),
        ([0.5, math.nan, None], ["0.5", None, None]),
        ([1.0, math.inf], ["1", "inf"]),
        ([math.nan, None], [None, None]),
    ],
)
def test_nan_in_parquet_floats_is_missing(
    tmp_path: Path, kind: pa.DataType, numbers: list[float | None], texts: list[str | None]
):
    pq.write_table(pa.table({"h": pa.array(numbers, kind, from_pandas=False)}), tmp_path / "t.parquet")
    assert read_table(tmp_path / "t.parquet", ["h"]).columns["h"].to_pylist() == texts


def test_large_whole_numbers_in_parquet(tmp_path: Path):
    numbers = pa.array([12345678901.0, math.nan, 2.0**53], from_pandas=False)
    pq.write_table(pa.table({"h": numbers, "i": pa.array([1e300, 1.0, 2.0])}), tmp_path / "t.parquet")
    columns = read_table(tmp_path / "t.parquet", ["h", "i"]).columns
    assert columns["h"].to_pylist() == ["12345678901", None, "9007199254740992"]
    assert columns["i"].to_pylist() == ["1e+300", "1", "2"]


@pytest.mark.parametrize(
    "column",
    [
        pa.array([["61110"], None]),
        pa.array([{"code": "61110"}, None]),
        pa.array([[("a", 1)], None], pa.map_("str", "int8")),
    ],
    ids=("list", "struct", "map"),
)
def test_parquet_columns_that_are_not_text(tmp_path: Path, column: pa.Array):
    pq.write_table(pa.table({"occ1": ["x", "y"], "h": column}), tmp_path / "t.parquet")
    assert open_table(tmp_path / "t.parquet", ["occ1"]).read(["occ1"]).columns["occ1"].to_pylist() == ["x", "y"]
    with pytest.raises(UserError, match=r"column 'h': .* one value in each cell"):
        open_table(tmp_path / "t.parquet", ["h"])
    with pytest.raises(UserError, match=r"column 'h': .* one value in each cell"):
        open_table(tmp_path / "t.parquet", ["occ1"]).read(["occ1", "h"])


def test_parquet_bytes_must_be_utf8(tmp_path: Path):
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"occ1": ["væver".encode()], "h": ["smør".encode("cp1252")]}), path)
    assert read_table(path, ["occ1"]).columns["occ1"].to_pylist() == ["væver"]
    with pytest.raises(UserError, match=r"t\.parquet, column 'h', holds bytes that are not UTF-8 text"):
        read_table(path, ["h"])


@pytest.mark.parametrize("header", ["occ1;lang;hisco_1", "lang;occ1", "occ1;other"])
def test_columns_that_may_be_missing_tell_the_separator(tmp_path: Path, header: str):
    path = tmp_path / "t.csv"
    path.write_text(f"{header};{NOTE}\n" + ";".join("x" * (header.count(";") + 2)) + "\n")
    file = open_table(path, ["occ1"], optional=["lang", "hisco_1"])
    assert file.header == [*header.split(";"), NOTE.strip('"')]
    assert file.read(["occ1"]).columns["occ1"].to_pylist() == ["x"]


def test_columns_are_checked_when_they_are_read(tmp_path: Path):
    (tmp_path / "t.csv").write_text("occ1,h,lang,lang\nx,1,a,b\n")
    file = open_table(tmp_path / "t.csv", ["occ1"], optional=["lang"])
    with pytest.raises(UserError, match="2 columns named 'lang'"):
        file.read(["occ1", "lang"])
    with pytest.raises(UserError, match="no column 'k'"):
        file.read(["k"])


def test_tables_are_opened_by_their_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    looked_at: list[Path] = []

    class Looked(csv_file.CsvFile):
        def __init__(self, path: Path, *names: object) -> None:
            looked_at.append(path)
            super().__init__(path, *names)

    monkeypatch.setattr(table, "CsvFile", Looked)

    examples, key, coded = (tmp_path / name for name in ("examples.csv", "key.csv", "coded.csv"))
    examples.write_text(f"occ1;hisco_1;hisco_2;lang;{NOTE}\nfarmer;61110;77610;en;x\n")
    key.write_text(f"system_code;code;{NOTE}\n61110;0;x\n77610;1;x\n")
    coded.write_text(f"occ1;hisco_1;prob_1;conf;{NOTE}\nfarmer;61110;0.5;0.5;x\n")
    found = ExampleFiles((examples,), ("hisco_1", "hisco_2"), build_formatter("hisco", num_blocks=2)).read()
    assert found.langs == ["en"] and found.codes.to_numpy().tolist() == [["61110", "77610"]]
    assert read_key(key).codes == ("61110", "77610")
    chosen = review(coded, tmp_path / "review.csv", budget=1)
    assert chosen["hisco_1"].tolist() == ["61110"]
    assert looked_at == [examples, key, coded]
