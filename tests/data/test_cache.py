"""Examples as arrays in files: the same for every chunk size, made once, made again where they are damaged."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from conftest import write_table

from histocoder.config import PrepareConfig
from histocoder.data import cache
from histocoder.data import table as tables
from histocoder.data.examples import ExampleFiles
from histocoder.data.labels import LabelRules
from histocoder.data.prepare import prepare
from histocoder.errors import UserError
from histocoder.formatters import build_formatter
from histocoder.formatters.tokenizers import CharacterTokenizer

FORMATTER = build_formatter("hisco", num_blocks=2)


def example_files(*paths: Path, **options) -> ExampleFiles:
    return ExampleFiles(paths, ("hisco_1", "hisco_2"), FORMATTER, **options)


def build(files: ExampleFiles, folder: Path, **options) -> Path:
    settings = {"max_len": 32, "text_normalization": "none", **options}
    return cache.build_cache(files, folder, **settings)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """A table of 64 rows with all that a chunk's border may fall on."""
    path = write_table(tmp_path / "mixed.csv", two_codes=True)
    lines = path.read_text(encoding="utf-8").splitlines()
    lines[5:5] = ["", ",,,", '"two\nlines",da,61110,', "no code,da,,", ",da,61110,", '"væver 🥿",da,-1,80110']
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each call that reads the lengths of a file's rows."""
    counts: list[int] = []
    lengths = CharacterTokenizer.lengths

    def count(self: CharacterTokenizer, descriptions: list[str], *args, **options):
        counts.append(len(descriptions))
        return lengths(self, descriptions, *args, **options)

    monkeypatch.setattr(CharacterTokenizer, "lengths", count)
    return counts


@pytest.mark.parametrize("split_by", ["text", "row"])
def test_the_size_of_chunks_changes_no_prepared_file(
    mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split_by: str
):
    config = PrepareConfig(
        str(mixed),
        ("hisco_1", "hisco_2"),
        language_col="lang",
        allow_codes_shorter_than_block_size=True,
        split_by=split_by,
    )
    prepare(config, tmp_path / "whole")
    monkeypatch.setattr(tables, "CHUNK_ROWS", 7)
    prepare(config, tmp_path / "chunks")
    assert contents(tmp_path / "whole") == contents(tmp_path / "chunks")
    record = json.loads((tmp_path / "whole" / "prepared.json").read_text())
    assert record["rows"]["rejected"] == 2  # no description, no code


def test_the_size_of_chunks_changes_no_array(mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    files = example_files(mixed, rules=LabelRules(drop_bad=True))
    whole = contents(build(files, tmp_path / "whole"))
    monkeypatch.setattr(tables, "CHUNK_ROWS", 7)
    assert contents(build(files, tmp_path / "chunks")) == whole
    assert len(files.sample(20, of=66, seed=3)) == 20 and len(files.sample(99, of=66, seed=3)) == 66


def test_mistakes_are_told_of_all_chunks_at_once(mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tables, "CHUNK_ROWS", 7)
    with mixed.open("a", encoding="utf-8") as file:
        file.write("smith,en,8311,\nsmith,en,83110,9\n")
    with pytest.raises(UserError, match=r"2 codes have fewer.*line 73, hisco_1: '8311'; line 74, hisco_2: '9'"):
        build(example_files(mixed), tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_arrays_hold_what_the_file_says(mixed: Path, tmp_path: Path):
    files = example_files(mixed, rules=LabelRules(drop_bad=True))
    arrays, examples = cache.open_cache(build(files, tmp_path / "cache")), files.read()
    assert len(arrays) == len(examples) == 66
    codes = np.array([None, *arrays.code_table], dtype=object)[arrays.codes]
    assert (codes == examples.codes.to_numpy()).all()
    texts = [f"{lang}[SEP]{text}" for lang, text in zip(examples.langs, examples.texts, strict=True)]
    assert arrays.texts(np.arange(66)) == texts and arrays.texts(np.array([7, 3])) == [texts[7], texts[3]]
    assert arrays.lengths.tolist() == [min(2 + len(text), 32) for text in texts]
    assert [arrays.languages[place] for place in arrays.langs] == examples.langs
    assert arrays.characters.dtype == np.uint32  # one character lies beyond 16 bits
    assert type(arrays.characters) is np.ndarray  # a `memmap` takes microseconds for each slice
    assert arrays.lengths.dtype == arrays.codes.dtype == np.uint8


def test_each_row_is_tokenised_once_for_all_runs(mixed: Path, tmp_path: Path, counted: list[int], logged: list[str]):
    files = example_files(mixed, rules=LabelRules(drop_bad=True))
    first = build(files, tmp_path / "cache")
    assert sum(counted) == 66 and "MB" in logged[0]
    assert build(files, tmp_path / "cache") == first
    assert sum(counted) == 66 and len(logged) == 1
    mixed.rename(tmp_path / "renamed.csv")
    moved = example_files(tmp_path / "renamed.csv", rules=LabelRules(drop_bad=True))
    assert build(moved, tmp_path / "cache") == first
    assert build(moved, tmp_path / "cache", max_len=64) != first
    assert build(moved, tmp_path / "cache", text_normalization="lower_ascii") != first


@pytest.mark.parametrize("damage", ["byte", "cut", "missing", "record", "foreign"])
def test_a_damaged_cache_is_built_again(table: Path, tmp_path: Path, counted: list[int], damage: str):
    files = ExampleFiles((table,), ("hisco_1",), FORMATTER)
    folder = build(files, tmp_path / "cache")
    before = contents(folder)
    characters = bytearray(before["characters"])
    if damage == "byte":
        characters[len(characters) // 2] ^= 1
        (folder / "characters").write_bytes(characters)
    elif damage == "cut":
        (folder / "characters").write_bytes(characters[:-4])
    elif damage == "missing":
        (folder / "codes").unlink()
    elif damage == "record":
        (folder / "cache.json").write_text("{")
    else:
        (folder / "cache.json").write_text("[]")
    counted.clear()
    assert build(files, tmp_path / "cache") == folder
    assert sum(counted) == 64 and contents(folder) == before


def test_examples_of_one_language(tmp_path: Path):
    table = tmp_path / "t.csv"
    for header, lang in (("occ1,hisco_1,lang", "da"), ("occ1,hisco_1,other", "x")):
        table.write_text(f"{header}\nvæver,75400,{lang}\n,75400,{lang}\n", encoding="cp1252")
        heard: list[str] = []
        assert example_files(table, language="en").read(say=heard.append).langs == ["en"]
        assert len(heard) == 2 and "cp1252" in heard[0] and "1 row without a description" in heard[1]
    caches = {build(example_files(table, language=language), tmp_path / "cache") for language in (None, "en", "da")}
    assert len(caches) == 3


def test_a_worker_is_handed_the_folder_and_not_the_arrays(table: Path, tmp_path: Path):
    arrays = cache.open_cache(build(ExampleFiles((table,), ("hisco_1",), FORMATTER), tmp_path / "cache"))
    handed = pickle.dumps(arrays)
    assert len(handed) < 1000 and np.array_equal(pickle.loads(handed).characters, arrays.characters)


def test_distinct_descriptions_are_counted_once(mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lines = mixed.read_text(encoding="utf-8").splitlines()
    mixed.write_text(
        "\n".join([*lines, "Farmer,en,61110,", "farmer,da,61110,", *lines[20:30]]) + "\n", encoding="utf-8"
    )
    files = example_files(mixed, rules=LabelRules(drop_bad=True))
    texts = files.read().texts
    monkeypatch.setattr(tables, "CHUNK_ROWS", 7)
    found = {
        name: cache.open_cache(build(files, tmp_path, text_normalization=name)) for name in ("none", "lower_ascii")
    }
    assert found["none"].num_distinct == len(set(texts)) < len(texts)
    assert found["lower_ascii"].num_distinct == len({text.lower() for text in texts}) == len(set(texts)) - 1


def test_numbers_are_counted_in_parts_as_in_one():
    rng = np.random.default_rng(1)
    ends = np.array([-(2**63), -(2**60), -1, 0, 1, 2**60, 2**63 - 1])
    parts = [np.sort(rng.choice(ends, 5)) for _ in range(3)]
    parts += [np.sort(rng.integers(-(2**63), 2**63 - 1, 500)) for _ in range(3)] * 2 + [np.array([], dtype=np.int64)]
    assert cache._num_distinct(parts) == len(np.unique(np.concatenate(parts)))
