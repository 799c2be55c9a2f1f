"""Codes as spreadsheets and statistics programs write them: understood where they mean one thing,
else refused.
"""

from pathlib import Path

import pandas as pd
import pytest
from conftest import cases, write

from histocoder.data.key import Key
from histocoder.data.labelled_files import LabelledFiles
from histocoder.data.labels import LabelRules
from histocoder.errors import UserError
from histocoder.formatters import build_formatter
from histocoder.tables import table

HISCO = build_formatter("hisco", num_blocks=1)
GENERAL = build_formatter("general", num_blocks=1)


def codes_of(path: Path, cells: list[str], *, formatter=GENERAL, key=None, **rules) -> list[str]:
    texts = [f"title {i}" for i in range(len(cells))]
    pd.DataFrame({"occ1": texts, "lang": "en", "h": cells}).to_csv(path, index=False)
    return (
        LabelledFiles((path,), ("h",), formatter, key=key, rules=LabelRules(**rules))
        .read()
        .codes["h"]
        .tolist()
    )


@pytest.mark.parametrize("zero_pad", [True, False])
def test_marks_of_missing_codes_are_no_codes(tmp_path: Path, zero_pad: bool):
    marks = ["NA", "NaN", "nan", "NULL", "null", "None", "N/A", "n/a", "#N/A", "<NA>", "."]
    assert codes_of(tmp_path / "t.csv", ["61110", *marks, "NA"], zero_pad=zero_pad) == ["61110"]
    codes = ("61110", "NA")
    assert codes_of(tmp_path / "t.csv", codes, key=Key(codes), allow_short=True) == [*codes]


@pytest.mark.parametrize("formatter", [HISCO, GENERAL], ids=["hisco", "general"])
def test_other_ways_of_writing_a_code(tmp_path: Path, formatter):
    cells = ["61110.0", "2000.0", "-1.0", "41025", '="22675"', "'03110", "6-11.10"]
    found = codes_of(tmp_path / "t.csv", cells, formatter=formatter, zero_pad=True)
    assert found == ["61110", "02000", "-1", "41025", "22675", "03110", "61110"]


def test_decimals_that_are_codes_stay(tmp_path: Path):
    assert codes_of(tmp_path / "t.csv", ["12.0", "12.5", "3"], allow_short=True) == [
        "12.0",
        "12.5",
        "3",
    ]
    with_sep = build_formatter("general", num_blocks=1, use_within_block_sep=True)
    assert codes_of(tmp_path / "t.csv", ["1,0", "2,10"], formatter=with_sep, allow_short=True) == [
        "1,0",
        "2,10",
    ]
    long = build_formatter("general", num_blocks=1, block_size=7)
    assert codes_of(tmp_path / "t.csv", ["6-11.10"], formatter=long) == ["6-11.10"]


def test_one_code_with_decimals_is_a_mistake_among_numbers_saved_with_them(tmp_path: Path):
    cells = ["12110.0", "53100.0", "61110.0"] * 10
    with pytest.raises(UserError, match=r"line 32, h: '61110\.5' looks like a code"):
        codes_of(tmp_path / "t.csv", [*cells, "61110.5"])
    kept = codes_of(tmp_path / "t.csv", [*cells, "61110.5"], drop_bad=True)
    assert kept == ["12110", "53100", "61110"] * 10


def test_how_codes_are_written_is_read_in_all_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(table, "CHUNK_ROWS", 2)
    rows = ["smith,,83110", "cook,,53110", "smith and cook,x,83110/53110", "baker,x,77610"]
    path = write(tmp_path / "t.csv", "occ1,checked,h_1,h_2", *(f"{row}," for row in rows))
    found = LabelledFiles((path,), ("h_1", "h_2"), build_formatter("hisco", num_blocks=2)).read()
    assert found.codes.fillna("").to_numpy().tolist() == [["83110", "53110"], ["77610", ""]]


@cases(
    ("cell", "message"),
    ("6.111E+04", "turned into a number"),
    ("#REF!", "looks like a code that a spreadsheet has turned into an error"),
    ("1-Nov", "turned into a date"),
    ("2024-11-01", "turned into a date"),
    ("61110; 75400", "holds 2 codes for 1 column"),
)
@pytest.mark.parametrize("formatter", [HISCO, GENERAL], ids=["hisco", "general"])
def test_cells_that_hold_no_single_code_are_refused(
    tmp_path: Path, formatter, cell: str, message: str
):
    with pytest.raises(UserError, match=rf"line 3, h: '.*' .*{message}"):
        codes_of(tmp_path / "t.csv", ["61110", cell], formatter=formatter, allow_short=True)
