"""What a cell of codes is, at every entrance that reads some; docs/data.md has the table."""

import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from conftest import shared, write

from docs.cells import (
    CODED,
    ENTRANCES,
    KINDS,
    LEFT_OUT,
    NONE,
    NOTICED,
    PAGE,
    REFUSED,
    Kind,
    with_table,
)
from histocoder.cli.audit import coded_rows, run_agreement
from histocoder.cli.flags import AgreementFlags
from histocoder.config import MixerConfig, PrepareConfig
from histocoder.data.corrections import read_corrections
from histocoder.data.examples import TRAIN
from histocoder.data.labelled_files import LabelledFiles
from histocoder.data.labels import LabelRules
from histocoder.data.prepare import prepare
from histocoder.desk.domain.coding import Coding
from histocoder.errors import UserError
from histocoder.evaluation.checked_file import read_decisions
from histocoder.evaluation.review_file import Columns
from histocoder.evaluation.scores import code_sets
from histocoder.formatters import build_formatter
from histocoder.inference.coder import Coder
from histocoder.inference.descriptions import Descriptions
from histocoder.inference.known import Known, files_of, training_files
from histocoder.log import log
from histocoder.training.data import example_files
from histocoder.training.start import Start

COLUMNS = ("hisco_1", "hisco_2")
PLAIN = [
    f"plain {i},{code},,"
    for i, code in enumerate(["61110", "77610", "80110", "41025", "95410", "01110"] * 3)
]
Read = Callable[[Path, Coder], dict[str, list[str]]]


@pytest.fixture(scope="session")
def coder(model: Path) -> Coder:
    return Coder.from_pretrained(model, "cpu")


def table_of(path: Path, cells: list[str], *, checked: str = "") -> Path:
    """A table of plain codes, and a row for each cell, whose description is its number."""
    rows = [
        f'cell {i},"{cell.replace(chr(34), chr(34) * 2)}",,{checked}'
        for i, cell in enumerate(cells)
    ]
    return write(path, f"occ1,hisco_1,hisco_2,{'checked' if checked else 'note'}", *PLAIN, *rows)


def trained(path: Path, _: Coder) -> dict[str, list[str]]:
    config = PrepareConfig(str(path), COLUMNS, titles="none", language="en", split_by="row")
    prepare(config, path.parent / "out")
    names = [path.parent / "out" / f"data_{part}.csv" for part in ("train", "val")]
    rows = pd.concat([pd.read_csv(name, dtype=str) for name in names])
    return dict(zip(rows["occ1"], map(list, code_sets(rows[[*COLUMNS]])), strict=True))


def mixed(path: Path, _: Coder) -> dict[str, list[str]]:
    config = MixerConfig(
        train_data=(str(path),),
        val_data=(str(path),),
        save_dir=str(path.parent),
        target_cols=COLUMNS,
    )
    examples = example_files(config, Start())[TRAIN].read()
    return dict(zip(examples.texts, map(list, code_sets(examples.codes)), strict=True))


def evaluated(path: Path, coder: Coder) -> dict[str, list[str]]:
    examples = files_of(coder, path, language="en").read()
    return dict(zip(examples.texts, map(list, code_sets(examples.codes)), strict=True))


def known(path: Path, coder: Coder) -> dict[str, list[str]]:
    rules = LabelRules(drop_bad=True)
    files, _ = training_files(path, coder, rules, input_col="occ1", language_col=None)
    answers = Known(any_language=True)
    for examples in files.chunks(say=log.info):
        answers.add(examples)
    texts = [f"cell {i}" for i in range(20)]
    pairs = zip(texts, answers.find(texts, ["en"] * len(texts)), strict=True)
    return {text: list(answer.codes) for text, answer in pairs if answer is not None}


def agreed(path: Path, _: Coder) -> dict[str, list[str]]:
    flags = AgreementFlags(files=(str(path), str(path)), target_cols=COLUMNS)
    rows = coded_rows(flags, str(path), None, "id_col", has_blank=True).rows
    return dict(zip(rows["text"], map(list, rows["codes"]), strict=True))


def all_checked(path: Path) -> Path:
    """A table of `table_of` whose rows are marked as right."""
    lines = path.read_text(encoding="utf-8").replace(",note", ",checked").splitlines()
    return write(path.with_name("checked.csv"), lines[0], *(f"{line}x" for line in lines[1:]))


def corrected(path: Path, coder: Coder) -> dict[str, list[str]]:
    checked = all_checked(path)
    config = PrepareConfig("t.csv", COLUMNS, language="en", corrections=(str(checked),))
    table = LabelledFiles((), COLUMNS, build_formatter("general", num_blocks=2))
    corrections = read_corrections(config, replace(table, known=coder.codes))
    rows = corrections.added().to_pandas()
    codes = rows[[f"codes.{name}" for name in COLUMNS]]
    return dict(zip(rows["text"], map(list, code_sets(codes)), strict=True))


def applied(path: Path, coder: Coder) -> dict[str, list[str]]:
    columns = Columns("occ1", target_cols=COLUMNS)
    decisions = read_decisions(
        all_checked(path), columns, known=coder.codes, system=coder.formatter.system
    )
    return {key: list(decision.codes) for (key, _), decision in decisions.items()}


READERS: dict[str, Read] = {"train": trained, "mixer": mixed, "evaluate": evaluated, "known": known}
READERS |= {"agreement": agreed, "corrections": corrected, "apply": applied}


@pytest.mark.parametrize("entrance", [name for name in ENTRANCES if name in READERS])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_cells_of_a_kind_in_tables(
    coder: Coder, tmp_path: Path, logged: list[str], kind: Kind, entrance: str
):
    read = READERS[entrance]
    result = kind.at(entrance)
    if result == REFUSED:
        for cell in kind.cells:
            with pytest.raises(UserError, match=kind.reason):
                read(table_of(tmp_path / "t.csv", [cell]), coder)
        return
    codes = read(table_of(tmp_path / "t.csv", [*kind.cells]), coder)
    expected = [] if result in (NONE, LEFT_OUT) else result.split()
    found = {text: codes.get(text, []) for text in (f"cell {i}" for i in range(len(kind.cells)))}
    assert found == dict.fromkeys(found, expected)
    left_out = [
        line for line in logged if re.search(kind.reason, line) and "line 20, hisco_1" in line
    ]
    assert result != LEFT_OUT or left_out, logged


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_cells_of_a_kind_by_hand(coder: Coder, model: Path, kind: Kind):
    coding = Coding(coder, model, name="m")
    for cell in kind.cells:
        if kind.at("desk") == REFUSED:
            with pytest.raises(UserError, match=kind.reason):
                coding.check_codes([cell])
        elif kind.at("desk") == NONE:
            with pytest.raises(UserError, match="There are 0 codes"):
                coding.check_codes([cell])
        else:
            assert coding.check_codes([cell]) == kind.at("desk").split()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_cells_of_a_kind_as_descriptions(kind: Kind):
    for cell in kind.cells:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert Descriptions.of([cell], "en", languages=("en",)).texts == [cell]
        assert kind.predict == (NOTICED if caught else CODED), cell


def test_the_table_of_the_page_is_made():
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_table(page), "run python -m docs.cells"


def codes_of(
    path: Path, *cells: str, columns: tuple[str, ...] = ("hisco_1",), **settings
) -> list[str]:
    """Prepare a table whose rows have these cells, and return the codes that a model would
    learn.
    """
    write(
        path / "t.csv",
        "occ1,hisco_1",
        *(f'title {n}-{i},"{cell}"' for n in range(4) for i, cell in enumerate(cells)),
    )
    prepare(
        PrepareConfig(str(path / "t.csv"), columns, titles="none", **settings),
        path / "out",
        overwrite=True,
    )
    return pd.read_csv(path / "out" / "key.csv", dtype=str)["system_code"].tolist()


def test_what_was_done_is_said_once_with_the_place(tmp_path: Path, logged: list[str]):
    cells = ["61110.0", "77610", "-", "80110,0", "n/a", "−1", "95410."]
    assert codes_of(tmp_path, *cells) == ["-1", "61110", "77610", "80110", "95410"]
    table = tmp_path / "t.csv"
    blank = (
        f"{table}: 8 cells of codes mean that there is no code: '-' (4), 'n/a' (4); the "
        "first in line 4, hisco_1: '-'."
    )
    assert any(line.startswith(blank) for line in logged)
    assert f"{table}: 16 cells of codes are read without what is not the code's; " in "".join(
        logged
    )
    assert "the first in line 2, hisco_1: '61110.0' as 61110." in "".join(logged)


def test_words_for_none_are_classes_among_words(tmp_path: Path, logged: list[str]):
    assert codes_of(tmp_path, "farmer", "craft", "none", "x") == ["craft", "farmer", "none", "x"]
    assert any(
        "8 cells of codes may mean that there is no code: 'none' (4), 'x' (4)" in line
        for line in logged
    )
    assert codes_of(tmp_path, "A1", "B2", "none", "C3") == ["A1", "B2", "C3"]


def test_spellings_of_one_class_are_joined(tmp_path: Path, logged: list[str]):
    cells = ["Farmer", "farmer", "Farmer", "Craft worker", "Craft  worker", "Craft worker"]
    assert codes_of(tmp_path, *cells) == ["Craft worker", "Farmer"]
    assert any(
        "8 cells of codes differ from others in case, blanks or zeros alone" in line
        for line in logged
    )
    key = write(tmp_path / "key.csv", "system_code,code", "Farmer,0", "farmer,1", "Craft worker,2")
    assert "farmer" in codes_of(tmp_path, *cells, key=str(key))
    assert codes_of(tmp_path, "2", "02", "2", "11", "12") == ["11", "12", "2"]


@pytest.mark.parametrize("sep", ["/", ";", " ; ", "|", "&", " "])
def test_several_codes_in_a_cell_need_columns(tmp_path: Path, sep: str):
    cells = [f"61110{sep}77610", "80110", "95410", "-1", "61110"]
    with pytest.raises(
        UserError, match=r"holds 2 codes for 1 column; .*--target-cols hisco_1 hisco_2\."
    ) as caught:
        codes_of(tmp_path, *cells)
    assert caught.value.settings == {
        "target_cols": ("hisco_1", "hisco_2"),
        "code_sep": sep.strip() or " ",
    }
    codes = codes_of(tmp_path, *cells, columns=COLUMNS, code_sep=sep.strip() or " ")
    assert codes == ["-1", "61110", "77610", "80110", "95410"]
    rows = pd.concat(
        [pd.read_csv(tmp_path / "out" / f"data_{part}.csv", dtype=str) for part in ("train", "val")]
    )
    assert rows["hisco_2"].dropna().tolist() == ["77610"] * 4


def test_a_named_separator_splits_words(tmp_path: Path):
    codes = codes_of(tmp_path, "farmer/baker", "farmer", "smith", columns=COLUMNS, code_sep="/")
    assert codes == ["baker", "farmer", "smith"]


def test_hisco_without_its_hyphen_is_recognised(tmp_path: Path):
    assert codes_of(tmp_path, "611-10", "776-10", "801-10") == ["61110", "77610", "80110"]
    assert codes_of(tmp_path, "123.45", "999.99", "007.77") == ["007.77", "123.45", "999.99"]


@pytest.mark.parametrize("cells", [("9",), ("abc",), ("9", "abc"), ("99", "7")])
def test_padding_is_offered_only_where_it_gives_codes(tmp_path: Path, cells: tuple[str, ...]):
    plain = ["61110", "77610", "80110", "95410", "41025", "75400", "83110"] * 3
    with pytest.raises(UserError) as caught:
        codes_of(tmp_path, *plain, *cells)
    assert caught.value.settings == {"drop_bad_labels": True} and "--zero-pad-codes" not in str(
        caught.value
    )
    with pytest.raises(UserError) as caught:
        codes_of(tmp_path, *plain, *cells, "1110")
    assert ("zero_pad_codes" in caught.value.settings) == (
        cells == ("abc",)
    )  # 9 is no code with zeros, either


@pytest.mark.parametrize("flag", ["zero_pad_codes", "allow_codes_shorter_than_block_size"])
def test_flags_for_short_codes_let_no_words_in(tmp_path: Path, flag: str):
    plain = ["61110", "77610", "80110", "95410", "1110", "7310", "83110"] * 3
    with pytest.raises(
        UserError, match=r"4 rows have labels that do not fit: line 23, hisco_1: 'abc' has"
    ):
        codes_of(tmp_path, *plain, "abc", **{flag: True})


def test_most_rows_are_never_left_out_as_a_repair(tmp_path: Path):
    with pytest.raises(UserError, match=r"mark of thousands.*list them in --key") as caught:
        codes_of(tmp_path, "61.110", "77.610", "1.110")
    assert caught.value.settings == {}


CASES = {"dash2.csv": 8, "zero2.csv": 8, "none.csv": 8, "deccomma.csv": 8, "deccomma00.csv": 11}


@pytest.mark.parametrize("name", CASES)
def test_tables_that_people_have(tmp_path: Path, name: str):
    columns = COLUMNS if name.endswith("2.csv") else COLUMNS[:1]
    config = PrepareConfig(
        str(shared(f"cases/{name}")), columns, titles="none", zero_pad_codes="00" in name
    )
    prepare(config, tmp_path / "out")
    codes = pd.read_csv(tmp_path / "out" / "key.csv", dtype=str)["system_code"]
    assert len(codes) == CASES[name] and codes.str.fullmatch(r"\d{5}").all()
    rows = pd.concat(
        [pd.read_csv(tmp_path / "out" / f"data_{part}.csv", dtype=str) for part in ("train", "val")]
    )
    assert len(rows) >= 48 and (columns == COLUMNS[:1] or rows["hisco_2"].notna().sum() == 8)


@pytest.mark.parametrize("name", ["th_dot.csv", "th_apos.csv"])
def test_marks_of_thousands_stop_the_run(tmp_path: Path, name: str):
    with pytest.raises(UserError, match="has a mark of thousands"):
        prepare(PrepareConfig(str(shared(f"cases/{name}")), ("hisco_1",)), tmp_path / "out")


def test_a_dash_is_no_code_to_evaluate_and_compare(coder: Coder, tmp_path: Path, logged: list[str]):
    examples = files_of(coder, shared("cases/evaluate_dash.csv")).read()
    assert examples.codes["hisco_2"].isna().all()
    files = (str(shared("cases/agreement_blank.csv")), str(shared("cases/agreement_dash.csv")))
    flags = {"target_cols": COLUMNS, "language_col": "lang", "output": str(tmp_path / "settle.csv")}
    run_agreement(AgreementFlags(files=files, **flags))
    assert any(re.search(r"all +150 +100\.0\s%.* 1\.000 ", line) for line in logged)


def test_a_checked_row_without_a_code_is_a_decision(
    coder: Coder, tmp_path: Path, logged: list[str]
):
    table = write(
        tmp_path / "t.csv", "occ1,hisco_1", *(f"title {i},6111{i % 2}" for i in range(20))
    )
    checked = write(
        tmp_path / "c.csv",
        "occ1,checked,hisco_1",
        "title 3,x,",
        "at home,x,-",
        ",x,61110",
        "title 4,,61110",
    )
    config = PrepareConfig(
        str(table), ("hisco_1",), titles="none", corrections=(str(checked),), share_val=0.3
    )
    prepare(config, tmp_path / "out")
    trained_on = pd.read_csv(tmp_path / "out" / "data_train.csv", dtype=str).set_index("occ1")[
        "hisco_1"
    ]
    assert (
        trained_on["title 3"] == trained_on["at home"] == "?"
        and "?" not in (tmp_path / "out" / "key.csv").read_text()
    )
    assert (
        f"{checked}: 2 checked rows have no code, which means no occupation; the first is "
        "in line 2."
    ) in logged
    rejected = pd.read_csv(tmp_path / "out" / "rejected.csv", dtype=str)
    assert rejected[["line", "reason"]].to_numpy().tolist() == [["4", f"{checked}: no description"]]

    # in hand-coded rows, and for two coders
    files, _ = training_files(
        checked, coder, LabelRules(drop_bad=True), input_col="occ1", language_col=None
    )
    answers = Known(any_language=True)
    answers.add(files.read())
    first, other = answers.find(["at home", "title 4"], ["en", "en"])
    assert first is not None and first.codes == () and other is None
    flags = AgreementFlags(files=(str(checked), str(checked)), target_cols=("hisco_1",))
    assert sorted(
        coded_rows(flags, str(checked), None, "id_col", has_blank=True).rows["codes"]
    ) == [
        (),
        (),
    ]
    mixer = MixerConfig(
        train_data=(str(checked),), val_data=(str(checked),), save_dir=str(tmp_path / "m")
    )
    with pytest.raises(
        UserError, match="line 2, hisco_1: is checked and blank; write the code of no occupation"
    ):
        example_files(mixer, Start())[TRAIN].read()
