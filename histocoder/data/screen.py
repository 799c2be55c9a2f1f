"""One pass over a user's table, which writes the rows that can be used, and those that can't, to one file."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from histocoder.config import PrepareConfig
from histocoder.data.checked import checked_tables
from histocoder.data.examples import CODES, LANG_COL, checked_rows, is_codes, row_schema
from histocoder.data.labels import LabelChecker
from histocoder.data.languages import own_languages
from histocoder.data.normalize import description_keys, normalize_column
from histocoder.data.table import TableFile
from histocoder.errors import UserError
from histocoder.log import log

_NUM_LINES = 10  # lines of the rows with the same codes that `conflicts.csv` names


def columns_of(config: PrepareConfig) -> dict[str, str]:
    """Return the columns of the user's table that are read, and the settings that name them."""
    targets = dict.fromkeys(config.target_cols, "target_cols")
    langs = {config.language_col: "language_col"} if config.language_col else {}
    return {config.input_col: "input_col", **targets, **langs}


def screen(file: TableFile, config: PrepareConfig, checker: LabelChecker, path: Path) -> pa.Table:
    """Check all rows of a table, write them to `path`, a chunk at a time, and return that file, mapped into memory.

    Its columns are those of `checked_rows`, `key` (see `description_keys`) and `unit`, the hash that splits them.

    Raises UserError if the table can't be read, its labels do not fit, or no row can be used.
    """
    schema = pa.schema([*row_schema(config.target_cols), ("key", pa.string()), ("unit", pa.uint64())])
    tables = checked_tables(file, columns_of(config), log.info)
    names = config.input_col, config.language_col
    with pa.ipc.new_file(str(path), schema) as writer:
        for rows in checked_rows(tables, checker, *names, language=config.language, say=log.info):
            keys = description_keys(rows["text"].fill_null(""))
            split_by = keys if config.split_by == "text" else rows["row"].to_numpy().astype(str).astype(object)
            units = pd.util.hash_array(split_by, hash_key=f"{config.seed:016x}"[-16:], categorize=False)
            columns = [*rows.columns, pa.array(keys, pa.string()), pa.array(units)]
            writer.write(pa.RecordBatch.from_arrays(columns, schema=schema))
    found = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    kept = found["reason"].is_null()
    if not pc.any(kept).as_py():
        raise UserError(f"{config.dataset} has no row with a description and labels that fit.")
    if strange := own_languages(found["lang"].filter(kept).unique().to_pylist()):
        log.info(strange)
    return found


def rejected(rows: pa.Table, config: PrepareConfig) -> Iterator[pa.Table]:
    """Yield the dropped rows with their lines in the table and the reasons."""
    names = ["line", "reason", "text", *(f"{CODES}{name}" for name in config.target_cols)]
    for batch in rows.select(names).to_batches():
        dropped = pa.Table.from_batches([batch.filter(batch["reason"].is_valid())])
        yield dropped.rename_columns(["line", "reason", config.input_col, *config.target_cols])


def conflicts(rows: pa.Table, config: PrepareConfig) -> tuple[pa.Table, int]:
    """Return the descriptions whose rows have different codes, a row for each set of codes; and their number.

    The descriptions of most rows come first. Accents make other descriptions here (väg, våg), unlike in
    `description_keys`.
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
    found = (
        found.drop_duplicates([*group]).set_index([*group])[columns].assign(rows=lines.size(), lines=lines.agg(_few))
    )
    order = found.assign(all=found.groupby("described")["rows"].transform("sum"))
    found = found.loc[order.sort_values(["all", "described", "rows"]).index[::-1]]
    found.columns = [config.input_col, LANG_COL, *config.target_cols, "rows", "lines"]
    return pa.Table.from_pandas(found, preserve_index=False), len(described)


def _described_and_coded(rows: pa.RecordBatch) -> pd.DataFrame:
    """Return hashes of the descriptions with their languages, and of the sets of codes, whatever their order."""
    lower = normalize_column(rows["text"], "lower")
    codes = [_hashes(rows[name].fill_null("")) for name in filter(is_codes, rows.schema.names)]
    return pd.DataFrame({"described": _hashes(lower) + 31 * _hashes(rows["lang"]), "coded": np.sum(codes, axis=0)})


def _hashes(column: pa.Array) -> np.ndarray:
    return pd.util.hash_array(column.to_numpy(zero_copy_only=False), categorize=False)


def _few(lines: pd.Series) -> str:
    """Return the first few lines."""
    return "; ".join([*map(str, lines[:_NUM_LINES]), *["…"] * (len(lines) > _NUM_LINES)])
