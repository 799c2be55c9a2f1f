"""Checks a table's codes against a formatter, a column at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pyarrow.compute as pc

from histocoder.data.key import Key
from histocoder.data.table import Table
from histocoder.errors import UserError
from histocoder.formatters import MISSING, Formatter

_NEVER_SHORT = {"-1", "-2", "-3", MISSING}
_NUM_EXAMPLES = 3


@dataclass(frozen=True)
class LabelRules:
    """What is done about codes that do not fit."""

    zero_pad: bool = False
    """Codes of digits get leading zeros up to the block size."""
    allow_short: bool = False
    """Codes may be shorter than the block."""
    drop_bad: bool = False
    """Rows with codes that do not fit are dropped, instead of stopping the run."""


@dataclass
class Labels:
    """Codes that fit, and the rows that have others."""

    codes: pd.DataFrame
    """Of shape (n, k): strings, None where there is none; each row's codes come first."""
    bad: dict[int, str]
    """Row -> why its labels do not fit."""
    notices: list[str]


def check_labels(
    table: Table, target_cols: Sequence[str], formatter: Formatter, rules: LabelRules, *, key: Key | None = None
) -> Labels:
    """Clean a table's codes and find the rows whose codes do not fit.

    Blanks around a code are taken off; reading of a row stops at its first missing code. Where the formatter has a
    mark for a missing first code, it is put there.

    Parameters
    ----------
    table : Table
    target_cols : sequence of str
        First code's column first.
    formatter : Formatter
    rules : LabelRules
    key : Key, optional
        The only codes there may be.

    Raises
    ------
    UserError
        Where there is no code at all, or one does not fit and `rules` do not provide for it; names rows by line.
    """
    system = formatter.system
    num_rows = len(table)
    codes: dict[str, np.ndarray] = {}
    bad: dict[int, str] = {}
    short_rows: list[tuple[int, str]] = []
    num_short = 0
    reading = np.ones(num_rows, dtype=bool)
    num_ignored = 0
    for i, column in enumerate(target_cols):
        coded = pc.dictionary_encode(table.columns[column])
        index = np.asarray(pc.fill_null(coded.indices, -1))
        distinct = [_clean(code, formatter, rules) for code in coded.dictionary.to_pylist()]
        present = index >= 0
        num_ignored += int((present & ~reading).sum())
        if i == 0 and not present.any():
            raise UserError(f"{table.path} has no code at all in the column {column!r}.")
        present &= reading

        is_short = np.array([_is_short(code, formatter) for code in distinct] + [False])
        short_rows += [(row, distinct[index[row]]) for row in np.flatnonzero(is_short[index] & present)[:_NUM_EXAMPLES]]
        num_short += int((is_short[index] & present).sum())

        problems = [_problem(code, formatter, key) for code in distinct]
        is_bad = np.array([problem is not None for problem in problems] + [False])
        for row in np.flatnonzero(is_bad[index] & present):
            bad.setdefault(int(row), f"{column}: {distinct[index[row]]!r} {problems[index[row]]}")

        values = np.array([*distinct, None], dtype=object)[np.where(present, index, -1)]
        if i == 0:
            if system.missing_block is not None:
                values[~present] = MISSING
                present = np.ones(num_rows, dtype=bool)
            else:
                for row in np.flatnonzero(~present):
                    bad.setdefault(int(row), f"{column}: no code")
        reading = present
        codes[column] = values

    if num_short and not rules.allow_short and not rules.zero_pad:
        raise UserError(_describe_short(table, short_rows, num_short, formatter))
    if bad and not rules.drop_bad:
        raise UserError(_describe_bad(table, bad))
    notices = []
    if num_ignored:
        notices.append(f"{num_ignored:,} codes stand behind an empty cell of their row and are left out.")
    return Labels(pd.DataFrame(codes, dtype=object), bad, notices)


def _clean(code: str, formatter: Formatter, rules: LabelRules) -> str:
    code = code.strip()
    if rules.zero_pad and code.isascii() and code.isdigit():
        return code.zfill(formatter.block_size)
    return code


def _is_short(code: str, formatter: Formatter) -> bool:
    return code not in _NEVER_SHORT and formatter.system.length(code) < formatter.block_size


def _problem(code: str, formatter: Formatter, key: Key | None) -> str | None:
    problem = formatter.system.problem(code)
    if problem is None and key is not None and code != MISSING and code not in key.index:
        return "is not in the key"
    return problem


def _describe_short(table: Table, rows: list[tuple[int, str]], count: int, formatter: Formatter) -> str:
    examples = _examples(table, [(row, repr(code)) for row, code in rows])
    ways = "add --zero-pad-codes if leading zeros were lost"
    if formatter.name == "general":
        ways += ", or --allow-codes-shorter-than-block-size if they are meant so"
    return (
        f"{table.path}: {count:,} codes are shorter than the block of {formatter.block_size}, such as {examples}. "
        f"{ways[0].upper()}{ways[1:]}."
    )


def _describe_bad(table: Table, bad: dict[int, str]) -> str:
    examples = _examples(table, sorted(bad.items()))
    rows = "row has a label that does" if len(bad) == 1 else "rows have labels that do"
    return (
        f"{table.path}: {len(bad):,} {rows} not fit: {examples}. Mend the labels, or leave such rows out with "
        "--drop-bad-labels."
    )


def _examples(table: Table, rows: Sequence[tuple[int, str]]) -> str:
    few = sorted(rows)[:_NUM_EXAMPLES]
    lines = table.lines(np.array([row for row, _ in few], dtype=np.int64))
    return "; ".join(f"line {line}, {text}" for line, (_, text) in zip(lines, few, strict=True))
