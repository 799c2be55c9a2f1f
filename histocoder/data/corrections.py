"""Codes that a person has checked; they override what the data say of the same descriptions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa

from histocoder.config import PrepareConfig
from histocoder.data.examples import LANG_COL, TEXT_COL
from histocoder.data.labels import LabelChecker, LabelRules
from histocoder.data.normalize import fold
from histocoder.data.table import Table, open_table
from histocoder.errors import UserError
from histocoder.formatters import MISSING, Formatter

CHECKED_COL = "checked"
"""The column that a person fills in."""
_NOT_CHECKED = {"", "0", "no", "n", "false"}


class Corrections:
    """Descriptions with checked codes; of several for the same description the last one counts.

    Descriptions are the same where they differ in case and blanks only. One with a language is about descriptions in
    that language.
    """

    def __init__(self, target_cols: Sequence[str], default_language: str) -> None:
        self._target_cols, self._default_language = tuple(target_cols), default_language
        self._codes: dict[tuple[str, str | None], list[str | None]] = {}
        self._texts: dict[tuple[str, str | None], str] = {}
        self._used: set[tuple[str, str | None]] = set()

    def __len__(self) -> int:
        return len(self._codes)

    @property
    def codes(self) -> set[str]:
        """All that occur."""
        return {code for codes in self._codes.values() for code in codes if code is not None}

    def add(self, text: str, lang: str | None, codes: list[str | None]) -> None:
        """Take one in."""
        self._codes[fold(text), lang] = codes
        self._texts[fold(text), lang] = text

    def apply(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, np.ndarray]:
        """Prepared rows with the codes corrected, and which of them are, of shape (n,)."""
        rows: dict[int, list[str | None]] = {}
        for row, (text, lang) in enumerate(
            zip(*(batch[name].to_pylist() for name in (TEXT_COL, LANG_COL)), strict=True)
        ):
            folded = fold(text)
            for key in ((folded, lang), (folded, None)):
                if key in self._codes:
                    rows[row] = self._codes[key]
                    self._used.add(key)
                    break
        is_corrected = np.zeros(len(batch), dtype=bool)
        is_corrected[list(rows)] = True
        if not rows:
            return batch, is_corrected
        for i, name in enumerate(self._target_cols):
            column = batch[name].to_pylist()
            for row, codes in rows.items():
                column[row] = codes[i]
            batch = batch.set_column(batch.schema.get_field_index(name), name, pa.array(column, pa.string()))
        return batch, is_corrected

    def others(self, schema: pa.Schema) -> pa.RecordBatch:
        """Return those whose description was in none of the rows, as prepared rows."""
        keys = [key for key in self._codes if key not in self._used]
        columns = {
            TEXT_COL: [self._texts[key] for key in keys],
            LANG_COL: [key[1] or self._default_language for key in keys],
            **{name: [self._codes[key][i] for key in keys] for i, name in enumerate(self._target_cols)},
        }
        return pa.RecordBatch.from_pydict(columns, schema=schema)


def read_corrections(config: PrepareConfig, formatter: Formatter, *, say: Callable[[str], None]) -> Corrections:
    """Read the files of `--corrections`, as `histocoder review` writes them and a person fills them in.

    Raises
    ------
    UserError
        Where a file lacks a column, a checked code does not fit, or nothing is checked.
    """
    found = Corrections(config.target_cols, config.language)
    for path in config.corrections or ():
        _read(path, config, formatter, found, say)
    return found


def _read(
    path: str, config: PrepareConfig, formatter: Formatter, found: Corrections, say: Callable[[str], None]
) -> None:
    first, *others = config.target_cols
    language_cols = [config.language_col] if config.language_col else []
    file = open_table(
        path, [config.input_col, CHECKED_COL, first], optional=[*others, *language_cols], codes=config.target_cols
    )
    for notice in file.notices:
        say(notice)
    names = [config.input_col, CHECKED_COL, first, *(name for name in [*others, *language_cols] if name in file.header)]
    table = file.read(names)
    marks = [(mark or "").strip().casefold() for mark in table.columns[CHECKED_COL].to_pylist()]
    is_checked = np.array([mark not in _NOT_CHECKED for mark in marks])
    if not is_checked.any():
        raise UserError(
            f"{path}: no row is checked. Write x in the column {CHECKED_COL!r} of each row that is right now."
        )
    columns = {name: column.filter(pa.array(is_checked)) for name, column in table.columns.items()}
    blank = pa.nulls(int(is_checked.sum()), pa.string())
    checked = Table(file, {**dict.fromkeys(others, blank), **columns}, table.rows[is_checked])
    rules = LabelRules(config.zero_pad_codes, config.allow_codes_shorter_than_block_size, config.drop_bad_labels)
    checker = LabelChecker(file, config.target_cols, formatter, rules)
    labels = checker.check(checked)
    for notice in checker.finish():
        say(notice)
    langs = columns[config.language_col].to_pylist() if config.language_col in columns else [None] * len(checked)
    num_used = 0
    for row, (text, lang) in enumerate(zip(columns[config.input_col].to_pylist(), langs, strict=True)):
        codes = labels.codes.iloc[row].tolist()
        if text is not None and row not in labels.bad and codes[0] not in (None, MISSING):
            found.add(text, lang, codes)
            num_used += 1
    parts = [f"{num_used:,} checked rows are used"]
    if num_unchecked := len(table) - len(checked):
        parts.append(f"{num_unchecked:,} are not checked and not used")
    if num_unused := len(checked) - num_used:
        parts.append(f"{num_unused:,} are checked, but have no description or no code that fits, and are not used")
    say(f"{path}: {'; '.join(parts)}.")
