"""Codes in tables, counted to fit a formatter and checked against one, a column at a time."""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from histocoder.config import MAX_TARGET_LEN, check_target_len
from histocoder.data.cells import WHOLE_NUMBER, have_decimals, read_code, spoilt
from histocoder.data.key import Key
from histocoder.errors import UserError, counted, shown
from histocoder.formatters import MISSING, CodeSystem, Formatter, build_formatter
from histocoder.tables.table import Table, TableFile

_SEVERAL_CODES = re.compile(r"(-[0-9]|[0-9]{3,})([\s;,/|&+]+(-[0-9]|[0-9]{3,}))+")
_NUM_EXAMPLES = 3
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


def rules_of(config: Any) -> LabelRules:
    """Return the rules in settings, of which not all have each."""
    return LabelRules(
        zero_pad=config.zero_pad_codes,
        allow_short=config.allow_codes_shorter_than_block_size,
        drop_bad=getattr(config, "drop_bad_labels", False),
        blank_means_no_occupation=getattr(config, "blank_means_no_occupation", False),
    )


def count_codes(tables: Iterable[Table], columns: Sequence[str]) -> Counter[str]:
    """Count the codes in some columns of tables, for `fit_codes`."""
    cells: Counter[str] = Counter()
    for table in tables:
        for name in columns:
            found = pc.value_counts(table.columns[name].drop_null())
            cells.update(dict(zip(*(part.to_pylist() for part in found.flatten()), strict=True)))
    decimals = have_decimals(cells)
    codes: Counter[str] = Counter()
    for cell, count in cells.items():
        code = read_code(cell, has_decimals=decimals)
        if code not in ("", MISSING) and not spoilt(code) and not _SEVERAL_CODES.fullmatch(code):
            codes[code] += count
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
    numbered. Short codes are right, except among numbers that mostly have three digits or more. `counts` is the number
    of cells of each code: if most have digits, others are mistakes, as are those among numbers, unless all codes
    `are_right`, as in a key.
    """
    build = partial(build_formatter, "general", num_blocks=num_blocks, use_within_block_sep=use_within_block_sep)
    most = MAX_TARGET_LEN if use_within_block_sep else _LONGEST_CODE
    system = build(block_size=most).system
    fits = {code: system.problem(code) is None and any(map(str.isdigit, code)) for code in counts}
    codes = [code for code in counts if fits[code] or use_within_block_sep]
    numbers = [code for code in codes if WHOLE_NUMBER.fullmatch(code)]
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
    """Reads the codes of a file chunk by chunk, and gathers those that do not fit.

    Codes are read by `read_code`; `known` are those of a model. With a key, no other codes are allowed. Reading of a
    row stops at its first missing code; a code that a row has twice counts once. The formatter's mark for a missing
    first code is missing, too, unless rows without codes are kept: they get it.
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
        allow_short = rules.allow_short or rules.zero_pad or any(is_short(code, formatter.system) for code in known)
        self._allow_short = allow_short
        self._marks_missing = rules.blank_means_no_occupation and formatter.system.missing_block is not None
        self._num_ignored = 0
        self._has_decimals: dict[str, bool] = {}  # by column; its first chunk tells
        self._too_short = f"has fewer than {formatter.block_size} characters"
        self._has_short, self._num_bad = False, 0
        self._first_bad: list[tuple[int, str]] = []  # line in the file, and what is there

    def check(self, table: Table) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Return each column's codes of a chunk's n rows, and the reasons why rows can't be used.

        Codes are strings, None where there is none; reasons are None if a row can be used. Chunks come in order.
        """
        bad: dict[int, str] = {}
        codes: dict[str, np.ndarray] = {}
        reading = np.ones(len(table), dtype=bool)
        is_read, is_filled = np.zeros((2, len(table)), dtype=bool)
        for name in self._target_cols:
            index, distinct = self._read(name, table.columns[name])
            present = index >= 0
            has_code = np.array([code != MISSING for code in distinct] + [False])[index]
            self._num_ignored += int((present & ~reading).sum())
            index[~reading] = -1
            problems = [self._problem(code) for code in distinct]
            is_bad = np.array([problem is not None for problem in problems] + [False])
            for row in np.flatnonzero(is_bad[index]).tolist():
                bad.setdefault(row, f"{name}: {shown(distinct[index[row]])} {problems[index[row]]}")
                self._has_short |= problems[index[row]] == self._too_short
            codes[name] = np.array([*distinct, None], dtype=object)[index]
            reading &= present
            is_read |= has_code & reading
            is_filled |= has_code
        if self._marks_missing:
            codes[self._target_cols[0]][~is_filled] = MISSING
            is_read |= ~is_filled
            is_filled[:] = True
        for row in np.flatnonzero(is_filled & ~is_read).tolist():
            bad.setdefault(row, f"{self._target_cols[0]}: no code, but one in a later column")
        self._num_bad += len(bad)
        lines = table.lines(np.array(sorted(bad)[:_NUM_EXAMPLES], dtype=np.int64)).tolist()
        first = [*self._first_bad, *zip(lines, (bad[row] for row in sorted(bad)), strict=False)]
        self._first_bad = first[:_NUM_EXAMPLES]
        reasons = np.empty(len(table), dtype=object)
        reasons[~is_filled] = "no code"
        reasons[list(bad)] = list(bad.values())
        columns = list(codes.values())
        pairs = list(itertools.combinations(columns, 2))
        repeats = np.logical_or.reduce([(one == other) & pd.notna(one) for one, other in pairs])
        for row in np.flatnonzero(repeats).tolist():
            found = [code for column in columns if (code := column[row]) is not None]
            kept = list(dict.fromkeys(found))
            self._num_ignored += len(found) - len(kept)
            for column, code in zip(columns, [*kept, *[None] * len(columns)], strict=False):
                column[row] = code
        return codes, reasons

    def _read(self, name: str, column: pa.Array) -> tuple[np.ndarray, list[str]]:
        """Return each cell's index among the distinct codes, -1 if missing, and these codes, "" if missing."""
        coded = pc.dictionary_encode(column)
        index, cells = np.array(pc.fill_null(coded.indices, -1)), coded.dictionary.to_pylist()
        system, is_first = self._formatter.system, name == self._target_cols[0]
        if name not in self._has_decimals:
            self._has_decimals[name] = self._formatter.name == "general" and have_decimals(cells)
        codes = []
        for cell in cells:
            code = read_code(cell, self._known, has_decimals=self._has_decimals[name], system=system)
            if code == MISSING and system.missing_block is not None and not (is_first and self._marks_missing):
                code = ""
            if self._rules.zero_pad and code.isascii() and code.isdigit() and is_short(code, system):
                code = code.zfill(system.block_size)
            codes.append(code)
        index[np.array([not code for code in codes] + [True])[index]] = -1
        return index, codes

    def _problem(self, code: str) -> str | None:
        """Return why a code does not fit; None if it does, or is missing."""
        system = self._formatter.system
        if not code:
            return None
        if not self._allow_short and is_short(code, system):
            return self._too_short
        problem = system.problem(code)
        is_decimal = problem is not None and re.fullmatch(r"-?[0-9]+\.[0-9]+(e[+-]?[0-9]+)?", code, re.IGNORECASE)
        changed = "a number" if is_decimal else spoilt(code)
        if changed is not None and (problem is not None or (self._key is None and code not in self._known)):
            return f"looks like a code that a spreadsheet has turned into {changed}; save the column as text"
        may_be_several = problem is not None or (system.labels is not None and code not in self._known)
        if may_be_several and _SEVERAL_CODES.fullmatch(code):
            return "holds several codes; put each in a column of its own"
        if problem is None and self._key is not None and code != MISSING and code not in self._key.index:
            return "is not in the key"
        return problem

    def finish(self, say: Callable[[str], None]) -> None:
        """Say what was found in all chunks.

        Raises UserError if a code does not fit and no rule covers it; names rows by line.
        """
        path, system = self.file.path, self._formatter.system
        if self._num_bad and (self._has_short or not self._rules.drop_bad):
            rows = counted(self._num_bad, "row has a label that does", "rows have labels that do")
            few = "; ".join(f"line {line}, {text}" for line, text in self._first_bad)
            zeros = " If leading zeros were lost, add --zero-pad-codes"
            zeros += "; if short codes are right, --allow-codes-shorter-than-block-size" * (system.name == "general")
            ways = "Correct the labels, or leave such rows out with --drop-bad-labels."
            message = f"{path}: {rows} not fit: {few}.{f'{zeros}.' if self._has_short else f' {ways}'}"
            raise UserError(message, **{"zero_pad_codes" if self._has_short else "drop_bad_labels": True})
        if self._num_ignored:
            codes = counted(self._num_ignored, "code is", "codes are")
            say(f"{path}: {codes} ignored, because an earlier cell of the row is empty or has the same code.")
