"""Tables in the forms that people have: Excel, Stata, Parquet, packed CSV; and texts that
spreadsheets would run.
"""

import gzip
import os
import re
import sys
import zipfile
from datetime import date, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import numpy as np
import openpyxl
import pandas as pd
import pyarrow as pa
import pytest
from archives import code, read, read_table, write_archive
from conftest import cases, shared, write, write_table
from hypothesis import given
from hypothesis import strategies as st

from histocoder.cli.main import main
from histocoder.config import FinetuneConfig, PrepareConfig
from histocoder.data.corrections import read_corrections
from histocoder.data.key import read_key
from histocoder.data.labelled_files import LabelledFiles
from histocoder.data.prepare import prepare
from histocoder.errors import UserError
from histocoder.evaluation.review_file import review
from histocoder.formatters import build_formatter
from histocoder.tables import output, stata
from histocoder.tables.csv_file import as_meant, without_formulas
from histocoder.tables.output import check_output
from histocoder.tables.table import open_table

skip_without_pipes = pytest.mark.skipif(
    not hasattr(os, "mkfifo"), reason="the system has no pipes among files"
)


def workbook(path: Path, *sheets: tuple[str, list[list[object]]]) -> Path:
    book = openpyxl.Workbook(write_only=True)
    for name, rows in sheets:
        sheet = book.create_sheet(name)
        for row in rows:
            sheet.append(row)
    book.save(path)
    return path


@pytest.mark.parametrize("suffix", [".csv.gz", ".tsv", ".xlsx", ".parquet", ".dta"])
def test_every_form_is_read_as_written(model: Path, tmp_path: Path, suffix: str):
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
            assert [t and float(t) for t in texts] == [
                t and pytest.approx(float(t)) for t in others
            ]
        else:
            assert texts == others, name
    code(
        model,
        tmp_path / f"out{suffix}",
        tmp_path / f"again{suffix}",
        mode="flat",
        threshold=0.2,
        columns="pred_",
    )
    found = read_table(tmp_path / f"again{suffix}", ["id", "pred_hisco_1"]).columns
    assert (
        found["pred_hisco_1"] == one.columns["hisco_1"]
        and found["id"].to_pylist() == frame["id"].tolist()
    )
    review(tmp_path / f"out{suffix}", tmp_path / f"review{suffix}", budget=3)
    chosen = read_table(tmp_path / f"review{suffix}", ["occ1", "checked", "hisco_1"])
    assert len(chosen) == 3 and set(chosen.columns["hisco_1"].to_pylist()) <= set(
        one.columns["hisco_1"].to_pylist()
    )
    assert not list(tmp_path.glob(".*"))


def test_numbers_of_excel_are_codes(tmp_path: Path):
    rows = [
        ["occ1", "h"],
        ["boss", 2000],
        *[[f"farmer {i}", 61110 + i] for i in range(20)],
        [None, "see note"],
        [],
    ]
    path = workbook(
        tmp_path / "t.xlsx", ("Data", [*rows, ["cook", " 53130"], ["none", -1.0]]), ("Sheet2", [])
    )
    assert read_table(path, ["h"]).columns["h"].to_pylist()[20:] == [
        "61129",
        "see note",
        None,
        " 53130",
        "-1",
    ]
    with pytest.raises(
        UserError, match=r"row 2, h: '2000' has fewer than 5 characters.*--zero-pad-codes"
    ):
        prepare(FinetuneConfig(str(path), ("h",), drop_bad_labels=True), tmp_path / "out")
    book = openpyxl.load_workbook(path)
    for row in range(2, 23):
        book["Data"].cell(row, 2).number_format = "00000"
    book.save(path)
    prepare(FinetuneConfig(str(path), ("h",), drop_bad_labels=True), tmp_path / "out")
    assert {"02000", "61110", "53130", "-1"} <= {*read(tmp_path / "out" / "key.csv")["system_code"]}
    assert read(tmp_path / "out" / "rejected.csv")["line"].tolist() == ["23", "24"]


def test_names_of_columns_need_not_be_exact(tmp_path: Path):
    rows = [
        ["Census of 1881"],
        ["Source:", "parish"],
        [],
        [" OCCUPATION", "Français", None, "Note"],
    ]
    rows += [
        ["smith_x000D_\nand farrier", "fermier", "x"],
        ["_x005F_x000D_", None, None, "?"],
    ]  # as Excel escapes them
    path = workbook(tmp_path / "t.xlsx", ("Data", rows))
    file = open_table(path, {"occupation": "input_col", "francais ": "target_cols"})
    assert (
        file.header == [" OCCUPATION", "Français", "C", "Note"]
        and "the header is row 4" in file.notices[0]
    )
    table = file.read(["occupation", "francais "])
    assert table.columns["occupation"].to_pylist() == ["smith\r\nand farrier", "_x000D_"]
    assert table.columns["francais "].to_pylist() == ["fermier", None] and table.lines(
        np.arange(2)
    ).tolist() == [5, 6]
    with pytest.raises(
        UserError, match=r"no column 'occ1'; .*Did you mean 'OCCUPATION'\? Name it with --input-col"
    ):
        open_table(path, {"occ1": "input_col"})


def test_sheets_are_named_where_several(model: Path, tmp_path: Path):
    rows = [["occ1", "lang", "hisco_1"], ["farmer", "en", "61110"], ["baker", "en", "77610"]]
    path = workbook(tmp_path / "t.xlsx", ("1880", rows), ("1890", rows))
    with pytest.raises(
        UserError, match=r"several sheets \('1880', '1890'\)\. Name one with --sheet"
    ):
        open_table(path, {"occ1": "input_col"})
    with pytest.raises(UserError, match=r"no sheet '1900'; it has: '1880', '1890'"):
        open_table(path, ["occ1"], sheet="1900")
    with pytest.raises(UserError, match=r"--sheet is for Excel workbooks"):
        open_table(write_table(tmp_path / "t.csv"), ["occ1"], sheet="1900")
    notes = workbook(tmp_path / "n.xlsx", ("Notes", [["Copied by", "J. S."]]), ("1881 ", rows))
    assert len(read_table(notes, ["occ1"])) == 2  # of the sheet that has the column
    assert open_table(notes, ["occ1"], sheet="1881").header == rows[0]
    flags = ["--model", str(model), "--sheet", "1890"]
    files = ["--input", str(path), "--output", str(tmp_path / "out.xlsx"), "--language-col", "lang"]
    main(["predict", *flags, *files, "--columns", "p_"])
    main(["evaluate", *flags, "--data", str(path), "--output", str(tmp_path / "report")])
    prepare(FinetuneConfig(str(path), ("hisco_1",), sheet="1880"), tmp_path / "out")
    assert openpyxl.load_workbook(tmp_path / "out.xlsx")["data"].cell(2, 4).number_format == "@"


def test_sheets_that_no_flag_names(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows = [["occ1", "lang", "hisco_1"], ["farmer", "en", "61110"]]
    notes, key = (
        [["occ1", "note"], ["smith", "?"]],
        [["system_code", "code"], ["61110", 0], ["77610", 1]],
    )
    assert read_key(workbook(tmp_path / "key.xlsx", ("notes", notes), ("codes", key))).codes == (
        "61110",
        "77610",
    )
    known = workbook(tmp_path / "known.xlsx", ("notes", notes), ("coded", rows))
    main(["predict", "--model", str(model), "--known", str(known), "--language", "en", "farmer"])
    assert capsys.readouterr().out.split()[-1] == "known"
    checked = workbook(
        tmp_path / "c.xlsx", ("n", notes), ("c", [[*rows[0], "checked"], [*rows[1], "x"]])
    )
    settings = PrepareConfig(
        "t.csv", ("hisco_1",), corrections=(str(checked),), language_col="lang"
    )
    files = LabelledFiles((), ("hisco_1",), build_formatter("hisco", num_blocks=1))
    assert len(read_corrections(settings, files)) == 1
    for several in ([notes, notes], [key, key]):
        with pytest.raises(
            UserError, match=r"several sheets \('a', 'b'\)\. Keep the one to read, or save it"
        ):
            read_key(workbook(tmp_path / "several.xlsx", *zip("ab", several, strict=True)))


@pytest.mark.parametrize("suffix", [".dta", ".sav"])
def test_stata_and_spss_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str):
    monkeypatch.setattr(stata, "_BLOCK_ROWS", 2)
    path = tmp_path / f"t{suffix}"
    frame = pd.DataFrame({"occ1": ["boss", "cook", ""], "h": [2000, 53130, None], "n": [0.5, 1, 2]})
    if suffix == ".dta":
        frame.to_stata(path, write_index=False, value_labels={"h": {53130: "Cook"}})
    else:
        pytest.importorskip("pyreadstat").write_sav(
            frame, path, variable_value_labels={"h": {53130: "Cook"}}
        )
    file = open_table(path, ["occ1", "h"])
    columns = file.read(["occ1", "h", "n"]).columns
    assert columns["occ1"].to_pylist() == ["boss", "cook", None] and columns["n"].to_pylist() == [
        "0.5",
        "1",
        "2",
    ]
    assert columns["h"].to_pylist() == ["2000", "53130", None]
    assert len(file.notices) == 1 and "value labels are not read" in file.notices[0]


@pytest.mark.parametrize("encoding", [None, "cp1250"])
def test_texts_of_old_files_of_stata_have_an_encoding(tmp_path: Path, encoding: str | None):
    texts = ["manœuvre", "chef d’équipe", "bødker"] if encoding is None else ["młynarz", "żołnierz"]
    path = tmp_path / "t.dta"
    as_bytes = [text.encode(encoding or "cp1252").decode("latin-1") for text in texts]
    pd.DataFrame({"occ1": as_bytes}).to_stata(path, write_index=False, version=114)
    file = open_table(path, ["occ1"], encoding=encoding)
    assert file.read(["occ1"]).columns["occ1"].to_pylist() == texts
    assert any("is read as Windows-1252" in text for text in file.notices) == (encoding is None)


def test_new_files_of_stata_are_utf8(tmp_path: Path):
    path = tmp_path / "t.dta"
    pd.DataFrame({"occ1": ["smith", "bødker"]}).to_stata(path, write_index=False, version=118)
    with pytest.raises(UserError, match="files that do not name their encoding"):
        open_table(path, ["occ1"], encoding="cp1252")
    path.write_bytes(path.read_bytes().replace("ø".encode(), b"\xf8 "))
    file = open_table(path, ["occ1"])
    assert file.read(["occ1"]).columns["occ1"].to_pylist() == ["smith", "bø dker"]
    assert "some texts are not UTF-8" in file.notices[0]


def test_years_of_stata_stay_years(tmp_path: Path):
    dates = pd.to_datetime(["1880-01-01", "1881-01-01", None])
    frame = pd.DataFrame({"occ1": ["a", "b", "c"], "year": dates, "day": dates})
    path = tmp_path / "t.dta"
    frame.to_stata(path, write_index=False, convert_dates={"year": "ty", "day": "td"})
    columns = open_table(path, ["occ1"]).read(["year", "day"]).columns
    assert columns["year"].to_pylist() == ["1880", "1881", None]
    assert columns["day"].to_pylist()[0].startswith("1880-01-01")


@pytest.mark.parametrize("decimal", [".", ","])
def test_identifiers_keep_their_digits_in_csv(tmp_path: Path, decimal: str):
    numbers = [188001011234.0, None, 0.25]
    form = output.Form(decimal=decimal, delimiter=";")
    output.write_table(tmp_path / "t.csv", [pa.table({"id": numbers, "n": [1, 2, 3]})], form)
    lines = (tmp_path / "t.csv").read_text().splitlines()
    assert lines[1:] == ["188001011234;1", ";2", f"0{decimal}25;3"]


def test_formulas_of_categories_are_quoted(tmp_path: Path):
    table = pa.Table.from_pandas(pd.DataFrame({"occ1": pd.Categorical(["=cmd()", "smith"])}))
    notices = output.write_table(tmp_path / "t.csv", [table])
    assert read(tmp_path / "t.csv")["occ1"].tolist() == ["'=cmd()", "smith"]
    assert len(notices) == 1


def test_a_column_may_have_two_uses(tmp_path: Path):
    pd.DataFrame({"occ1": ["cook"]}).to_parquet(tmp_path / "t.parquet")
    columns = read_table(tmp_path / "t.parquet", ["occ1", "OCC1"]).columns
    assert [cells.to_pylist() for cells in columns.values()] == [["cook"], ["cook"]]


def test_user_missing_values_of_spss_are_told(tmp_path: Path):
    frame = pd.DataFrame({"occ1": ["boss", "cook"], "h": [99999, 53130]})
    path = tmp_path / "t.sav"
    pytest.importorskip("pyreadstat").write_sav(frame, path, missing_ranges={"h": [99999]})
    file = open_table(path, ["occ1", "h"])
    assert file.read(["h"]).columns["h"].to_pylist() == [None, "53130"]
    assert file.notices == [f"{path}: user-missing values are read as blank, in 'h'."]


def test_codes_are_texts_in_stata(tmp_path: Path):
    path, long = tmp_path / "o.dta", "å" * 1500
    table = pa.table(
        {"hisco 1": ["02000", "-1", None], "note": [long, "", None], "ok": [True, None, False]}
    )
    notices = output.write_table(path, [table.slice(0, 1), table.slice(1)])
    assert notices == [f"{path}: names of columns that Stata does not allow are changed."]
    columns = read_table(path, ["hisco_1", "note", "ok"]).columns
    assert columns["hisco_1"].to_pylist() == ["02000", "-1", None]
    assert columns["note"][0].as_py() == long and columns["ok"].to_pylist() == ["1", None, "0"]
    with pytest.raises(UserError, match=r"\.sav files can't be written"):
        check_output(tmp_path / "o.sav")


def test_what_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pyreadstat", None)
    (tmp_path / "t.sav").write_bytes(b"$FL2")
    with pytest.raises(UserError, match="pip install pyreadstat"):
        open_table(tmp_path / "t.sav", ["occ1"])


@cases(
    ("name", "content", "message"),
    ("t.xlsx", b"occ1,h\nx,1\n", "can't be read as a workbook: it is damaged"),
    ("t.xlsx", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600), "protected by a password"),
    ("t.xlsx", lambda path: zipfile.ZipFile(path, "w").close(), "can't be read as a workbook"),
    ("t.xlsx", lambda path: workbook(path, ("a", [])), "t.xlsx is empty"),
    ("t.xlsx", lambda path: workbook(path, ("a", [["occ1", "h"]])), "no rows"),
    ("t.ods", b"PK", "can't be read as a workbook"),
    ("t.xls", b"\xd0\xcf\x11\xe0", "can't be read as a workbook"),
    ("t.xlsb", b"PK", r"\.xlsb files can't be read\. Use one of the formats \.csv"),
    ("t.dta", b"no Stata", "can't be read as a .dta file"),
    (
        "t.dta",
        lambda path: pd.DataFrame({"occ1": []}, dtype=float).to_stata(path),
        "has columns but no rows",
    ),
    ("t.csv.gz", b"occ1,h\nx,1\n", "damaged, or not a gzip file"),
    ("t.csv.gz", gzip.compress(b"occ1,h\nx,1\n")[:-9], "damaged, or not a gzip file"),
    ("folder", Path.mkdir, "is a folder; name a CSV"),
    pytest.param(
        "pipe", getattr(os, "mkfifo", None), "save it to a file first", marks=skip_without_pipes
    ),
    ids=lambda value: value if isinstance(value, str) else "content",  # the same in each process
)
def test_files_that_can_not_be_read(tmp_path: Path, name: str, content, message: str):
    path = tmp_path / name
    path.write_bytes(content) if isinstance(content, bytes) else content(path)
    with pytest.raises(UserError, match=message) as caught:
        read_table(path, ["occ1"])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["out.xlsx", "out.dta"])
def test_values_that_sheets_lack_become_text(tmp_path: Path, name: str):
    values = {
        "born": date(1850, 3, 1),
        "alive": True,
        "paid": Decimal("1.50"),
        "name": b"Ann",
        "lived": timedelta(1),
    }
    columns = {name: [value, None] for name, value in values.items()}
    columns["seen"] = pa.array([datetime(2020, 3, 1, 12), None], pa.timestamp("us")).cast(
        pa.timestamp("us", "UTC")
    )
    table = pa.table(
        columns | {"person": [9_007_199_254_740_993, 9_007_199_254_740_995], "code": ["7", "02110"]}
    )
    output.write_table(tmp_path / name, [table])
    found = read_table(tmp_path / name, table.column_names).columns
    assert found["person"].to_pylist() == ["9007199254740993", "9007199254740995"]
    assert found["code"].to_pylist() == ["7", "02110"] and found["name"].to_pylist() == [
        "Ann",
        None,
    ]
    assert found["born"].to_pylist() == ["1850-03-01", None] and str(found["seen"][0]).startswith(
        "2020-03-01 12"
    )
    assert float(found["paid"][0].as_py()) == 1.5
    with pytest.raises(
        UserError, match=r"1,048,576 rows are more than Excel's 1,048,575; choose \.csv"
    ):
        check_output(tmp_path / "out.xlsx", num_rows=1_048_576)


RUN = ["=1+1", "+a", "-daughter", "@SUM(A1)", "\t=x", "\r=x", "'=1", "-1+2"]
SHOWN = ["-1", "-2", "-3", "61110", "+4.5e3", "-", "--", "a=b", "'tis", "", None]


@given(st.lists(st.text("=+-@\t\r'1a\n", max_size=5)))
def test_neutralised_formulas_are_read_as_before(texts: list[str]):
    cells = [*texts, *RUN, *SHOWN]
    written, num_changed = without_formulas(pa.array(cells, pa.string()))
    assert written.to_pylist()[len(texts) :] == [*(f"'{text}" for text in RUN), *SHOWN]
    assert as_meant(written).to_pylist() == cells
    assert num_changed == sum(a != b for a, b in zip(cells, written.to_pylist(), strict=True))


def test_the_loop_closes_over_formulas(model: Path, tmp_path: Path, logged: list[str]):
    texts = ["=farmer", "-baker", "'tis", "x"]
    source = write(tmp_path / "in.csv", "occ1,lang,'=n", *(f'"{text}",en,61110' for text in texts))
    code(model, source, tmp_path / "out.csv")
    code(model, source, tmp_path / "raw.csv", raw=True)
    assert read(tmp_path / "out.csv")["occ1"].tolist() == ["'=farmer", "'-baker", "'tis", "x"]
    assert read(tmp_path / "raw.csv")["occ1"].tolist() == texts
    assert read_table(tmp_path / "out.csv", ["occ1", "=n"]).columns["occ1"].to_pylist() == texts
    review(tmp_path / "out.csv", tmp_path / "review.csv", budget=4)
    assert "2 cells begin like formulas and were written with a leading apostrophe" in logged[0]
    checked = read(tmp_path / "review.csv").assign(
        checked="x", hisco_1=["61110", "77610", "80110", "61110"]
    )
    checked.to_csv(tmp_path / "review.csv", index=False)
    write(
        source,
        "occ1,lang,hisco_1",
        "=farmer,en,77610",
        "=a,en,",
        "b,en,77610",
        "c,en,61110",
        "d,en,61110",
    )
    settings = {
        "language_col": "lang",
        "corrections": (str(tmp_path / "review.csv"),),
        "initial_checkpoint": "m",
    }
    prepare(FinetuneConfig(str(source), ("hisco_1", "hisco_2"), **settings), tmp_path / "out")
    assert (
        "1 row has corrected codes, and 3 descriptions are added; all are training data." in logged
    )
    assert read(tmp_path / "out" / "data_train.csv")["occ1"].tolist().count("'=farmer") == 1
    assert read(tmp_path / "out" / "rejected.csv")["occ1"].tolist() == ["'=a"]


def test_columns_without_names_are_kept(tmp_path: Path):
    path = workbook(
        tmp_path / "t.xlsx",
        ("a", [["C", None, "occ1"], ["1", "x", "smith", "y"], [], ["2", None, None, 3]]),
    )
    file = open_table(path, ["occ1"])
    assert file.header == ["C", "B", "occ1", "D"]
    assert file.source["D"].to_pylist() == ["y", None, "3"] and not file.notices
    taken = workbook(tmp_path / "u.xlsx", ("a", [["B", None], ["smith", "x"]]))
    assert open_table(taken, ["B"]).header == ["B", "column B"]


def test_other_sheets_are_named(tmp_path: Path):
    book = openpyxl.Workbook()
    for name in ("data", "notes", "old"):
        for row in (["occ1", name], ["smith", "x"]):
            book.create_sheet(name).append(row) if name not in book.sheetnames else book[
                name
            ].append(row)
    book["old"].sheet_state = "hidden"
    book["data"].column_dimensions["B"].hidden = True
    book.save(tmp_path / "t.xlsx")
    file = open_table(tmp_path / "t.xlsx", {"data": "input_col"})
    assert file.notices == [
        f"{tmp_path / 't.xlsx'}: the sheet 'data' is read, and others are not: 'notes', 'old'."
    ]
    assert file.header == ["occ1", "data"]  # also the hidden one
    del book["notes"]
    book.save(tmp_path / "t.xlsx")
    assert open_table(tmp_path / "t.xlsx", {"occ1": "input_col"}).header == [
        "occ1",
        "data",
    ]  # not of the hidden sheet


def write_formulas(path: Path, writer: str) -> Path:
    """A workbook with formulas as a program writes them that does not compute them."""
    if writer == "openpyxl":
        return workbook(
            path, ("a", [["occ1", "n", "x"], ["smith", '=A2&"!"', 0], ["baker", "=C3+1", None]])
        )
    xlsxwriter = pytest.importorskip("xlsxwriter")
    with xlsxwriter.Workbook(path) as book:
        sheet = book.add_worksheet()
        sheet.write_row(0, 0, ["occ1", "n", "x"])
        sheet.write_row(1, 0, ["smith", "=1+1", 0])
        sheet.write_row(2, 0, ["baker", "=2+2"])
    return path


@pytest.mark.parametrize("writer", ["openpyxl", "xlsxwriter"])
def test_formulas_without_values_are_counted(tmp_path: Path, writer: str):
    path = write_formulas(tmp_path / "t.xlsx", writer)
    file = open_table(path, ["occ1"])
    assert (
        "the column 'n' has 2 formulas without a stored value, as programs write them, the "
        "first in B2"
    ) in file.notices[0]
    assert file.source["n"].to_pylist() == [None, None]
    assert file.source["x"].to_pylist() == [0, None]
    for wanted in ({"columns": ["n"]}, {"columns": ["occ1"], "optional": ["n"]}):
        with pytest.raises(UserError, match=r"first in B2\. Open the file in Excel and save it"):
            open_table(path, **wanted)


def test_merged_cells_are_read_in_all_rows(tmp_path: Path):
    book = openpyxl.Workbook()
    sheet = book.active
    for row in (
        [None, "Census"],
        [],
        ["occ1", "h"],
        ["smith", "83110"],
        ["baker"],
        [],
        ["cook", "53130"],
        ["maid"],
    ):
        sheet.append(row)
    for merged in ("A1:B1", "B4:B6", "B7:C8"):
        sheet.merge_cells(merged)
    book.save(tmp_path / "t.xlsx")
    file = open_table(tmp_path / "t.xlsx", ["occ1"])
    table = file.read(["h"])
    assert table.columns["h"].to_pylist() == ["83110", "83110", None, "53130", "53130"]
    assert table.lines(np.arange(5)).tolist() == [4, 5, 6, 7, 8]
    assert "cells are merged (B4:B6 and 1 more)" in file.notices[0]


def test_sparse_sheets_cost_what_they_hold(tmp_path: Path):
    book = openpyxl.Workbook()
    for column in range(1, 201):
        book.active.cell(1, column, f"c{column}")
    book.active.cell(2, 1, "smith")
    book.active.cell(1_048_576, 1, "farmer")
    book.save(tmp_path / "t.xlsx")
    file = open_table(tmp_path / "t.xlsx", ["c1"])
    table = file.read(["c1"])
    assert table.columns["c1"].to_pylist() == ["smith", "farmer"]
    assert table.lines(np.arange(2)).tolist() == [2, 1_048_576]
    assert "blank rows are left out; the last row with content is 1,048,576" in file.notices[0]
    for column in range(1, 16_385):
        book.active.cell(1, column, "c")
    for row in range(2, 2000):
        book.active.cell(row, row, "x")
    book.save(tmp_path / "t.xlsx")
    with pytest.raises(
        UserError,
        match=r"the first 1,221 rows and 16,384 columns have only 1,222 cells with content",
    ):
        open_table(tmp_path / "t.xlsx", ["c1"])


def write_ods(
    path: Path, rows: list[list[str]], *, repeats: int = 1, cell_repeats: int = 1
) -> Path:
    """A workbook of LibreOffice, whose last row is repeated, as each of its cells is."""
    spaces = " ".join(
        f'xmlns:{name}="urn:oasis:names:tc:opendocument:xmlns:{name}:1.0"'
        for name in ("office", "table", "text")
    )
    content = ""
    for i, row in enumerate(rows):
        is_last = i == len(rows) - 1
        times = f' table:number-columns-repeated="{cell_repeats}"' if is_last else ""
        cells = "".join(
            (
                f"<table:table-cell{times} "
                f'office:value-type="string"><text:p>{text}</text:p></table:table-cell>'
            )
            if text
            else "<table:table-cell/>"
            for text in row
        )
        times = f' table:number-rows-repeated="{repeats}"' if is_last else ""
        content += f"<table:table-row{times}>{cells}</table:table-row>"
    table = f'<table:table table:name="a">{content}</table:table>'
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("mimetype", "application/vnd.oasis.opendocument.spreadsheet")
        archive.writestr(
            "content.xml",
            f'<?xml version="1.0" encoding="UTF-8"?><office:document-content {spaces}><office:body>'
            f"<office:spreadsheet>{table}</office:spreadsheet></office:body></office:document-content>",
        )
        archive.writestr("META-INF/manifest.xml", '<?xml version="1.0"?><manifest/>')
    return path


def test_merged_cells_of_ods_are_read(tmp_path: Path):
    path = write_ods(
        tmp_path / "t.ods",
        [["occ1", "h"], ["smith", "SPAN"], ["baker", "HIDDEN"], ["cook", "53130"]],
    )
    with zipfile.ZipFile(path) as archive:
        content = archive.read("content.xml").decode()
    cell = '<table:table-cell office:value-type="string"><text:p>{}</text:p></table:table-cell>'
    span = cell.format("83110").replace(
        "<table:table-cell", '<table:table-cell table:number-rows-spanned="2"'
    )
    content = content.replace(cell.format("SPAN"), span).replace(
        cell.format("HIDDEN"), "<table:covered-table-cell/>"
    )
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("mimetype", "application/vnd.oasis.opendocument.spreadsheet")
        archive.writestr("content.xml", content)
        archive.writestr("META-INF/manifest.xml", '<?xml version="1.0"?><manifest/>')
    file = open_table(path, ["occ1"])
    assert file.read(["h"]).columns["h"].to_pylist() == ["83110", "83110", "53130"]
    assert "cells are merged (B2:B3)" in file.notices[0]


def test_old_workbooks_are_read(tmp_path: Path):
    write_ods(
        tmp_path / "t.ods",
        [["occ1", "h", "n"], ["smith", "83110", "0.5"], ["", "", "1"], ["baker", "77610", "2"]],
    )
    xlwt = pytest.importorskip("xlwt")
    book = xlwt.Workbook()
    sheet = book.add_sheet("a")
    for i, row in enumerate(
        [["occ1", "h", "n"], ["smith", 83110, 0.5], ["", "", 1], ["baker", 77610, 2]]
    ):
        for j, value in enumerate(row):
            sheet.write(i, j, value)
    book.save(str(tmp_path / "t.xls"))
    for suffix in (".ods", ".xls"):
        table = read_table(tmp_path / f"t{suffix}", ["occ1", "h", "n"])
        assert table.columns["occ1"].to_pylist() == ["smith", None, "baker"]
        assert table.columns["h"].to_pylist() == ["83110", None, "77610"]
        assert table.lines(np.arange(3)).tolist() == [2, 3, 4]
    with pytest.raises(UserError, match=r"\.ods files can't be written"):
        check_output(tmp_path / "o.ods")


def test_repeated_cells_of_ods_are_bounded(tmp_path: Path):
    path = write_ods(tmp_path / "t.ods", [["occ1"], ["smith"]], repeats=900_000, cell_repeats=900)
    with pytest.raises(UserError, match="would unpack to more than memory may hold"):
        open_table(path, ["occ1"])


@cases(
    ("name", "message"),
    ("row_gap.xlsx", "blank rows are left out; the last row with content is 1,048,576"),
    (
        "unnamed_column_and_formulas.xlsx",
        "the column 'formula' has 4 formulas without a stored value",
    ),
    ("merged_code.xlsx", r"cells are merged \(B2:B4 and 19 more\)"),
)
def test_cases_are_read_and_named(name: str, message: str):
    file = open_table(shared(f"cases/{name}"), [])
    assert re.search(message, file.notices[0])
    assert file.source.num_columns == {"row_gap.xlsx": 200, "merged_code.xlsx": 2}.get(name, 5)


@pytest.mark.parametrize("name", ["out.csv", "out.xlsx", "out.dta"])
def test_bytes_are_refused_before_anything_is_coded(model: Path, tmp_path: Path, name: str):
    source = tmp_path / "t.parquet"
    pa.parquet.write_table(
        pa.table({"occ1": ["smith"], "lang": ["en"], "b": [b"\xff\x00"]}), source
    )
    with pytest.raises(
        UserError, match=r"column 'b' holds bytes that are not UTF-8 text"
    ) as caught:
        code(model, source, tmp_path / name)
    assert "run the same command again" not in str(caught.value) and not (tmp_path / name).exists()


@cases(
    ("content", "coded"),
    (b'a,occ1,c\r\nx,"y,z",1\r\n', b'a,occ1,c,code,conf\r\nx,"y,z",1,06,0.5\r\n'),
    (
        b'"a","occ1"\n"x",""\n"v","w"\n',
        b'"a","occ1","code","conf"\n"x","","06","0.5"\n"v","w","06","0.5"\n',
    ),
    (
        b'"","occ1","n"\n"1","x",3\n"2","y",NA\n',
        b'"","occ1","n","code","conf"\n"1","x",3,"06",0.5\n"2","y",NA,"06",0.5\n',
    ),
    (b'a;occ1\n1,5;"x ""y"""\n', b'a;occ1;code;conf\n1,5;"x ""y""";06;0,5\n'),
    (b'a\tocc1\n1\t"x\ny"\n', b'a\tocc1\tcode\tconf\n1\t"x\ny"\t06\t0.5\n'),
    ids=["needed", "all", "as R", "decimal comma", "breaks in cells"],
)
def test_csv_is_written_as_it_was_read(tmp_path: Path, content: bytes, coded: bytes):
    (tmp_path / "in.csv").write_bytes(content)
    file = open_table(tmp_path / "in.csv", ["occ1"])
    (block,) = file.chunks(chunk_rows=10)
    block = block.append_column("code", pa.array(["06"] * len(block)))
    block = block.append_column("conf", pa.array([0.5] * len(block)))
    output.write_table(tmp_path / "out.csv", [block], output.Form.like(file))
    assert (tmp_path / "out.csv").read_bytes() == coded


def test_rows_of_workbooks_are_called_rows(tmp_path: Path):
    frame = pd.DataFrame({"occ1": ["smed", "bager"], "hisco_1": ["83110", "baker"]})
    frame.to_excel(tmp_path / "a.xlsx", index=False)
    frame.to_csv(tmp_path / "a.csv", index=False)
    for name, where in (("a.xlsx", "row 3, hisco_1"), ("a.csv", "line 3, hisco_1")):
        config = PrepareConfig(
            dataset=str(tmp_path / name), target_cols=("hisco_1",), save_path=str(tmp_path / "out")
        )
        with pytest.raises(UserError, match=where):
            prepare(config, tmp_path / "out")
