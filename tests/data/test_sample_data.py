"""The sample data in data/ are of the right form and can be made again."""

import re

import pandas as pd
from archives import read
from conftest import ROOT, SHARED, run

from histocoder.data.key import read_key
from histocoder.formatters.classifications import HISCO_TITLES

DATA = ROOT / "data"
REFERENCE = SHARED / "reference" / "hisco_codes.csv"
CODE = re.compile(r"\d{5}|-[123]")
CODE_COLUMNS = [f"hisco_{i}" for i in range(1, 6)]
LANGUAGES = {"en", "da", "se", "nl", "fr", "ge", "no", "is", "es", "it", "pt", "ca"}


def test_sample_titles_are_unique_by_language():
    titles, key = read(HISCO_TITLES), read_key(DATA / "key.csv")
    counts, codes = titles["lang"].value_counts(), {*titles["hisco"]}
    assert (
        len(titles) >= 800
        and len(counts) >= 8
        and {*counts.index} <= LANGUAGES
        and counts.min() >= 50
    )
    assert titles["title"].ne("").all() and titles["title"].eq(titles["title"].str.strip()).all()
    assert (
        not titles.assign(title=titles["title"].str.casefold()).duplicated(["title", "lang"]).any()
    )
    assert all(map(CODE.fullmatch, codes)) and {*key.codes} == {*key.descriptions} == codes
    assert not REFERENCE.exists() or codes <= {*read(REFERENCE)["hisco"]}


def test_sample_rows_are_in_one_file():
    train, val = (read(DATA / name) for name in ("train.csv", "val.csv"))
    rows = pd.concat([train, val])
    assert rows[CODE_COLUMNS].ne("").sum(axis=1).isin([1, 2]).all() and {*rows["lang"]} <= LANGUAGES
    keys = rows["occ1"].str.strip().str.casefold()
    assert keys.ne("").all() and rows.groupby([keys, rows["lang"]])[CODE_COLUMNS].nunique().eq(
        1
    ).all(axis=None)
    assert not {*keys[: len(train)]} & {*keys[len(train) :]}
    assert {*val[CODE_COLUMNS].stack()} <= {*train[CODE_COLUMNS].stack()}


def test_making_the_data_again_gives_the_same_bytes(tmp_path):
    run(DATA / "make_data.py", "--out-dir", tmp_path, fresh=True)
    for name in ("train.csv", "val.csv"):
        assert (tmp_path / name).read_bytes() == (DATA / name).read_bytes(), (
            f"{name}: run python data/make_data.py"
        )
