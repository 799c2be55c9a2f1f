"""Languages by ISO code, OccCANINE's code or name: the same in training, predicting and
evaluating.
"""

import re
import warnings
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from conftest import ROOT, mistake, write, write_table
from models import save_tiny_model, tiny_coder, tiny_model

from docs.flags import PAGE
from histocoder.checkpoints.model_files import save_config
from histocoder.cli.main import main
from histocoder.config import ModelConfig, PrepareConfig
from histocoder.data.labelled_files import LabelledFiles
from histocoder.data.prepare import prepare
from histocoder.errors import Notice, UserError
from histocoder.formatters import build_formatter
from histocoder.inference.descriptions import Descriptions, thresholds_of
from histocoder.inference.table_coder import BlockCoder
from histocoder.text.languages import NAMES, Language

SWEDISH = ["se", "sv", "SV", "Swedish", " swedish ", "sv-SE", "sv_FI"]


def test_one_code_for_each_language():
    assert {Language(text) for text in SWEDISH} == {"se"}
    assert [
        *map(Language, "de ge German el gr no Danish".split())
    ] == "ge ge ge gr gr no da".split()
    assert {Language(text) for text in ("", " ", "unk", "Unknown", "NA", "nan")} == {"unk"}
    assert Language(" Plattdeutsch") == "Plattdeutsch"
    assert len(NAMES) == 182 and all(re.fullmatch("[a-z]{2}", code) for code in NAMES)


@pytest.mark.parametrize("known", ["se", "sv", "Swedish"])
def test_a_model_is_given_the_code_it_knows(known: str):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = Descriptions.of(["dräng"] * len(SWEDISH), SWEDISH, languages=("da", known, "unk"))
    assert found.langs == ["se"] and found.rows.tolist() == [0] * len(SWEDISH)
    assert [Language("se").among(("da", known)), Language("se").among(())] == [
        known,
        "se",
    ]  # () of a published model
    assert [Language("xx").among(("da", known)), Language("xx").among(())] == ["unk", "xx"]
    with pytest.warns(Notice, match="does not know the language 'xx'.* as unknown"):
        Descriptions.of(["x"], ["xx"], languages=("da", known))
    with pytest.warns(Notice, match="histocoder does not know: 'xx'"):
        Descriptions.of(["x"], ["xx"], languages=())
    config = {
        **tiny_model().config.to_dict(),
        "languages": ["da", known, "unk"],
        "thresholds": {known: 0.3, "*": 0.6},
    }
    assert thresholds_of(
        ModelConfig.from_dict(config), ("sv", "se", "da")
    ).tolist() == pytest.approx([0.3, 0.3, 0.6])


def test_tables_have_one_code_for_each_language(tmp_path: Path):
    lines = [f"title {i},{lang},{61110 + i % 2}" for i, lang in enumerate([*SWEDISH, "NA", "de"])]
    path = write(tmp_path / "t.csv", "occ1,lang,h", *lines)
    expected = ["se"] * len(SWEDISH) + ["unk", "ge"]
    assert (
        LabelledFiles((path,), ("h",), build_formatter("hisco", num_blocks=1)).read().langs
        == expected
    )
    for name, changes in (("a", {"language_col": "lang"}), ("b", {"language": "Swedish"})):
        prepare(PrepareConfig(str(path), ("h",), **changes), tmp_path / name)
        frame = pd.concat(
            pd.read_csv(tmp_path / name / f"data_{part}.csv") for part in ("train", "val")
        )
        assert sorted(frame["lang"]) == (sorted(expected) if name == "a" else ["se"] * len(lines))


def test_unknown_languages_of_a_column_are_named(tmp_path: Path, logged: list[str]):
    table = write_table(tmp_path / "t.csv", two_codes=True)
    table.write_text(table.read_text().replace(",en,", ",Danisch,", 9))
    prepare(PrepareConfig(str(table), ("hisco_1",), language_col="lang"), tmp_path / "out")
    assert any(
        "'Danisch' (did you mean Danish, da?)" in text and "languages of their own" in text
        for text in logged
    )
    with pytest.warns(Notice, match="'Danisch' .did you mean Danish, da?.* treats it as unknown"):
        tiny_coder(languages=("en", "unk")).predict(["cook"], ["Danisch"])


@pytest.mark.parametrize("language", ["Danisch", "xx"])
def test_one_language_for_all_must_be_known(table: Path, tmp_path: Path, language: str, capsys):
    model = str(save_tiny_model(tmp_path / "model"))
    save_config(tmp_path / "model", replace(tiny_model().config, languages=("Plattdeutsch", "unk")))
    flags = ("--model", model, "--language", language)
    said = mistake(capsys, "predict", *flags, "cook").removeprefix("error: ")
    assert "and unk where" in said and ("'Danisch' (did you mean Danish, da?)" in said) == (
        language == "Danisch"
    )
    assert said in mistake(
        capsys, "evaluate", *flags, "--data", table, "--output", tmp_path / "report"
    )
    with pytest.raises(UserError, match=f"^{re.escape(said)}$"):
        prepare(PrepareConfig(str(table), ("hisco_1",), language=language), tmp_path / "out")
    with pytest.raises(UserError, match=f"^{re.escape(said)}$"):  # of Ray and Spark
        BlockCoder.of(model, ["occ1"], device="cpu", precision="fp32", language=language)
    main(["predict", "--model", model, "--language", "Plattdeutsch", "cook"])
    assert "Plattdeutsch" not in capsys.readouterr().err


def test_languages_are_listed():
    assert all(f"{code} {name}" in PAGE.read_text(encoding="utf-8") for code, name in NAMES.items())
    sample = set(pd.read_csv(ROOT / "data" / "train.csv")["lang"])
    assert {Language(lang) for lang in sample} == sample  # as it was trained with
