"""Codes that a person has checked; they override what the data say of the same descriptions."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa

from histocoder.config import PrepareConfig
from histocoder.data.examples import LANG_COL, TEXT_COL
from histocoder.data.labels import LabelChecker, LabelRules
from histocoder.data.languages import language_code
from histocoder.data.normalize import fold
from histocoder.data.table import Table, open_table
from histocoder.errors import UserError
from histocoder.formatters import MISSING, Formatter

CHECKED_COL = "checked"
"""The column that a person fills in."""
_NOT_CHECKED = {"", "0", "no", "n", "false"}
_HELD_OUT_SHARE, _MOST_HELD_OUT = 0.2, 200
_FEWEST = 20
"""Corrections from which some are held out: of fewer, a fifth shows nothing."""


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
        self._held_out: tuple[tuple[str, str | None], ...] = ()

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

    def hold_out(self, seed: int) -> int:
        """Set a fifth aside, 200 at most, to compare models on; return how many.

        Which ones depends on the hashes of seed and description alone: a later run with more corrections never trains
        on what is held out here, or the other way round, except that those beyond 200 are trained on then.
        """
        if len(self) < _FEWEST:
            return 0
        units = {key: _unit(key[0], seed) for key in self._codes}
        chosen = sorted((key for key, unit in units.items() if unit < _HELD_OUT_SHARE), key=lambda key: units[key])
        self._held_out = tuple(chosen[:_MOST_HELD_OUT])
        return len(self._held_out)

    def apply(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, np.ndarray, np.ndarray]:
        """Return prepared rows with the codes corrected; which of them are, and which are held out, of shape (n,)."""
        found: dict[int, tuple[str, str | None]] = {}
        for row, (text, lang) in enumerate(
            zip(*(batch[name].to_pylist() for name in (TEXT_COL, LANG_COL)), strict=True)
        ):
            keys = ((fold(text), lang), (fold(text), None))
            if key := next((key for key in keys if key in self._codes), None):
                found[row] = key
        is_corrected, is_held_out = np.zeros((2, len(batch)), dtype=bool)
        if not found:
            return batch, is_corrected, is_held_out
        self._used.update(found.values())
        is_corrected[list(found)] = True
        is_held_out[[row for row, key in found.items() if key in self._held_out]] = True
        for i, name in enumerate(self._target_cols):
            column = batch[name].to_pylist()
            for row, key in found.items():
                column[row] = self._codes[key][i]
            batch = batch.set_column(batch.schema.get_field_index(name), name, pa.array(column, pa.string()))
        return batch, is_corrected & ~is_held_out, is_held_out

    def others(self, schema: pa.Schema) -> pa.RecordBatch:
        """Return those whose description was in none of the rows, without those held out, as prepared rows."""
        passed = {*self._used, *self._held_out}
        return self._rows([key for key in self._codes if key not in passed], schema)

    def held_out(self, schema: pa.Schema) -> pa.RecordBatch:
        """Return those held out, a prepared row of each."""
        return self._rows(self._held_out, schema)

    def _rows(self, keys: Sequence[tuple[str, str | None]], schema: pa.Schema) -> pa.RecordBatch:
        columns = {
            TEXT_COL: [self._texts[key] for key in keys],
            LANG_COL: [key[1] or self._default_language for key in keys],
            **{name: [self._codes[key][i] for key in keys] for i, name in enumerate(self._target_cols)},
        }
        return pa.RecordBatch.from_pydict(columns, schema=schema)


def _unit(text: str, seed: int) -> float:
    """Hash a description to a number from 0 to 1."""
    return int.from_bytes(hashlib.sha256(f"{seed} {text}".encode()).digest()[:8], "big") / 2**64


def read_corrections(config: PrepareConfig, formatter: Formatter, *, say: Callable[[str], None]) -> Corrections:
    """Read the files of `--corrections`, as `histocoder review` writes them and a person fills them in.

    Raises
    ------
    UserError
        Where a file lacks a column, a checked code does not fit, or nothing is checked.
    """
    found = Corrections(config.target_cols, language_code(config.language))
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
    langs: list[str | None] = [None] * len(checked)
    if config.language_col in columns:
        langs = [None if lang is None else language_code(lang) for lang in columns[config.language_col].to_pylist()]
    elif config.language_col:
        say(f"{path} has no column {config.language_col!r}: its codes are for descriptions in every language.")
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
