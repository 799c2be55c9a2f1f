"""Checks of a table's codes against a formatter, a column at a time."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from histocoder.config import DataConfig
from histocoder.data.cells import (
    MISSING_MARKS,
    bare,
    is_integer,
    looks_like_a_number,
    printed_hisco,
    spoilt,
    whole_number,
)
from histocoder.data.key import Key
from histocoder.data.table import Table, TableFile
from histocoder.errors import UserError, shown
from histocoder.formatters import MISSING, Formatter

_NEVER_SHORT = {"", "-1", "-2", "-3", MISSING}
_NUM_EXAMPLES = 3
_BETWEEN_CODES = re.compile(r"[\s;,/|&+]+")


@dataclass(frozen=True)
class LabelRules:
    """Rules for codes that do not fit."""

    zero_pad: bool = False  # whether codes of digits get leading zeros up to the block size
    allow_short: bool = False  # whether codes may be shorter than the block
    drop_bad: bool = False  # whether rows with codes that do not fit are dropped, instead of stopping the run
    blank_means_no_occupation: bool = False  # whether to keep rows without codes, as the formatter marks them
    is_training: bool = True  # whether messages may name flags that only training has


def rules_of(config: DataConfig) -> LabelRules:
    return LabelRules(
        config.zero_pad_codes,
        config.allow_codes_shorter_than_block_size,
        config.drop_bad_labels,
        config.blank_means_no_occupation,
    )


class LabelChecker:
    """Cleans the codes of a file chunk by chunk, and gathers those that do not fit.

    Blanks around a code and marks of spreadsheets are removed (see `cells`); marks such as NA are missing codes, unless
    they are codes of the key, or of a model (`known`). With a key, no other codes are allowed. Reading of a row stops
    at its first missing code; a code that a row has twice counts once; if the formatter has a mark for a missing first
    code, it is put there; as a further code, this mark is missing.
    """

    def __init__(
        self,
        file: TableFile,
        target_cols: Sequence[str],
        formatter: Formatter,
        rules: LabelRules,
        *,
        key: Key | None = None,
        known: Collection[str] = (),
    ) -> None:
        self._file, self._target_cols, self._formatter = file, target_cols, formatter
        self._rules, self._key, self._known = rules, key, {*known, *(key.codes if key else ())}
        self._has_codes = False
        self._num_ignored = self._num_repeated = self._num_uncoded = 0
        self._marks: Counter[str] = Counter()
        self._rewritten: Counter[tuple[str, str]] = Counter()
        self._decimals: Counter[str] = Counter()
        self._num_integers = 0
        self._holds_integers: dict[str, bool] = {}
        self._short, self._bad = _Found(), _Found()

    @property
    def num_bad(self) -> int:
        """Number of rows with codes that do not fit."""
        return self._bad.count

    def check(self, table: Table) -> tuple[pd.DataFrame, np.ndarray]:
        """Return the codes of a chunk's n rows, of shape (n, k), and the reasons why rows can't be used.

        Codes are strings, None where there is none; reasons are None if a row can be used. Chunks come in order.
        """
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
        reasons = np.empty(len(table), dtype=object)
        reasons[~is_filled] = "no code"
        reasons[list(bad)] = list(bad.values())
        return pd.DataFrame(self._without_repeats(codes), dtype=object), reasons

    def _without_repeats(self, codes: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return columns of codes with each row's codes once, the first ones first."""
        columns = list(codes.values())
        pairs = list(itertools.combinations(columns, 2))
        repeats = np.logical_or.reduce([(one == other) & pd.notna(one) for one, other in pairs])
        for row in np.flatnonzero(repeats).tolist():
            found = [code for column in columns if (code := column[row]) is not None]
            kept = list(dict.fromkeys(found))
            self._num_repeated += len(found) - len(kept)
            for column, code in zip(columns, [*kept, *[None] * len(columns)], strict=False):
                column[row] = code
        return codes

    def _check_column(
        self, table: Table, i: int, reading: np.ndarray, bad: dict[int, str]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the i-th column's codes, and masks of rows to read on and of rows with a code here; add to `bad`."""
        name = self._target_cols[i]
        index, distinct = self._distinct(name, table.columns[name])
        present = index >= 0
        has_code = np.array([code != MISSING for code in distinct] + [False])[index]
        self._num_ignored += int((present & ~reading).sum())
        self._has_codes |= i == 0 and bool(present.any())
        present &= reading

        system = self._formatter.system
        is_short = np.array(
            [code not in _NEVER_SHORT and system.length(code) < system.block_size for code in distinct] + [False]
        )
        short = np.flatnonzero(is_short[index] & present)
        self._short.add(
            table.rows, {row: f"{name}: {shown(distinct[index[row]])}" for row in short[:_NUM_EXAMPLES]}, len(short)
        )
        problems = [self._problem(code) for code in distinct]
        is_bad = np.array([problem is not None for problem in problems] + [False])
        for row in np.flatnonzero(is_bad[index] & present).tolist():
            bad.setdefault(row, f"{name}: {shown(distinct[index[row]])} {problems[index[row]]}")

        values = np.array([*distinct, None], dtype=object)[np.where(present, index, -1)]
        if i == 0 and system.missing_block is not None:
            values[~present] = MISSING
            present = np.ones(len(table), dtype=bool)
        return values, present, has_code

    def _distinct(self, name: str, column: pa.Array) -> tuple[np.ndarray, list[str]]:
        """Return each cell's index among the distinct codes, -1 if missing, and these codes, "" if missing."""
        coded = pc.dictionary_encode(column)
        index, cells = np.asarray(pc.fill_null(coded.indices, -1)), coded.dictionary.to_pylist()
        counts = np.bincount(index[index >= 0], minlength=len(cells))
        codes = []
        for cell, count in zip(cells, counts.tolist(), strict=True):
            code = self._read(name, cell)
            if not code:
                self._marks[cell.strip()] += count
            elif code != cell.strip():
                self._rewritten[cell.strip(), code] += count
            if looks_like_a_number(code) and code not in self._known:
                self._decimals[code] += count
            elif is_integer(code):
                self._num_integers += count
            if self._rules.zero_pad and code.isascii() and code.isdigit():
                code = code.zfill(self._formatter.block_size)
            codes.append(code)
        is_missing = np.array([not code for code in codes] + [True])
        return np.where(is_missing[index], -1, index), codes

    def _read(self, name: str, cell: str) -> str:
        """Return the code in a cell of a column, "" if it is missing."""
        code = bare(cell)
        if code in self._known:
            return code
        is_further = name != self._target_cols[0] and self._formatter.system.missing_block is not None
        if code in MISSING_MARKS or (code == MISSING and is_further):
            return ""
        if (digits := whole_number(code)) is not None and self._is_of_integers(name):
            return digits
        printed = printed_hisco(code)
        if printed is not None and self._formatter.system.problem(code) and self._formatter.block_size == len(printed):
            return printed
        return code

    def _is_of_integers(self, name: str) -> bool:
        """Return whether a column holds integers only, so that decimals do not belong to its codes."""
        if self._formatter.name != "general":
            return True
        if name not in self._holds_integers:
            cells = {
                bare(cell)
                for table in self._file.tables([name])
                for cell in pc.unique(table.columns[name]).drop_null().to_pylist()
            }
            self._holds_integers[name] = all(
                is_integer(cell) or printed_hisco(cell) is not None for cell in cells - MISSING_MARKS
            )
        return self._holds_integers[name]

    def _problem(self, code: str) -> str | None:
        """Return why a code does not fit; None if it does, or is missing."""
        if not code:
            return None
        system = self._formatter.system
        problem = system.problem(code)
        changed = spoilt(code) or ("a number" if problem is not None and looks_like_a_number(code) else None)
        if changed is not None and (problem is not None or (self._key is None and code not in self._known)):
            return f"looks like a code that a spreadsheet has turned into {changed}; save the column as text"
        if problem is None:
            is_strange = self._key is not None and code != MISSING and code not in self._key.index
            return "is not in the key" if is_strange else None
        parts = _BETWEEN_CODES.split(code)
        if len(parts) > 1 and all(system.problem(p) is None and system.length(p) == system.block_size for p in parts):
            return "holds several codes; put each in a column of its own"
        if self._rules.is_training and self._formatter.name == "general":
            is_long = system.length(code) > system.block_size
            flag = " (see --use-within-block-sep)" if "has ','" in problem else " (see --block-size)" * is_long
            return f"{problem}{flag}"
        return problem

    def finish(self, say: Callable[[str], None]) -> None:
        """Say what was found in all chunks.

        Raises UserError if there is no code at all, or one does not fit and no rule covers it; names rows by line.
        """
        path = self._file.path
        if not self._has_codes:
            raise UserError(f"{path} has no code at all in the column {self._target_cols[0]!r}.")
        if self._short.count and not self._rules.allow_short and not self._rules.zero_pad:
            raise UserError(self._describe_short())
        if self._bad.count and not self._rules.drop_bad:
            raise UserError(self._describe_bad())
        if self._marks:
            marks = ", ".join(f"{shown(mark)} ({count:,})" for mark, count in self._marks.most_common())
            say(f"{path}: {self._marks.total():,} cells of codes are treated as missing: {marks}.")
        if self._rewritten:
            cell, code = next(iter(self._rewritten))
            say(
                f"{path}: extra characters in {self._rewritten.total():,} cells of codes are ignored; for example, "
                f"{shown(cell)} is read as {shown(code)}."
            )
        if self._key is None and 0 < (number := self._decimals.total()) < self._num_integers:
            codes = "1 code has" if number == 1 else f"{number:,} codes have"
            say(
                f"{path}: {codes} decimals, such as {shown(next(iter(self._decimals)))}, but most are whole numbers. "
                "If a spreadsheet has changed codes, save the column as text."
            )
        if self._num_ignored:
            codes = "1 code is" if self._num_ignored == 1 else f"{self._num_ignored:,} codes are"
            say(f"{path}: {codes} ignored, because an earlier cell of the row is empty.")
        if self._num_repeated:
            codes = "1 code is" if self._num_repeated == 1 else f"{self._num_repeated:,} codes are"
            say(f"{path}: {codes} ignored, because an earlier cell of the row has the same code.")
        if self._num_uncoded:
            rows = "row without any code is" if self._num_uncoded == 1 else "rows without any code are"
            may_keep = self._rules.is_training and self._formatter.system.missing_block is not None
            how = "; --blank-means-no-occupation trains on such rows as descriptions of no occupation"
            say(f"{path}: {self._num_uncoded:,} {rows} left out{how * may_keep}.")

    def _describe_short(self) -> str:
        ways = "add --zero-pad-codes if leading zeros were lost"
        if self._formatter.name == "general":
            ways += ", or --allow-codes-shorter-than-block-size if they are correct"
        return (
            f"{self._file.path}: {self._short.count:,} codes have fewer than {self._formatter.block_size} characters, "
            f"such as {self._short.describe(self._file)}. {ways[0].upper()}{ways[1:]}."
        )

    def _describe_bad(self) -> str:
        rows = "row has a label that does" if self._bad.count == 1 else "rows have labels that do"
        return (
            f"{self._file.path}: {self._bad.count:,} {rows} not fit: {self._bad.describe(self._file)}. Correct "
            "the labels, or leave such rows out with --drop-bad-labels."
        )


@dataclass
class _Found:
    """Number of findings in a file, and the first few of them."""

    count: int = 0
    first: list[tuple[int, str]] = field(default_factory=list)  # positions in the file, and what is there

    def add(self, positions: np.ndarray, found: dict[int, str], count: int) -> None:
        """Add `count` findings of a chunk; `found` maps rows of the first few of them, at least, to texts."""
        self.count += count
        few = sorted(found.items())[:_NUM_EXAMPLES]
        self.first = sorted([*self.first, *((int(positions[row]), text) for row, text in few)])[:_NUM_EXAMPLES]

    def describe(self, file: TableFile) -> str:
        """Return the first few with their lines."""
        lines = file.lines(np.array([position for position, _ in self.first], dtype=np.int64))
        return "; ".join(f"line {line}, {text}" for line, (_, text) in zip(lines, self.first, strict=True))
