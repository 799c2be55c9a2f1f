"""Codes in tables, counted to fit a formatter and checked against one, a column at a time."""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.compute as pc

from histocoder.config import MAX_TARGET_LEN, check_target_len
from histocoder.data import cells as kinds
from histocoder.data.cells import (
    FEWEST_DIGITS,
    WHOLE_NUMBER,
    Cell,
    CodeColumn,
    bare,
    has_own_decimals,
    has_thousands,
    is_short,
    loose_hisco,
    means_blank_among_numbers,
    number_in,
    separators_in,
    spoilt,
)
from histocoder.data.key import Key
from histocoder.errors import UserError, counted, shown
from histocoder.formatters import MISSING, CodeSystem, Formatter, build_formatter
from histocoder.formatters.classifications import hisco_codes, is_of_hisco_or_occ1950
from histocoder.tables.table import Table, TableFile
from histocoder.text.characters import is_missing

_NUM_EXAMPLES = 3
HISCO_DIGITS = 5
_LONGEST_CODE = 10  # characters; longer ones are numbered
_MOST, _NEARLY_ALL = (
    0.5,
    0.9,
)  # shares of cells: with codes, so that words are mistakes; that a block must hold
_LEAST_HISCO = 1 / 2  # share of numbers such as 641-00 that are HISCO's, so that all are


@dataclass(frozen=True, kw_only=True)
class LabelRules:
    """Rules for codes that do not fit."""

    zero_pad: bool = False  # whether codes of digits get leading zeros up to the block size
    allow_short: bool = False  # whether codes may be shorter than the block
    drop_bad: bool = (
        False  # whether rows with codes that do not fit are dropped, instead of stopping the run
    )
    blank_means_no_occupation: bool = (
        False  # whether to keep rows without codes, as the formatter marks them
    )
    code_sep: str | None = (
        None  # separator of several codes in one cell; None: the one that fits all such cells
    )
    needs_code: bool = (
        False  # whether a row that a person has checked needs a code, since no mark stands for none
    )


def rules_of(config: Any) -> LabelRules:
    """Return the rules in settings, of which not all have each."""
    return LabelRules(
        zero_pad=config.zero_pad_codes,
        allow_short=config.allow_codes_shorter_than_block_size,
        drop_bad=getattr(config, "drop_bad_labels", False),
        blank_means_no_occupation=getattr(config, "blank_means_no_occupation", False),
        code_sep=getattr(config, "code_sep", None),
    )


def count_cells(tables: Iterable[Table], columns: Sequence[str]) -> Counter[str]:
    """Count the cells of each text in some columns of tables, but for blank ones, for
    `column_of`.
    """
    counts: Counter[str] = Counter()
    for table in tables:
        for name in columns:
            values = pc.value_counts(table.columns[name].drop_null())
            counts.update(dict(zip(*(part.to_pylist() for part in values.flatten()), strict=True)))
    return counts


def count_codes(counts: Mapping[str, int], column: CodeColumn) -> Counter[str]:
    """Count the codes in the cells of a column, for `fit_codes`."""
    codes: Counter[str] = Counter()
    for cell, count in counts.items():
        for code in column.read(cell).codes:
            codes[code] += count
    return codes


def column_of(
    counts: Mapping[str, int],
    *,
    known: Collection[str] = (),
    system: CodeSystem | None = None,
    code_sep: str | None = None,
    has_commas: bool = False,
) -> CodeColumn:
    """Decide how the cells of columns of codes are written, from the number of cells of each text.

    With `known` codes, of a key or a model, these decide whether codes are numbers; so does the
    `system`, if it is HISCO or OCC1950. `has_commas` says that commas separate the tokens within a
    code.
    """
    known = frozenset(known) - {""}
    texts = _texts(counts, known)
    known_once = Counter(dict.fromkeys(known, 1))

    # several codes in one cell are counted each
    separator = code_sep or _separator(
        texts, known, _usual_length(known_once or texts), has_commas=has_commas
    )
    parts: Counter[str] = Counter()
    for text, count in texts.items():
        for part in text.split(separator) if separator else (text,):
            parts[part.strip()] += count

    # whether codes have digits, or are words
    examples = known_once or parts
    codes = [text for text in examples if not means_blank_among_numbers(text) and not spoilt(text)]
    with_digits = [text for text in codes if any(map(str.isdigit, text))]
    numbers = {text: number for text in with_digits if (number := number_in(text)) is not None}
    num_codes = sum(examples[text] for text in codes)
    num_with_digits = sum(examples[text] for text in with_digits)
    num_numbers = sum(examples[text] for text in numbers)
    has_form = system is not None and system.name != "general"
    has_digits = has_form or (num_with_digits > 0 and num_with_digits >= _MOST * num_codes)
    is_numeric = has_form or (has_digits and num_numbers >= _NEARLY_ALL * num_with_digits)
    num_digits = system.block_size if has_form and system is not None else _usual_length(examples)

    # marks in numbers: of HISCO as printed, of thousands, of decimals
    in_cells = {number for text in parts if (number := number_in(text)) is not None}
    loose = {number: digits for number in in_cells if (digits := loose_hisco(number)) is not None}
    has_marks = not all(map(WHOLE_NUMBER.fullmatch, loose))
    is_hisco = has_marks and _are_hisco(
        loose.values(), known, has_form=has_form and num_digits == HISCO_DIGITS
    )
    has_decimal_codes = any(has_own_decimals(numbers.get(text, text)) for text in with_digits)
    has_loose_decimals = has_marks and not is_hisco and not known

    # a lone 0 is a code where codes of zeros, or others of one digit, are
    wholes = {
        match[1] for number in {*in_cells, *known} if (match := WHOLE_NUMBER.fullmatch(number))
    }
    has_short_codes = any(len(whole) == 1 and whole != "0" for whole in wholes)
    column = CodeColumn(
        known=known,
        has_digits=has_digits,
        is_numeric=is_numeric,
        num_digits=num_digits,
        has_decimals=has_decimal_codes or has_loose_decimals,
        has_commas=has_commas,
        has_thousands=any(map(has_thousands, in_cells)),
        is_hisco=is_hisco,
        zero_is_code="0" * num_digits in wholes or has_short_codes,
        separator=separator,
    )
    return replace(column, spellings=_spellings(column, counts))


def _texts(counts: Mapping[str, int], known: Collection[str]) -> Counter[str]:
    """Count the texts of cells that are neither blank nor known codes."""
    texts: Counter[str] = Counter()
    for cell, count in counts.items():
        text = bare(cell)
        if text and text not in known and not is_missing(text):
            texts[text] += count
    return texts


def _are_hisco(codes: Collection[str], known: Collection[str], *, has_form: bool) -> bool:
    """Return whether numbers with marks are HISCO's; `codes` are their digits.

    The form of the data, the codes of a model or, where neither is known, HISCO itself tells.
    """
    if has_form or any(code in known for code in codes):
        return True
    return not known and sum(code in hisco_codes() for code in codes) >= _LEAST_HISCO * len(codes)


def column_of_few(
    cells: Sequence[str], *, known: Collection[str], system: CodeSystem
) -> CodeColumn:
    """Return how a few cells are written that a person gives beside the `known` codes of a
    model.
    """
    column = column_of(
        Counter(cells), known=known, system=system, has_commas=bool(system.separator)
    )
    return replace(column, system=system, allow_short=any(is_short(code, system) for code in known))


def _usual_length(counts: Mapping[str, int]) -> int:
    """Return the number of digits that nine tenths of all numbers have at most; 0 if there are
    none.
    """
    lengths: Counter[int] = Counter()
    for text, count in counts.items():
        number = number_in(text)
        if number is not None and not number.startswith("-"):
            whole = WHOLE_NUMBER.fullmatch(number)
            lengths[sum(map(str.isdigit, whole[1] if whole else number))] += count
    total = sum(lengths.values())
    return next(
        (
            n
            for n in sorted(lengths)
            if sum(lengths[m] for m in lengths if m <= n) >= _NEARLY_ALL * total
        ),
        0,
    )


def _separator(
    texts: Collection[str], known: Collection[str], num_digits: int, *, has_commas: bool
) -> str:
    """Return the one mark that separates the codes in each cell of several; "" if there is none."""
    marks = [separators_in(text, known, num_digits=num_digits) for text in texts]
    common = set.intersection(*filter(None, marks)) if any(marks) else set()
    is_one = all(len(some) == 1 for some in marks if some)
    return next(iter(common - ({","} if has_commas else set())), "") if is_one else ""


def _spellings(column: CodeColumn, counts: Mapping[str, int]) -> dict[str, str]:
    """Return the spelling to use of each code that is written in several ways: the known one, or
    the most frequent.
    """
    codes = Counter(dict.fromkeys(column.known, 1)) if column.known else count_codes(counts, column)
    by_key: dict[str, list[str]] = {}
    for code, _ in codes.most_common():
        by_key.setdefault(column.spelling_key(code), []).append(code)
    if column.known:  # those of one key that are all known are different codes
        return {key: codes[0] for key, codes in by_key.items() if len(codes) == 1}
    return {key: codes[0] for key, codes in by_key.items() if len(codes) > 1}


def fit_codes(
    counts: Mapping[str, int],
    rules: LabelRules,
    *,
    num_blocks: int,
    use_within_block_sep: bool = False,
    are_right: bool = False,
) -> tuple[Formatter, LabelRules]:
    """Return the formatter that codes need, by `--block-size auto`, and the rules that they are
    checked by.

    Codes with digits are written by their characters, in blocks that hold the longest; others are
    labels, which are numbered. Short codes are right, except among numbers that mostly have three
    digits or more. `counts` is the number of cells of each code: if most have digits, others are
    mistakes, as are those among numbers, unless all codes `are_right`, as in a key.
    """
    build = partial(
        build_formatter, "general", num_blocks=num_blocks, use_within_block_sep=use_within_block_sep
    )
    most = MAX_TARGET_LEN if use_within_block_sep else _LONGEST_CODE
    system = build(block_size=most).system
    fits = {code: system.problem(code) is None and any(map(str.isdigit, code)) for code in counts}
    codes = [code for code in counts if fits[code] or use_within_block_sep]
    numbers = [code for code in codes if WHOLE_NUMBER.fullmatch(code)]
    num_cells, num_codes, num_numbers = (
        sum(counts[code] for code in some) for some in (counts, codes, numbers)
    )
    if num_codes < num_cells * (1 if are_right else _MOST):
        return build(labels=sorted(counts)), rules
    is_numeric = num_numbers >= _NEARLY_ALL * num_codes and not use_within_block_sep
    found = numbers if is_numeric and not are_right else codes
    lengths = np.array([system.length(code) for code in found] or [5])
    cells = np.array([0 if code.startswith("-") else counts[code] for code in found] or [1])
    size = int(lengths.max())
    usual = next(
        n for n in range(size + 1) if cells[lengths <= n].sum() >= _NEARLY_ALL * cells.sum()
    )
    may_lack_zeros = is_numeric and usual >= FEWEST_DIGITS
    if may_lack_zeros and not (are_right or rules.allow_short):
        size = usual
    check_target_len(num_blocks, size)
    return build(block_size=size), replace(
        rules, allow_short=rules.allow_short or not may_lack_zeros
    )


@dataclass
class _Changed:
    """Cells that were not taken as they stand, of one kind."""

    number: int = 0
    texts: Counter[str] = field(default_factory=Counter)
    first: str = ""  # where the first one is, and what it is


class LabelChecker:
    """Reads the codes of a file chunk by chunk, and gathers those that do not fit.

    Cells are read by a `CodeColumn`: the given one, or that of the first chunk. `known` are the
    codes of a model. With a key, no other codes are allowed. Reading of a row stops at its first
    missing code; a code that a row has twice counts once, and the codes of a cell that has several
    are codes of the row. `MISSING`, the mark for a missing first code, is missing, too, unless rows
    without codes are kept: they get it. So do rows without codes of a file whose rows a person has
    checked: that is a decision.
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
        column: CodeColumn | None = None,
        is_checked: bool = False,
    ) -> None:
        self.file, self._target_cols, self._formatter = file, target_cols, formatter
        self._rules, self._key = rules, key
        self._known = {*known, *(key.codes if key else ())} - {""}
        self._allow_short = rules.allow_short or any(
            is_short(code, formatter.system) for code in known
        )
        self._is_checked, self._needs_code = is_checked, is_checked and rules.needs_code
        self._marks_missing = (
            is_checked or rules.blank_means_no_occupation
        ) and not self._needs_code
        self._num_without = self._first_without = (
            0  # number of checked rows without codes, and the first one's line
        )
        self._given = column
        self._column: CodeColumn | None = None
        self._num_ignored = self._num_rows = self._num_bad = 0
        self._most_codes = 0  # of a row that has more than there are columns
        self._codes: set[str] = set()  # those that fit
        self._short: set[str] = set()
        self._has_short = False
        self._changed: dict[str, _Changed] = {}
        self._first_bad: list[tuple[int, str]] = []  # line in the file, and what is there

    def check(self, table: Table) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Return each column's codes of a chunk's n rows, and the reasons why rows can't be used.

        Codes are strings, None where there is none; reasons are None if a row can be used. Chunks
        come in order.
        """
        if self._column is None:
            self._column = self._column_for(table)
        bad: dict[int, str] = {}
        codes: dict[str, np.ndarray] = {}
        read = {name: self._read(name, table) for name in self._target_cols}
        for name, (index, texts, cells) in read.items():
            # the text of a damaged cell stands for its code, so that the row has one
            firsts = [
                cell.codes[0] if cell.codes else text if cell.problem else None
                for text, cell in zip(texts, cells, strict=True)
            ]
            codes[name] = np.array([*firsts, None], dtype=object)[index]
        self._split(codes, read, bad)

        # a row is read up to its first missing code
        reading = np.ones(len(table), dtype=bool)
        is_read, is_filled = np.zeros((2, len(table)), dtype=bool)
        for name, (index, texts, cells) in read.items():
            present = pd.notna(codes[name])
            has_code = present & (codes[name] != MISSING)
            self._num_ignored += int((present & ~reading).sum())
            codes[name][~reading] = None
            is_damaged = np.array([bool(cell.problem) for cell in cells] + [False])
            for row in np.flatnonzero(is_damaged[index] & reading).tolist():
                text, cell = texts[index[row]], cells[index[row]]
                bad.setdefault(row, f"{name}: {shown(text)} {cell.problem}")
                self._has_short |= cell.is_short
                self._short.update(cell.codes)
            reading &= present
            is_read |= has_code & reading
            is_filled |= has_code
        without = np.flatnonzero(~is_filled)
        if self._marks_missing:
            codes[self._target_cols[0]][without] = MISSING
            is_read[without] = is_filled[without] = True
        if self._is_checked and len(without) and not self._num_without:
            self._first_without = int(table.lines(without[:1])[0])
        self._num_without += len(without) if self._is_checked else 0
        for row in without.tolist() if self._needs_code else ():
            bad[row] = (
                f"{self._target_cols[0]}: is checked and blank; write the code of no "
                "occupation, such as -1"
            )
        for row in np.flatnonzero(is_filled & ~is_read).tolist():
            bad.setdefault(row, f"{self._target_cols[0]}: no code, but one in a later column")

        self._num_bad += len(bad)
        self._num_rows += int(is_filled.sum())
        lines = table.lines(np.array(sorted(bad)[:_NUM_EXAMPLES], dtype=np.int64)).tolist()
        first = [*self._first_bad, *zip(lines, (bad[row] for row in sorted(bad)), strict=False)]
        self._first_bad = first[:_NUM_EXAMPLES]
        reasons = np.empty(len(table), dtype=object)
        reasons[~is_filled] = "no code"
        reasons[list(bad)] = list(bad.values())
        self._without_repeats(codes)
        return codes, reasons

    def _column_for(self, table: Table) -> CodeColumn:
        """Return how cells are written: as given, else as those of the first chunk."""
        system, rules, given = self._formatter.system, self._rules, self._given
        counts = count_cells([table], [name for name in self._target_cols if name in table.columns])
        how: dict[str, Any] = {
            "system": system,
            "code_sep": rules.code_sep,
            "has_commas": bool(system.separator),
        }
        own = column_of(counts, known=self._known, **how)
        if given is not None:
            known = frozenset({*given.known, *self._known})
            own = replace(given, known=known, separator=given.separator or own.separator)
        return replace(
            own,
            system=system,
            allowed=None if self._key is None else frozenset(self._key.codes),
            zero_pad=rules.zero_pad,
            allow_short=self._allow_short,
        )

    def _read(self, name: str, table: Table) -> tuple[np.ndarray, list[str], list[Cell]]:
        """Return each cell's index among the distinct texts of a column, -1 if blank, these texts,
        and their cells.
        """
        if name not in table.columns:
            return np.full(len(table), -1), [], []
        assert self._column is not None
        coded = pc.dictionary_encode(table.columns[name])
        index, texts = np.array(pc.fill_null(coded.indices, -1)), coded.dictionary.to_pylist()
        cells = [self._column.read(text) for text in texts]
        if name == self._target_cols[0] and self._marks_missing:
            # prepared data have the formatter's own mark of a row without codes
            cells = [
                Cell((MISSING,)) if bare(text) == MISSING else cell
                for text, cell in zip(texts, cells, strict=True)
            ]
        self._count_changes(name, table, index, texts, cells)
        self._codes.update(code for cell in cells if not cell.problem for code in cell.codes)
        return index, texts, cells

    def _count_changes(
        self, name: str, table: Table, index: np.ndarray, texts: list[str], cells: list[Cell]
    ) -> None:
        """Count the cells that were not taken as they stand."""
        if not any(cell.change for cell in cells):
            return
        numbers = np.bincount(index[index >= 0], minlength=len(cells))
        present, rows = np.unique(index, return_index=True)
        for i, row in sorted(
            zip(present.tolist(), rows.tolist(), strict=True), key=lambda pair: pair[1]
        ):
            if i < 0 or not (change := cells[i].change):
                continue
            changed = self._changed.setdefault(change, _Changed())
            if not changed.first:
                line = table.lines(np.array([row]))[0]
                result = (
                    f" as {' & '.join(cells[i].codes)}"
                    if cells[i].codes and change != kinds.MAYBE_BLANK
                    else ""
                )
                changed.first = f"the first in line {line}, {name}: {shown(texts[i])}{result}"
            changed.number += int(numbers[i])
            changed.texts[texts[i].strip()] += int(numbers[i])

    def _split(
        self,
        codes: dict[str, np.ndarray],
        read: Mapping[str, tuple[np.ndarray, list[str], list[Cell]]],
        bad: dict[int, str],
    ) -> None:
        """Give rows with several codes in one cell the codes of all their cells, in place."""
        is_split = np.zeros(len(codes[self._target_cols[0]]), dtype=bool)
        for index, _, cells in read.values():
            is_split |= np.array([len(cell.codes) > 1 for cell in cells] + [False])[index]
        for row in np.flatnonzero(is_split).tolist():
            cells_of_row = [
                cells[index[row]] for index, _, cells in read.values() if index[row] >= 0
            ]
            found = list(dict.fromkeys(code for cell in cells_of_row for code in cell.codes))
            for name, code in itertools.zip_longest(codes, found[: len(codes)]):
                codes[name][row] = code
            if len(found) > len(codes):
                texts = ", ".join(
                    shown(texts[index[row]]) for index, texts, _ in read.values() if index[row] >= 0
                )
                columns = counted(len(codes), "column", "columns")
                bad[row] = f"{self._target_cols[0]}: {texts} holds {len(found)} codes for {columns}"
                self._most_codes = max(self._most_codes, len(found))

    def _without_repeats(self, codes: dict[str, np.ndarray]) -> None:
        """Leave out codes that a row has twice, in place."""
        columns = list(codes.values())
        pairs = list(itertools.combinations(columns, 2))
        repeats = np.logical_or.reduce([(one == other) & pd.notna(one) for one, other in pairs])
        for row in np.flatnonzero(repeats).tolist():
            found = [code for column in columns if (code := column[row]) is not None]
            distinct = list(dict.fromkeys(found))
            self._num_ignored += len(found) - len(distinct)
            for column, code in zip(columns, [*distinct, *[None] * len(columns)], strict=False):
                column[row] = code

    def finish(self, say: Callable[[str], None]) -> None:
        """Say what was found in all chunks.

        Raises UserError if a code does not fit and no rule covers it; names rows by line.
        """
        path = self.file.path
        no_codes = self._no_codes()
        may_pad = self._has_short and not no_codes
        is_asked = self._has_short and (
            len(no_codes) < len(self._short) or not self._is_known_classification()
        )
        rows = counted(self._num_bad, "row has a label that does", "rows have labels that do")
        few = "; ".join(f"line {line}, {text}" for line, text in self._first_bad)
        if self._num_bad and (is_asked or not self._rules.drop_bad):
            advice, settings = self._way_on(may_pad=may_pad, is_asked=is_asked)
            raise UserError(f"{path}: {rows} not fit: {few}. {advice}", **settings)
        if self._num_bad:
            say(f"{path}: {rows} not fit, and are left out: {few}.")
        if self._num_without:
            rows = counted(self._num_without, "checked row has", "checked rows have")
            say(
                f"{path}: {rows} no code, which means no occupation; the first is in line "
                f"{self._first_without}."
            )
        for change, changed in self._changed.items():
            say(f"{path}: {self._sentence(change, changed)}")
        if self._num_ignored:
            codes = counted(self._num_ignored, "code is", "codes are")
            say(
                f"{path}: {codes} ignored, because an earlier cell of the row is empty or "
                "has the same code."
            )

    def _way_on(self, *, may_pad: bool, is_asked: bool) -> tuple[str, dict[str, Any]]:
        """Return what to do about codes that do not fit, and the settings that are right for them,
        if any are.
        """
        short = "if short codes are right, --allow-codes-shorter-than-block-size"
        is_general = self._formatter.name == "general"
        if may_pad:
            advice = "If leading zeros were lost, add --zero-pad-codes" + (
                f"; {short}" if is_general else ""
            )
            return f"{advice}.", {"zero_pad_codes": True}
        if is_asked:
            padded = shown(min(self._no_codes()))
            zeros = f"if leading zeros were lost (there is no code {padded} yet), --zero-pad-codes"
            return f"Correct the labels; {short}; {zeros}.", {}
        if self._most_codes and self._column is not None:
            names = _more_names(self._target_cols, self._most_codes)
            separator = self._column.separator
            advice = (
                "Name a column for each of a row's codes: --target-cols "
                f"{' '.join(names)}. --code-sep "
                f"{shown(separator)} fills those that the table lacks. Or leave such rows "
                "out with --drop-bad-labels."
            )
            return advice, {"target_cols": names, "code_sep": separator}
        if 2 * self._num_bad > self._num_rows:  # leaving most rows out is no repair
            return "Correct the labels; if they are codes as they stand, list them in --key.", {}
        return "Correct the labels, or leave such rows out with --drop-bad-labels.", {
            "drop_bad_labels": True
        }

    def _no_codes(self) -> set[str]:
        """Return short codes that with leading zeros are neither codes of the table nor of a
        classification.
        """
        codes = self._codes | self._known
        padded = (code.zfill(self._formatter.block_size) for code in self._short)
        return {code for code in padded if code not in codes and not is_of_hisco_or_occ1950(code)}

    def _is_known_classification(self) -> bool:
        """Return whether all codes of the classification are known, so that others are mistakes."""
        codes = [code for code in self._codes if len(code) == self._formatter.block_size]
        num_of_hisco = sum(map(is_of_hisco_or_occ1950, codes))
        return bool(self._known) or (len(codes) > 0 and num_of_hisco >= _MOST * len(codes))

    def _sentence(self, change: str, changed: _Changed) -> str:
        """Return what was done with cells that were not taken as they stand."""
        cells = counted(changed.number, "cell", "cells")
        few = ", ".join(
            f"{shown(text)} ({count:,})" for text, count in changed.texts.most_common(5)
        )
        match change:
            case kinds.BLANK:
                text = f"{cells} of codes mean that there is no code: {few}; {changed.first}."
                return f"{text} If one is a code, list all codes in --key."
            case kinds.FORMATTED:
                return f"{cells} of codes are read without what is not the code's; {changed.first}."
            case kinds.PADDED:
                return f"{cells} of codes got leading zeros; {changed.first}."
            case kinds.RESPELT:
                text = (
                    f"{cells} of codes differ from others in case, blanks or zeros alone, and "
                    "are read as these"
                )
                return (
                    f"{text}; {changed.first}. If they are different codes, list all codes "
                    "in --key."
                )
            case kinds.SPLIT:
                assert self._column is not None
                text = (
                    f"{cells} hold several codes, with {shown(self._column.separator)} between them"
                )
                return f"{text}; {changed.first}."
        return (
            f"{cells} of codes may mean that there is no code: {few}; {changed.first}. They "
            "are taken as a code."
        )


def _more_names(columns: Sequence[str], number: int) -> tuple[str, ...]:
    """Return names of columns of codes, so many, that go on as the last one does.

    Examples
    --------
    >>> _more_names(["hisco_1"], 2), _more_names(["code"], 3)
    (('hisco_1', 'hisco_2'), ('code', 'code_2', 'code_3'))
    """
    stem = re.sub(r"_?[0-9]+$", "", columns[-1])
    return (*columns, *(f"{stem}_{i + 1}" for i in range(len(columns), number)))
