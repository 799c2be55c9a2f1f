"""One pass over a user's table, which writes the rows that can be used, and those that can't, to one file."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from histocoder.config import PrepareConfig
from histocoder.data.checked import checked_tables
from histocoder.data.examples import LANG_COL, TEXT_COL, CheckedChunk, checked_chunks
from histocoder.data.labels import LabelChecker
from histocoder.data.languages import own_languages
from histocoder.data.normalize import description_keys
from histocoder.data.output import Output
from histocoder.data.table import TableFile
from histocoder.errors import UserError
from histocoder.formatters import MISSING
from histocoder.log import log

_REASON, _POSITION, _UNIT = "reason", "position", "unit"


@dataclass
class Screened:
    """Rows of a table, checked by `screen`."""

    file: TableFile
    config: PrepareConfig
    path: Path  # file of all rows, with the reasons why they are dropped
    num_kept: int = 0
    num_dropped: int = 0
    codes: set[str] = field(default_factory=set)  # codes that occur in rows that are kept
    languages: set[str] = field(default_factory=set)  # and their languages

    @property
    def schema(self) -> pa.Schema:
        """The columns of prepared data."""
        return _strings(TEXT_COL, LANG_COL, *self.config.target_cols)

    def units(self) -> np.ndarray:
        """Return the hashes by which the kept rows are split, of shape (num_kept,)."""
        return np.concatenate([units for _, units in self.kept()])

    def kept(self) -> Iterator[tuple[pa.RecordBatch, np.ndarray]]:
        """Yield the kept rows, a chunk at a time, with their hashes."""
        for batch in self._batches(kept=True):
            yield batch.select(self.schema.names), batch[_UNIT].to_numpy()

    def _batches(self, *, kept: bool) -> Iterator[pa.RecordBatch]:
        with pa.memory_map(str(self.path)) as source:
            reader = pa.ipc.open_file(source)
            for i in range(reader.num_record_batches):
                batch = reader.get_batch(i)
                yield batch.filter(batch[_REASON].is_null() if kept else batch[_REASON].is_valid())

    def write_rejected(self, path: Path) -> None:
        """Write the dropped rows with their lines in the table and the reasons."""
        lines = self.file.lines(np.concatenate([batch[_POSITION].to_numpy() for batch in self._batches(kept=False)]))
        cells = _strings(_REASON, self.config.input_col, *self.config.target_cols)
        schema = pa.schema([("line", pa.int64()), *cells])

        def tables() -> Iterator[pa.Table]:
            written = 0
            for batch in self._batches(kept=False):
                numbers = pa.array(lines[written : written + len(batch)])
                columns = [batch[name] for name in (_REASON, TEXT_COL, *self.config.target_cols)]
                yield pa.Table.from_arrays([numbers, *columns], schema=schema)
                written += len(batch)

        for notice in Output(Path(path.name)).write(path, schema, tables()):
            log.info(notice)


def columns_of(config: PrepareConfig) -> list[str]:
    """Return the columns of the user's table that are read."""
    return [config.input_col, *config.target_cols, *([config.language_col] if config.language_col else [])]


def screen(file: TableFile, config: PrepareConfig, checker: LabelChecker, path: Path) -> Screened:
    """Check all rows of a table, a chunk at a time, and write them to `path`.

    Raises UserError if the table can't be read, its labels do not fit, or no row can be used.
    """
    found = Screened(file, config, path)
    numbers = pa.schema([(_POSITION, pa.int64()), (_UNIT, pa.uint64())])
    schema = pa.schema([*found.schema, *_strings(_REASON), *numbers])
    with pa.ipc.new_file(str(path), schema) as writer:
        tables = checked_tables(file, columns_of(config), log.info)
        for chunk in checked_chunks(tables, checker, config.input_col, config.language_col, language=config.language):
            batch = _rows(chunk, config, schema)
            writer.write(batch)
            found.num_kept += (num_kept := chunk.reasons.null_count)
            found.num_dropped += len(batch) - num_kept
            found.languages.update(chunk.langs.filter(chunk.usable).unique().to_pylist())
            found.codes.update(*(batch[name].filter(chunk.usable).unique().to_pylist() for name in config.target_cols))
    checker.finish(log.info)
    if found.num_kept == 0:
        raise UserError(f"{config.dataset} has no row with a description and labels that fit.")
    found.codes -= {None, MISSING}
    if strange := own_languages(found.languages):
        log.info(strange)
    return found


def _strings(*names: str) -> pa.Schema:
    return pa.schema([(name, pa.string()) for name in names])


def _rows(chunk: CheckedChunk, config: PrepareConfig, schema: pa.Schema) -> pa.RecordBatch:
    """Return all rows of a chunk: kept ones as prepared data have them, dropped ones with their cells unchanged."""
    table, texts = chunk.table, chunk.table.columns[config.input_col]
    cleaned = [pa.array(chunk.codes[name].to_numpy(), pa.string()) for name in config.target_cols]
    codes = [
        pc.if_else(chunk.usable, column, table.columns[name])
        for name, column in zip(config.target_cols, cleaned, strict=True)
    ]
    units = pa.array(_units(texts.fill_null(""), table.rows, config))
    columns = [texts, chunk.langs, *codes, chunk.reasons, pa.array(table.rows), units]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _units(texts: pa.Array, positions: np.ndarray, config: PrepareConfig) -> np.ndarray:
    """Hash the key of each row's description, or its position if rows are split, with the seed as key."""
    values = description_keys(texts) if config.split_by == "text" else positions.astype(str).astype(object)
    return pd.util.hash_array(values, hash_key=f"{config.seed:016x}"[-16:], categorize=False)
