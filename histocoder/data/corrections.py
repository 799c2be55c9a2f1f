"""Codes that a person has checked; they override what the data say of the same descriptions."""

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from histocoder.config import PrepareConfig
from histocoder.data.cells import MISSING_MARKS
from histocoder.data.examples import LANG_COL, TEXT_COL
from histocoder.data.labels import LabelChecker, LabelRules
from histocoder.data.languages import language_code
from histocoder.data.normalize import fold
from histocoder.data.table import open_table
from histocoder.distributed import log
from histocoder.errors import UserError, shown
from histocoder.formatters import MISSING, Formatter

CHECKED_COL = "checked"  # the column that a person fills in
_YES = {*"x ✓ ✔ 1 1.0 y yes true ok j ja wahr oui vrai s si sí sì sim kyllä tak".split()}
_NO = {*"- – — ? 0 0.0 n no false nein falsch nej nee nei non faux não nao ei nie".split()}
_NO |= {"", *map(str.casefold, MISSING_MARKS)}
_HELD_OUT_SHARE, _MOST_HELD_OUT = 0.2, 200
_FEWEST = 20  # number of corrections from which some are held out: a fifth of fewer shows nothing
_Key = tuple[str, str | None]  # folded description, and language; None: every language


class Corrections:
    """Descriptions with checked codes; of several for the same description the last one counts.

    Descriptions are the same if they differ in case and blanks only. One with a language applies to descriptions in
    that language.
    """

    def __init__(self, target_cols: Sequence[str], default_language: str) -> None:
        self._target_cols, self._default_language = tuple(target_cols), default_language
        self._found: dict[_Key, tuple[str, list[str | None]]] = {}
        self._used: set[_Key] = set()
        self._held_out: list[_Key] = []

    def __len__(self) -> int:
        return len(self._found)

    @property
    def codes(self) -> set[str]:
        """All codes that occur."""
        return {code for _, codes in self._found.values() for code in codes if code is not None}

    def add(self, text: str, lang: str | None, codes: list[str | None]) -> None:
        self._found[fold(text), lang] = text, codes

    def hold_out(self, seed: int) -> int:
        """Set a fifth aside, 200 at most, to compare models on; return how many.

        The choice depends on the hashes of seed and description alone, so that a later run with more corrections never
        trains on what is held out here, or the other way round, except for those beyond 200.
        """
        if len(self) < _FEWEST:
            return 0
        digests = {key: hashlib.sha256(f"{seed} {key[0]}".encode()).digest()[:8] for key in self._found}
        units = {key: int.from_bytes(digest, "big") / 2**64 for key, digest in digests.items()}
        chosen = sorted((key for key, unit in units.items() if unit < _HELD_OUT_SHARE), key=units.__getitem__)
        self._held_out = chosen[:_MOST_HELD_OUT]
        return len(self._held_out)

    def apply(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, np.ndarray, np.ndarray, np.ndarray]:
        """Return prepared rows with corrected codes, and masks of shape (n,).

        The masks are those of rows with corrected codes, and, in whatever language, of rows whose description has a
        correction to train on, and of those whose correction is held out.
        """
        texts, langs = [fold(text) for text in batch[TEXT_COL].to_pylist()], batch[LANG_COL].to_pylist()
        held_out = {text for text, _ in self._held_out}
        is_held_out = np.array([text in held_out for text in texts], dtype=bool)
        known = {text for text, _ in self._found} - held_out
        is_known = np.array([text in known for text in texts], dtype=bool)
        found: dict[int, _Key] = {}
        for row in np.flatnonzero(is_known | is_held_out).tolist():
            keys = ((texts[row], langs[row]), (texts[row], None))
            if key := next((key for key in keys if key in self._found), None):
                found[row] = key
        self._used.update(found.values())
        is_corrected = np.zeros(len(batch), dtype=bool)
        is_corrected[list(found)] = True
        for i, name in enumerate(self._target_cols if found else ()):
            column = batch[name].to_pylist()
            for row, key in found.items():
                column[row] = self._found[key][1][i]
            batch = batch.set_column(batch.schema.get_field_index(name), name, pa.array(column, pa.string()))
        return batch, is_corrected & ~is_held_out, is_known, is_held_out

    def others(self, schema: pa.Schema) -> pa.RecordBatch:
        """Return the corrections that were in no row and are not held out, as prepared rows."""
        passed = {*self._used, *self._held_out}
        return self._rows([key for key in self._found if key not in passed], schema)

    def held_out(self, schema: pa.Schema) -> pa.RecordBatch:
        """Return the held-out corrections as prepared rows."""
        return self._rows(self._held_out, schema)

    def _rows(self, keys: Sequence[_Key], schema: pa.Schema) -> pa.RecordBatch:
        columns = {
            TEXT_COL: [self._found[key][0] for key in keys],
            LANG_COL: [key[1] or self._default_language for key in keys],
            **{name: [self._found[key][1][i] for key in keys] for i, name in enumerate(self._target_cols)},
        }
        return pa.RecordBatch.from_pydict(columns, schema=schema)


def read_corrections(config: PrepareConfig, formatter: Formatter, known: Collection[str] = ()) -> Corrections:
    """Read the files of `--corrections`, as `histocoder review` writes them and a person fills them in.

    For `known` see `ExampleFiles`.

    Raises UserError if a file lacks a column, a checked code does not fit, or nothing is checked.
    """
    found = Corrections(config.target_cols, language_code(config.language))
    for path in config.corrections or ():
        for correction in _read(path, config, formatter, known):
            found.add(*correction)
    return found


def _read(
    path: str, config: PrepareConfig, formatter: Formatter, known: Collection[str]
) -> Iterator[tuple[str, str | None, list[str | None]]]:
    needed = [config.input_col, CHECKED_COL, config.target_cols[0]]
    optional = [*config.target_cols[1:], *([config.language_col] if config.language_col else [])]
    file = open_table(path, needed, optional=optional, codes=config.target_cols)
    for notice in file.notices:
        log.info(notice)
    if lacking := [name for name in config.target_cols[1:] if name not in file.header]:
        log.info(f"{path} has no column {', '.join(map(repr, lacking))}: the rows that it corrects get no such codes.")
    table = file.read([*needed, *(name for name in optional if name in file.header)])
    marks = [(mark or "").strip().casefold() for mark in table.columns[CHECKED_COL].to_pylist()]
    if unclear := [row for row, mark in enumerate(marks) if mark not in _YES | _NO]:
        line = table.lines(np.array(unclear[:1]))[0]
        raise UserError(
            f"{path}, line {line}, {CHECKED_COL}: {shown(marks[unclear[0]])} is neither yes nor no. Write x in each "
            "row that is right, and leave the column blank in the others."
        )
    checked = table.filter(np.array([mark in _YES for mark in marks]))
    if not len(checked):
        raise UserError(
            f"{path}: no row is checked. Write x in the column {CHECKED_COL!r} of each row that is right now."
        )
    blank = pa.nulls(len(checked), pa.string())
    columns = {name: checked.columns.get(name, blank) for name in [*needed, *optional]}
    rules = LabelRules(config.zero_pad_codes, config.allow_codes_shorter_than_block_size, config.drop_bad_labels)
    checker = LabelChecker(file, config.target_cols, formatter, rules, known=known)
    codes, reasons = checker.check(replace(checked, columns=columns))
    checker.finish(log.info)
    langs: list[str | None] = [None] * len(checked)
    if config.language_col in file.header:
        langs = [None if lang is None else language_code(lang) for lang in columns[config.language_col].to_pylist()]
    elif config.language_col:
        log.info(f"{path} has no column {config.language_col!r}; its codes apply to descriptions in every language.")
    num_used = 0
    for row, (text, lang) in enumerate(zip(columns[config.input_col].to_pylist(), langs, strict=True)):
        found = codes.iloc[row].tolist()
        if text is not None and reasons[row] is None and found[0] not in (None, MISSING):
            yield text, lang, found
            num_used += 1
    parts = [f"{num_used:,} checked rows are used"]
    if num_unchecked := len(table) - len(checked):
        parts.append(f"{num_unchecked:,} unchecked rows are ignored")
    if num_unused := len(checked) - num_used:
        parts.append(f"{num_unused:,} checked rows are ignored, because they have no description or no code that fits")
    log.info(f"{path}: {'; '.join(parts)}.")
