"""Rows of a prepared table that people should look at: those left out, and those that contradict others."""

from collections.abc import Iterator

import numpy as np
import pandas as pd
import pyarrow as pa

from histocoder.config import PrepareConfig
from histocoder.data.examples import CODES, LANG_COL, is_codes

_NUM_LINES = 10  # lines of the rows with the same codes that `conflicts` names


def rejected_rows(rows: pa.Table, config: PrepareConfig) -> Iterator[pa.Table]:
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
    hashes = [_hashes(batch) for batch in batches]
    described = pd.concat(hashes).drop_duplicates()["described"]
    described = described[described.duplicated()].unique()
    masks = [one["described"].isin(described) for one in hashes]
    found = pa.Table.from_batches([batch.filter(pa.array(mask)) for batch, mask in zip(batches, masks, strict=True)])
    group = pd.concat([one[mask] for one, mask in zip(hashes, masks, strict=True)], ignore_index=True)
    groups = found.to_pandas().join(group).groupby([*group], sort=False)
    codes = list(filter(is_codes, rows.column_names))
    first = groups[["text", "lang", *codes]].head(1).set_axis(groups["line"].first().index)
    first = first.assign(rows=groups.size(), lines=groups["line"].agg(_few))
    order = first.assign(all=first.groupby("described")["rows"].transform("sum"))
    first = first.loc[order.sort_values(["all", "described", "rows"]).index[::-1]]
    first.columns = [config.input_col, LANG_COL, *(name.removeprefix(CODES) for name in codes), "rows", "lines"]
    return pa.Table.from_pandas(first, preserve_index=False), len(described)


def _hashes(rows: pa.RecordBatch) -> pd.DataFrame:
    """Return hashes of the descriptions with their languages, and of the sets of codes, whatever their order."""
    names = ["key", "lang", *filter(is_codes, rows.schema.names)]
    columns = (rows[name].fill_null("").to_numpy(zero_copy_only=False) for name in names)
    # of languages and codes there are few, so that each is hashed once
    key, lang, *codes = (pd.util.hash_array(column, categorize=i > 0) for i, column in enumerate(columns))
    return pd.DataFrame({"described": key + 31 * lang, "coded": np.sum(codes, axis=0)})


def _few(lines: pd.Series) -> str:
    return "; ".join([*map(str, lines[:_NUM_LINES]), *["…"] * (len(lines) > _NUM_LINES)])
