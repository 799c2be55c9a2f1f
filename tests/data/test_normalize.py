"""Spellings of one text that look alike: read alike by new models, and kept together where data are split."""

import unicodedata
from pathlib import Path

import pandas as pd
from hypothesis import given
from hypothesis import strategies as st

from histocoder.config import NORMALIZATIONS, PrepareConfig
from histocoder.data.examples import Examples
from histocoder.data.normalize import description_keys, normalize
from histocoder.data.prepare import prepare
from histocoder.evaluation.baselines import Baselines
from histocoder.inference.known import Known

NFC, NFD = (unicodedata.normalize(form, "Dräng") for form in ("NFC", "NFD"))


@given(st.text(st.characters(max_codepoint=0x52F, exclude_categories=["Cc", "Cs"], exclude_characters="\u037e\u0387")))
def test_keys_are_equal_where_models_read_alike(text: str):
    variants = [text, unicodedata.normalize("NFD", text), f"  {text}\t"]
    variants += [read for how in NORMALIZATIONS for read in normalize([text], how)]
    assert set(description_keys(variants)) == set(description_keys([text]))


def test_keys_of_letters_that_ascii_lacks():
    texts = ["Væver", "vaever", "STRASSENKEHRER", "Straßenkehrer", "wine\u2014 merchant", "😀", "👑", "γεωργός"]
    keys = ["vaever"] * 2 + ["strassenkehrer"] * 2 + ["wine-- merchant", "😀", "👑", "georgos"]
    assert description_keys(texts).tolist() == keys


def test_variants_stand_on_one_side_of_the_split(tmp_path: Path):
    variants = [variant for i in range(40) for variant in (f"{NFC} {i}", f"{NFD} {i}", f" DRANG  {i}")]
    lines = [f"{text},{62105 + len(text) % 2}\n" for text in variants]
    (tmp_path / "t.csv").write_text("occ1,hisco_1\n" + "".join(lines), encoding="utf-8")
    prepare(PrepareConfig(str(tmp_path / "t.csv"), ("hisco_1",)), tmp_path / "out")
    train, val = (pd.read_csv(tmp_path / "out" / f"data_{part}.csv")["occ1"].tolist() for part in ("train", "val"))
    assert len(val) == 24 and not set(description_keys(train)) & set(description_keys(val))
    assert sorted(train + val) == sorted(variants)  # the texts themselves are written as they came


def test_seen_in_training_in_another_spelling():
    def examples(*texts: str) -> Examples:
        return Examples.of(list(texts), ["se"] * len(texts), pd.DataFrame({"hisco_1": ["62105"] * len(texts)}))

    baselines = Baselines(examples("  dräng", "piga"), Known(), max_size=0)
    baselines.add(examples(NFC, NFD.upper()))
    assert baselines.texts_seen == {"drang": 2}
