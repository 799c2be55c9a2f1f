"""`examples.arrow`, the checked rows of a run, and `prepared.json`, what they were made from."""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from histocoder.config import LANG_SEP, PrepareConfig, settings_of
from histocoder.data.example_files import ExampleFiles
from histocoder.data.examples import ROW, SEEN, SPLITS, TRAIN, VAL, Examples
from histocoder.data.hashes import key_hashes
from histocoder.data.normalize import description_keys, normalize_column
from histocoder.errors import UserError
from histocoder.files import make_folder, replacing, sha256, temporary_folder, write_text
from histocoder.log import log
from histocoder.tables.table import fingerprint

EXAMPLES_FILE, PREPARED_FILE = "examples.arrow", "prepared.json"
_EARLIER_FOLDER = ".earlier"  # with prepared data that a run has replaced and not yet begun with
_ABSENT_FILE = ".absent.json"  # in it, the names of files that the run has added
PREPARED_VERSION = 4
"""Version of the rules; since 2, rows without any code are dropped; since 3, the split is by
`description_keys`; since 4, these ignore punctuation.
"""
_OLDEST_VERSION = 2
EXAMPLES_VERSION = 2
"""Version of the form of `examples.arrow`, and of how it is read; since 2, a batch is of one
split.
"""
NO_SPLIT = -1  # of rows that are dropped, or left out since their correction is held out
_NOT_OF_THE_DATA = {"dataset", "corrections", "save_path", "prepare_only"}
_FILES = {"dataset", "key", "corrections"}  # settings whose files are compared by their content
_NAMES = {"allow_codes_shorter_than_block_size": "allow_short_codes"}
"""Setting -> its name in `prepared.json`, if it differs."""


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
        files: ExampleFiles,
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
    splits: Mapping[str, ExampleFiles],
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
    splits: Mapping[str, ExampleFiles],
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


def set_aside(folder: Path, names: Sequence[str]) -> None:
    """Move prepared data that are about to be replaced into a folder, from which a run that fails
    puts them back.

    `names` are the files that will be replaced or deleted. What an earlier call has set aside
    stays.
    """
    earlier = folder / _EARLIER_FOLDER
    present = [name for name in names if (folder / name).exists()]
    if earlier.exists() or not present:
        return

    # the folder is complete before it has the name that `put_back_earlier` looks for
    absent = [name for name in names if name not in present]
    with temporary_folder(earlier) as temporary:
        write_text(temporary / _ABSENT_FILE, json.dumps(absent))
        os.replace(temporary, earlier)
    for name in present:
        os.replace(folder / name, earlier / name)


def put_back_earlier(folder: Path) -> None:
    """Undo the replacement of prepared data by a run that has failed or was killed, if there was
    one.
    """
    earlier = folder / _EARLIER_FOLDER
    if not earlier.exists():
        return
    try:
        for name in json.loads((earlier / _ABSENT_FILE).read_text(encoding="utf-8")):
            (folder / name).unlink(missing_ok=True)
        for path in earlier.iterdir():
            if path.name != _ABSENT_FILE:
                os.replace(path, folder / path.name)
    except OSError:
        # On Windows a file that is still mapped into memory can't be replaced; the next run tries
        # again
        return
    shutil.rmtree(earlier)


def forget_earlier(folder: Path) -> None:
    """Delete prepared data that were replaced, once a run has begun with the new ones."""
    shutil.rmtree(folder / _EARLIER_FOLDER, ignore_errors=True)


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


def record_of(config: PrepareConfig) -> dict[str, Any]:
    """Return what `prepared.json` records of the source and the settings, before the data are
    prepared.
    """
    names = [one.name for one in settings_of(PrepareConfig) if one.name not in _NOT_OF_THE_DATA]
    settings = {_NAMES.get(name, name): getattr(config, name) for name in names}
    lists = {
        name: list(getattr(config, name) or ()) or None
        for name in ("target_cols", "attribute_cols")
    }
    settings["language_col"] = config.column_of_languages
    settings |= {**lists, "key": fingerprint(config.key) if config.key else None}
    if config.titles not in ("auto", "none"):
        settings["titles"] = fingerprint(config.titles)
    if config.corrections:
        settings["corrections"] = [fingerprint(path) for path in config.corrections]
    dataset = Path(config.dataset)
    source = {"file": dataset.name, "sha256": fingerprint(dataset), "bytes": dataset.stat().st_size}
    return {"format_version": PREPARED_VERSION, "source": source, "settings": settings}


def prepared_before(folder: Path, wanted: dict[str, Any]) -> dict[str, Any] | None:
    """Return the record of data that were prepared in a folder; None if there are none, or not all
    of them yet.

    Raises UserError if they were prepared from other data, with settings other than the `wanted` ones, by a newer
    histocoder or one with other rules.
    """
    if not (folder / PREPARED_FILE).is_file():
        return None
    record, instead = (
        read_prepared(folder),
        "Choose another folder, or add --overwrite to prepare them again.",
    )
    version = record.get("format_version", 0)
    if version and "settings" not in record:
        return None
    if not _OLDEST_VERSION <= version <= PREPARED_VERSION:
        raise UserError(
            f"{folder / PREPARED_FILE} is damaged, or of another version of histocoder. {instead}"
        )
    old, new = ({**r["settings"], "dataset": r["source"]["sha256"]} for r in (record, wanted))
    if "titles" not in old:  # of an earlier version
        new.pop("titles")
    # without the flags, those of the data
    new |= {name: old[name] for name in ("block_size", "share_val") if new[name] is None}
    differences = ", ".join(
        f"{name} has changed"
        if name in _FILES
        else f"{name}: {old.get(name)!r} there, {new.get(name)!r} now"
        for name in {**new, **old}
        if old.get(name) != new.get(name)
    )
    if differences:
        raise UserError(
            f"{folder} holds data prepared with other settings ({differences}). {instead}"
        )
    return record
