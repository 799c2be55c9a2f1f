"""Coded files with what people have decided in them."""

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from archives import read
from conftest import mistake, write
from models import CODES, save_tiny_model, tiny_model

from histocoder.checkpoints.model_files import save_model
from histocoder.classes.class_columns import classes_of
from histocoder.cli.main import main
from histocoder.config.prediction import ClassOptions
from histocoder.errors import UserError
from histocoder.evaluation import checked_file
from histocoder.evaluation.checked_file import (
    ANY_LANGUAGE,
    DecidedCodes,
    read_decisions,
    write_checked,
)
from histocoder.evaluation.review_file import Columns
from histocoder.formatters import build_formatter
from histocoder.formatters.code_system import HISCO
from histocoder.tables.table import open_table

CODED = (
    "id,occ1,lang,hisco_1,prob_1,desc_1,hisco_2,prob_2,desc_2,conf",
    "1,Smed,da,61110,0.9,Farmer,,,,0.9",
    "2,baker,en,77610,0.6,Baker,61110,0.5,Farmer,0.3",
    "3,smed,se,61110,0.5,Farmer,,,,0.5",
    "4,,en,,,,,,,",
)
COLUMNS = Columns("occ1", "lang", ("hisco_1", "hisco_2"))
TITLES = {"83110": "Blacksmith", "77610": "Baker"}


@pytest.fixture
def coded(tmp_path: Path) -> Path:
    return write(tmp_path / "coded.csv", *CODED)


def test_decisions_replace_codes_and_keep_the_models(coded: Path, tmp_path: Path):
    decisions = {
        ("smed", "da"): DecidedCodes(("83110", "77610"), "Anna", "2026-01-02"),
        ("baker", "en"): DecidedCodes(("77610",)),
    }
    assert write_checked(coded, tmp_path / "out.csv", decisions, COLUMNS, titles=TITLES) == 2
    table = read(tmp_path / "out.csv")
    own = ["hisco_1", "prob_1", "desc_1", "hisco_2", "prob_2", "desc_2"]
    assert table[own].to_numpy().tolist() == [
        ["83110", "", "Blacksmith", "77610", "", "Baker"],
        ["77610", "", "Baker", "", "", ""],
        ["61110", "0.5", "Farmer", "", "", ""],
        ["", "", "", "", "", ""],
    ]
    beside = ["conf", "checked_by", "checked_at", "model_hisco_1", "model_hisco_2"]
    assert [*table][-4:] == beside[1:]
    assert table[beside].to_numpy().tolist()[:3] == [
        ["0.9", "Anna", "2026-01-02", "61110", ""],
        ["0.3", "", "", "77610", "61110"],
        ["0.5", "", "", "61110", ""],
    ]


def test_a_decision_without_language_counts_for_all(coded: Path, tmp_path: Path):
    decisions = {
        ("smed", ANY_LANGUAGE): DecidedCodes(("83110",)),
        ("smed", "se"): DecidedCodes(("77610",)),
    }
    write_checked(coded, tmp_path / "out.csv", decisions, COLUMNS, titles={})
    assert read(tmp_path / "out.csv")["hisco_1"].tolist() == ["83110", "77610", "77610", ""]


def test_classes_are_those_of_the_decided_codes(tmp_path: Path):
    table = write(tmp_path / "hisclass.csv", "hisco,hisclass", "61110,8", "83110,7", "77610,6")
    lines = (
        "occ1,hisco_1,prob_1,conf,hisclass,hisclass_prob",
        "smed,61110,0.9,0.9,8,0.8",
        "baker,77610,0.9,0.9,6,0.7",
    )
    coded = write(tmp_path / "coded.csv", *lines)
    classes = classes_of(
        ["hisco_1"], ClassOptions(), str(table), codes=None, prefix="", expect=False
    )
    decisions = {("smed", ANY_LANGUAGE): DecidedCodes(("83110",))}
    write_checked(coded, tmp_path / "out.csv", decisions, Columns(), titles={}, classes=classes)
    written = read(tmp_path / "out.csv")[["hisco_1", "hisclass", "hisclass_prob"]]
    assert written.to_numpy().tolist() == [["83110", "7", ""], ["77610", "6", "0.7"]]


def test_codes_beyond_the_columns_of_the_training_data_stay(coded: Path, tmp_path: Path):
    model = tiny_model()  # which writes two codes
    config = replace(model.config, target_cols=("hisco_1",))
    save_model(tmp_path / "model", config, model.state_dict(), tokenizer=model.tokenizer)
    rows = ("smed,da,x,83110,77610", "baker,en,x,77610,61110")
    review = write(tmp_path / "review.csv", "occ1,lang,checked,hisco_1,hisco_2", *rows)
    files = ("--predictions", coded, "--apply", review, "--output", tmp_path / "final.csv")
    main(["review", "--model", *map(str, (tmp_path / "model", *files)), "--language-col", "lang"])
    final = read(tmp_path / "final.csv")[["hisco_1", "hisco_2"]]
    assert final.to_numpy().tolist()[:2] == [["83110", "77610"], ["77610", "61110"]]


@pytest.mark.parametrize("codes", [pa.string(), pa.large_string(), pa.int64()])
@pytest.mark.parametrize("suffix", [".parquet", ".dta"])
def test_types_of_columns_do_not_depend_on_decisions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codes: pa.DataType, suffix: str
):
    monkeypatch.setattr(checked_file, "CHUNK_ROWS", 2)
    columns = {
        "occ1": pa.array(["a", "b", "smed", "c"]),
        "hisco_1": pa.array([61110] * 4).cast(codes),
        "prob_1": pa.array([0.5] * 4),
        "hisco_2": pa.nulls(4),
        "prob_2": pa.nulls(4),
        "conf": pa.array([0.5] * 4),
    }
    coded = tmp_path / "coded.parquet"
    pyarrow.parquet.write_table(pa.table(columns), coded)
    decisions = {("smed", ANY_LANGUAGE): DecidedCodes(("83110", "77610"))}
    output = tmp_path / f"out{suffix}"
    columns_of_file = Columns(target_cols=COLUMNS.target_cols)
    write_checked(coded, output, decisions, columns_of_file, titles={})
    written = open_table(output, ()).read(["hisco_1", "hisco_2"]).columns
    assert written["hisco_1"].to_pylist() == ["61110", "61110", "83110", "61110"]
    assert written["hisco_2"].to_pylist() == [None, None, "77610", None]


@pytest.fixture
def classed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A command that writes a coded file with classes and groups, and a decision on it, in the
    current folder.
    """
    monkeypatch.chdir(tmp_path)
    model = save_tiny_model(Path("model"))
    write(Path("hsn.csv"), "hisco,hisclass", *(f"{code},9" for code in CODES), "83110,7")
    write(Path("in.csv"), "occ1", "smed", "bonde")
    flags = (
        "--mode combined --levels major --classes hsn.csv --input in.csv --output coded.csv".split()
    )
    main(["predict", "--model", str(model), *flags])
    write(Path("review.csv"), "occ1,checked,hisco_1", "smed,x,83110")
    flags = "--predictions coded.csv --apply review.csv --output final.csv".split()
    return ["review", "--model", str(model), *flags]


CLASS_COLS = ["hisclass_1", "hisclass_1_prob", "major_1", "major_1_prob"]


def test_review_applies_classes_of_the_decided_codes(classed: list[str]):
    main(classed)
    before = read(Path("coded.csv"))[CLASS_COLS]
    after = read(Path("final.csv"))[CLASS_COLS]
    assert after.loc[0].tolist() == ["7", "", "7/8/9", ""]
    assert after.loc[1].tolist() == before.loc[1].tolist()


@pytest.mark.parametrize("missing", ["hsn.csv", "coded.histocoder.json"])
def test_classes_of_an_unknown_table_become_blank(
    classed: list[str], missing: str, logged: list[str]
):
    Path(missing).unlink()
    main(classed)
    before = read(Path("coded.csv"))[CLASS_COLS]
    after = read(Path("final.csv"))[CLASS_COLS]
    assert after.loc[0].tolist() == ["", "", "7/8/9", ""]
    assert after.loc[1].tolist() == before.loc[1].tolist()
    assert "these rows have no hisclass_1, hisclass_2, whose table" in logged[-1]
    assert "histocoder classes --table TABLE --input final.csv" in logged[-1]


def test_classes_whose_column_was_deleted_stay_away(classed: list[str]):
    coded = read(Path("coded.csv")).drop(columns="hisclass_2")
    coded.to_csv("coded.csv", index=False)
    main(classed)
    final = read(Path("final.csv"))
    assert final.loc[0, "hisclass_1"] == ""
    assert "hisclass_2" not in final


def test_more_codes_than_columns_are_refused(coded: Path, tmp_path: Path):
    decisions = {("smed", "da"): DecidedCodes(("83110", "77610", "61110"))}
    with pytest.raises(UserError, match=r"was given 3 codes, and .* has 2 columns of codes"):
        write_checked(coded, tmp_path / "out.csv", decisions, COLUMNS, titles={})
    assert not (tmp_path / "out.csv").exists()


def test_review_applies_what_is_checked(
    coded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model = save_tiny_model(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    write(
        tmp_path / "review.csv",
        "occ1,lang,checked,hisco_1,hisco_2",
        "smed,da,x,61115,",
        "baker,en,,61110,",
    )
    arguments = [
        "review",
        "--model",
        str(model),
        "--predictions",
        "coded.csv",
        "--apply",
        "review.csv",
    ]
    main([*arguments, "--output", "final.csv"])
    assert read(tmp_path / "final.csv")["hisco_1"].tolist() == ["61115", "77610", "61110", ""]


def test_cells_of_decisions_are_read_as_in_training(tmp_path: Path):
    lines = (
        "occ1,lang,checked,hisco_1,hisco_2",
        'a,da,x,"61110,0",-',
        "b,,x,,",
        "c,da,,x,",
        "d,unk,ja,77610 & 61110,",
    )
    path = write(tmp_path / "review.csv", *lines)
    decisions = read_decisions(path, COLUMNS, known={"61110", "77610"}, system=HISCO)
    assert {key: decision.codes for key, decision in decisions.items()} == {
        ("a", "da"): ("61110",),
        ("b", ANY_LANGUAGE): (),
        ("d", ANY_LANGUAGE): ("77610", "61110"),
    }
    write(path, "occ1,checked,hisco_1", "a,x,61.110")
    with pytest.raises(
        UserError, match=r"review\.csv, line 2, column 'hisco_1': '61\.110' has a mark of thousands"
    ):
        read_decisions(path, COLUMNS, known={"61110", "77610"}, system=HISCO)


@pytest.mark.parametrize("code", ["2110", "99999999", "7711O"])
def test_codes_that_do_not_fit_are_not_applied(
    code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], coded: Path
):
    model = save_tiny_model(tmp_path / "model")
    review = write(tmp_path / "review.csv", "occ1,lang,checked,hisco_1", f"smed,da,x,{code}")
    flags = ("--predictions", coded, "--apply", review, "--output", tmp_path / "final.csv")
    message = mistake(capsys, "review", "--model", model, *flags)
    assert f"{review}, line 2, column 'hisco_1': '{code}'" in message
    assert not (tmp_path / "final.csv").exists()


def test_a_letter_among_codes_of_digits_is_refused(tmp_path: Path):
    path = write(tmp_path / "review.csv", "occ1,lang,checked,hisco_1", "a,da,x,7711O")
    general = build_formatter("general", num_blocks=2).system
    with pytest.raises(UserError, match="'7711O' is not a number, unlike all codes of the model"):
        read_decisions(path, COLUMNS, known={"61110", "-1"}, system=general)
    decisions = read_decisions(path, COLUMNS, known={"61110", "6111A"}, system=general)
    assert decisions["a", "da"].codes == ("7711O",)


def test_a_code_that_is_given_twice_counts_once(tmp_path: Path):
    path = write(tmp_path / "review.csv", "occ1,lang,checked,hisco_1,hisco_2", "a,da,x,61110,61110")
    decisions = read_decisions(path, COLUMNS, known={"61110"}, system=HISCO)
    assert decisions["a", "da"].codes == ("61110",)


def test_a_file_in_which_nothing_is_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], coded: Path
):
    model = save_tiny_model(tmp_path / "model")
    review = write(tmp_path / "review.csv", "occ1,lang,checked,hisco_1", "smed,da,,61110")
    flags = ("--predictions", coded, "--apply", review, "--output", tmp_path / "final.csv")
    assert "no row is checked" in mistake(capsys, "review", "--model", model, *flags)
