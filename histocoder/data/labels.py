"""Codes of rows, checked chunk by chunk, and what is wrong with them."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.compute as pc

from histocoder.data.cells import (
    BLANK,
    FORMATTED,
    MAYBE_BLANK,
    PADDED,
    RESPELT,
    SPLIT,
    Cell,
    CodeColumn,
    bare,
)
from histocoder.data.code_columns import MIN_SHARE_WITH_DIGITS
from histocoder.errors import UserError, counted, shown
from histocoder.formatters import MISSING, Formatter
from histocoder.formatters.classifications import is_of_hisco_or_occ1950
from histocoder.tables.table import Table, TableFile

_NUM_EXAMPLES = 3  # rows that an error names
_SENTENCES = {
    BLANK: "{cells} of codes mean that there is no code: {texts}; {first}. If one is a code, "
    "list all codes in --key.",
    FORMATTED: "{cells} of codes are read without what is not the code's; {first}.",
    PADDED: "{cells} of codes got leading zeros; {first}.",
    RESPELT: "{cells} of codes differ from others in case, blanks or zeros alone, and are "
    "read as these; {first}. If they are different codes, list all codes in --key.",
    SPLIT: "{cells} hold several codes, with {separator} between them; {first}.",
    MAYBE_BLANK: "{cells} of codes may mean that there is no code: {texts}; {first}. They "
    "are taken as a code.",
}
"""`Cell.change` -> the notice of the cells that have it."""


@dataclass(frozen=True, kw_only=True)
class LabelRules:
    """Rules for codes that do not fit."""

    zero_pad: bool = False
    """Whether codes of digits get leading zeros up to the block size."""
    allow_short: bool = False
    """Whether codes may be shorter than the block."""
    drop_bad: bool = False
    """Whether rows with codes that do not fit are dropped, instead of stopping the run."""
    blank_means_no_occupation: bool = False
    """Whether to keep rows without codes, as the formatter marks them."""
    code_sep: str | None = None
    """Separator of several codes in one cell; None: the one that fits all such cells."""
    needs_code: bool = False
    """Whether a row that a person has checked needs a code, since no mark stands for none."""


def rules_of(config: Any) -> LabelRules:
    """Return the rules in settings, of which not all have each."""
    return LabelRules(
        zero_pad=config.zero_pad_codes,
        allow_short=config.allow_codes_shorter_than_block_size,
        drop_bad=getattr(config, "drop_bad_labels", False),
        blank_means_no_occupation=getattr(config, "blank_means_no_occupation", False),
        code_sep=getattr(config, "code_sep", None),
    )


@dataclass
class ReadColumn:
    """A column of codes of a chunk, each distinct text read once."""

    index: np.ndarray  # index of each row's text, -1 where it is blank
    texts: list[str]
    cells: list[Cell]  # what each text holds; like `texts`, ends with that of a blank


@dataclass
class CheckedRow:
    """Codes of the rows with some texts, and why they can't be used."""

    codes: list[str]
    problem: str | None
    has_code: bool
    """Whether there is a code, or the mark for none."""
    is_blank: bool
    """Whether no cell holds a code."""
    num_codes: int
    """Number of codes of all cells, which is at most that of the columns in a row that fits."""
    num_ignored: int
    """Number of codes that follow a missing one or repeat another."""
    short_codes: set[str]
    """Codes that may have lost zeros."""

    @property
    def reason(self) -> str | None:
        """Why the rows are dropped; None if they are kept."""
        if self.problem is None and not self.has_code:
            return "no code"
        return self.problem


@dataclass
class Changed:
    """Cells that were not taken as they stand, of one kind."""

    texts: Counter[str] = field(default_factory=Counter)
    first: str = ""  # where the first one is, and what it is


@dataclass
class Findings:
    """Counts of what was noticed in all chunks of a file."""

    num_rows: int = 0
    """Number of rows with a code."""
    num_bad: int = 0
    """Number of rows with codes that can't be used."""
    first_bad: list[str] = field(default_factory=list)
    num_ignored: int = 0
    """Number of codes that were ignored."""
    num_without: int = 0
    """Number of checked rows without codes."""
    first_without: int = 0
    """Line, or row, of the first of them."""
    max_codes: int = 0
    """Largest number of codes of a row that has more than there are columns."""
    codes: set[str] = field(default_factory=set)
    """Codes that fit."""
    short_codes: set[str] = field(default_factory=set)
    """Codes that may have lost zeros."""
    changed: dict[str, Changed] = field(default_factory=dict)


class LabelChecker:
    """Reads the codes of a file chunk by chunk, and gathers those that do not fit.

    Cells are read by a `CodeColumn`. Reading of a row stops at its first missing code; a code that
    a row has twice counts once, and the codes of a cell that has several are codes of the row.
    `MISSING`, the mark for a missing first code, is missing, too, unless rows without codes are
    kept: they get it. So do rows without codes of a file whose rows a person has checked: that is a
    decision.
    """

    def __init__(
        self,
        file: TableFile,
        target_cols: Sequence[str],
        formatter: Formatter,
        rules: LabelRules,
        *,
        column: CodeColumn,
        is_checked: bool = False,
    ) -> None:
        self.file = file
        self._target_cols = target_cols
        self._formatter = formatter
        self._rules = rules
        self._column = column
        self._is_checked = is_checked
        self._needs_code = is_checked and rules.needs_code
        marks_missing = is_checked or rules.blank_means_no_occupation
        self._marks_missing = marks_missing and not self._needs_code
        self._findings = Findings()

    def check(self, table: Table) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Return each column's codes of a chunk's n rows, and the reasons why rows can't be used.

        Codes are strings, None where there is none; reasons are None if a row can be used. Chunks
        come in order.
        """
        # rows with the same cells are checked once
        columns = [self._read_column(name, table) for name in self._target_cols]
        index = pd.DataFrame({i: column.index for i, column in enumerate(columns)})
        row_index = index.groupby(list(index), sort=False).ngroup().to_numpy()
        _, first_rows, counts = np.unique(row_index, return_index=True, return_counts=True)
        rows = [self._check_row(columns, indices) for indices in index.to_numpy()[first_rows]]
        self._count(table, rows, row_index, counts)

        # each row gets what was found for its cells
        codes = {}
        for i, name in enumerate(self._target_cols):
            distinct = [row.codes[i] if i < len(row.codes) else None for row in rows]
            codes[name] = np.array(distinct, dtype=object)[row_index]
        reasons = np.array([row.reason for row in rows], dtype=object)
        return codes, reasons[row_index]

    def _read_column(self, name: str, table: Table) -> ReadColumn:
        """Read the distinct cells of a column, and count those that are not taken as they stand."""
        # index -1, of a blank cell, is that of the last text
        blank = Cell()
        if name not in table.columns:
            return ReadColumn(np.full(len(table), -1), [""], [blank])
        coded = pc.dictionary_encode(table.columns[name])
        index = np.array(pc.fill_null(coded.indices, -1))
        texts = [*coded.dictionary.to_pylist(), ""]
        cells = [self._column.read(text) for text in texts[:-1]]
        cells.append(blank)

        # prepared data have the formatter's own mark of a row without codes
        if name == self._target_cols[0] and self._marks_missing:
            for i, text in enumerate(texts):
                if bare(text) == MISSING:
                    cells[i] = Cell((MISSING,))

        column = ReadColumn(index, texts, cells)
        self._count_cells(name, table, column)
        return column

    def _count_cells(self, name: str, table: Table, column: ReadColumn) -> None:
        """Count the codes of a column, and its cells that are not taken as they stand."""
        counts = np.bincount(column.index[column.index >= 0], minlength=len(column.cells)).tolist()
        for i, cell in enumerate(column.cells):
            if cell.problem:
                continue
            self._findings.codes.update(cell.codes)
            if not cell.change:
                continue

            # a notice gives examples, and the line of the first
            text = column.texts[i]
            changed = self._findings.changed.setdefault(cell.change, Changed())
            changed.texts[text.strip()] += counts[i]
            if not changed.first:
                line = table.lines(np.flatnonzero(column.index == i)[:1])[0]
                changed.first = f"the first in {table.file.unit} {line}, {name}: {shown(text)}"
                if cell.codes and cell.change != MAYBE_BLANK:
                    changed.first += f" as {' & '.join(cell.codes)}"

    def _check_row(self, columns: Sequence[ReadColumn], indices: np.ndarray) -> CheckedRow:
        """Check a row, which has the text `indices[i]` of the i-th column."""
        first_col = self._target_cols[0]
        texts = [column.texts[i] for column, i in zip(columns, indices, strict=True)]
        cells = [column.cells[i] for column, i in zip(columns, indices, strict=True)]

        # of several problems the first is reported
        problems = []
        codes = _codes_of_row(texts, cells)
        num_codes = len(codes)
        if num_codes > len(cells):
            content = ", ".join(shown(text) for text in texts if text)
            num_columns = counted(len(cells), "column", "columns")
            problems.append(f"{first_col}: {content} holds {num_codes} codes for {num_columns}")
            codes = codes[: len(cells)]

        # a row is read up to its first missing code, and the cell there may be a damaged one
        num_read = len(codes)
        if None in codes:
            num_read = codes.index(None)
        row_codes = [code for code in dict.fromkeys(codes[:num_read]) if code is not None]
        num_ignored = len(codes) - codes.count(None) - len(row_codes)
        short_codes: set[str] = set()
        for name, text, cell in zip(self._target_cols[: num_read + 1], texts, cells, strict=False):
            if cell.problem:
                problems.append(f"{name}: {shown(text)} {cell.problem}")
                short_codes.update(cell.codes)

        # rows without codes are dropped, or have the mark for none
        is_blank = not set(codes) - {None, MISSING}
        if is_blank and self._needs_code:
            problems.append(
                f"{first_col}: is checked and blank; write the code of no occupation, such as -1"
            )
        elif is_blank and self._marks_missing:
            row_codes = [MISSING]
        elif not is_blank and not set(row_codes) - {MISSING}:
            problems.append(f"{first_col}: no code, but one in a later column")
        return CheckedRow(
            row_codes,
            problem=problems[0] if problems else None,
            has_code=self._marks_missing or not is_blank,
            is_blank=is_blank,
            num_codes=num_codes,
            num_ignored=num_ignored,
            short_codes=short_codes,
        )

    def _count(
        self, table: Table, rows: Sequence[CheckedRow], index: np.ndarray, counts: np.ndarray
    ) -> None:
        """Count what was noticed in a chunk, whose rows are `rows[index]`."""
        findings = self._findings
        for row, count in zip(rows, counts.tolist(), strict=True):
            findings.num_rows += count * row.has_code
            findings.num_bad += count * (row.problem is not None)
            findings.num_ignored += count * row.num_ignored
            findings.short_codes |= row.short_codes
            if row.num_codes > len(self._target_cols):
                findings.max_codes = max(findings.max_codes, row.num_codes)

        # the first bad rows of the file are shown as examples
        is_bad = np.array([row.problem is not None for row in rows], dtype=bool)
        positions = np.flatnonzero(is_bad[index])[: _NUM_EXAMPLES - len(findings.first_bad)]
        for line, i in zip(table.lines(positions).tolist(), index[positions], strict=True):
            findings.first_bad.append(f"{table.file.unit} {line}, {rows[i].problem}")

        # a person who checked a blank row has decided that there is no occupation
        if self._is_checked:
            is_blank = np.array([row.is_blank for row in rows], dtype=bool)
            positions = np.flatnonzero(is_blank[index])
            if len(positions) and not findings.num_without:
                findings.first_without = int(table.lines(positions[:1])[0])
            findings.num_without += len(positions)

    def finish(self, say: Callable[[str], None]) -> None:
        """Say what was found in all chunks.

        Raises UserError if a code does not fit and no rule covers it; names rows by line.
        """
        path = self.file.path
        findings = self._findings

        # short codes are not left out as mistakes if they may be codes that have lost their zeros
        num_short = len(findings.short_codes)
        num_unknown = len(self._unknown_padded_codes())
        should_pad = num_short > 0 and num_unknown == 0
        may_pad = num_short > 0 and (num_unknown < num_short or not self._is_known_classification())

        # codes that do not fit end the run, or are left out
        if findings.num_bad:
            rows = counted(
                findings.num_bad, "row has a label that does", "rows have labels that do"
            )
            examples = "; ".join(findings.first_bad)
            if may_pad or not self._rules.drop_bad:
                advice, settings = self._advice(should_pad=should_pad, may_pad=may_pad)
                raise UserError(f"{path}: {rows} not fit: {examples}. {advice}", **settings)
            say(f"{path}: {rows} not fit, and are left out: {examples}.")

        # what was read in another way than it is written
        if findings.num_without:
            rows = counted(findings.num_without, "checked row has", "checked rows have")
            say(
                f"{path}: {rows} no code, which means no occupation; the first is in "
                f"{self.file.unit} {findings.first_without}."
            )
        for change, changed in findings.changed.items():
            examples = ", ".join(
                f"{shown(text)} ({count:,})" for text, count in changed.texts.most_common(5)
            )
            sentence = _SENTENCES[change].format(
                cells=counted(changed.texts.total(), "cell", "cells"),
                texts=examples,
                first=changed.first,
                separator=shown(self._column.separator),
            )
            say(f"{path}: {sentence}")
        if findings.num_ignored:
            codes = counted(findings.num_ignored, "code is", "codes are")
            say(
                f"{path}: {codes} ignored, because an earlier cell of the row is empty or "
                "has the same code."
            )

    def _advice(self, *, should_pad: bool, may_pad: bool) -> tuple[str, dict[str, Any]]:
        """Return what to do about codes that do not fit, and the settings that are right for them,
        if any are.
        """
        findings = self._findings
        short = "if short codes are right, --allow-codes-shorter-than-block-size"
        if should_pad:
            advice = "If leading zeros were lost, add --zero-pad-codes"
            if self._formatter.name == "general":
                advice += f"; {short}"
            return f"{advice}.", {"zero_pad_codes": True}

        # zeros may be lost, which the user alone knows
        if may_pad:
            padded = shown(min(self._unknown_padded_codes()))
            zeros = f"if leading zeros were lost (there is no code {padded} yet), --zero-pad-codes"
            return f"Correct the labels; {short}; {zeros}.", {}

        # rows with more codes than columns
        if findings.max_codes:
            names = more_names(self._target_cols, findings.max_codes)
            separator = self._column.separator
            advice = (
                "Name a column for each of a row's codes: --target-cols "
                f"{' '.join(names)}. --code-sep "
                f"{shown(separator)} fills those that the table lacks. Or leave such rows "
                "out with --drop-bad-labels."
            )
            return advice, {"target_cols": names, "code_sep": separator}

        # other mistakes
        if 2 * findings.num_bad > findings.num_rows:  # leaving most rows out is no repair
            return "Correct the labels; if they are codes as they stand, list them in --key.", {}
        return "Correct the labels, or leave such rows out with --drop-bad-labels.", {
            "drop_bad_labels": True
        }

    def _unknown_padded_codes(self) -> set[str]:
        """Return the short codes, with leading zeros, that are then neither codes of the table nor
        of a classification.
        """
        codes = self._findings.codes.union(self._column.known)
        padded = (code.zfill(self._formatter.block_size) for code in self._findings.short_codes)
        return {code for code in padded if code not in codes and not is_of_hisco_or_occ1950(code)}

    def _is_known_classification(self) -> bool:
        """Return whether all codes of the classification are known, so that others are mistakes."""
        codes = [code for code in self._findings.codes if len(code) == self._formatter.block_size]
        num_of_hisco = sum(map(is_of_hisco_or_occ1950, codes))
        return bool(self._column.known) or (
            len(codes) > 0 and num_of_hisco >= MIN_SHARE_WITH_DIGITS * len(codes)
        )


def _codes_of_row(texts: Sequence[str], cells: Sequence[Cell]) -> list[str | None]:
    """Return a row's code in each column, or all of its codes if there are more than columns."""
    codes: list[str | None] = []

    # the codes of a cell that has several are codes of the row
    if any(len(cell.codes) > 1 for cell in cells):
        codes.extend(dict.fromkeys(code for cell in cells for code in cell.codes))
        num_missing = len(cells) - len(codes)
        codes.extend([None] * num_missing)
        return codes

    # the text of a damaged cell stands for its code, so that the row has one
    for text, cell in zip(texts, cells, strict=True):
        if cell.codes:
            codes.append(cell.codes[0])
        else:
            codes.append(text if cell.problem else None)
    return codes


def more_names(columns: Sequence[str], number: int) -> tuple[str, ...]:
    """Return names of columns of codes, so many, that go on as the last one does.

    Examples
    --------
    >>> more_names(["hisco_1"], 2), more_names(["code"], 3)
    (('hisco_1', 'hisco_2'), ('code', 'code_2', 'code_3'))
    """
    stem = re.sub(r"_?[0-9]+$", "", columns[-1])
    names = list(columns)
    for i in range(len(columns), number):
        names.append(f"{stem}_{i + 1}")
    return tuple(names)
