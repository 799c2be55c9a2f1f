"""Tables in the forms that people have: Excel, Stata, SPSS, Parquet in folders, packed CSV."""

from __future__ import annotations

import gzip
import zipfile
from datetime import date, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import numpy as np
import openpyxl
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from archives import code, read, read_table, write_archive
from conftest import write_table
from models import save_tiny_model

from histocoder.cli.main import main
from histocoder.config import FinetuneConfig
from histocoder.data import output
from histocoder.data.output import check_output
from histocoder.data.prepare import prepare
from histocoder.data.table import fingerprint, open_table
from histocoder.errors import UserError
from histocoder.evaluation.review_file import review


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def workbook(path: Path, *sheets: tuple[str, list[list[object]]]) -> Path:
    book = openpyxl.Workbook()
    book.remove(book.active)
    for name, rows in sheets:
        sheet = book.create_sheet(name)
        for row in rows:
            sheet.append(row)
    book.save(path)
    return path


@pytest.mark.parametrize("suffix", [".csv.gz", ".tsv", ".tsv.gz", ".xlsx", ".dta", ".sav", ".parquet"])
def test_every_form_is_read_as_it_was_written(model: Path, tmp_path: Path, suffix: str):
    if suffix == ".sav":
        pytest.importorskip("pyreadstat")
    frame = write_archive(tmp_path / "in.csv", 40)
    frame.loc[0, "occ1"] = "=1+1"
    frame.to_csv(tmp_path / "in.csv", index=False)
    code(model, tmp_path / "in.csv", tmp_path / "out.csv", mode="flat", threshold=0.2)
    code(model, tmp_path / "in.csv", tmp_path / f"out{suffix}", mode="flat", threshold=0.2)
    names = ["id", "occ1", "lang", "hisco_1", "prob_1", "desc_1", "conf"]
    one, other = (read_table(tmp_path / f"out{end}", names) for end in (".csv", suffix))
    for name in names:
        texts, others = one.columns[name].to_pylist(), other.columns[name].to_pylist()
        if name in ("prob_1", "conf"):
            assert [t and float(t) for t in texts] == [t and pytest.approx(float(t)) for t in others]
        else:
            assert texts == others, name
    again = tmp_path / f"again{suffix}"
    code(model, tmp_path / f"out{suffix}", again, mode="flat", threshold=0.2, columns="pred_")
    found = read_table(again, ["id", "pred_hisco_1"]).columns
    assert found["pred_hisco_1"] == one.columns["hisco_1"] and found["id"].to_pylist() == frame["id"].tolist()
    review(tmp_path / f"out{suffix}", tmp_path / f"review{suffix}", budget=3)
    chosen = read_table(tmp_path / f"review{suffix}", ["occ1", "checked", "hisco_1"])
    assert len(chosen) == 3 and set(chosen.columns["hisco_1"].to_pylist()) <= set(one.columns["hisco_1"].to_pylist())
    assert not list(tmp_path.glob(".*"))


def test_numbers_of_excel_are_codes(tmp_path: Path):
    rows = [
        ["occ1", "hisco_1", "notes"],
        ["boss", 2000],
        ["farmer", 61110.0],
        ["baker", "77610"],
        [None, None, "illegible"],
        [],
        ["cook", " 53130"],
    ]
    path = workbook(tmp_path / "t.xlsx", ("Data", rows), ("Sheet2", []))
    table = read_table(path, ["occ1", "hisco_1"])
    assert table.columns["hisco_1"].to_pylist() == ["2000", "61110", "77610", None, " 53130"]
    config = FinetuneConfig(str(path), ("hisco_1",), zero_pad_codes=True)
    prepare(config, tmp_path / "out")
    parts = [read(tmp_path / "out" / name) for name in ("data_train.csv", "data_val.csv")]
    assert sorted(pd.concat(parts)["hisco_1"]) == ["02000", "53130", "61110", "77610"]
    assert read(tmp_path / "out" / "rejected.csv")["line"].tolist() == ["5"]


def test_headers_are_found_below_titles(tmp_path: Path):
    rows = [["Census of 1881"], [], ["Source:", "parish"], [" OCCUPATION", "Français", None, "Note"]]
    path = workbook(tmp_path / "t.xlsx", ("Data", [*rows, ["farmer", "fermier", "x"], ["baker", None, None, "?"]]))
    file = open_table(path, {"occupation": "input_col", "francais ": "target_cols"})
    assert file.header == [" OCCUPATION", "Français", "Note"] and "the header is row 4" in file.notices[0]
    table = file.read(["occupation", "francais "])
    assert table.columns["francais "].to_pylist() == ["fermier", None] and table.lines(np.arange(2)).tolist() == [5, 6]
    with pytest.raises(UserError, match="no column 'occ1'; it has: OCCUPATION, Français, Note") as refused:
        open_table(path, {"occ1": "input_col"})
    assert refused.value.settings == {"input_col": {"occ1": "OCCUPATION"}}


def test_lost_zeros_follow_the_cells_format(tmp_path: Path):
    rows = [["occ1", "h"], ["boss", 2000], *[[f"farmer {i}", 61110 + i] for i in range(20)], ["none", -1]]
    path = workbook(tmp_path / "t.xlsx", ("Data", rows))
    with pytest.raises(UserError, match=r"fewer than 5 characters, such as line 2, h: '2000'.*--zero-pad-codes"):
        prepare(FinetuneConfig(str(path), ("h",)), tmp_path / "out")
    book = openpyxl.load_workbook(path)
    for row in range(2, 24):
        book["Data"].cell(row, 2).number_format = "00000"
    book.save(path)
    codes = read_table(path, ["h"]).columns["h"].to_pylist()
    assert codes[:2] == ["02000", "61110"] and codes[-1] == "-1"


def test_sheets_are_named_where_there_are_several(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows = [["occ1", "lang", "hisco_1"], ["farmer", "en", "61110"], ["baker", "en", "77610"]]
    path = workbook(tmp_path / "t.xlsx", ("1880", rows), ("1890", rows))
    with pytest.raises(UserError, match=r"several sheets \('1880', '1890'\)\. Name one with --sheet"):
        open_table(path, ["occ1"])
    with pytest.raises(UserError, match=r"no sheet '1900'; it has: '1880', '1890'"):
        open_table(path, ["occ1"], sheet="1900")
    with pytest.raises(UserError, match=r"--sheet is for Excel workbooks"):
        open_table(write_table(tmp_path / "t.csv"), ["occ1"], sheet="1900")
    notes = workbook(tmp_path / "n.xlsx", ("Notes", [["Copied by", "J. S."]]), ("1881 ", rows))
    assert len(read_table(notes, ["occ1"])) == 2  # of the sheet that has the column
    with pytest.raises(UserError, match="several sheets") as refused:
        open_table(notes, ["occ"])
    assert refused.value.settings == {"sheet": "1881"} and open_table(notes, ["occ1"], sheet="1881").header == rows[0]
    flags = ["--model", str(model), "--sheet", "1890"]
    main(["predict", *flags, "--input", str(path), "--output", str(tmp_path / "out.xlsx"), "--language-col", "lang",
          "--columns", "p_"])  # fmt: skip
    main(["evaluate", *flags, "--data", str(path), "--output", str(tmp_path / "report")])
    prepare(FinetuneConfig(str(path), ("hisco_1",), sheet="1880"), tmp_path / "out")
    assert openpyxl.load_workbook(tmp_path / "out.xlsx")["data"].cell(2, 4).number_format == "@"


def test_stata_labels_are_read_as_text(tmp_path: Path):
    frame = pd.DataFrame({"occ1": pd.Categorical(["boss", "cook", None]), "h": [2000.0, 53130, None], "n": [1, 2, 3]})
    frame.to_stata(tmp_path / "t.dta", write_index=False, value_labels={"h": {53130: "Cook"}, "n": {1: "one"}})
    file = open_table(tmp_path / "t.dta", ["occ1", "h"], codes=["h"])
    columns = file.read(["occ1", "h", "n"]).columns
    assert columns["occ1"].to_pylist() == ["boss", "cook", None] and columns["n"].to_pylist() == ["one", "2", "3"]
    assert columns["h"].to_pylist() == ["2000", "53130", None] and "value labels: occ1, n" in file.notices[0]
    (notice,) = output.write_table(tmp_path / "o.dta", [pa.table({"hisco 1": ["02000", "-1", None]})])
    assert "hisco 1 as hisco_1" in notice
    assert read_table(tmp_path / "o.dta", ["hisco_1"]).columns["hisco_1"].to_pylist() == ["02000", "-1", None]


def test_codes_that_stata_has_encoded_are_their_labels(tmp_path: Path):
    frame = pd.DataFrame({"occ1": ["boss", "none", "cook"], "h": pd.Categorical(["02000", "-1", "53130"])})
    frame.to_stata(tmp_path / "t.dta", write_index=False)
    file = open_table(tmp_path / "t.dta", ["occ1", "h"], codes=["h"])
    assert file.read(["h"]).columns["h"].to_pylist() == ["02000", "-1", "53130"]
    assert "read as their value labels: h" in file.notices[0]


def test_folders_of_parquet_are_one_table(model: Path, tmp_path: Path):
    for year, codes in ((1880, [61110, None]), (1890, [77610, 2000])):
        (tmp_path / "in" / f"year={year}").mkdir(parents=True)
        part = pa.table(
            {"occ1": ["farmer", "baker"], "hisco_1": pa.array(codes, pa.float64() if None in codes else pa.int64())}
        )
        pq.write_table(part, tmp_path / "in" / f"year={year}" / "part-0.parquet")
    table = read_table(tmp_path / "in", ["year", "hisco_1"])
    assert table.columns["year"].to_pylist() == ["1880", "1880", "1890", "1890"]
    assert table.columns["hisco_1"].to_pylist() == ["61110", None, "77610", "2000"]
    code(model, tmp_path / "in", tmp_path / "out.csv", language_col=None, columns="p_", block_rows=3)
    assert read(tmp_path / "out.csv")["year"].tolist() == ["1880", "1880", "1890", "1890"]
    before = fingerprint(tmp_path / "in")
    pq.write_table(pa.table({"occ1": [1]}), tmp_path / "in" / "year=1890" / "part-1.parquet")
    assert fingerprint(tmp_path / "in") != before
    with pytest.raises(UserError, match="do not fit together"):
        open_table(tmp_path / "in", ["occ1"])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.xlsx", b"occ1,h\nx,1\n", "can't be read as an Excel workbook: it is damaged"),
        ("t.xlsx", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600), "protected by a password"),
        ("t.xlsx", lambda path: zipfile.ZipFile(path, "w").close(), "can't be read as an Excel workbook"),
        ("t.xlsx", lambda path: workbook(path, ("a", [])), "t.xlsx is empty"),
        ("t.xlsx", lambda path: workbook(path, ("a", [["occ1", "h"]])), "no rows"),
        ("t.ods", b"PK", r"\.ods files can't be read\. Save the table as \.csv"),
        ("t.dta", b"no Stata", "can't be read as a .dta file"),
        ("t.sav", b"no SPSS", "can't be read as a .sav file"),
        ("t.csv.gz", b"occ1,h\nx,1\n", "damaged, or not a gzip file"),
        ("t.csv.gz", gzip.compress(b"occ1,h\nx,1\n")[:-9], "damaged, or not a gzip file"),
        ("folder", Path.mkdir, "a folder without Parquet files"),
    ],
    ids=lambda value: value if isinstance(value, str) else "content",  # the same in each process
)
def test_files_that_can_not_be_read(tmp_path: Path, name: str, content, message: str):
    if name == "t.sav":
        pytest.importorskip("pyreadstat")
    path = tmp_path / name
    path.write_bytes(content) if isinstance(content, bytes) else content(path)
    with pytest.raises(UserError, match=message) as caught:
        read_table(path, ["occ1"])
    assert "\n" not in str(caught.value)


def test_what_is_not_installed_is_named(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "pyreadstat", None)
    (tmp_path / "t.sav").write_bytes(b"$FL2")
    with pytest.raises(UserError, match="pip install pyreadstat"):
        open_table(tmp_path / "t.sav", ["occ1"])
    write_archive(tmp_path / "in.csv", 10)
    with pytest.raises(UserError, match="pip install pyreadstat"):
        code(model, tmp_path / "in.csv", tmp_path / "out.sav")
    assert {path.name for path in tmp_path.iterdir()} == {"t.sav", "in.csv"}


def test_more_rows_than_excel_takes(tmp_path: Path):
    with pytest.raises(UserError, match=r"1,048,576 rows are more than Excel's 1,048,575; choose \.csv"):
        check_output(tmp_path / "t.xlsx", num_rows=1_048_576)


@pytest.mark.parametrize("suffix", [".xlsx", ".dta", ".sav"])
def test_values_that_sheets_lack_become_text(tmp_path: Path, suffix: str):
    if suffix == ".sav":
        pytest.importorskip("pyreadstat")
    table = pa.table(
        {
            "born": pa.array([date(1850, 3, 1), None]),
            "seen": pa.array([datetime(2020, 3, 1, 12), None], pa.timestamp("us")).cast(pa.timestamp("us", "UTC")),
            "person": [9_007_199_254_740_993, 9_007_199_254_740_995],
            "alive": pa.array([True, None]),
            "paid": pa.array([Decimal("1.50"), None]),
            "code": ["7", "02110"],
            "name": pa.array([b"Ann", None]),
            "lived": pa.array([timedelta(1), None]),
        }
    )
    path = tmp_path / f"out{suffix}"
    output.write_table(path, [table])
    found = read_table(path, table.column_names).columns
    assert found["person"].to_pylist() == ["9007199254740993", "9007199254740995"]
    assert found["code"].to_pylist() == ["7", "02110"]
    assert str(found["born"][0]).startswith("1850-03-01") and str(found["seen"][0]).startswith("2020-03-01 12")
    assert found["name"].to_pylist() == ["Ann", None]
    assert float(found["paid"][0].as_py()) == 1.5 and not found["born"][1].is_valid


def test_excels_escaped_characters_are_read(tmp_path: Path):
    path = workbook(tmp_path / "t.xlsx", ("a", [["occ1"], ["smith_x000D_\nand farrier"], ["_x005F_x000D_"]]))
    texts = ["smith\r\nand farrier", "_x000D_"]
    assert read_table(path, ["occ1"]).columns["occ1"].to_pylist() == texts
