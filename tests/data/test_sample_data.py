"""The sample data in data/ are of the right form and can be made again."""

import csv
import re
import subprocess
import sys
from collections import Counter, defaultdict

from conftest import ROOT, SHARED

from histocoder.data.key import read_key
from histocoder.data.titles import HISCO

DATA = ROOT / "data"
REFERENCE = SHARED / "reference" / "hisco_codes.csv"
CODE = re.compile(r"\d{5}|-[123]")
CODE_COLUMNS = [f"hisco_{i}" for i in range(1, 6)]
LANGUAGES = {"en", "da", "se", "nl", "fr", "ge", "no", "is", "es", "it", "pt", "ca"}


def read(name):
    with (HISCO if name == "titles.csv" else DATA / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def codes_of(row):
    return [row[name] for name in CODE_COLUMNS if row[name]]


def test_sample_titles_are_unique_by_language():
    titles = read("titles.csv")
    counts = Counter(row["lang"] for row in titles)
    assert len(titles) >= 800 and len(counts) >= 8 and set(counts) <= LANGUAGES and min(counts.values()) >= 50
    codes = {row["hisco"] for row in titles}
    assert all(map(CODE.fullmatch, codes)) and all(
        row["title"] and row["title"] == row["title"].strip() for row in titles
    )
    assert max(Counter((row["title"].casefold(), row["lang"]) for row in titles).values()) == 1
    key = read_key(DATA / "key.csv")
    assert set(key.codes) == set(key.descriptions) == codes
    if REFERENCE.exists():
        with REFERENCE.open(encoding="utf-8", newline="") as file:
            assert codes <= {row["hisco"] for row in csv.DictReader(file)}


def test_sample_rows_are_in_one_file():
    train, val = read("train.csv"), read("val.csv")
    codings = defaultdict(set)
    for row in (*train, *val):
        codes = codes_of(row)
        assert 1 <= len(codes) <= 2 and row["occ1"].strip() and row["lang"] in LANGUAGES
        codings[row["occ1"].strip().casefold(), row["lang"]].add(tuple(codes))
    assert all(len(found) == 1 for found in codings.values())
    assert not {row["occ1"].strip().casefold() for row in train} & {row["occ1"].strip().casefold() for row in val}
    assert {code for row in val for code in codes_of(row)} <= {code for row in train for code in codes_of(row)}


def test_making_the_data_again_gives_the_same_bytes(tmp_path):
    command = [sys.executable, str(DATA / "make_data.py"), "--out-dir", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    for name in ("train.csv", "val.csv"):
        assert (tmp_path / name).read_bytes() == (DATA / name).read_bytes(), f"{name}: run python data/make_data.py"
