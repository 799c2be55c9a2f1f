"""The sample data in data/ are of the right form and can be made again."""

import csv
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from histocoder.data.key import read_key

ROOT = Path(__file__).parents[2]
DATA = ROOT / "data"
REFERENCE = ROOT.parent / "shared" / "reference" / "hisco_codes.csv"

CODE = re.compile(r"\d{5}|-[123]")
CODE_COLUMNS = [f"hisco_{i}" for i in range(1, 6)]
LANGUAGES = {"en", "da", "se", "nl", "fr", "ge", "no", "is", "es", "it", "pt", "ca"}


def read(name):
    with (DATA / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def codes_of(row):
    return [row[name] for name in CODE_COLUMNS if row[name]]


def test_titles_are_many_and_in_many_languages():
    titles = read("titles.csv")
    counts = Counter(row["lang"] for row in titles)
    assert len(titles) >= 800
    assert len(counts) >= 8
    assert set(counts) <= LANGUAGES
    assert min(counts.values()) >= 50


def test_codes_of_titles_have_the_right_form():
    assert [row for row in read("titles.csv") if not CODE.fullmatch(row["hisco"])] == []


def test_each_title_stands_once_in_its_language():
    counts = Counter((row["title"].casefold(), row["lang"]) for row in read("titles.csv"))
    assert [key for key, count in counts.items() if count > 1] == []


def test_titles_are_sorted_and_without_outer_blanks():
    keys = [(row["hisco"], row["lang"], row["title"]) for row in read("titles.csv")]
    assert keys == sorted(keys)
    assert [title for _, _, title in keys if not title or title != title.strip()] == []


def test_each_code_stands_in_the_reference_list():
    if not REFERENCE.exists():
        pytest.skip(f"no list of HISCO codes at {REFERENCE}")
    with REFERENCE.open(encoding="utf-8", newline="") as file:
        known = {row["hisco"] for row in csv.DictReader(file)}
    assert {row["hisco"] for row in read("titles.csv")} <= known


def test_key_describes_the_codes_of_titles():
    key = read_key(DATA / "key.csv")
    assert set(key.codes) == set(key.descriptions) == {row["hisco"] for row in read("titles.csv")}


@pytest.mark.parametrize("name", ["train.csv", "val.csv"])
def test_rows_have_codes_of_titles_and_none_twice(name):
    known = {row["hisco"] for row in read("titles.csv")}
    for row in read(name):
        codes = codes_of(row)
        assert 1 <= len(codes) <= 2
        assert codes == [row[column] for column in CODE_COLUMNS[: len(codes)]]
        assert len(set(codes)) == len(codes)
        assert set(codes) <= known
        assert row["occ1"].strip()
        assert row["lang"] in LANGUAGES


@pytest.mark.parametrize("name", ["train.csv", "val.csv"])
def test_some_rows_name_two_occupations(name):
    rows = read(name)
    assert 0.08 < sum(len(codes_of(row)) == 2 for row in rows) / len(rows) < 0.16


def test_no_description_is_in_both_train_and_val():
    train, val = ({row["occ1"].strip().casefold() for row in read(name)} for name in ("train.csv", "val.csv"))
    assert train & val == set()


def test_codes_of_val_occur_in_train():
    train, val = ({code for row in read(name) for code in codes_of(row)} for name in ("train.csv", "val.csv"))
    assert val <= train


def test_a_description_has_one_coding_in_each_language():
    codings = defaultdict(set)
    for row in read("train.csv") + read("val.csv"):
        codings[row["occ1"].strip().casefold(), row["lang"]].add(tuple(codes_of(row)))
    assert [key for key, value in codings.items() if len(value) > 1] == []


def make(folder, *flags):
    command = [sys.executable, str(DATA / "make_data.py"), "--out-dir", str(folder), *flags]
    subprocess.run(command, check=True, capture_output=True)


def test_making_the_data_again_gives_the_same_bytes(tmp_path):
    make(tmp_path)
    for name in ("train.csv", "val.csv"):
        assert (tmp_path / name).read_bytes() == (DATA / name).read_bytes(), f"{name}: run python data/make_data.py"


def test_flags_set_the_seed_and_the_numbers_of_rows(tmp_path):
    make(tmp_path, "--seed", "7", "--train-rows", "300", "--val-rows", "40")
    for name, num_rows in (("train.csv", 300), ("val.csv", 40)):
        lines = (tmp_path / name).read_text(encoding="utf-8").splitlines()
        assert len(lines) == num_rows + 1
        assert lines[1] != (DATA / name).read_text(encoding="utf-8").splitlines()[1]


def test_the_folder_is_small():
    assert sum(path.stat().st_size for path in DATA.iterdir() if path.is_file()) < 2_000_000
