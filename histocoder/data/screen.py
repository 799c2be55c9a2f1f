"""One pass over a user's table, which writes the rows that can be used, and those that can't, to one file."""

from collections import Counter
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
from histocoder.data.normalize import description_keys, normalize
from histocoder.data.output import write_table
from histocoder.data.table import TableFile
from histocoder.errors import UserError
from histocoder.formatters import MISSING
from histocoder.log import log

_REASON, _POSITION, _UNIT = "reason", "position", "unit"
_KEY, _SET = "hash of the description", "hash of the codes"
_NUM_LINES = 10  # lines of the rows with the same codes that `conflicts.csv` names


@dataclass
class Screened:
    """Rows of a table, checked by `screen`."""

    file: TableFile
    config: PrepareConfig
    path: Path  # file of all rows, with the reasons why they are dropped
    num_kept: int = 0
    reasons: Counter[str] = field(default_factory=Counter)  # why rows are dropped
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
            yield schema.empty_table()
            written = 0
            for batch in self._batches(kept=False):
                numbers = pa.array(lines[written : written + len(batch)])
                columns = [batch[name] for name in (_REASON, TEXT_COL, *self.config.target_cols)]
                yield pa.Table.from_arrays([numbers, *columns], schema=schema)
                written += len(batch)

        write_table(path, tables())

    def write_conflicts(self, path: Path) -> int:
        """Write the descriptions whose rows have different codes, a row for each set of codes; return their number.

        The descriptions of most rows come first. Nothing is written if there are none.
        """
        columns, group = [TEXT_COL, LANG_COL, *self.config.target_cols], [_KEY, _SET]
        pairs = pa.Table.from_batches([batch.select(group) for batch in self._batches(kept=True)]).to_pandas()
        keys = pairs.drop_duplicates()[_KEY]
        keys = keys[keys.duplicated()].unique()
        if not len(keys):
            return 0
        parts = [batch.filter(pa.array(np.isin(batch[_KEY].to_numpy(), keys))) for batch in self._batches(kept=True)]
        rows = pa.Table.from_batches(parts).to_pandas()
        lines = pd.Series(self.file.lines(rows[_POSITION].to_numpy())).groupby([rows[name] for name in group])
        found = rows.drop_duplicates(group).set_index(group)[columns].assign(rows=lines.size(), lines=lines.agg(_few))
        order = found.assign(all=found.groupby(_KEY)["rows"].transform("sum")).sort_values(["all", _KEY, "rows"])
        found = found.loc[order.index[::-1]].rename(columns={TEXT_COL: self.config.input_col})
        table = pa.Table.from_pandas(found, preserve_index=False)
        write_table(path, [table])
        return len(keys)


def columns_of(config: PrepareConfig) -> dict[str, str]:
    """Return the columns of the user's table that are read, and the settings that name them."""
    targets = dict.fromkeys(config.target_cols, "target_cols")
    langs = {config.language_col: "language_col"} if config.language_col else {}
    return {config.input_col: "input_col", **targets, **langs}


def screen(file: TableFile, config: PrepareConfig, checker: LabelChecker, path: Path) -> Screened:
    """Check all rows of a table, a chunk at a time, and write them to `path`.

    Raises UserError if the table can't be read, its labels do not fit, or no row can be used.
    """
    found = Screened(file, config, path)
    numbers = pa.schema([(_POSITION, pa.int64()), *((name, pa.uint64()) for name in (_UNIT, _KEY, _SET))])
    schema = pa.schema([*found.schema, *_strings(_REASON), *numbers])
    with pa.ipc.new_file(str(path), schema) as writer:
        tables = checked_tables(file, columns_of(config), log.info)
        columns = config.input_col, config.language_col
        for chunk in checked_chunks(tables, checker, *columns, language=config.language, say=log.info):
            batch = _rows(chunk, config, schema)
            writer.write(batch)
            found.num_kept += chunk.reasons.null_count
            found.reasons.update(map(_kind_of, chunk.reasons.drop_null().to_pylist()))
            found.languages.update(chunk.langs.filter(chunk.usable).unique().to_pylist())
            found.codes.update(*(batch[name].filter(chunk.usable).unique().to_pylist() for name in config.target_cols))
    if found.num_kept == 0:
        raise UserError(f"{config.dataset} has no row with a description and labels that fit.")
    found.codes -= {None, MISSING}
    if strange := own_languages(found.languages):
        log.info(strange)
    return found


def _kind_of(reason: str) -> str:
    """Return the kind of a reason, as a notice counts them."""
    kinds = {"no description": "without a description", "no code": "without a code"}
    return kinds.get(reason, "with codes that do not fit")


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
    keys = description_keys(texts.fill_null(""))
    split_by = keys if config.split_by == "text" else table.rows.astype(str).astype(object)
    units = pd.util.hash_array(split_by, hash_key=f"{config.seed:016x}"[-16:], categorize=False)
    # accents make other words here (väg, våg), unlike in `description_keys`
    lower = pa.array(normalize(texts.fill_null("").to_pylist(), "lower"), pa.string())
    described = _hashes(lower) + 31 * _hashes(chunk.langs)
    sets = np.sum([_hashes(column.fill_null("")) for column in cleaned], axis=0)  # whatever their order
    numbers = [pa.array(values) for values in (table.rows, units, described, sets)]
    return pa.RecordBatch.from_arrays([texts, chunk.langs, *codes, chunk.reasons, *numbers], schema=schema)


def _hashes(column: pa.Array) -> np.ndarray:
    return pd.util.hash_array(column.to_numpy(zero_copy_only=False), categorize=False)


def _few(lines: pd.Series) -> str:
    """Return the first few lines."""
    return "; ".join([*map(str, lines[:_NUM_LINES]), *["…"] * (len(lines) > _NUM_LINES)])
