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
from histocoder.data.examples import NO_SPLIT, ROW, SEEN, SPLITS, TRAIN, VAL, Examples
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
        own = {
            "split": pa.dictionary(pa.int8(), pa.string()),
            "key": pa.string(),
            "input": pa.string(),
        }
        first = [("split", own["split"]), *ROW, ("key", own["key"]), ("input", own["input"])]
        self._schema = pa.schema([*first, *list(files.schema)[len(ROW) :]])
        self.path, self._how = path, text_normalization
        self._learned = [np.zeros(0, np.int32) if trained_on is None else trained_on]
        self._compares_splits = compares_splits
        self._writer = pa.ipc.new_file(str(path), self._schema)

    def close(self) -> None:
        self._writer.close()

    def write(self, rows: pa.RecordBatch, split: np.ndarray) -> None:
        """Write a chunk; `split` has an index into `SPLITS` for each row, or `NO_SPLIT`."""
        texts = normalize_column(rows["text"], self._how)
        keys = rows["key"] if "key" in rows.schema.names else None
        keys = (
            pa.array(description_keys(rows["text"].fill_null("")), pa.string())
            if keys is None
            else keys
        )
        split = self._with_seen(split, keys)
        own = {"key": keys, "input": pc.binary_join_element_wise(rows["lang"], texts, LANG_SEP)}
        columns = [own[name] if name in own else rows[name] for name in self._schema.names[1:]]
        whole = pa.RecordBatch.from_arrays(columns, self._schema.names[1:])
        found = np.unique(split).tolist()
        for i in found:
            part = whole if len(found) == 1 else whole.filter(pa.array(split == i))
            index = pa.array(
                np.full(len(part), i), pa.int8(), mask=np.full(len(part), i == NO_SPLIT)
            )
            names = pa.DictionaryArray.from_arrays(index, [*SPLITS])
            self._writer.write(
                pa.RecordBatch.from_arrays([names, *part.columns], schema=self._schema)
            )

    def _with_seen(self, split: np.ndarray, keys: pa.Array) -> np.ndarray:
        """Return the splits of a chunk with `SEEN` in place of `VAL` where a description was
        learned from.
        """
        is_val = split == SPLITS.index(VAL)
        if self._compares_splits and (split == SPLITS.index(TRAIN)).any():
            self._learned.append(np.unique(key_hashes(keys)[split == SPLITS.index(TRAIN)]))
        if not is_val.any():
            return split
        if len(self._learned) > 1:
            self._learned = [np.unique(np.concatenate(self._learned))]
        return np.where(
            is_val & np.isin(key_hashes(keys), self._learned[0]), SPLITS.index(SEEN), split
        )


def examples_record(path: Path, source: dict[str, Any]) -> dict[str, Any]:
    """Return what tells `examples.arrow` from others, and the number of distinct descriptions of
    each split.
    """
    keys = ((name, Examples.open(path, name).table["key"]) for name in SPLITS)
    distinct = {name: len(key.unique()) for name, key in keys if len(key)}
    return {"made_from": source, "sha256": sha256(path), "num_distinct": distinct}


def made_from(
    splits: Mapping[str, LabelledFiles],
    text_normalization: str,
    trained_on: np.ndarray | None = None,
) -> dict[str, Any]:
    """Return what determines the examples of some files, for JSON."""
    files = next(iter(splits.values()))
    return {
        "version": EXAMPLES_VERSION,
        "sources": {
            name: [fingerprint(path) for path in part.paths] for name, part in splits.items()
        },
        "columns": [files.input_col, files.language_col, *files.target_cols],
        "language": files.language,
        "formatter": files.formatter.to_config(),
        "key": None
        if files.key is None
        else hashlib.sha256("&".join(files.key.codes).encode()).hexdigest(),
        "rules": asdict(files.rules),
        "text_normalization": text_normalization,
        "trained_on": None
        if trained_on is None
        else hashlib.sha256(trained_on.tobytes()).hexdigest(),
        **({"attributes": list(files.attribute_cols)} if files.attribute_cols else {}),
    }


def store_examples(
    folder: Path,
    splits: Mapping[str, LabelledFiles],
    *,
    text_normalization: str,
    trained_on: np.ndarray | None = None,
    compares_splits: bool = False,
    sets_aside: bool = False,
) -> dict[str, Any]:
    """Write `examples.arrow` from files, by one checked pass, unless it is there; return its
    record.

    The record is kept as `examples` in `prepared.json`: what it was made from, its SHA-256, by
    which one that is damaged or not finished is recognised, and its numbers of distinct
    descriptions. For `trained_on` and `compares_splits` see `ExampleWriter`; examples of an earlier
    version, which knew neither, are used as they are. With `sets_aside`, other examples are set
    aside, from where `put_back_earlier` can put them back.

    Raises UserError if the files can't be read as examples, or the file can't be written; nothing
    half-built is left.
    """
    source = made_from(splits, text_normalization, trained_on)
    path, whole = folder / EXAMPLES_FILE, read_prepared(folder)
    record = whole.pop("examples", None) or {}
    before = record.get("made_from") or {}
    is_same = {**before, "trained_on": source["trained_on"]} == source
    is_same &= before.get("trained_on", source["trained_on"]) == source["trained_on"]
    if is_same and path.is_file() and sha256(path) == record["sha256"]:
        return record
    make_folder(folder)
    if sets_aside:
        set_aside(folder, (EXAMPLES_FILE, PREPARED_FILE))
    write_record(folder, {"format_version": PREPARED_VERSION, **whole})
    with replacing(path) as temporary:
        first = next(iter(splits.values()))
        with closing(
            ExampleWriter(
                temporary,
                first,
                text_normalization=text_normalization,
                trained_on=trained_on,
                compares_splits=compares_splits,
            )
        ) as writer:
            for name, files in splits.items():
                for rows in files.rows(say=log.info):
                    writer.write(
                        rows, np.where(rows["reason"].is_null(), SPLITS.index(name), NO_SPLIT)
                    )
        record = examples_record(temporary, source)
    write_record(folder, {**read_prepared(folder), "examples": record})
    names = ", ".join(path.name for files in splits.values() for path in files.paths)
    log.info(f"Read {names} into {path} ({path.stat().st_size / 1e6:,.1f} MB).")
    return record
