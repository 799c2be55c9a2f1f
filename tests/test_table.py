"""Tables as they come: each is read right, or refused with the line and what to do."""

from pathlib import Path

import pytest

from histocoder.data.table import read_table
from histocoder.errors import UserError

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
    (b"occ1,h\n\x81,1\n", "neither UTF-8 nor Windows-1252"),
    (b"\n\nocc1,h\nx,1\n", "no column 'occ1'"),
]


@pytest.mark.parametrize(("content", "texts"), GOOD)
def test_read_right(tmp_path: Path, content: bytes, texts: list[str | None]):
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    assert read_table(path, ["occ1"]).columns["occ1"].to_pylist() == texts


@pytest.mark.parametrize(("content", "message"), BAD)
def test_refused_in_one_sentence(tmp_path: Path, content: bytes, message: str):
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        read_table(path, ["occ1"])
    assert "\n" not in str(caught.value)


def test_lines_count_quoted_line_breaks_and_blank_lines(tmp_path: Path):
    path = tmp_path / "t.csv"
    path.write_text('occ1,h\n"a\nb",1\n\nc,2\n\n\nd,3\n')
    table = read_table(path, ["occ1"])
    assert table.lines(table.rows * 0 + range(3)).tolist() == [2, 5, 8]


def test_missing_file_names_the_nearest(tmp_path: Path):
    (tmp_path / "census.csv").write_text("occ1\nx\n")
    with pytest.raises(UserError, match=r"no file .*sensus.csv. Did you mean .*census.csv"):
        read_table(tmp_path / "sensus.csv", ["occ1"])
    with pytest.raises(UserError, match="is a folder"):
        read_table(tmp_path, ["occ1"])


def test_no_parquet_file(tmp_path: Path):
    (tmp_path / "t.parquet").write_text("occ1\nx\n")
    with pytest.raises(UserError, match="not a Parquet file"):
        read_table(tmp_path / "t.parquet", ["occ1"])
