"""The rows of a user's table, checked, corrected, split into training and validation data, and listed."""

import hashlib
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from histocoder.config import PrepareConfig
from histocoder.data.codes import LabelRules
from histocoder.data.example_files import CHECKED_COL, ExampleFiles
from histocoder.data.examples import (
    CODES,
    HELD_OUT,
    LANG_COL,
    SPLITS,
    TEXT_COL,
    TITLES,
    TRAIN,
    VAL,
    Examples,
    is_codes,
    row_schema,
)
from histocoder.data.languages import Language, own_languages
from histocoder.data.normalize import description_keys
from histocoder.data.output import write_table
from histocoder.data.store import NO_SPLIT, ExampleWriter
from histocoder.data.table import open_table
from histocoder.errors import UserError, counted
from histocoder.formatters import Formatter
from histocoder.log import log

SPLIT_FILES = {
    TRAIN: "data_train.csv",
    VAL: "data_val.csv",
    HELD_OUT: "data_held_out.csv",
    TITLES: "data_titles.csv",
}
"""Split -> the table that people read; corrections are held out to compare the model with the one before."""
_HELD_OUT_SHARE, _MOST_HELD_OUT = 0.2, 200
_FEWEST = 20  # number of corrections from which some are held out: a fifth of fewer shows nothing
_ANY = Language()  # that of a correction that applies to every language


class Corrections:
    """Descriptions with checked codes, by their keys and languages; of several for one description the last counts.

    `rows` has the columns of checked rows and `key`; the language of those that apply to every one is "unk".
    """

    def __init__(self, rows: pa.Table, default_language: Language) -> None:
        self._rows = rows.to_pandas().drop_duplicates(["key", "lang"], keep="last", ignore_index=True)
        self._index = pd.MultiIndex.from_frame(self._rows[["key", "lang"]])
        self._default_language, self._schema = default_language, rows.schema
        self._is_used, self._is_held_out = np.zeros((2, len(self)), dtype=bool)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def keys(self) -> set[str]:
        """Keys of all descriptions."""
        return {*self._rows["key"]}

    @property
    def codes(self) -> set[str]:
        """All codes that occur."""
        return {code for name in filter(is_codes, self._rows) for code in self._rows[name].dropna()}

    def hold_out(self, seed: int) -> int:
        """Set a fifth aside, about 200 at most, to compare models on; return how many.

        The choice depends on the hashes of seed and description alone, so that a later run with more corrections never
        trains on what is held out here, or the other way round, except for those beyond 200.
        """
        if len(self) < _FEWEST:
            return 0
        digests = {key: hashlib.sha256(f"{seed} {key}".encode()).digest()[:8] for key in self._rows["key"]}
        units = {key: int.from_bytes(digest, "big") / 2**64 for key, digest in digests.items()}
        chosen = sorted((key for key, unit in units.items() if unit < _HELD_OUT_SHARE), key=units.__getitem__)
        self._is_held_out = self._rows["key"].isin(chosen[:_MOST_HELD_OUT]).to_numpy()
        return int(self._is_held_out.sum())

    def apply(self, rows: pa.RecordBatch) -> tuple[pa.RecordBatch, np.ndarray, np.ndarray, np.ndarray]:
        """Return checked rows, which have a `key`, with corrected codes, and masks of shape (n,).

        The masks are those of rows with corrected codes, and, in whatever language, of rows whose description has a
        correction to train on, and of those whose correction is held out. No dropped row is among them.
        """
        frame, is_kept = rows.select(["key", "lang"]).to_pandas(), np.asarray(rows["reason"].is_null())
        held_out = {*self._rows["key"][self._is_held_out]}
        is_held_out = frame["key"].isin(held_out).to_numpy() & is_kept
        is_known = frame["key"].isin(self.keys - held_out).to_numpy() & is_kept
        found = self._index.get_indexer(pd.MultiIndex.from_frame(frame))
        of_all = self._index.get_indexer(pd.MultiIndex.from_frame(frame.assign(lang=str(_ANY))))
        found = np.where(is_known | is_held_out, np.where(found < 0, of_all, found), -1)
        self._is_used[found[found >= 0]] = True
        for i, name in enumerate(rows.schema.names):
            if is_codes(name) and (found >= 0).any():
                corrected = pa.array(self._rows[name], pa.string()).take(pa.array(found, mask=found < 0))
                rows = rows.set_column(i, name, pc.if_else(pa.array(found >= 0), corrected, rows[name]))
        return rows, (found >= 0) & ~is_held_out, is_known, is_held_out

    def others(self) -> pa.RecordBatch:
        """Return the corrections that were in no row and are not held out, as checked rows."""
        return self._checked_rows(~self._is_used & ~self._is_held_out)

    def held_out(self) -> pa.RecordBatch:
        """Return the held-out corrections as checked rows."""
        return self._checked_rows(self._is_held_out)

    def _checked_rows(self, mask: np.ndarray) -> pa.RecordBatch:
        rows = self._rows[mask].assign(row=None, line=None)
        rows["lang"] = rows["lang"].where(rows["lang"] != _ANY, self._default_language)
        return pa.RecordBatch.from_pandas(rows, self._schema, preserve_index=False)


def read_corrections(
    config: PrepareConfig, formatter: Formatter, rules: LabelRules, known: Collection[str] = ()
) -> Corrections:
    """Read the files of `--corrections`, as `histocoder review` writes them and a person fills them in.

    For `rules` and `known` see `ExampleFiles`.

    Raises UserError if a file lacks a column, a checked code does not fit, or nothing is checked.
    """
    parts: list[pa.Table] = []
    for path in map(Path, config.corrections or ()):
        columns = [*config.target_cols[1:], *([config.language_col] if config.language_col else [])]
        needed = [config.input_col, CHECKED_COL, config.target_cols[0]]
        file = open_table(path, needed, optional=columns)
        if lacking := [name for name in config.target_cols[1:] if not file.has(name)]:
            names = ", ".join(map(repr, lacking))
            log.info(f"{path} has no column {names}: the rows that it corrects get no such codes.")
        has_language = config.language_col is not None and file.has(config.language_col)
        if config.language_col and not has_language:
            log.info(
                f"{path} has no column {config.language_col!r}; its codes apply to descriptions in every language."
            )
        files = ExampleFiles(
            (path,),
            config.target_cols,
            formatter,
            input_col=config.input_col,
            language_col=config.language_col or LANG_COL,
            language=None if has_language else _ANY,
            known=known,
            rules=rules,
        )
        parts += [examples.coded().table for examples in files.chunks(say=log.info)]
    rows = pa.concat_tables(parts)
    rows = rows.append_column("key", pa.array(description_keys(rows["text"].to_pylist()), pa.string()))
    return Corrections(rows, Language(config.language))


def screen(files: ExampleFiles, config: PrepareConfig, path: Path) -> pa.Table:
    """Check all rows of a table, write them to `path`, a chunk at a time, and return that file, mapped into memory.

    Its columns are those of `checked_rows`, `key` (see `description_keys`) and `unit`, the hash that splits them.

    Raises UserError if the table can't be read, its labels do not fit, or no row can be used.
    """
    schema = pa.schema([*row_schema(config.target_cols), ("key", pa.string()), ("unit", pa.uint64())])
    with pa.ipc.new_file(str(path), schema) as writer:
        for rows in files.rows(say=log.info):
            keys = description_keys(rows["text"].fill_null(""))
            split_by = keys if config.split_by == "text" else rows["row"].to_numpy().astype(str).astype(object)
            units = pd.util.hash_array(split_by, hash_key=f"{config.seed:016x}"[-16:], categorize=False)
            columns = [*rows.columns, pa.array(keys, pa.string()), pa.array(units)]
            writer.write(pa.RecordBatch.from_arrays(columns, schema=schema))
    found = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    if strange := own_languages(found["lang"].filter(found["reason"].is_null()).unique().to_pylist()):
        log.info(strange)
    return found


def write_split(
    folder: Path,
    rows: pa.Table,
    config: PrepareConfig,
    writer: ExampleWriter,
    *,
    corrections: Corrections | None,
    titles: pa.RecordBatch | None,
) -> dict[str, int]:
    """Write all rows with their splits, and a table of each split; return their numbers of rows.

    All corrections are to train on, except for held-out ones, which have a split of their own, as titles have.
    """
    threshold = _threshold(rows, config)
    num_held_out = corrections.hold_out(config.seed) if corrections else 0
    train, val, held_out, _ = range(len(SPLITS))
    with writer:
        num_corrected = 0
        for checked in rows.to_batches():
            batch, split = checked, np.where(checked["unit"].to_numpy() <= threshold, val, train)
            if corrections is not None:
                batch, is_corrected, is_known, is_held_out = corrections.apply(checked)
                split[is_known], split[is_held_out] = train, NO_SPLIT
                num_corrected += int(is_corrected.sum())
            split[checked["reason"].is_valid()] = NO_SPLIT
            writer.write(batch, split)
        if titles is not None:
            writer.write(titles, np.full(len(titles), SPLITS.index(TITLES)))
        if corrections is not None:
            others, others_held_out = corrections.others(), corrections.held_out()
            writer.write(others, np.full(len(others), train))
            writer.write(others_held_out, np.full(num_held_out, held_out))
            corrected = counted(num_corrected, "row has", "rows have")
            added = counted(len(others), "description is", "descriptions are")
            log.info(f"{corrected} corrected codes, and {added} added; all are training data.")
    examples = {name: Examples.open(writer.path, name) for name in SPLITS}
    if not len(examples[VAL]):
        raise UserError(
            "All validation data are corrected, which makes them training data. Set aside more with --share-val."
        )
    for name, split_examples in examples.items():
        if len(split_examples):
            write_table(folder / SPLIT_FILES[name], map(_as_people_read, split_examples.chunks()))
    if num_held_out:
        log.info(
            f"{num_held_out:,} of {len(corrections or ()):,} corrections, chosen at random, are held out "
            f"({SPLIT_FILES[HELD_OUT]}) to compare the new model with the old one; training leaves out their rows."
        )
    numbers = {"train": len(examples[TRAIN]), "val": len(examples[VAL])}
    return {**numbers, "held_out": num_held_out} if num_held_out else numbers


def _as_people_read(examples: Examples) -> pa.Table:
    codes = list(filter(is_codes, examples.table.column_names))
    names = [TEXT_COL, LANG_COL, *(name.removeprefix(CODES) for name in codes)]
    return examples.table.select(["text", "lang", *codes]).rename_columns(names)


def _threshold(rows: pa.Table, config: PrepareConfig) -> np.uint64:
    """Return the hash threshold of the validation split."""
    distinct = np.unique(rows["unit"].filter(rows["reason"].is_null()).to_numpy())
    if len(distinct) < 2:
        raise UserError(f"{config.dataset} has one distinct description; it can't be split for validation.")
    return distinct[min(max(round(len(distinct) * config.share_val), 1), len(distinct) - 1) - 1]


def rejected(rows: pa.Table, config: PrepareConfig) -> Iterator[pa.Table]:
    """Yield the dropped rows with their lines in the table and the reasons."""
    names = ["line", "reason", "text", *(f"{CODES}{name}" for name in config.target_cols)]
    for batch in rows.select(names).to_batches():
        dropped = pa.Table.from_batches([batch.filter(batch["reason"].is_valid())])
        yield dropped.rename_columns(["line", "reason", config.input_col, *config.target_cols])


def num_conflicts(rows: pa.Table) -> int:
    """Return the number of descriptions whose rows have different codes, whatever their order."""
    found = []
    for batch in rows.to_batches():
        kept = batch.filter(batch["reason"].is_null())
        codes = [_hashes(kept[name].fill_null("")) for name in filter(is_codes, kept.schema.names)]
        pairs = {"described": _hashes(kept["key"]) + 31 * _hashes(kept["lang"]), "coded": np.sum(codes, axis=0)}
        found.append(pd.DataFrame(pairs).drop_duplicates())
    described = pd.concat(found).drop_duplicates()["described"]
    return int(described[described.duplicated()].nunique())


def _hashes(column: pa.Array) -> np.ndarray:
    return pd.util.hash_array(column.to_numpy(zero_copy_only=False), categorize=False)
