"""Titles of codes are learned from, but never validated on."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import run
from jobs import finetune

from histocoder.checkpoints.model_files import read_model_config
from histocoder.config import PrepareConfig
from histocoder.data.dataset import OccupationDataset
from histocoder.data.examples import TITLES, TRAIN, VAL, Examples
from histocoder.data.normalize import description_keys
from histocoder.data.prepare import prepare
from histocoder.data.samplers import Share
from histocoder.data.titles import HISCO
from histocoder.errors import UserError
from histocoder.formatters import build_formatter


def titled(lang: str) -> pd.DataFrame:
    titles = pd.read_csv(HISCO, dtype=str)
    return titles[titles["lang"] == lang]


def prepared(tmp_path: Path, rows: pd.DataFrame, **settings) -> dict[str, Examples]:
    """Descriptions and codes of a table, by the split that preparing puts them into."""
    rows.to_csv(tmp_path / "table.csv", index=False)
    names = {"dataset": str(tmp_path / "table.csv"), "target_cols": ("hisco",), "input_col": "title"}
    prepare(PrepareConfig(**{**names, "language": "English", **settings}), tmp_path / "out")
    return {name: Examples.open(tmp_path / "out" / "examples.arrow", name) for name in (TRAIN, VAL, TITLES)}


def test_a_hisco_table_gets_titles_of_its_languages(tmp_path: Path):
    rows = titled("en").sample(300, random_state=0)
    found = prepared(tmp_path, rows[["title", "hisco"]])
    assert set(found[TITLES].langs) == {"en"} and len(found[TRAIN]) + len(found[VAL]) == 300
    given = {*description_keys(rows["title"].tolist())}
    assert not given & {*description_keys(found[TITLES].texts)} and len(found[TITLES]) > 300
    key = pd.read_csv(tmp_path / "out" / "key.csv", dtype=str)
    assert {*found[TITLES].code_table} <= {*key["system_code"]}


@pytest.mark.parametrize(
    ("change", "settings"),
    [
        (lambda code: f"1{code[:4]}", {}),
        (lambda code: f"x{code[:2]}", {}),
        (lambda code: code, {"titles": "none"}),
        (lambda code: code, {"language": "unk"}),
    ],
    ids=["other digits", "other codes", "none", "an unknown language"],
)
def test_other_tables_get_no_titles(tmp_path: Path, change, settings: dict[str, str]):
    rows = titled("en").sample(200, random_state=1).query("hisco.str.len() == 5")
    found = prepared(tmp_path, rows.assign(hisco=rows["hisco"].map(change)), **settings)
    assert len(found[TITLES]) == 0 and not (tmp_path / "out" / "data_titles.csv").exists()


def test_a_key_bounds_the_codes_of_titles(tmp_path: Path):
    rows = titled("en").sample(200, random_state=2)
    pd.DataFrame({"system_code": rows["hisco"].unique(), "code": range(rows["hisco"].nunique())}).to_csv(
        tmp_path / "key.csv", index=False
    )
    found = prepared(tmp_path, rows, key=str(tmp_path / "key.csv"))
    assert len(found[TITLES]) and {*found[TITLES].code_table} <= {*rows["hisco"]}


def test_data_prepared_by_an_earlier_version_are_kept(tmp_path: Path):
    rows = titled("en").sample(200, random_state=5)
    assert len(prepared(tmp_path, rows, titles="none")[TITLES]) == 0
    path = tmp_path / "out" / "prepared.json"
    record = json.loads(path.read_text())
    del record["settings"]["titles"]  # which it did not have
    path.write_text(json.dumps(record))
    assert len(prepared(tmp_path, rows)[TITLES]) == 0
    record["settings"]["titles"] = "none"
    path.write_text(json.dumps(record))
    with pytest.raises(UserError, match="titles: 'none' there, 'auto' now"):
        prepared(tmp_path, rows)


def test_titles_of_other_classifications_are_read(tmp_path: Path):
    (tmp_path / "titles.csv").write_text("title,code\nplough boy,A1\nfarmer,A1\nladle maker,B2\nodd,none such code\n")
    rows = pd.DataFrame({"title": ["farmer", "baker", "cook", "spoon maker"], "hisco": ["A1", "C3", "C3", "B2"]})
    found = prepared(tmp_path, rows, titles=str(tmp_path / "titles.csv"), share_val=0.25)
    assert found[TITLES].texts == ["plough boy", "ladle maker"]
    (tmp_path / "key.csv").write_text("title,lang\nfarmer,en\n")
    (tmp_path / "other").mkdir()
    with pytest.raises(UserError, match="has no column of codes"):
        prepared(tmp_path / "other", rows, titles=str(tmp_path / "key.csv"))


def test_titles_weigh_less_than_rows(tmp_path: Path):
    found = prepared(tmp_path, titled("en").sample(300, random_state=3))
    examples = Examples.open(tmp_path / "out" / "examples.arrow", TRAIN, TITLES)
    formatter = build_formatter("general", num_blocks=1)
    data = OccupationDataset(examples, formatter=formatter, classes=examples.code_table, max_len=64)
    batch = data[Share(np.arange(len(data)), epoch=0, num_rows=len(data), num_target_blocks=1, weight=1.0)]
    expected = [1.0] * len(found[TRAIN]) + [0.3] * len(found[TITLES])
    torch.testing.assert_close(batch.counts, torch.tensor(expected))
    assert data.num_titles == len(found[TITLES])


def test_a_run_learns_codes_of_titles_alone(tmp_path: Path):
    titled("en").sample(60, random_state=4).rename(columns={"title": "occ1", "hisco": "hisco_1"}).to_csv(
        tmp_path / "table.csv", index=False
    )
    flags = ("--language", "en", "--max-steps", 2, "--titles", "auto")
    said = run(*finetune(tmp_path / "table.csv", tmp_path / "out", *flags)).stdout
    titles = pd.read_csv(tmp_path / "out" / "data_titles.csv", dtype=str)
    assert f"{len(titles):,} titles of codes" in said
    assert {*titles["hisco_1"]} <= {*read_model_config(tmp_path / "out").codes}
