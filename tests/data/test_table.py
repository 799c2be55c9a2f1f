"""Tables as they come: each is read right, or refused with the line; tests/faults/test_tables.py has more of them."""

import csv
import gzip
import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from archives import read_table

from histocoder.data.table import open_table
from histocoder.errors import Notice, UserError


def test_damaged_utf8_is_told_from_cp1252(tmp_path: Path):
    path = tmp_path / "t.csv"
    rows = "occ1,h\nvæver og købmand,1\n€,2\n«CAFÉ»,3\n"  # É» is a character of UTF-8, too
    path.write_bytes(rows.encode("cp1252"))
    assert read_table(path, ["occ1"]).columns["occ1"].to_pylist() == ["væver og købmand", "€", "«CAFÉ»"]
    path.write_bytes(rows.encode() + b"sm\xf8r,4\n" + rows.encode())
    with pytest.raises(UserError, match=r"line 5: the byte 0xF8"):
        open_table(path, ["occ1"])


STRAY = {
    "opened in the last column, and not closed": ('a,en,"Smith\nb,en,x\nc,en,y\n', UserError),
    "opened in another column, and not closed": ('a,"en,x\nb,en,y\nc,en,z\n', UserError),
    "the same behind a closed one": ('a,en,"x"\nb,en,"Smith', None),  # nothing is lost
    "opened twice in one column": ('a,"en,x\nb,en,y\nc,"en,z\n', Notice),
    "ditto marks": ('a,",x\nb,",y\n', Notice),
    "text of two lines": ('a,en,"x\ny, z"\nb,en,"one\ntwo"\n', None),
    "behind many rows": ("a,en,x\n" * 29 + 'a,en,6" x\nb,en,"y\n' + "c,en,z\n" * 60, UserError),
    "at the end, closed": ('a,en,"x\ny"\n\n', None),
}


@pytest.mark.parametrize(("rows", "expected"), STRAY.values(), ids=STRAY)
def test_quotation_marks_too_few_or_too_many(
    tmp_path: Path, rows: str, expected: type[Exception] | None, recwarn: pytest.WarningsRecorder
):
    path = tmp_path / "t.csv"
    path.write_text("occ1,lang,note\n" + rows)
    if expected is UserError:
        with pytest.raises(UserError, match=r"line (2|32): a quotation mark is opened and not closed"):
            read_table(path, ["occ1"])
        return
    read_table(path, ["occ1"])
    found = [str(one.message) for one in recwarn if issubclass(one.category, Notice)]
    assert len(found) == (expected is not None) and all("line 2: one cell holds" in text for text in found)


def test_titles_above_the_header_are_ignored(tmp_path: Path):
    path = tmp_path / "t.csv"
    path.write_text("Census of 1881\n\nSource,parish\nOCC1;h;note\nfarmer;1;\n")
    file = open_table(path, ["occ1"])
    assert file.header == ["OCC1", "h", "note"] and file.read(["occ1"]).columns["occ1"].to_pylist() == ["farmer"]
    assert file.notices == [f"{path}: the header is line 4; what is above it is ignored."]


@pytest.mark.parametrize("header", [["", "occ1"], ["", "job", "note"], ["occ1", "", "", ""]])
def test_headers_may_have_blank_names(tmp_path: Path, header: list[str]):
    with gzip.open(path := tmp_path / "T.CSV.GZ", "wt") as text:
        text.write("".join(",".join(row) + "\n" for row in (header, *[[str(i) for i in range(len(header))]] * 3)))
    file = open_table(path, [])
    assert file.header == header and sum(map(len, file.chunks(chunk_rows=2))) == 3


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


@pytest.mark.parametrize(
    ("cells", "texts"),
    [
        (pa.array([2000.0, math.nan, None, -1.0], pa.float32(), from_pandas=False), ["2000", None, None, "-1"]),
        (pa.array([0.5, math.inf, 1e300]), ["0.5", "inf", "1e+300"]),
        (pa.array([12345678901.0, 2.0**53]), ["12345678901", "9007199254740992"]),
        (pa.array(["væver".encode(), None]), ["væver", None]),
        (pa.array(["smør".encode("cp1252")]), r"column 'h', holds bytes that are not UTF-8 text"),
        (pa.array([["61110"], None]), r"column 'h', holds .* one value in each cell"),
    ],
    ids=range(6),
)
def test_types_of_parquet_as_text(tmp_path: Path, cells: pa.Array, texts: list[str | None] | str):
    pq.write_table(pa.table({"h": cells}), tmp_path / "t.parquet")
    if isinstance(texts, list):
        assert read_table(tmp_path / "t.parquet", ["h"]).columns["h"].to_pylist() == texts
        return
    with pytest.raises(UserError, match=texts):
        read_table(tmp_path / "t.parquet", ["h"])
