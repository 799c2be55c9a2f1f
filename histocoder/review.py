"""Chooses what a person should check first in a coded file."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa

from histocoder.data.table import check_output, open_table, write_csv
from histocoder.errors import UserError, shown
from histocoder.files import replacing

_CHUNK_ROWS = 200_000
_CONFIDENCE = re.compile(r"((?:pred_)*)conf")
"""The column of a coded file; of one that was coded several times the longest name is the last time's."""


def review(
    predictions: Path,
    output: Path,
    *,
    budget: int,
    input_col: str = "occ1",
    language_col: str | None = None,
    overwrite: bool = False,
    say: Callable[[str], None] = print,
) -> pd.DataFrame:
    """Write the descriptions whose check is worth most, as a CSV to fill in.

    A description is worth checking by the number of rows that are likely wrong with it: how often it occurs, times
    1 - `conf`. What `finetune.py --dataset` takes is that file with the codes mended.

    Parameters
    ----------
    predictions : Path
        What `histocoder predict` wrote, in a mode that gives `conf`.
    output : Path
        With the columns of description, language and codes as predicted, to be mended; and `times`, `conf`.
    budget : int
        Descriptions at most.
    input_col, language_col : str
        Columns of descriptions and, if there is one, of languages; by default that which `predict --language` added.
    overwrite : bool
        Whether an output that is there is replaced.
    say : callable
        Told what a user should know.

    Returns
    -------
    DataFrame
        What was written.

    Raises
    ------
    UserError
        Where a column is missing, or the output is there already.
    """
    if budget < 1:
        raise UserError(f"--budget is {budget}; it must be 1 or more.")
    check_output(output)
    if output.exists() and not overwrite:
        raise UserError(f"{output} is there already, perhaps filled in. Add --overwrite to replace it.")
    file = open_table(
        predictions, [c for c in (input_col, language_col) if c], optional=("conf", "pred_conf", "lang", "pred_lang")
    )
    for notice in file.notices:
        say(notice)
    prefix = max((match[1] for name in file.header if (match := _CONFIDENCE.fullmatch(name))), default="", key=len)
    language_col = language_col or next((name for name in (f"{prefix}lang", "lang") if name in file.header), None)
    by = [input_col, *([language_col] if language_col else [])]
    columns = [*by, *_code_columns(file.header, prefix), f"{prefix}conf"]
    file.check(columns)
    parts, passed = [], 0
    for chunk in file.chunks(chunk_rows=_CHUNK_ROWS, columns=columns):
        frame = chunk.select(columns).to_pandas()
        cells = frame.pop(f"{prefix}conf")
        frame["conf"] = pd.to_numeric(cells, errors="coerce")
        if len(bad := np.flatnonzero(frame["conf"].isna() & cells.notna() & (cells != ""))):
            line = file.lines(bad[:1] + passed)[0]
            raise UserError(f"{predictions}, line {line}, {prefix}conf: {shown(cells[bad[0]])} is no number.")
        passed += len(frame)
        parts.append(_distinct(frame[frame["conf"].notna()].assign(times=1), by))
    table = _distinct(pd.concat(parts, ignore_index=True), by).rename(columns=lambda name: name.removeprefix(prefix))
    worth = (table["times"] * (1 - table["conf"])).sort_values(ascending=False, kind="stable")
    chosen = table.loc[worth.index[:budget]].reset_index(drop=True)
    with replacing(output) as temporary:
        write_csv(pa.Table.from_pandas(chosen, preserve_index=False), temporary)
    rows, total, wrong = int(chosen["times"].sum()), int(table["times"].sum()), worth.iloc[:budget].sum()
    say(
        f"Wrote {len(chosen):,} descriptions to {output}. They stand for {rows:,} of {total:,} rows, of which about "
        f"{wrong:,.0f} are likely wrong. Mend the codes, then: finetune.py --dataset {output}."
    )
    return chosen


def _distinct(rows: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """The first row of each description, with the sum of `times`."""
    times = rows.groupby(by, dropna=False)["times"].transform("sum")
    return rows.assign(times=times).drop_duplicates(by)


def _code_columns(header: list[str], prefix: str) -> list[str]:
    """The columns of codes: those that stand before a `prob_…` of the same number."""
    return [
        header[i - 1]
        for i, name in enumerate(header)
        if i and name.startswith(f"{prefix}prob_") and header[i - 1].endswith(name[len(f"{prefix}prob") :])
    ]
