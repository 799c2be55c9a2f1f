"""Tables as no one should write them: each is read right, or refused in a sentence that names line
and column.
"""

import csv
import gzip
import io
import math
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from archives import read_table
from conftest import cases, mistake, shared, write
from hypothesis import given, settings
from hypothesis import strategies as st

from histocoder.cli.main import main
from histocoder.config import PrepareConfig
from histocoder.data.augment import WordList
from histocoder.data.key import read_key
from histocoder.data.prepare import prepare
from histocoder.errors import Notice, UserError
from histocoder.tables.table import open_table

GOOD = b"occ1,hisco_1\nfarmer,61110\nbaker,77610\n"

REFUSED = [
    (b"", "is empty"),
    (b"\xef\xbb\xbf", "is empty"),
    (b"occ1,hisco_1", "no rows"),
    (b"occ1\nfarmer\n", "no column 'hisco_1'; it has: occ1"),
    (b"occ1&hisco_1\nfarmer&61110\n", "no column 'occ1'; it has: occ1&hisco_1"),
    (
        b"OCC1,Occ1 ,HISCO_1\nx,y,61110\n",
        r"several columns like 'occ1' \('OCC1', 'Occ1 '\); rename all but one",
    ),
    (b"occup,hisco_1\nfarmer,61110\n", r"Did you mean 'occup'\? Name it with --input-col\."),
    (b'"occ1,hisco_1\nfarmer,61110\n', r"it has: 'occ1,hisco_1\\nfarmer,61110'"),
    (b'a\x1b[31mb,"x\ny"\n1,2\n', r"it has: 'a\\x1b\[31mb', 'x\\ny'"),
    (
        b",".join(b"column%d" % i for i in range(5000)) + b"\n",
        r"it has: column0.*column49, …\. Name it with --input",
    ),
    (b"occ1,hisco_1\nfarmer\n", "line 2: 1 fields where the header has 2"),
    (GOOD + b"miner, coal,71105\n", "line 4: 3 fields .*Quote a field"),
    (GOOD + b'maker of 5" nails,71105,y\n', "line 4: 3 fields where the header has 2"),  # inches
    (GOOD + b'"a\nb",61110\nx\n', "line 6: 1 fields"),
    (GOOD.replace(b"\n", b"\r\n") + b"x\r\n", "line 4: 1 fields"),
    (GOOD + b"mi\0ner,71105\n", "NUL byte in line 4"),
    (
        GOOD + bytes(range(0x81, 0xFF, 3)) * 9 + b",71105\n",
        "not UTF-8 text, nor in another usual encoding",
    ),
    (
        GOOD + b"v\xc3\xa6ver,71105\nkj\xc3\xb8ber,1\nsmed\xe6,1\n",
        "line 6: the byte 0xE6 is not UTF-8",
    ),
    (
        GOOD + b"\xe2\x82\xac \xc3\xa6,71105\nsmed\xc3",
        "line 5: the byte 0xC3 is not UTF-8",
    ),  # cut off
    (
        b"\xef\xbb\xbf" + GOOD + b"v\xe6ver,71105\n",
        "line 4: the byte 0xE6 is not UTF-8",
    ),  # the mark says UTF-8
    (b"PK\x03\x04\x14\0\x06\0", "or a workbook"),
    (b'{"occ1": "farmer", "hisco_1": 61110}\n', "no column 'occ1'"),
    (
        GOOD + b'"a\nb",7110\n\nc,2\n',
        "line 4, hisco_1: '7110' has .*line 7, hisco_1: '2' .*--allow",
    ),
    (
        GOOD + b"cook,53130\n" * 20 + b"miner,711055\n",
        "line 24, hisco_1: '711055' is longer than 5 characters",
    ),
    (GOOD + b"miner,71 05\n", "line 4, hisco_1: '71 05'"),
    (GOOD + b'miner,"71\n05"\n', r"line 4, hisco_1: '71\\n05'"),
    (GOOD + b"miner," + b"7" * 100_000 + b"\n", r"line 4, hisco_1: '7{57}\.\.\.'"),
    (b"occ1,hisco_1\n,61110\n ,77610\n", "no row has a description"),
    (b"occ1,hisco_1\nfarmer,61110\nbaker,61110\n", "only one code"),
    (b"occ1,hisco_1\nfarmer,61110\nfarmer,77610\n", "one distinct description"),
]

READ = [
    *(
        (GOOD.decode().encode(form), ["farmer", "baker"])
        for form in ("utf-16", "utf-16-le", "utf-16-be", "utf-32")
    ),
    (GOOD + b",\n,,,\n , ,\nmiller,77110,,\n,,\n", ["farmer", "baker", "miller"]),
    (GOOD.replace(b"\n", b"\r\r\n") + b"miller,77110\x1a\x1a", ["farmer", "baker", "miller"]),
    (b"sep=^\nocc1^hisco_1\nfarmer^61110\nbaker^77610\n", ["farmer", "baker"]),
    (b'"occ1" "hisco_1"\n"1" "pig farmer" "61110"\n"2" "baker" "77610"\n', ["pig farmer", "baker"]),
    (b"occ1\thisco_1\n1\tfarmer\t61110\n2\tbaker\t77610\n", ["farmer", "baker"]),
    (b"occ1;hisco_1\nfarmer;61110;\nbaker;77610;\n", ["farmer", "baker"]),
    (GOOD + GOOD + b"\xef\xbb\xbf" + GOOD, [*["farmer"] * 3, *["baker"] * 3]),
    (GOOD, ["farmer", "baker"]),
    (GOOD + "miner,7110\u200b5\n".encode(), ["farmer", "baker", "miner"]),
    (GOOD + b"nan,71105\nNULL,71105\n", ["farmer", "baker", "nan", "NULL"]),
    (GOOD + b'six" nails,71105\n', ["farmer", "baker", 'six" nails']),
    (GOOD + b"=1+1,71105\n#x,71105\n\\,71105\n", ["farmer", "baker", "=1+1", "#x", "\\"]),
    (GOOD + "👩‍🌾 \u2028x,71105\n".encode(), ["farmer", "baker", "👩‍🌾 \u2028x"]),
    (GOOD + b"x" * 100_000 + b",71105\n", ["farmer", "baker", "x" * 100_000]),
    # É» is a character of UTF-8, too
    (
        "occ1,hisco_1\nvæver,61110\n€,77610\n«CAFÉ»,80110\n".encode("cp1252"),
        ["væver", "€", "«CAFÉ»"],
    ),
    (b"occ1,hisco_1\nfarmer, 61110 \nbaker,77610\n", ["farmer", "baker"]),
    (b"Census\n\n OCC1 |Hisco_1\nfarmer|61110\nbaker|77610\n", ["farmer", "baker"]),
]


@contextmanager
def table_of(content: bytes) -> Iterator[Path]:
    """A table in a folder of its own; for each of hypothesis' examples."""
    folder = Path(tempfile.mkdtemp())
    try:
        (folder / "t.csv").write_bytes(content)
        yield folder / "t.csv"
    finally:
        shutil.rmtree(folder)


def prepared(table: Path, **rules: bool) -> list[str]:
    """The descriptions of the rows that preparing keeps, in their order."""
    out = table.parent / "out"
    prepare(PrepareConfig(str(table), ("hisco_1",), share_val=0.5, **rules), out)
    parts = (
        read_table(out / f"data_{part}.csv", ["occ1"]).columns["occ1"] for part in ("train", "val")
    )
    kept = [text for part in parts for text in part.to_pylist()]
    return sorted(kept, key=read_table(table, ["occ1"]).columns["occ1"].to_pylist().index)


def refusal(work, *args: object) -> str:
    with pytest.raises(UserError) as caught:
        work(*args)
    message = str(caught.value)
    assert "\n" not in message.replace("\n- ", "") and len(message) < 3000
    return message


@pytest.mark.parametrize(("content", "message"), REFUSED, ids=range(len(REFUSED)))
def test_refused_with_line_and_column(content: bytes, message: str):
    with table_of(content) as table:
        said = refusal(prepared, table)
        assert re.search(message, said), said
        assert [path.name for path in table.parent.rglob("*")] == [
            "t.csv",
            "out",
        ]  # nothing half-prepared


@pytest.mark.parametrize(("content", "texts"), READ, ids=range(len(READ)))
def test_read_right(content: bytes, texts: list[str]):
    with table_of(content) as table:
        assert prepared(table) == texts


PIECES = [
    *'," \n\r;\t\\a1?\0',
    '""',
    "\r\n",
    "æ",
    "²",
    "\u2028",
    "\x0b",
    "61110",
    "2000",
    "a,61110\n",
    "x,77610\r\n",
]
CONTENTS = st.one_of(
    st.binary(max_size=80),
    st.builds(
        lambda head, pieces, encoding: (head + "".join(pieces)).encode(encoding, "replace"),
        st.sampled_from(
            [
                "",
                "occ1,hisco_1\n",
                "occ1;x;hisco_1\r\n",
                '"hisco_1"\tocc1\r',
                "\ufeffocc1,hisco_1\n",
            ]
        ),
        st.lists(st.sampled_from(PIECES), max_size=15),
        st.sampled_from(["utf-8", "cp1252", "latin-1", "utf-16"]),
    ),
    st.builds(
        lambda tail, at: GOOD[:at] + tail + GOOD[at:],
        st.binary(max_size=20),
        st.integers(0, len(GOOD)),
    ),
)


@given(CONTENTS, st.booleans(), st.booleans())
@settings(max_examples=400)
def test_any_bytes_are_prepared_or_refused(
    content: bytes, allow_short_codes: bool, drop_bad_labels: bool
):
    with table_of(content) as table:
        try:
            rules = {
                "allow_codes_shorter_than_block_size": allow_short_codes,
                "drop_bad_labels": drop_bad_labels,
            }
            assert prepared(table, **rules)
        except UserError as error:
            assert (
                "\n" not in str(error).replace("\n- ", "")
                and not (table.parent / "out" / "prepared.json").exists()
            )


CELLS = st.text(st.sampled_from('ab ,;"\n\r\tæ\\#'), max_size=6)


@given(
    st.lists(st.tuples(CELLS, CELLS, CELLS), min_size=1, max_size=8),
    st.sampled_from(",;\t"),
    st.sampled_from(
        [("\r\n", csv.QUOTE_MINIMAL), *((end, csv.QUOTE_ALL) for end in ("\n", "\r\n", "\r"))]
    ),
    st.sampled_from(["utf-8", "utf-8-sig", "cp1252"]),
)
@settings(max_examples=300)
def test_well_formed_tables_are_read_exactly(
    rows, delimiter: str, form: tuple[str, int], encoding: str
):
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=delimiter, lineterminator=form[0], quoting=form[1])
    writer.writerows([("occ1", "lang", "hisco_1"), *rows])
    with table_of(text.getvalue().encode(encoding)) as table:
        found = read_table(table, ["occ1", "lang", "hisco_1"]).columns.values()
        expected = [tuple(cell if cell.strip() else None for cell in row) for row in rows]
        assert list(zip(*(column.to_pylist() for column in found), strict=True)) == expected


@cases(
    ("content", "message"),
    ("61110,0\n77610,²\n", "line 3 has '²'"),
    ("61110,0\n77610,\n", "line 3 has ''"),
    ("61110,0\n77610,0\n", "line 3 has '0'"),
    ("61110,0\n77610," + "9" * 5000 + "\n", r"line 3 has '9{57}\.\.\.'"),
    (
        "61110,0\n61110 ,1\n",
        "each code, and a blank, once in the column 'system_code'; line 3 has '61110'",
    ),
    ids=range(5),
)
def test_keys(content: str, message: str):
    with table_of(f"system_code,code\n{content}".encode()) as path:
        assert re.search(message, refusal(read_key, path))


def test_frequencies_that_are_no_numbers(tmp_path: Path):
    for cell in ("many", "nan", "inf", "1e999", ""):
        path = write(tmp_path / "t.csv", "word,freq", "a,1", f"b,{cell}")
        assert f"line 3, freq: {cell!r} is not a number" in refusal(WordList.read, str(path), "nfc")
    path = tmp_path / "t.parquet"  # which has rows, not lines
    pq.write_table(pa.table({"word": ["a", "b"], "freq": ["1", "many"]}), path)
    assert "row 2, freq: 'many' is not a number" in refusal(WordList.read, str(path), "nfc")


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
    tmp_path: Path, rows: str, expected: type[Exception] | None, recwarn
):
    path = tmp_path / "t.csv"
    path.write_text(f"occ1,lang,note\n{rows}")
    if expected is UserError:
        with pytest.raises(
            UserError, match=r"line (2|32): a quotation mark is opened and not closed"
        ):
            read_table(path, ["occ1"])
        return
    read_table(path, ["occ1"])
    found = [str(one.message) for one in recwarn if issubclass(one.category, Notice)]
    assert len(found) == (expected is not None) and all(
        "line 2: one cell holds" in text for text in found
    )


def test_titles_above_the_header_are_ignored(tmp_path: Path):
    path = write(tmp_path / "t.csv", "Census of 1881\n\nSource,parish\nOCC1;h;note\nfarmer;1;")
    file = open_table(path, ["occ1"])
    assert file.header == ["OCC1", "h", "note"] and file.read(["occ1"]).columns[
        "occ1"
    ].to_pylist() == ["farmer"]
    assert file.notices == [f"{path}: the header is line 4; what is above it is ignored."]


@pytest.mark.parametrize("header", [["", "occ1"], ["", "job", "note"]])
def test_numbers_of_rows_need_no_name(tmp_path: Path, header: list[str]):
    with gzip.open(path := tmp_path / "T.CSV.GZ", "wt") as text:
        text.write(
            "".join(
                ",".join(row) + "\n"
                for row in (header, *[[str(i) for i in range(len(header))]] * 3)
            )
        )
    file = open_table(path, [])
    assert file.header == header and sum(map(len, file.chunks(chunk_rows=2))) == 3
    assert open_table(write(tmp_path / "t.csv", ",Census", "job,h", "smith,1"), []).header == [
        "job",
        "h",
    ]


@pytest.mark.parametrize("num_columns", [2, 10_000])
def test_lines_are_found_behind_long_cells_and_headers(tmp_path: Path, num_columns: int):
    header = ",".join(f"column number {i}" for i in range(num_columns))
    path = write(tmp_path / "t.csv", header, "x" * 200_000 + "," * (num_columns - 1), "y")
    limit = csv.field_size_limit()
    with pytest.raises(UserError, match=f"line 3: 1 fields where the header has {num_columns}"):
        read_table(path, ["column number 1"])
    assert csv.field_size_limit() == limit  # which others that use Python's reader have set


def test_rows_with_a_separator_more_have_backslashes_too(tmp_path: Path):
    rows = (r'"boat \"Anna\" builder, master",61110', r'"boat \"Anna\" builder, master",61110,')
    path = write(tmp_path / "t.csv", '"occ1","code"', *rows)
    columns = read_table(path, ["occ1"]).columns
    assert columns["occ1"].to_pylist() == ['boat "Anna" builder, master'] * 2


def test_a_header_may_stand_below_many_blank_lines(tmp_path: Path):
    path = write(tmp_path / "t.csv", "\n" * 70_000 + "occ1,h", "smith,83110")
    assert read_table(path, ["occ1"]).columns["occ1"].to_pylist() == ["smith"]


def test_backslashes_before_quotation_marks_are_those_of_r(tmp_path: Path):
    path = write(
        tmp_path / "t.csv",
        '"occ1","h"\n"smith",1\n"the \\"old, weak, or\nlame\\" cook","2"\n"5\\"",3\nx,4',
    )
    file = open_table(path, ["occ1"])
    table = file.read(["occ1"])
    assert table.columns["occ1"].to_pylist() == [
        "smith",
        'the "old, weak, or\nlame" cook',
        '5"',
        "x",
    ]
    assert table.lines(table.positions * 0 + range(4)).tolist() == [2, 3, 5, 6]
    assert "quotation marks are escaped with backslashes, as R writes them" in file.notices[0]
    path.write_text('occ1,h\n"C:\\",1\n"a \\""b\\"" c",2\n5\\"x,3\n')
    file = open_table(path, ["occ1"])
    assert (
        file.read(["occ1"]).columns["occ1"].to_pylist() == ["C:\\", 'a \\"b\\" c', '5\\"x']
        and not file.notices
    )


@cases(
    ("cells", "texts"),
    (
        pa.array([2000.0, math.nan, None, -1.0], pa.float32(), from_pandas=False),
        ["2000", None, None, "-1"],
    ),
    (pa.array([0.5, math.inf, 1e300]), ["0.5", "inf", "1e+300"]),
    (pa.array([12345678901.0, 2.0**53]), ["12345678901", "9007199254740992"]),
    (pa.array(["væver".encode(), None]), ["væver", None]),
    (pa.array(["smør".encode("cp1252")]), r"column 'h', holds bytes that are not UTF-8 text"),
    (pa.array([["61110"], None]), r"column 'h', holds .* one value in each cell"),
    ids=range(6),
)
def test_types_of_parquet_as_text(tmp_path: Path, cells: pa.Array, texts: list[str | None] | str):
    pq.write_table(pa.table({"h": cells}), tmp_path / "t.parquet")
    if isinstance(texts, list):
        assert read_table(tmp_path / "t.parquet", ["h"]).columns["h"].to_pylist() == texts
        return
    with pytest.raises(UserError, match=texts):
        read_table(tmp_path / "t.parquet", ["h"])


WORDS = "båtuthyrare fjäderförman sågverksförman försäkringsbolagsbiträde änka sjuksköterska"
TEXTS = {
    "cp1252": WORDS,
    "cp850": WORDS,
    "mac_roman": WORDS,
    "iso8859_2": "żołnierz właściciel ślusarz młynarz córka",
}


@pytest.mark.parametrize(("encoding", "words"), [*TEXTS.items(), ("cp1250", TEXTS["iso8859_2"])])
def test_encoding_is_the_one_that_makes_words(tmp_path: Path, encoding: str, words: str):
    path = tmp_path / "t.csv"
    path.write_bytes("\r\n".join(["occ1", *words.split()]).encode(encoding))
    file = open_table(path, ["occ1"])
    assert file.read(["occ1"]).columns["occ1"].to_pylist() == words.split()
    longest = max(words.split(), key=len)
    assert f"({encoding}), for example" in file.notices[0] and longest in file.notices[0]


def test_named_encoding_decides(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "t.csv"
    path.write_bytes("occ1,hisco_1\nдворник,61110\nпекарь,77610\nткач,75400\n".encode("cp1251"))
    named = open_table(path, ["occ1"], encoding="cp1251")
    assert named.read(["occ1"]).columns["occ1"][0].as_py() == "дворник" and not named.notices
    prepared = (
        "finetune",
        "--dataset",
        path,
        "--target-cols",
        "hisco_1",
        "--prepare-only",
        "--save-path",
    )
    main([*map(str, prepared), str(tmp_path / "out"), "--file-encoding", "cp1251"])
    assert "дворник" in "".join(
        (tmp_path / "out" / f"data_{part}.csv").read_text() for part in ("train", "val")
    )
    assert "there is no encoding 'dos'. Usual ones are utf-8" in mistake(
        capsys, *prepared, tmp_path / "o", "--file-encoding", "dos"
    )
    assert "line 2, is not text in the encoding utf-8" in refusal(
        lambda: open_table(path, ["occ1"], encoding="utf8")
    )


@pytest.mark.parametrize("misread_as", ["cp1252", "latin-1", "mac_roman", "cp850"])
def test_twice_encoded_text_is_counted(tmp_path: Path, misread_as: str):
    twice = "båtuthyrare".encode().decode(misread_as)
    path = write(
        tmp_path / "t.csv", "occ1,h", f"{twice},1", "ÄNKA Ã,2", "«CAFÉ»,3", f"fd {twice},4"
    )
    file = open_table(path, ["occ1"])
    assert (
        f"2 words were encoded twice ({twice!r} was 'båtuthyrare'), and nothing is repaired"
        in file.notices[0]
    )
    assert file.read(["occ1"]).columns["occ1"][0].as_py() == twice


def test_repeated_headers_are_said_with_lines(tmp_path: Path):
    path = write(
        tmp_path / "t.csv",
        "occ1,h",
        "smith,1",
        "occ1,h",
        '"x',
        'occ1,h",3',
        "\ufeffocc1,h",
        "occ1,2",
    )
    file = open_table(path, ["occ1"])
    assert file.read(["occ1"]).columns["occ1"].to_pylist() == [
        "smith",
        None,
        "x\nocc1,h",
        None,
        "occ1",
    ]
    assert "the header is repeated in line 3, 6, as in files that were joined" in file.notices[0]


def test_long_lines_and_wide_headers_are_refused(tmp_path: Path):
    with gzip.open(tmp_path / "t.csv.gz", "wb") as file:
        file.write(b"occ1,h\nsmith,1\n")
        for _ in range(6):
            file.write(bytes([97]) * (1 << 20))
    assert "line 3: 4 MB without a line break" in refusal(
        open_table, tmp_path / "t.csv.gz", ["occ1"]
    )
    path = write(tmp_path / "t.csv", ",".join(["occ1", *["x"] * 99_999]), "smith")
    assert "100,000 columns, and 16,384 are the most" in refusal(open_table, path, ["occ1"])


@cases(
    ("name", "texts"),
    ("Rtable.txt", ["farmer 0", "blacksmith 0", "baker 0"]),
    ("Rtable_tab.txt", ["farmer 0", "blacksmith 0", "baker 0"]),
    ("ctrlz.csv", ["farmer 0", "blacksmith 0", "baker 0"]),
    ("blank_tail.csv", ["driver royal field artillery", "builder's foreman", "lace manufacturer"]),
    *(
        (name, ["fd verktygsfilare", "båtuthyrare", "fd installationsinspektör"])
        for name in ("mac_roman.csv", "cp850.csv", "utf16.csv", "utf16_tab.txt")
    ),
)
def test_cases_are_read_right(tmp_path: Path, name: str, texts: list[str]):
    path = tmp_path / name
    path.write_bytes(shared(f"cases/{name}").read_bytes())
    found = read_table(path, ["occ1"]).columns["occ1"].to_pylist()
    assert found[:3] == texts
    assert sorted(filter(None, found)) == sorted(prepared(path))


def test_case_of_text_encoded_twice():
    file = open_table(shared("cases/mojibake.csv"), ["occ1"])
    assert "25 words were encoded twice ('bÃ¥tuthyrare' was 'båtuthyrare'" in file.notices[0]
