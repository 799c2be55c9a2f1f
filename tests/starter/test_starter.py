"""The model in the box: what it knows, what its folder holds, and where it codes."""

import csv
import json
import sys
from pathlib import Path

import pandas as pd
import pytest
from conftest import program
from safetensors import safe_open

from histocoder import Coder
from histocoder.checkpoints.model_files import CONFIG_FILE, WEIGHTS_FILE
from histocoder.checkpoints.starter import STARTER
from histocoder.formatters.classifications import HISCO_TITLES

DESCRIPTIONS = Path(__file__).with_name("descriptions.csv")
"""Descriptions that were written for this test, in 32 languages, with their codes."""
FILES = {
    "about.json",
    "config.json",
    "manifest.json",
    "model.safetensors",
    "LICENSE",
    "NOTICE",
    "README.md",
}
MAX_BYTES = 30_000_000


@pytest.fixture(scope="module")
def coder() -> Coder:
    return Coder.from_pretrained(device="cpu")


def written_rows() -> pd.DataFrame:
    return pd.read_csv(DESCRIPTIONS, dtype=str, keep_default_na=False)


def test_the_box_codes_descriptions_written_for_it(coder: Coder):
    rows = written_rows()
    predicted = coder.predict(rows["occ1"], rows["lang"], progress=False)
    columns = ["hisco_1", "hisco_2"]
    right = (predicted[columns].fillna("") == rows[columns]).all(axis=1)
    by_lang = right.groupby(rows["lang"]).mean()[rows["lang"].value_counts() >= 20]
    assert len(rows) >= 300 and right.mean() > 0.8, rows[~right]
    assert by_lang.min() > 0.6, by_lang


def test_unsure_answers_are_more_often_wrong(coder: Coder):
    rows = written_rows()
    predicted = coder.predict(rows["occ1"], rows["lang"], progress=False)
    right = predicted["hisco_1"] == rows["hisco_1"]
    is_sure = predicted["conf"] >= 0.8
    assert right[is_sure].mean() > 0.9 > right[~is_sure].mean()


def test_the_folder_of_the_box_is_small():
    files = [path for path in STARTER.rglob("*") if path.is_file()]
    assert {path.name for path in files} == FILES
    assert sum(path.stat().st_size for path in files) <= MAX_BYTES


def test_the_box_has_numbers_and_no_text_of_tables():
    with safe_open(STARTER / WEIGHTS_FILE, "pt") as file:
        assert file.metadata() is None  # tensors are numbers, whatever their names
    config = json.loads((STARTER / CONFIG_FILE).read_text(encoding="utf-8"))
    texts = [name for name, value in config.items() if isinstance(value, dict | list) and value]
    assert set(texts) == {
        *("codes", "confidence", "descriptions", "encoder", "experts", "experts_by_language"),
        *("formatter", "languages", "target_cols"),
    }


def test_codes_of_the_written_descriptions_are_in_the_key(coder: Coder):
    with HISCO_TITLES.open(encoding="utf-8", newline="") as file:
        assert {row["hisco"] for row in csv.DictReader(file)} <= set(coder.codes)
    rows = written_rows()
    assert {*rows["hisco_1"], *rows["hisco_2"]} - {""} <= set(coder.codes)


def test_languages_with_few_titles_say_so(coder: Coder):
    with pytest.warns(match="learned little of Basque"):
        predicted = coder.predict(["okina"], "eu", progress=False)
    assert predicted["conf"][0] < 0.8


def test_commands_say_once_that_the_box_codes():
    command = (sys.executable, "-m", "histocoder")
    done = program(*command, "predict", "husmand", "--language", "da")
    assert "61115" in done.stdout
    assert done.stderr.count("the model in the box, version") == 1
    about = program(*command, "about")
    assert "CC BY-SA 4.0" in about.stdout and "library_name" not in about.stdout
