"""Writing of `examples.arrow`, the checked rows of a run."""

import hashlib
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from histocoder.config import LANG_SEP
from histocoder.data.examples import NO_SPLIT, ROW_FIELDS, SEEN, SPLITS, TRAIN, VAL, Examples
from histocoder.data.hashes import key_hashes
from histocoder.data.labelled_files import LabelledFiles
from histocoder.data.prepared_folder import (
    PREPARED_FILE,
    PREPARED_VERSION,
    read_prepared,
    set_aside,
    write_record,
)
from histocoder.files import make_folder, replacing, sha256
from histocoder.log import log
from histocoder.tables.table import fingerprint
from histocoder.text.normalize import description_keys, normalize_column

EXAMPLES_FILE = "examples.arrow"
EXAMPLES_VERSION = 2
"""Version of the form of `examples.arrow`, and of how it is read; since 2, a batch is of one
split.
"""


class ExampleWriter:
    """Writes `examples.arrow`: checked rows (see `row_schema`), with these columns before those of
    codes:

    - `split`: one of `SPLITS`, the same for all rows of a batch; null if the rows are in none of
      them
    - `key`: what equal descriptions have in common (see `description_keys`)
    - `input`: what models read: language and normalised description; null without a description

    Rows to validate on become those of the split `SEEN` if the model has learned from their
    descriptions: `trained_on` are the hashes of those that it was trained on before (see
    `key_hashes`). If `compares_splits`, those of the rows to train on, which come first, count as
    well.
    """

    def __init__(
        self,
        path: Path,
        files: LabelledFiles,
        *,
        text_normalization: str,
        trained_on: np.ndarray | None = None,
        compares_splits: bool = False,
    ) -> None:
        fields = [("split", pa.dictionary(pa.int8(), pa.string())), *ROW_FIELDS]
        fields += [("key", pa.string()), ("input", pa.string())]
        self._schema = pa.schema([*fields, *list(files.schema)[len(ROW_FIELDS) :]])
        self._text_normalization = text_normalization
        self._learned: list[np.ndarray] = []  # hashes, joined in `_with_seen`
        if trained_on is not None:
            self._learned.append(trained_on)
        self._compares_splits = compares_splits
        self._writer = pa.ipc.new_file(str(path), self._schema)

    def close(self) -> None:
        self._writer.close()

    def write(self, rows: pa.RecordBatch, split: np.ndarray) -> None:
        """Write a chunk; `split` has an index into `SPLITS` for each row, or `NO_SPLIT`."""
        columns = dict(zip(rows.schema.names, rows.columns, strict=True))

        # rows of a table that is prepared have keys, by which they were split
        if "key" not in columns:
            keys = description_keys(rows["text"].fill_null(""))
            columns["key"] = pa.array(keys, pa.string())
        texts = normalize_column(rows["text"], self._text_normalization)
        columns["input"] = pc.binary_join_element_wise(rows["lang"], texts, LANG_SEP)

        # the rows of a batch are of one split
        split = self._with_seen(split, columns["key"])
        for i in np.unique(split).tolist():
            is_part = pa.array(split == i)
            num_rows = int((split == i).sum())
            mask = np.full(num_rows, i == NO_SPLIT)
            index = pa.array(np.full(num_rows, i), pa.int8(), mask=mask)
            arrays = [pa.DictionaryArray.from_arrays(index, list(SPLITS))]
            arrays += [columns[name].filter(is_part) for name in self._schema.names[1:]]
            self._writer.write(pa.RecordBatch.from_arrays(arrays, schema=self._schema))

    def _with_seen(self, split: np.ndarray, keys: pa.Array) -> np.ndarray:
        """Return the splits of a chunk with `SEEN` in place of `VAL` where a description was
        learned from.
        """
        # rows to train on come first, so that all of them are known before any to validate on
        hashes = key_hashes(keys)
        is_train = split == SPLITS.index(TRAIN)
        if self._compares_splits and is_train.any():
            self._learned.append(np.unique(hashes[is_train]))

        is_val = split == SPLITS.index(VAL)
        if not self._learned or not is_val.any():
            return split

        # the hashes of all chunks are joined once, with the first rows to validate on
        if len(self._learned) > 1:
            self._learned = [np.unique(np.concatenate(self._learned))]
        is_seen = is_val & np.isin(hashes, self._learned[0])
        return np.where(is_seen, SPLITS.index(SEEN), split)


def examples_record(path: Path, source: dict[str, Any]) -> dict[str, Any]:
    """Return what tells `examples.arrow` from others, and the number of distinct descriptions of
    each split.
    """
    num_distinct = {}
    for split in SPLITS:
        keys = Examples.open(path, split).table["key"]
        if len(keys):
            num_distinct[split] = len(keys.unique())
    return {"made_from": source, "sha256": sha256(path), "num_distinct": num_distinct}


def made_from(
    splits: Mapping[str, LabelledFiles],
    text_normalization: str,
    trained_on: np.ndarray | None = None,
) -> dict[str, Any]:
    """Return what determines the examples of some files, for JSON."""
    # the files of all splits have the same columns and rules
    files = next(iter(splits.values()))
    sources = {
        split: [fingerprint(path) for path in files.paths] for split, files in splits.items()
    }
    source = {
        "version": EXAMPLES_VERSION,
        "sources": sources,
        "columns": [files.input_col, files.language_col, *files.target_cols],
        "language": files.language,
        "formatter": files.formatter.to_config(),
        "key": None if files.key is None else _hash("&".join(files.key.codes).encode()),
        "rules": asdict(files.rules),
        "text_normalization": text_normalization,
        "trained_on": None if trained_on is None else _hash(trained_on.tobytes()),
    }
    if files.attribute_cols:
        source["attributes"] = list(files.attribute_cols)
    return source


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def store_examples(
    folder: Path,
    splits: Mapping[str, LabelledFiles],
    *,
    text_normalization: str,
    trained_on: np.ndarray | None = None,
    compares_splits: bool = False,
) -> dict[str, Any]:
    """Write `examples.arrow` from files, by one checked pass, unless it is there; return its
    record.

    The record is kept as `examples` in `prepared.json`: what it was made from, its SHA-256, by
    which one that is damaged or not finished is recognised, and its numbers of distinct
    descriptions. For `trained_on` and `compares_splits` see `ExampleWriter`; examples of an earlier
    version, which knew neither, are used as they are. Other examples are set aside, from where
    `put_back_earlier` can put them back.

    Raises UserError if the files can't be read as examples, or the file can't be written; nothing
    half-built is left.
    """
    source = made_from(splits, text_normalization, trained_on)
    path = folder / EXAMPLES_FILE
    prepared = read_prepared(folder)
    record = prepared.pop("examples", None) or {}

    # earlier versions knew no `trained_on`
    before = {"trained_on": source["trained_on"]} | (record.get("made_from") or {})
    if before == source and path.is_file() and sha256(path) == record["sha256"]:
        return record

    # the record is written without the examples first, so that half of them are never used
    make_folder(folder)
    set_aside(folder, (EXAMPLES_FILE, PREPARED_FILE))
    write_record(folder, {"format_version": PREPARED_VERSION} | prepared)
    with replacing(path) as temporary:
        writer = ExampleWriter(
            temporary,
            next(iter(splits.values())),
            text_normalization=text_normalization,
            trained_on=trained_on,
            compares_splits=compares_splits,
        )
        with closing(writer):
            _write_splits(writer, splits)
        record = examples_record(temporary, source)
    write_record(folder, read_prepared(folder) | {"examples": record})
    names = ", ".join(path.name for files in splits.values() for path in files.paths)
    log.info(f"Read {names} into {path} ({path.stat().st_size / 1e6:,.1f} MB).")
    return record


def _write_splits(writer: ExampleWriter, splits: Mapping[str, LabelledFiles]) -> None:
    for split, files in splits.items():
        for rows in files.rows(say=log.info):
            is_kept = rows["reason"].is_null()
            writer.write(rows, np.where(is_kept, SPLITS.index(split), NO_SPLIT))
