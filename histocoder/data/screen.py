"""One pass over a user's table: rows that can be used, and rows that can't, each kind into a file of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa

from histocoder.config import PrepareConfig
from histocoder.data.arrays import map_array
from histocoder.data.examples import LANG_COL, TEXT_COL, language_codes
from histocoder.data.key import Key
from histocoder.data.labels import LabelChecker, Labels, rules_of
from histocoder.data.languages import language_code
from histocoder.data.normalize import folded
from histocoder.data.output import Output
from histocoder.data.table import Table, TableFile, open_table
from histocoder.errors import UserError
from histocoder.formatters import MISSING, Formatter

_KEPT, _UNITS, _DROPPED, _POSITIONS = "kept.arrow", "units", "dropped.arrow", "positions"


@dataclass
class Screened:
    """What `screen` found, and the folder where it wrote it."""

    file: TableFile
    folder: Path
    schema: pa.Schema
    """Of the kept rows: the columns of prepared data."""
    num_kept: int = 0
    num_dropped: int = 0
    codes: set[str] = field(default_factory=set)
    """Those that occur in rows that are kept."""

    def units(self) -> np.ndarray:
        """Return what each kept row belongs to when rows are split, of shape (num_kept,): a hash."""
        return map_array(self.folder / _UNITS, np.uint64)

    def kept(self) -> Iterator[pa.RecordBatch]:
        """Yield the kept rows, a chunk at a time."""
        with pa.memory_map(str(self.folder / _KEPT)) as source:
            reader = pa.ipc.open_file(source)
            for i in range(reader.num_record_batches):
                yield reader.get_batch(i)


def screen(
    config: PrepareConfig, formatter: Formatter, key: Key | None, folder: Path, *, say: Callable[[str], None]
) -> Screened:
    """Check all rows of a table, a chunk at a time.

    Parameters
    ----------
    config : PrepareConfig
    formatter : Formatter
    key : Key, optional
        The only codes allowed.
    folder : Path
        Where intermediate files are written.
    say : callable
        Receives each notice to the user.

    Raises
    ------
    UserError
        If the table can't be read, its labels do not fit, or no row can be used.
    """
    columns = [config.input_col, *config.target_cols, *([config.language_col] if config.language_col else [])]
    file = open_table(config.dataset, columns, sheet=config.sheet, codes=config.target_cols)
    for notice in file.notices:
        say(notice)
    checker = LabelChecker(file, config.target_cols, formatter, rules_of(config), key=key)
    found = Screened(file, folder, _strings(TEXT_COL, LANG_COL, *config.target_cols))
    dropped_schema = _strings("reason", config.input_col, *config.target_cols)
    with (
        pa.ipc.new_file(str(folder / _KEPT), found.schema) as kept,
        pa.ipc.new_file(str(folder / _DROPPED), dropped_schema) as dropped,
        (folder / _UNITS).open("wb") as units,
        (folder / _POSITIONS).open("wb") as positions,
    ):
        for table in file.tables(columns):
            labels = checker.check(table)
            reasons = _reasons(table, labels, config)
            keep = np.ones(len(table), dtype=bool)
            keep[list(reasons)] = False
            batch = _kept_rows(table, labels, keep, config, found.schema)
            kept.write(batch)
            units.write(_units(batch[TEXT_COL], table.rows[keep], config).tobytes())
            dropped.write(_dropped_rows(table, reasons, config, dropped_schema))
            positions.write(table.rows[~keep].tobytes())
            found.num_kept += len(batch)
            found.num_dropped += len(reasons)
            found.codes.update(*(batch[column].unique().to_pylist() for column in config.target_cols))
    for notice in checker.finish():
        say(notice)
    if found.num_kept == 0:
        raise UserError(f"{config.dataset} has no row with a description and labels that fit.")
    found.codes -= {None, MISSING}
    return found


def write_rejected(path: Path, found: Screened, *, say: Callable[[str], None]) -> None:
    """Write the dropped rows with their lines in the table and why."""
    positions = np.fromfile(found.folder / _POSITIONS, dtype=np.int64)
    lines = found.file.lines(positions)
    with pa.memory_map(str(found.folder / _DROPPED)) as source:
        dropped = pa.ipc.open_file(source).read_all()
        rejected = dropped.add_column(0, "line", pa.array(lines))
        for notice in Output(Path(path.name)).write(path, rejected.schema, [rejected]):
            say(notice)


def _strings(*names: str) -> pa.Schema:
    return pa.schema([(name, pa.string()) for name in names])


def _reasons(table: Table, labels: Labels, config: PrepareConfig) -> dict[int, str]:
    """Row -> why it is dropped."""
    blank = np.flatnonzero(table.columns[config.input_col].is_null()).tolist()
    return {**dict.fromkeys(labels.uncoded.tolist(), "no code"), **labels.bad, **dict.fromkeys(blank, "no description")}


def _kept_rows(
    table: Table, labels: Labels, keep: np.ndarray, config: PrepareConfig, schema: pa.Schema
) -> pa.RecordBatch:
    mask = pa.array(keep)
    texts = table.columns[config.input_col].filter(mask)
    if config.language_col is None:
        langs = pa.repeat(pa.scalar(language_code(config.language)), len(texts))
    else:
        langs = language_codes(table.columns[config.language_col].filter(mask))
    codes = [pa.array(labels.codes[name].to_numpy()[keep], pa.string()) for name in config.target_cols]
    return pa.RecordBatch.from_arrays([texts, langs, *codes], schema=schema)


def _dropped_rows(table: Table, reasons: dict[int, str], config: PrepareConfig, schema: pa.Schema) -> pa.RecordBatch:
    rows = sorted(reasons)
    cells = [table.columns[name].take(pa.array(rows, pa.int64())) for name in (config.input_col, *config.target_cols)]
    why = pa.array([reasons[row] for row in rows], pa.string())
    return pa.RecordBatch.from_arrays([why, *cells], schema=schema)


def _units(texts: pa.Array, positions: np.ndarray, config: PrepareConfig) -> np.ndarray:
    """Hash each row's description, alike for its variants, or its position if rows are split; keyed by the seed."""
    values = folded(texts.to_pylist()) if config.split_by == "text" else positions.astype(str)
    key = f"{config.seed:016x}"[-16:]
    return pd.util.hash_array(np.array(values, dtype=object), hash_key=key, categorize=False)
