"""examples.arrow: the same for every chunk size, written once, written again where it is
damaged.
"""

import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from conftest import write, write_table
from trainers import stored

from histocoder.config import PrepareConfig
from histocoder.data.example_writer import EXAMPLES_FILE, store_examples
from histocoder.data.examples import Examples
from histocoder.data.key import read_key
from histocoder.data.labelled_files import LabelledFiles
from histocoder.data.labels import LabelRules
from histocoder.data.prepare import prepare, prepared_files
from histocoder.formatters import build_formatter
from histocoder.tables import table as tables
from histocoder.text.normalize import normalize
from histocoder.text.tokenizers import join_language

DROPPING = LabelRules(drop_bad=True)


def example_files(*paths: Path, **options) -> LabelledFiles:
    return LabelledFiles(
        paths, ("hisco_1", "hisco_2"), build_formatter("hisco", num_blocks=2), **options
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def rows_of(path: Path) -> list[dict]:
    with pa.memory_map(str(path)) as source:
        return sorted(pa.ipc.open_file(source).read_all().to_pylist(), key=lambda row: row["row"])


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """A table of 64 rows with all that a chunk's border may fall on."""
    lines = (
        write_table(tmp_path / "mixed.csv", two_codes=True).read_text(encoding="utf-8").splitlines()
    )
    lines[5:5] = [
        "",
        ",,,",
        '"two\nlines",da,61110,',
        "no code,da,,",
        ",da,61110,",
        '"væver 🥿",da,-1,80110',
    ]
    return write(tmp_path / "mixed.csv", *lines)


@pytest.fixture
def config(mixed: Path) -> PrepareConfig:
    allowed = {"language_col": "lang", "allow_codes_shorter_than_block_size": True}
    return PrepareConfig(str(mixed), ("hisco_1", "hisco_2"), titles="none", **allowed)


def test_the_size_of_chunks_changes_nothing(
    config: PrepareConfig, mixed: Path, tmp_path: Path, monkeypatch
):
    files = example_files(mixed, rules=DROPPING)
    record, examples = prepare(config, tmp_path / "whole"), stored(tmp_path / "files", files)
    monkeypatch.setattr(tables, "CHUNK_ROWS", 7)
    prepare(config, tmp_path / "chunks")
    whole, chunks = contents(tmp_path / "whole"), contents(tmp_path / "chunks")
    assert all(chunks[name] == content for name, content in whole.items() if name.endswith(".csv"))
    assert rows_of(tmp_path / "chunks" / EXAMPLES_FILE) == rows_of(
        tmp_path / "whole" / EXAMPLES_FILE
    )
    assert record["rows"]["rejected"] == 4  # two blank rows, no description, no code
    in_chunks = stored(tmp_path / "files in chunks", files)
    rows = np.arange(66)
    assert (
        in_chunks.inputs.texts(rows) == examples.inputs.texts(rows)
        and (in_chunks.code_index == examples.code_index).all()
    )
    for some in (examples, in_chunks):
        assert some.sample(20, seed=3).texts == examples.sample(20, seed=3).texts
        assert len(some.sample(99, seed=3)) == sum(map(len, some.chunks())) == 66


def test_every_row_says_where_it_is_from(config: PrepareConfig, tmp_path: Path):
    record = prepare(config, tmp_path, text_normalization="lower")
    rows = {row["row"]: row for row in rows_of(tmp_path / EXAMPLES_FILE)}
    assert rows[6] == {
        **{
            "split": "train",
            "row": 6,
            "line": 8,
            "text": "two\nlines",
            "lang": "da",
            "reason": None,
        },
        **{
            "key": "two lines",
            "input": "da[SEP]two lines",
            "codes.hisco_1": "61110",
            "codes.hisco_2": None,
        },
    }
    assert rows[7]["line"] == 10 and rows[7]["reason"] == "no code" and rows[7]["split"] is None
    assert rows[8]["reason"] == "no description" and rows[8]["input"] is None
    splits = [row["split"] for row in rows.values()]
    assert (
        splits.count("train") == record["rows"]["train"]
        and splits.count("validation") == record["rows"]["val"]
    )
    train = {row["key"] for row in rows.values() if row["split"] == "train"}
    assert record["examples"]["num_distinct"]["train"] == len(train)
    assert train.isdisjoint(row["key"] for row in rows.values() if row["split"] == "validation")


@pytest.mark.parametrize("how", ["none", "lower_ascii"])
def test_prepared_tables_are_what_is_stored(config: PrepareConfig, tmp_path: Path, how: str):
    record = prepare(config, tmp_path, text_normalization=how)
    files = prepared_files(tmp_path, record, read_key(tmp_path / "key.csv"))
    path = tmp_path / EXAMPLES_FILE
    before = path.stat().st_mtime_ns
    assert store_examples(tmp_path, files, text_normalization=how) == record["examples"]
    assert path.stat().st_mtime_ns == before
    kept = [Examples.open(path, split) for split in files]
    path.unlink()  # as if an earlier histocoder had prepared the folder
    store_examples(tmp_path, files, text_normalization=how)
    for one, part, split in zip(kept, files.values(), files, strict=True):
        other, read, rows = Examples.open(path, split), part.read(), np.arange(len(one))
        assert one.texts == other.texts == read.texts and one.codes.equals(read.codes)
        for found in (one, other):
            codes = np.array([None, *found.code_table], dtype=object)[found.code_index]
            assert (codes == read.codes.to_numpy()).all()
            assert [found.languages[lang] for lang in found.lang_index] == read.langs
            inputs = join_language(normalize(read.texts, how), read.langs)
            assert (
                found.inputs.texts(rows) == inputs
                and found.inputs.texts(rows[::-2]) == inputs[::-2]
            )
            assert found.inputs.lengths.tolist() == [*map(len, inputs)]


def test_files_are_read_once_for_the_same_settings(mixed: Path, tmp_path: Path, logged: list[str]):
    out = tmp_path / "out"
    stored(out, example_files(mixed, rules=DROPPING))
    num_logged = len(logged)
    assert "MB" in logged[-1]
    moved = mixed.rename(tmp_path / "renamed.csv")
    stored(out, example_files(moved, rules=DROPPING))
    assert len(logged) == num_logged
    stored(out, example_files(moved, rules=DROPPING), text_normalization="lower")
    assert len(logged) > num_logged
    num_logged = len(logged)
    stored(out, example_files(moved, rules=DROPPING, language="en"), text_normalization="lower")
    assert len(logged) > num_logged


@pytest.mark.parametrize("damage", ["byte", "missing", "record"])
def test_damaged_examples_are_read_again(table: Path, tmp_path: Path, damage: str):
    out, files = tmp_path / "out", example_files(table)
    stored(out, files)
    path, before = out / EXAMPLES_FILE, contents(out)
    if damage == "byte":
        content = bytearray(before[EXAMPLES_FILE])
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif damage == "missing":
        path.unlink()
    else:
        (out / "prepared.json").write_text("{")
    stored(out, files)
    assert contents(out) == before


def test_workers_are_handed_the_path_alone(table: Path, tmp_path: Path):
    examples = stored(tmp_path, example_files(table))
    handed, rows = pickle.dumps(examples), np.arange(64)
    assert len(handed) < 1000 and pickle.loads(handed).inputs.texts(rows) == examples.inputs.texts(
        rows
    )
