"""Checks a table's codes against a formatter, a column at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from histocoder.data.key import Key
from histocoder.data.table import Table, TableFile
from histocoder.errors import UserError, shown
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
    blank_means_no_occupation: bool = False
    """Rows without any code are kept, with the formatter's mark of a missing code, instead of being dropped."""
    is_training: bool = True
    """Whether messages may name flags that only training has."""


@dataclass
class Labels:
    """Codes that fit, and the rows that have others."""

    codes: pd.DataFrame
    """Of shape (n, k): strings, None where there is none; each row's codes come first."""
    bad: dict[int, str]
    """Row -> why its labels do not fit."""
    uncoded: np.ndarray
    """Rows without any code, which are to be dropped."""


class LabelChecker:
    """Cleans the codes of a file chunk by chunk, and gathers what does not fit.

    Blanks around a code are taken off; reading of a row stops at its first missing code. Where the formatter has a
    mark for a missing first code, it is put there; that mark alone is no code.

    Parameters
    ----------
    file : TableFile
    target_cols : sequence of str
        First code's column first.
    formatter : Formatter
    rules : LabelRules
    key : Key, optional
        The only codes there may be.
    """

    def __init__(
        self,
        file: TableFile,
        target_cols: Sequence[str],
        formatter: Formatter,
        rules: LabelRules,
        *,
        key: Key | None = None,
    ) -> None:
        self._file, self._target_cols, self._formatter = file, target_cols, formatter
        self._rules, self._key = rules, key
        self._has_codes = False
        self._num_ignored = self._num_uncoded = 0
        self._short, self._bad = _Found(), _Found()

    def check(self, table: Table) -> Labels:
        """Clean the codes of a chunk; a chunk's rows stand behind those of the chunk before."""
        bad: dict[int, str] = {}
        codes: dict[str, np.ndarray] = {}
        reading = np.ones(len(table), dtype=bool)
        is_read, is_filled = np.zeros((2, len(table)), dtype=bool)
        for i, column in enumerate(self._target_cols):
            codes[column], reading, has_code = self._check_column(table, i, reading, bad)
            is_read |= has_code & reading
            is_filled |= has_code
        if self._rules.blank_means_no_occupation and self._formatter.system.missing_block is not None:
            is_read[:] = is_filled[:] = True
        for row in np.flatnonzero(is_filled & ~is_read).tolist():
            bad.setdefault(row, f"{self._target_cols[0]}: no code, but one in a later column")
        self._bad.add(table.rows, bad, len(bad))
        self._num_uncoded += int((~is_filled).sum())
        return Labels(pd.DataFrame(codes, dtype=object), bad, np.flatnonzero(~is_filled))

    def _check_column(
        self, table: Table, i: int, reading: np.ndarray, bad: dict[int, str]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The codes of the i-th column, the rows that are read on, and those with a code here; adds to `bad`."""
        name = self._target_cols[i]
        index, distinct = self._distinct(table.columns[name])
        present = index >= 0
        has_code = np.array([code != MISSING for code in distinct] + [False])[index]
        self._num_ignored += int((present & ~reading).sum())
        self._has_codes |= i == 0 and bool(present.any())
        present &= reading

        is_short = np.array([_is_short(code, self._formatter) for code in distinct] + [False])
        short = np.flatnonzero(is_short[index] & present)
        self._short.add(
            table.rows, {row: f"{name}: {shown(distinct[index[row]])}" for row in short[:_NUM_EXAMPLES]}, len(short)
        )
        problems = [_problem(code, self._formatter, self._key) for code in distinct]
        is_bad = np.array([problem is not None for problem in problems] + [False])
        for row in np.flatnonzero(is_bad[index] & present).tolist():
            bad.setdefault(row, f"{name}: {shown(distinct[index[row]])} {problems[index[row]]}")

        values = np.array([*distinct, None], dtype=object)[np.where(present, index, -1)]
        if i == 0 and self._formatter.system.missing_block is not None:
            values[~present] = MISSING
            present = np.ones(len(table), dtype=bool)
        return values, present, has_code

    def _distinct(self, column: pa.Array) -> tuple[np.ndarray, list[str]]:
        """Each cell's place among the distinct codes, -1 where it is blank; and these, cleaned."""
        coded = pc.dictionary_encode(column)
        index = np.asarray(pc.fill_null(coded.indices, -1))
        return index, [_clean(code, self._formatter, self._rules) for code in coded.dictionary.to_pylist()]

    def finish(self) -> list[str]:
        """Say what was found in all chunks.

        Returns
        -------
        list of str
            What a user should know.

        Raises
        ------
        UserError
            Where there is no code at all, or one does not fit and the rules do not provide for it; names rows by line.
        """
        if not self._has_codes:
            raise UserError(f"{self._file.path} has no code at all in the column {self._target_cols[0]!r}.")
        if self._short.count and not self._rules.allow_short and not self._rules.zero_pad:
            raise UserError(self._describe_short())
        if self._bad.count and not self._rules.drop_bad:
            raise UserError(self._describe_bad())
        notices = []
        if self._num_ignored:
            notices.append(f"{self._num_ignored:,} codes stand behind an empty cell of their row and are left out.")
        if self._num_uncoded:
            rows = "row without any code is" if self._num_uncoded == 1 else "rows without any code are"
            notices.append(f"{self._file.path}: {self._num_uncoded:,} {rows} left out{self._how_to_keep_uncoded()}.")
        return notices

    def _how_to_keep_uncoded(self) -> str:
        if self._rules.is_training and self._formatter.system.missing_block is not None:
            return "; --blank-means-no-occupation trains on such rows as descriptions of no occupation"
        return ""

    def _describe_short(self) -> str:
        ways = "add --zero-pad-codes if leading zeros were lost"
        if self._formatter.name == "general":
            ways += ", or --allow-codes-shorter-than-block-size if they are meant so"
        return (
            f"{self._file.path}: {self._short.count:,} codes are shorter than the block of "
            f"{self._formatter.block_size}, such as {self._short.describe(self._file)}. {ways[0].upper()}{ways[1:]}."
        )

    def _describe_bad(self) -> str:
        rows = "row has a label that does" if self._bad.count == 1 else "rows have labels that do"
        return (
            f"{self._file.path}: {self._bad.count:,} {rows} not fit: {self._bad.describe(self._file)}. Mend the "
            "labels, or leave such rows out with --drop-bad-labels."
        )


@dataclass
class _Found:
    """How many there are of something, and the first few of them."""

    count: int = 0
    first: list[tuple[int, str]] = field(default_factory=list)
    """Positions in the file, and what is there."""

    def add(self, positions: np.ndarray, found: dict[int, str], count: int) -> None:
        """Take in what was found in a chunk: row -> text, of the first few of `count` at least."""
        self.count += count
        few = sorted(found.items())[:_NUM_EXAMPLES]
        self.first = sorted([*self.first, *((int(positions[row]), text) for row, text in few)])[:_NUM_EXAMPLES]

    def describe(self, file: TableFile) -> str:
        """The first few with their lines."""
        lines = file.lines(np.array([position for position, _ in self.first], dtype=np.int64))
        return "; ".join(f"line {line}, {text}" for line, (_, text) in zip(lines, self.first, strict=True))


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
