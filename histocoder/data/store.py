"""`examples.arrow`: the checked rows of a run, which all its processes map into memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from histocoder.config import LANG_SEP
from histocoder.data.examples import ROW, ExampleFiles, Examples, is_codes, row_schema
from histocoder.data.normalize import description_keys, normalize_column
from histocoder.data.table import fingerprint
from histocoder.data.tokens import ragged
from histocoder.files import make_folder, replacing, sha256, write_text
from histocoder.log import log

EXAMPLES_FILE, PREPARED_FILE = "examples.arrow", "prepared.json"
TRAIN, VAL, HELD_OUT = SPLITS = ("train", "validation", "held out")
PREPARED_VERSION = 3
"""Version of the rules; since 2, rows without any code are dropped; since 3, the split is by `description_keys`."""
EXAMPLES_VERSION = 1
"""Version of the columns of `examples.arrow`, and of how they are read."""
NO_SPLIT = -1  # of rows that are dropped, or left out since their correction is held out


def made_from(splits: Mapping[str, ExampleFiles], text_normalization: str) -> dict[str, Any]:
    """Return what determines the examples of some files, for JSON."""
    files = next(iter(splits.values()))
    return {
        "version": EXAMPLES_VERSION,
        "sources": {name: [fingerprint(path) for path in part.paths] for name, part in splits.items()},
        "columns": [files.input_col, files.language_col, *files.target_cols],
        "language": files.language,
        "formatter": files.formatter.to_config(),
        "key": None if files.key is None else hashlib.sha256("&".join(files.key.codes).encode()).hexdigest(),
        "rules": asdict(files.rules),
        "text_normalization": text_normalization,
    }


def store_examples(folder: Path, splits: Mapping[str, ExampleFiles], *, text_normalization: str) -> dict[str, Any]:
    """Write `examples.arrow` from files, by one checked pass, unless it is there; return its record.

    The record is kept as `examples` in `prepared.json`: what it was made from, its SHA-256, by which one that is
    damaged or not finished is recognised, notices on how the files were read, and numbers of distinct descriptions.

    Raises UserError if the files can't be read as examples, or the file can't be written; nothing half-built is left.
    """
    source = made_from(splits, text_normalization)
    path, whole = folder / EXAMPLES_FILE, read_prepared(folder)
    record = whole.pop("examples", None) or {}
    if record.get("made_from") == source and path.is_file() and sha256(path) == record["sha256"]:
        return record
    make_folder(folder)
    write_record(folder, {"format_version": PREPARED_VERSION, **whole})
    notices: list[str] = []
    with replacing(path) as temporary:
        target_cols = next(iter(splits.values())).target_cols
        with ExampleWriter(temporary, target_cols, text_normalization=text_normalization) as writer:
            for name, files in splits.items():
                for rows in files.rows(say=notices.append):
                    writer.write(rows, np.where(rows["reason"].is_null(), SPLITS.index(name), NO_SPLIT))
        record = {"made_from": source, **writer.record(), "notices": notices}
    write_record(folder, {**read_prepared(folder), "examples": record})
    names = ", ".join(path.name for files in splits.values() for path in files.paths)
    log.info(f"Read {names} into {path} ({path.stat().st_size / 1e6:,.1f} MB).")
    return record


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Write `prepared.json`."""
    write_text(folder / PREPARED_FILE, json.dumps(record, indent=2) + "\n")


def read_prepared(folder: Path) -> dict[str, Any]:
    """Return the content of `prepared.json`; an empty dict if it is missing or damaged."""
    try:
        found = json.loads((folder / PREPARED_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


class ExampleWriter:
    """Writes `examples.arrow`: checked rows (see `checked_rows`), with these columns before those of codes:

    - `split`: one of `SPLITS`; null if the row is in none of them
    - `key`: what equal descriptions have in common (see `description_keys`)
    - `input`: what models read: language and normalised description; null without a description
    """

    def __init__(self, path: Path, target_cols: Sequence[str], *, text_normalization: str) -> None:
        split = ("split", pa.dictionary(pa.int8(), pa.string()))
        codes = [field for field in row_schema(target_cols) if is_codes(field.name)]
        self._schema = pa.schema([split, *ROW, ("key", pa.string()), ("input", pa.string()), *codes])
        self._path, self._normalization = path, text_normalization
        self._writer = pa.ipc.new_file(str(path), self._schema)
        self._hashes: list[list[np.ndarray]] = [[] for _ in SPLITS]

    def __enter__(self) -> ExampleWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        self._writer.close()

    def write(self, rows: pa.RecordBatch, split: np.ndarray) -> None:
        """Write checked rows, which may have a `key`; `split` holds indices into `SPLITS`, or `NO_SPLIT`."""
        has_key = "key" in rows.schema.names
        keys = rows["key"] if has_key else pa.array(description_keys(rows["text"].fill_null("")), pa.string())
        texts = normalize_column(rows["text"], self._normalization)
        own = {
            "split": pa.DictionaryArray.from_arrays(pa.array(split, pa.int8(), mask=split == NO_SPLIT), [*SPLITS]),
            "key": keys,
            "input": pc.binary_join_element_wise(rows["lang"], texts, LANG_SEP),
        }
        columns = [own[name] if name in own else rows[name] for name in self._schema.names]
        self._writer.write(pa.RecordBatch.from_arrays(columns, schema=self._schema))
        hashes = pd.util.hash_array(keys.to_numpy(zero_copy_only=False), categorize=False)
        for i, found in enumerate(self._hashes):
            found.append(hashes[split == i])

    def record(self) -> dict[str, Any]:
        """Return what tells the file from others, and the number of distinct descriptions of each split."""
        hashes = {name: np.concatenate(parts) for name, parts in zip(SPLITS, self._hashes, strict=True)}
        num_distinct = {name: len(pd.unique(found)) for name, found in hashes.items() if len(found)}
        return {"sha256": sha256(self._path), "num_distinct": num_distinct}


class StoredExamples:
    """Rows of some splits of `examples.arrow`, mapped into memory, so that all processes of a node share one copy.

    The rows of one split come in the order of the file, those of the next one behind them. Pickling keeps the path and
    the splits alone.
    """

    def __init__(self, path: Path, *splits: str) -> None:
        self.path, self.splits = path, splits
        content = pa.memory_map(str(path)).read_buffer()
        self._file = pa.ipc.open_file(content)
        table = self._file.read_all()
        chunks = table["split"].chunks
        split = np.concatenate([np.asarray(chunk.indices.fill_null(NO_SPLIT)) for chunk in chunks])
        rows = np.concatenate([np.flatnonzero(split == SPLITS.index(name)) for name in splits])
        self._rows = rows  # index of each row in the file
        self._bytes = np.frombuffer(content, np.uint8)
        found = [_starts_and_sizes(chunk, content.address) for chunk in table["input"].chunks]
        starts, sizes = (np.concatenate(part) for part in zip(*found, strict=True))
        self._starts, self._sizes = starts[rows], _smallest(sizes[rows])  # of each row's input, in bytes
        lengths = pc.utf8_length(table["input"]).fill_null(0)
        self.num_characters = _smallest(np.asarray(lengths)[rows])  # of each row's input, of shape (n,)
        index, self.languages = _index([table["lang"]], rows)
        self.langs = index[:, 0] - 1
        codes = [table[name] for name in table.column_names if is_codes(name)]
        self.codes, self.code_table = _index(codes, rows)
        """Index of each code in `code_table`, from 1; 0 where there is none; of shape (n, k)."""

    def __len__(self) -> int:
        return len(self._rows)

    def __reduce__(self) -> tuple[type[StoredExamples], tuple[Any, ...]]:
        return StoredExamples, (self.path, *self.splits)

    def inputs(self, rows: np.ndarray, *, skip: np.ndarray | int = 0) -> list[str]:
        """Return what models read: the languages and descriptions of some rows, joined for `tokenize`.

        `skip` is a number of first characters to leave out, that of all rows or of each.
        """
        text, numbers = self._content(rows).tobytes().decode(), self.num_characters[rows].astype(np.int64)
        ends = np.cumsum(numbers)
        starts = ends - numbers + skip
        return [text[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]

    def characters(self, rows: np.ndarray, *, most: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the Unicode code points of `inputs`, at most so many of each row, and how many each row has."""
        found, numbers = self._content(rows), self.num_characters[rows].astype(np.int64)
        if len(found) != numbers.sum():  # not ASCII
            found = np.frombuffer(found.tobytes().decode().encode("utf-32-le"), "<u4")
        if numbers.max() <= most:
            return found, numbers
        kept = np.minimum(numbers, most)
        return found[ragged(np.cumsum(numbers) - numbers, kept)], kept

    def _content(self, rows: np.ndarray) -> np.ndarray:
        """Return the bytes of the inputs of some rows, one behind the other."""
        return self._bytes[ragged(self._starts[rows], self._sizes[rows].astype(np.int64))]

    def chunks(self) -> Iterator[Examples]:
        """Yield all rows, a chunk at a time."""
        return self._chunks(self._rows)

    def read(self) -> Examples:
        return Examples.join(list(self.chunks()))

    def take(self, rows: np.ndarray) -> Examples:
        """Return some rows, which ascend."""
        return Examples.join(list(self._chunks(self._rows[rows])))

    def _chunks(self, rows: np.ndarray) -> Iterator[Examples]:
        passed = 0
        for batch in map(self._file.get_batch, range(self._file.num_record_batches)):
            first, last = np.searchsorted(rows, (passed, passed + len(batch)))
            yield Examples.from_rows(batch.take(pa.array(rows[first:last] - passed)))
            passed += len(batch)

    def sample(self, num_rows: int, *, seed: int) -> Examples:
        """Draw rows at random, in their order; all of them if there are fewer."""
        return self.take(np.sort(np.random.default_rng(seed).permutation(len(self))[:num_rows]))


def _starts_and_sizes(texts: pa.Array, address: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the index of each text's first byte behind an address, and its number of bytes."""
    _, offsets, content = texts.buffers()
    bounds = np.frombuffer(offsets, np.int32)[texts.offset : texts.offset + len(texts) + 1]
    start = content.address - address if content is not None else 0
    return start + bounds[:-1].astype(np.int64), np.diff(bounds)


def _index(columns: Sequence[pa.ChunkedArray], rows: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the index of each value of some rows among the distinct ones, from 1; 0 where there is none; and these.

    The index is of shape (n, number of columns).
    """
    joined = pa.chunked_array([chunk for column in columns for chunk in column.chunks], pa.string())
    coded = joined.dictionary_encode().unify_dictionaries()
    index = np.concatenate([np.asarray(chunk.indices.fill_null(-1)) for chunk in coded.chunks])
    index = index.reshape(len(columns), -1)[:, rows].T + 1
    values = coded.chunk(0).dictionary
    used = np.flatnonzero(np.bincount(index.ravel(), minlength=1 + len(values))[1:])  # others are in other splits
    new = np.zeros(1 + len(values), dtype=np.min_scalar_type(len(used)))
    new[1 + used] = np.arange(1, 1 + len(used))
    return new[index], tuple(values.take(pa.array(used)).to_pylist())


def _smallest(values: np.ndarray) -> np.ndarray:
    """Return numbers of 0 or more in the smallest type that holds them all."""
    return values.astype(np.min_scalar_type(int(values.max(initial=0))))
