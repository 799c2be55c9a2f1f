"""Checks of a table's codes against a formatter, a column at a time."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from histocoder.config import MAX_TARGET_LEN, DataConfig, check_target_len
from histocoder.data.cells import (
    MISSING_MARKS,
    bare,
    is_integer,
    looks_like_a_number,
    printed_hisco,
    spoilt,
    whole_number,
)
from histocoder.data.checked import checked_tables
from histocoder.data.key import Key
from histocoder.data.table import Table, TableFile
from histocoder.errors import UserError, counted, shown
from histocoder.formatters import MISSING, CodeSystem, Formatter, GeneralCodes, Labels, build_formatter

_NUM_EXAMPLES = 3
_SEVERAL_CODES = re.compile(r"(-[0-9]|[0-9]{3,})([\s;,/|&+]+(-[0-9]|[0-9]{3,}))+")
_LONGEST_CODE = 10  # characters; longer ones are numbered
_FEWEST_DIGITS = 3  # of codes whose zeros may be lost: shorter ones, such as HISCLASS's, have none
_MOST, _NEARLY_ALL = 0.5, 0.9  # shares of cells: with codes, so that words are mistakes; that a block must hold


@dataclass(frozen=True, kw_only=True)
class LabelRules:
    """Rules for codes that do not fit."""

    zero_pad: bool = False  # whether codes of digits get leading zeros up to the block size
    allow_short: bool = False  # whether codes may be shorter than the block
    drop_bad: bool = False  # whether rows with codes that do not fit are dropped, instead of stopping the run
    blank_means_no_occupation: bool = False  # whether to keep rows without codes, as the formatter marks them
    is_training: bool = True  # whether messages may name flags that only training has


def rules_of(config: DataConfig) -> LabelRules:
    return LabelRules(
        zero_pad=config.zero_pad_codes,
        allow_short=config.allow_codes_shorter_than_block_size,
        drop_bad=config.drop_bad_labels,
        blank_means_no_occupation=config.blank_means_no_occupation,
    )


def count_codes(file: TableFile, columns: Sequence[str]) -> Counter[str]:
    """Count the cells of columns of codes, for `fit_codes`."""
    cells: Counter[str] = Counter()
    for table in checked_tables(file, columns, lambda _: None):
        for name in columns:
            found = pc.value_counts(table.columns[name].drop_null())
            for cell, count in zip(*(part.to_pylist() for part in found.flatten()), strict=True):
                cells[bare(cell)] += count
    is_whole = all(is_integer(cell) or printed_hisco(cell) is not None for cell in cells.keys() - MISSING_MARKS)
    codes: Counter[str] = Counter()
    for cell, count in cells.items():
        if cell not in {"", MISSING, *MISSING_MARKS} and not spoilt(cell) and not _SEVERAL_CODES.fullmatch(cell):
            codes[printed_hisco(cell) or (whole_number(cell) if is_whole else None) or cell] += count
    return codes


def fit_codes(
    counts: Mapping[str, int],
    rules: LabelRules,
    *,
    num_blocks: int,
    use_within_block_sep: bool = False,
    are_right: bool = False,
) -> tuple[Formatter, LabelRules]:
    """Return the formatter that codes need, by `--block-size auto`, and the rules that they are checked by.

    Codes with digits are written by their characters, in blocks that hold the longest; others are labels, which are
    numbered. Short codes are right, except among numbers that mostly have three digits or more.

    Parameters
    ----------
    counts : mapping
        Number of cells of each code. If most have digits, others are mistakes, as are those among numbers.
    rules : LabelRules
    num_blocks : int
    use_within_block_sep : bool
    are_right : bool
        Whether there are no mistakes among the codes, as in a key.
    """
    build = partial(build_formatter, "general", num_blocks=num_blocks, use_within_block_sep=use_within_block_sep)
    most = MAX_TARGET_LEN if use_within_block_sep else _LONGEST_CODE
    system = GeneralCodes(most, use_within_block_sep=use_within_block_sep)
    fits = {code: system.problem(code) is None and any(map(str.isdigit, code)) for code in counts}
    codes = [code for code in counts if fits[code] or use_within_block_sep]
    numbers = [code for code in codes if is_integer(code)]
    num_cells, num_codes, num_numbers = (sum(counts[code] for code in some) for some in (counts, codes, numbers))
    if num_codes < num_cells * (1 if are_right else _MOST):
        return build(labels=sorted(counts)), rules
    is_numeric = num_numbers >= _NEARLY_ALL * num_codes and not use_within_block_sep
    found = numbers if is_numeric and not are_right else codes
    lengths = np.array([system.length(code) for code in found] or [5])
    cells = np.array([0 if code.startswith("-") else counts[code] for code in found] or [1])
    size = int(lengths.max())
    usual = next(n for n in range(size + 1) if cells[lengths <= n].sum() >= _NEARLY_ALL * cells.sum())
    may_lack_zeros = is_numeric and usual >= _FEWEST_DIGITS
    if may_lack_zeros and not (are_right or rules.allow_short):
        size = usual
    check_target_len(num_blocks, size)
    return build(block_size=size), replace(rules, allow_short=rules.allow_short or not may_lack_zeros)


def is_short(code: str, system: CodeSystem) -> bool:
    """Return whether a code does not fill its block, as if it had lost zeros; -1 and the like never do."""
    return not code.startswith("-") and code not in ("", MISSING) and system.length(code) < system.block_size


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
        self.file, self._target_cols, self._formatter = file, target_cols, formatter
        self._rules, self._key, self._known = rules, key, {*known, *(key.codes if key else ())}
        self._allow_short = rules.allow_short or any(is_short(code, formatter.system) for code in known)
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

    def check(self, table: Table) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Return each column's codes of a chunk's n rows, and the reasons why rows can't be used.

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
        self._bad.add(table, bad, len(bad))
        self._num_uncoded += int((~is_filled).sum())
        reasons = np.empty(len(table), dtype=object)
        reasons[~is_filled] = "no code"
        reasons[list(bad)] = list(bad.values())
        return self._without_repeats(codes), reasons

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
        short = np.array([*(is_short(code, system) for code in distinct), False])
        short = np.flatnonzero(short[index] & present)
        few = {row: f"{name}: {shown(distinct[index[row]])}" for row in short[:_NUM_EXAMPLES].tolist()}
        self._short.add(table, few, len(short))
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
            if self._rules.zero_pad and code.isascii() and code.isdigit() and is_short(code, self._formatter.system):
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
                for table in checked_tables(self.file, [name], lambda _: None)
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
        may_be_several = problem is not None or (isinstance(system, Labels) and code not in self._known)
        if may_be_several and _SEVERAL_CODES.fullmatch(code):
            return "holds several codes; put each in a column of its own"
        if problem is None:
            is_strange = self._key is not None and code != MISSING and code not in self._key.index
            return "is not in the key" if is_strange else None
        if self._rules.is_training and self._formatter.name == "general":
            flag = "--use-within-block-sep" if "has ','" in problem else "--block-size"
            return f"{problem} (see {flag})"
        return problem

    def finish(self, say: Callable[[str], None]) -> None:
        """Say what was found in all chunks.

        Raises UserError if there is no code at all, or one does not fit and no rule covers it; names rows by line.
        """
        path = self.file.path
        if not self._has_codes:
            raise UserError(f"{path} has no code at all in the column {self._target_cols[0]!r}.")
        if self._short.count and not self._allow_short and not self._rules.zero_pad:
            raise UserError(self._describe_short(), zero_pad_codes=True)
        if self._bad.count and not self._rules.drop_bad:
            raise UserError(self._describe_bad(), drop_bad_labels=True)
        if self._marks:
            marks = ", ".join(f"{shown(mark)} ({count:,})" for mark, count in self._marks.most_common())
            cells = counted(self._marks.total(), "cell of codes is", "cells of codes are")
            say(f"{path}: {cells} treated as missing: {marks}.")
        if self._rewritten:
            cell, code = next(iter(self._rewritten))
            cells = counted(self._rewritten.total(), "cell", "cells")
            say(
                f"{path}: extra characters in {cells} of codes are ignored; for example, {shown(cell)} is read as "
                f"{shown(code)}."
            )
        if self._key is None and 0 < (number := self._decimals.total()) < self._num_integers:
            codes = counted(number, "code has", "codes have")
            say(
                f"{path}: {codes} decimals, such as {shown(next(iter(self._decimals)))}, but most are whole numbers. "
                "If a spreadsheet has changed codes, save the column as text."
            )
        if self._num_ignored:
            codes = counted(self._num_ignored, "code is", "codes are")
            say(f"{path}: {codes} ignored, because an earlier cell of the row is empty.")
        if self._num_repeated:
            codes = counted(self._num_repeated, "code is", "codes are")
            say(f"{path}: {codes} ignored, because an earlier cell of the row has the same code.")
        if self._num_uncoded:
            rows = counted(self._num_uncoded, "row without any code is", "rows without any code are")
            may_keep = self._rules.is_training and self._formatter.system.missing_block is not None
            how = "; --blank-means-no-occupation trains on such rows as descriptions of no occupation"
            say(f"{path}: {rows} left out{how * may_keep}.")

    def _describe_short(self) -> str:
        codes = counted(self._short.count, "code has", "codes have")
        ways = "If leading zeros were lost, add --zero-pad-codes"
        if self._formatter.name == "general":
            ways += "; if they are correct, add --allow-codes-shorter-than-block-size"
        return (
            f"{self.file.path}: {codes} fewer than {self._formatter.block_size} characters, such as "
            f"{self._short}. {ways}."
        )

    def _describe_bad(self) -> str:
        rows = counted(self._bad.count, "row has a label that does", "rows have labels that do")
        return (
            f"{self.file.path}: {rows} not fit: {self._bad}. Correct "
            "the labels, or leave such rows out with --drop-bad-labels."
        )


@dataclass
class _Found:
    """Number of findings in a file, and the first few of them."""

    count: int = 0
    first: list[tuple[int, str]] = field(default_factory=list)  # line in the file, and what is there

    def add(self, table: Table, found: Mapping[int, str], count: int) -> None:
        """Add `count` findings of a chunk; `found` maps rows of the first few of them, at least, to texts."""
        self.count += count
        rows = sorted(found)[:_NUM_EXAMPLES]
        lines = table.lines(np.array(rows, dtype=np.int64)).tolist()
        self.first = sorted([*self.first, *zip(lines, map(found.__getitem__, rows), strict=True)])[:_NUM_EXAMPLES]

    def __str__(self) -> str:
        return "; ".join(f"line {line}, {text}" for line, text in self.first)
