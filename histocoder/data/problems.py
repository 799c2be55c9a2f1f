"""Rows of a prepared table that people should look at: those left out, and those that contradict
others.
"""

import itertools
from collections.abc import Iterable, Iterator

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from histocoder.config import PrepareConfig
from histocoder.data.examples import CODES, LANG_COL, is_codes
from histocoder.data.hashes import cell_hashes

_NUM_LINES = 10  # lines of the rows with the same codes that `conflicts` names


def rejected_rows(tables: Iterable[pa.Table], config: PrepareConfig) -> Iterator[pa.Table]:
    """Yield the dropped rows of checked rows with their lines in their tables and the reasons."""
    names = ["line", "reason", "text", *(f"{CODES}{name}" for name in config.target_cols)]
    for batch in itertools.chain.from_iterable(rows.select(names).to_batches() for rows in tables):
        dropped = pa.Table.from_batches([batch.filter(batch["reason"].is_valid())])
        yield dropped.rename_columns(["line", "reason", config.input_col, *config.target_cols])


def joined_spellings(rows: pa.Table) -> tuple[int, int]:
    """Return the number of descriptions that are spelt in several ways, and of their rows; see
    `description_keys`.
    """
    kept = rows.filter(rows["reason"].is_null()).select(["key", "text"])
    by_key = kept.group_by("key").aggregate([("text", "count_distinct"), ("text", "count")])
    several = by_key.filter(pc.greater(by_key["text_count_distinct"], 1))
    return len(several), pc.sum(several["text_count"], min_count=0).as_py()


def conflicts(rows: pa.Table, config: PrepareConfig) -> tuple[pa.Table, int]:
    """Return the descriptions whose rows have different codes, a row for each set of codes; and
    their number.

    The descriptions of most rows come first; what the same description is, `description_keys` says.
    """
    batches = [batch.filter(batch["reason"].is_null()) for batch in rows.to_batches()]
    hashes = []  # of descriptions with their languages, and of sets of codes, whatever their order
    for batch in batches:
        key, lang, *codes = (
            cell_hashes(batch[name])
            for name in ("key", "lang", *filter(is_codes, rows.column_names))
        )
        hashes.append(pd.DataFrame({"described": key + 31 * lang, "coded": np.sum(codes, axis=0)}))
    described = pd.concat(hashes).drop_duplicates()["described"]
    described = described[described.duplicated()].unique()
    masks = [one["described"].isin(described) for one in hashes]
    found = pa.Table.from_batches(
        [batch.filter(pa.array(mask)) for batch, mask in zip(batches, masks, strict=True)]
    )
    group = pd.concat(
        [one[mask] for one, mask in zip(hashes, masks, strict=True)], ignore_index=True
    )
    groups = found.to_pandas().join(group).groupby([*group], sort=False)
    names = list(filter(is_codes, rows.column_names))
    first = groups[["text", "lang", *names]].head(1).set_axis(groups["line"].first().index)
    first = first.assign(rows=groups.size(), lines=groups["line"].agg(_few))
    order = first.assign(all=first.groupby("described")["rows"].transform("sum"))
    first = first.loc[order.sort_values(["all", "described", "rows"]).index[::-1]]
    first.columns = [
        config.input_col,
        LANG_COL,
        *(name.removeprefix(CODES) for name in names),
        "rows",
        "lines",
    ]
    return pa.Table.from_pandas(first, preserve_index=False), len(described)


def _few(lines: pd.Series) -> str:
    return "; ".join([*map(str, lines[:_NUM_LINES]), *["…"] * (len(lines) > _NUM_LINES)])
