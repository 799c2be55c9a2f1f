"""Rows of a prepared table that people should look at: those left out, and those that contradict
others.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from histocoder.config import PrepareConfig
from histocoder.data.examples import CODES_PREFIX, LANG_COL, is_codes
from histocoder.data.hashes import cell_hashes

MAX_LINES = 10
"""Number of lines of the rows with the same codes that `conflicts` names."""


def rejected_rows(tables: Iterable[pa.Table], config: PrepareConfig) -> Iterator[pa.Table]:
    """Yield the dropped rows of checked rows with their lines in their tables and the reasons."""
    names = ["line", "reason", "text", *(f"{CODES_PREFIX}{name}" for name in config.target_cols)]
    headers = ["line", "reason", config.input_col, *config.target_cols]
    for rows in tables:
        for batch in rows.select(names).to_batches():
            dropped = batch.filter(batch["reason"].is_valid())
            yield pa.Table.from_batches([dropped]).rename_columns(headers)


def joined_spellings(rows: pa.Table) -> tuple[int, int]:
    """Return the number of descriptions that are spelt in several ways, and of their rows; see
    `description_keys`.
    """
    kept_rows = rows.filter(rows["reason"].is_null()).select(["key", "text"])
    counts = kept_rows.group_by("key").aggregate([("text", "count_distinct"), ("text", "count")])
    several = counts.filter(pc.greater(counts["text_count_distinct"], 1))
    return len(several), pc.sum(several["text_count"], min_count=0).as_py()


def conflicts(rows: pa.Table, config: PrepareConfig) -> tuple[pa.Table, int]:
    """Return the descriptions whose rows have different codes, a row for each set of codes; and
    their number.

    The descriptions of most rows come first; what the same description is, `description_keys` says.
    """
    rows = rows.filter(rows["reason"].is_null())
    code_cols = list(filter(is_codes, rows.column_names))

    # a description with its language, and a set of codes, whatever their order
    described = cell_hashes(rows["key"]) + 31 * cell_hashes(rows["lang"])
    coded = np.sum([cell_hashes(rows[name]) for name in code_cols], axis=0)
    hashes = pd.DataFrame({"described": described, "coded": coded})
    pairs = hashes.drop_duplicates()
    several = pairs["described"][pairs["described"].duplicated()].unique()
    is_conflict = hashes["described"].isin(several)

    # a row for each set of codes: its first one, the number of its rows, and their lines
    frame = rows.filter(pa.array(is_conflict)).to_pandas()
    frame = frame.join(hashes[is_conflict].reset_index(drop=True))
    lines_of_set = frame.groupby(["described", "coded"], sort=False)["line"]
    frame["rows"] = lines_of_set.transform("size")
    frame["lines"] = lines_of_set.transform(_first_lines)
    sets = frame.drop_duplicates(["described", "coded"])

    # the description of most rows comes first, and of its sets that of most rows
    sets = sets.assign(all_rows=sets.groupby("described")["rows"].transform("sum"))
    sets = sets.sort_values(["all_rows", "described", "rows"])[::-1]
    table = sets[["text", "lang", *code_cols, "rows", "lines"]]
    names = (name.removeprefix(CODES_PREFIX) for name in code_cols)
    table.columns = [config.input_col, LANG_COL, *names, "rows", "lines"]
    return pa.Table.from_pandas(table, preserve_index=False), len(several)


def _first_lines(lines: pd.Series) -> str:
    texts = list(map(str, lines[:MAX_LINES]))
    if len(lines) > MAX_LINES:
        texts.append("…")
    return "; ".join(texts)
