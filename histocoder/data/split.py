"""The rows of a user's table, checked, corrected, split into training and validation data, and listed."""

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa

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
from histocoder.data.output import CsvWriter
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
_NUM_LINES = 10  # lines of the rows with the same codes that `conflicts.csv` names
_HELD_OUT_SHARE, _MOST_HELD_OUT = 0.2, 200
_FEWEST = 20  # number of corrections from which some are held out: a fifth of fewer shows nothing
_ANY = Language()  # that of a correction that applies to every language


class Corrections:
    """Descriptions with checked codes, by their keys and languages; of several for one description the last counts."""

    def __init__(self, target_cols: Sequence[str], default_language: Language) -> None:
        self._target_cols, self._default_language = tuple(target_cols), default_language
        self._found: dict[tuple[str, str], tuple[str, list[str | None]]] = {}  # key, language -> description, codes
        self._used: set[tuple[str, str]] = set()
        self._held_out: set[str] = set()  # keys

    def __len__(self) -> int:
        return len(self._found)

    @property
    def keys(self) -> set[str]:
        """Keys of all descriptions."""
        return {key for key, _ in self._found}

    @property
    def codes(self) -> set[str]:
        """All codes that occur."""
        return {code for _, codes in self._found.values() for code in codes if code is not None}

    def add(self, examples: Examples) -> None:
        rows = examples.codes.to_numpy(dtype=object).tolist()
        keys = zip(description_keys(examples.texts), examples.langs, strict=True)
        self._found |= dict(zip(keys, zip(examples.texts, rows, strict=True), strict=True))

    def hold_out(self, seed: int) -> int:
        """Set a fifth aside, about 200 at most, to compare models on; return how many.

        The choice depends on the hashes of seed and description alone, so that a later run with more corrections never
        trains on what is held out here, or the other way round, except for those beyond 200.
        """
        if len(self) < _FEWEST:
            return 0
        digests = {key: hashlib.sha256(f"{seed} {key}".encode()).digest()[:8] for key, _ in self._found}
        units = {key: int.from_bytes(digest, "big") / 2**64 for key, digest in digests.items()}
        chosen = sorted((key for key, unit in units.items() if unit < _HELD_OUT_SHARE), key=units.__getitem__)
        self._held_out = set(chosen[:_MOST_HELD_OUT])
        return sum(key in self._held_out for key, _ in self._found)

    def apply(self, rows: pa.RecordBatch) -> tuple[pa.RecordBatch, np.ndarray, np.ndarray, np.ndarray]:
        """Return checked rows, which have a `key`, with corrected codes, and masks of shape (n,).

        The masks are those of rows with corrected codes, and, in whatever language, of rows whose description has a
        correction to train on, and of those whose correction is held out. No dropped row is among them.
        """
        langs, keys = rows["lang"].to_pylist(), rows["key"].to_pylist()
        is_kept = np.asarray(rows["reason"].is_null())
        known = {key for key, _ in self._found} - self._held_out
        is_held_out, is_known = (
            np.array([key in some for key in keys], dtype=bool) & is_kept for some in (self._held_out, known)
        )
        found: dict[int, tuple[str, str]] = {}
        for row in np.flatnonzero(is_known | is_held_out).tolist():
            own, of_all = (keys[row], langs[row]), (keys[row], str(_ANY))
            if own in self._found or of_all in self._found:
                found[row] = own if own in self._found else of_all
        self._used.update(found.values())
        is_corrected = np.zeros(len(rows), dtype=bool)
        is_corrected[list(found)] = True
        for i, name in enumerate(filter(is_codes, rows.schema.names if found else ())):
            column = rows[name].to_pylist()
            for row, own_key in found.items():
                column[row] = self._found[own_key][1][i]
            rows = rows.set_column(rows.schema.get_field_index(name), name, pa.array(column, pa.string()))
        return rows, is_corrected & ~is_held_out, is_known, is_held_out

    def others(self) -> pa.RecordBatch:
        """Return the corrections that were in no row and are not held out, as checked rows."""
        return self._rows([one for one in self._found if one not in self._used and one[0] not in self._held_out])

    def held_out(self) -> pa.RecordBatch:
        """Return the held-out corrections as checked rows."""
        return self._rows([one for one in self._found if one[0] in self._held_out])

    def _rows(self, chosen: Sequence[tuple[str, str]]) -> pa.RecordBatch:
        columns = {
            "text": [self._found[one][0] for one in chosen],
            "lang": [self._default_language if lang == _ANY else lang for _, lang in chosen],
            **{
                f"{CODES}{name}": [self._found[one][1][i] for one in chosen] for i, name in enumerate(self._target_cols)
            },
        }
        schema = row_schema(self._target_cols)
        nothing = [None] * len(chosen)
        return pa.RecordBatch.from_pydict({name: columns.get(name, nothing) for name in schema.names}, schema=schema)


def read_corrections(
    config: PrepareConfig, formatter: Formatter, rules: LabelRules, known: Collection[str] = ()
) -> Corrections:
    """Read the files of `--corrections`, as `histocoder review` writes them and a person fills them in.

    For `rules` and `known` see `ExampleFiles`.

    Raises UserError if a file lacks a column, a checked code does not fit, or nothing is checked.
    """
    corrections = Corrections(config.target_cols, Language(config.language))
    for path in map(Path, config.corrections or ()):
        columns = [*config.target_cols[1:], *([config.language_col] if config.language_col else [])]
        needed = [config.input_col, CHECKED_COL, config.target_cols[0]]
        file = open_table(path, needed, optional=columns, codes=config.target_cols)
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
        for examples in files.chunks(say=log.info):
            corrections.add(examples.coded())
    return corrections


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
    num_rows = Counter[str]()
    schema = pa.schema([(name, pa.string()) for name in (TEXT_COL, LANG_COL, *config.target_cols)])
    names = ["text", "lang", *(f"{CODES}{name}" for name in config.target_cols)]
    present = {TRAIN: True, VAL: True, HELD_OUT: num_held_out > 0, TITLES: titles is not None}
    files = {name: file for name, file in SPLIT_FILES.items() if present[name]}
    with writer, ExitStack() as stack:
        tables = {name: stack.enter_context(CsvWriter(folder / file, schema)) for name, file in files.items()}

        def write(batch: pa.RecordBatch, split: np.ndarray) -> None:
            writer.write(batch, split)
            for name, table in tables.items():
                kept = batch.select(names).filter(pa.array(split == SPLITS.index(name)))
                table.write(pa.RecordBatch.from_arrays(kept.columns, schema=schema))
                num_rows[name] += len(kept)

        num_corrected = 0
        for checked in rows.to_batches():
            batch, is_validation = checked, checked["unit"].to_numpy() <= threshold
            split = np.where(is_validation, SPLITS.index(VAL), SPLITS.index(TRAIN))
            if corrections is not None:
                batch, is_corrected, is_known, is_held_out = corrections.apply(checked)
                split[is_known], split[is_held_out] = SPLITS.index(TRAIN), NO_SPLIT
                num_corrected += int(is_corrected.sum())
            split[checked["reason"].is_valid()] = NO_SPLIT
            write(batch, split)
        if titles is not None:
            write(titles, np.full(len(titles), SPLITS.index(TITLES)))
        if corrections is not None:
            others, held_out = corrections.others(), corrections.held_out()
            write(others, np.full(len(others), SPLITS.index(TRAIN)))
            write(held_out, np.full(len(held_out), SPLITS.index(HELD_OUT)))
            corrected = counted(num_corrected, "row has", "rows have")
            added = counted(len(others), "description is", "descriptions are")
            log.info(f"{corrected} corrected codes, and {added} added; all are training data.")
    if num_rows[VAL] == 0:
        raise UserError(
            "All validation data are corrected, which makes them training data. Set aside more with --share-val."
        )
    if num_held_out:
        log.info(
            f"{num_held_out:,} of {len(corrections or ()):,} corrections, chosen at random, are held out "
            f"({SPLIT_FILES[HELD_OUT]}) to compare the new model with the old one; training leaves out their rows."
        )
    numbers = {"train": num_rows[TRAIN], "val": num_rows[VAL]}
    return {**numbers, "held_out": num_held_out} if num_held_out else numbers


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


def conflicts(rows: pa.Table, config: PrepareConfig) -> tuple[pa.Table, int]:
    """Return the descriptions whose rows have different codes, a row for each set of codes; and their number.

    The descriptions of most rows come first; what the same description is, `description_keys` says.
    """
    batches = [batch.filter(batch["reason"].is_null()) for batch in rows.to_batches()]
    groups = [_described_and_coded(batch) for batch in batches]
    described = pd.concat(groups).drop_duplicates()["described"]
    described = described[described.duplicated()].unique()
    masks = [group["described"].isin(described) for group in groups]
    parts = [batch.filter(pa.array(mask)) for batch, mask in zip(batches, masks, strict=True)]
    group = pd.concat([group[mask] for group, mask in zip(groups, masks, strict=True)], ignore_index=True)
    found = pa.Table.from_batches(parts).to_pandas().join(group)
    lines = found.groupby([*group])["line"]
    columns = ["text", "lang", *filter(is_codes, found.columns)]
    found = found.drop_duplicates([*group]).set_index([*group])[columns]
    found = found.assign(rows=lines.size(), lines=lines.agg(_few))
    order = found.assign(all=found.groupby("described")["rows"].transform("sum"))
    found = found.loc[order.sort_values(["all", "described", "rows"]).index[::-1]]
    found.columns = [config.input_col, LANG_COL, *config.target_cols, "rows", "lines"]
    return pa.Table.from_pandas(found, preserve_index=False), len(described)


def _described_and_coded(rows: pa.RecordBatch) -> pd.DataFrame:
    """Return hashes of the descriptions with their languages, and of the sets of codes, whatever their order."""
    codes = [_hashes(rows[name].fill_null("")) for name in filter(is_codes, rows.schema.names)]
    return pd.DataFrame(
        {"described": _hashes(rows["key"]) + 31 * _hashes(rows["lang"]), "coded": np.sum(codes, axis=0)}
    )


def _hashes(column: pa.Array) -> np.ndarray:
    return pd.util.hash_array(column.to_numpy(zero_copy_only=False), categorize=False)


def _few(lines: pd.Series) -> str:
    """Return the first few lines."""
    return "; ".join([*map(str, lines[:_NUM_LINES]), *["…"] * (len(lines) > _NUM_LINES)])
