"""Examples: descriptions, languages and codes, read from files."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa

from histocoder.data.cells import MISSING_MARKS
from histocoder.data.checked import checked_tables
from histocoder.data.key import Key
from histocoder.data.labels import LabelChecker, LabelRules, count_codes
from histocoder.data.languages import language_code
from histocoder.data.normalize import DECODED, decode_entities
from histocoder.data.table import Table, TableFile, open_table
from histocoder.errors import UserError, counted, shown
from histocoder.formatters import MISSING, Formatter

TEXT_COL, LANG_COL = "occ1", "lang"
MAX_CODES = 5  # largest number of code columns of a prepared file
_INDEX_COLS = tuple(f"code{i}" for i in range(1, MAX_CODES + 1))  # those of indices into a key


@dataclass
class Examples:
    """Descriptions with languages and codes, of n rows."""

    texts: list[str]
    langs: list[str]
    codes: pd.DataFrame  # codes, of shape (n, k): strings, None where there is none

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, rows: np.ndarray) -> Examples:
        texts, langs = ([values[row] for row in rows] for values in (self.texts, self.langs))
        return Examples(texts, langs, self.codes.iloc[rows].reset_index(drop=True))

    def coded(self) -> Examples:
        """Return the rows that have codes."""
        first = self.codes.iloc[:, 0]
        return self.take(np.flatnonzero(first.notna() & (first != MISSING)))

    @classmethod
    def join(cls, parts: list[Examples]) -> Examples:
        return cls(
            texts=[text for part in parts for text in part.texts],
            langs=[lang for part in parts for lang in part.langs],
            codes=pd.concat([part.codes for part in parts], ignore_index=True),
        )


@dataclass(frozen=True)
class ExampleFiles:
    """Files with a description, a language and codes in each row, which are read one after the other.

    Every method that reads them raises `UserError` for mistakes in them, with the file and the line.
    """

    paths: tuple[Path, ...]
    target_cols: tuple[str, ...]
    """Columns of codes, first code first. A file may have the first few of them only.
    If it has `code1`, `code2`, … instead, these are indices into `key`."""
    formatter: Formatter
    all_needed: bool = False
    """Whether a file that lacks one of these columns is refused."""
    input_col: str = TEXT_COL
    language_col: str = LANG_COL
    """Column of languages; all rows of a file without it are "unk"."""
    language: str | None = None
    """Language of all rows, if given, instead of `language_col`."""
    key: Key | None = None
    """Key whose codes alone are allowed; None: all codes that fit."""
    known: Collection[str] = ()
    """Codes of a model, which are read as they are even if they look like marks of missing values, or numbers."""
    rules: LabelRules = field(default_factory=LabelRules)
    """Rules for codes that do not fit."""
    sheet: str | None = None
    """Sheet of Excel workbooks; None: the only one with content."""

    def chunks(self, *, say: Callable[[str], None] = lambda _: None) -> Iterator[Examples]:
        """Yield all rows in chunks; labels that do not fit raise an error at the end."""
        is_empty = True
        for path in self.paths:
            for examples in self._file_chunks(path, say):
                is_empty &= len(examples) == 0
                yield examples
        if is_empty:
            raise UserError(f"{', '.join(map(str, self.paths))}: no row has a description and codes that fit.")

    def read(self, *, say: Callable[[str], None] = lambda _: None) -> Examples:
        return Examples.join(list(self.chunks(say=say)))

    def sample(self, num_rows: int, *, of: int, seed: int) -> Examples:
        """Draw `num_rows` of the `of` rows at random, in their order; all of them if there are fewer."""
        chosen = np.sort(np.random.default_rng(seed).permutation(of)[:num_rows])
        parts, passed = [], 0
        for examples in self.chunks():
            first, last = np.searchsorted(chosen, (passed, passed + len(examples)))
            parts.append(examples.take(chosen[first:last] - passed))
            passed += len(examples)
        return Examples.join(parts)

    def count_codes(self) -> Counter[str]:
        """Count the codes in all files, for `fit_codes`."""
        files = [self._open(path) for path in self.paths]
        return sum((count_codes(file, [*self._code_columns(file)[0].values()]) for file in files), Counter[str]())

    def _open(self, path: Path) -> TableFile:
        codes = (*self.target_cols, *_INDEX_COLS)
        optional, columns = [self.language_col, *codes], {self.input_col: "input_col"}
        return open_table(path, columns, optional=optional, sheet=self.sheet, codes=codes)

    def _file_chunks(self, path: Path, say: Callable[[str], None]) -> Iterator[Examples]:
        file = self._open(path)
        code_columns, use_index = self._code_columns(file)
        targets, columns = list(code_columns), list(code_columns.values())
        lang_cols = [self.language_col] if self.language is None and file.has(self.language_col) else []
        wanted = [self.input_col, *lang_cols, *columns]
        for notice in file.notices:
            say(notice)
        checker = LabelChecker(file, targets, self.formatter, self.rules, key=self.key, known=self.known)
        tables = _with_targets(checked_tables(file, wanted, say), code_columns, self.key if use_index else None)
        num_blank = 0
        language = self.language or "unk"
        for chunk in checked_chunks(tables, checker, self.input_col, *lang_cols, language=language, say=say):
            num_blank += chunk.table.columns[self.input_col].null_count
            texts, langs = (
                a.filter(chunk.usable).to_pylist() for a in (chunk.table.columns[self.input_col], chunk.langs)
            )
            codes = chunk.codes[np.asarray(chunk.usable)].reset_index(drop=True)
            codes = codes.assign(**dict.fromkeys(set(self.target_cols) - set(targets)))
            yield Examples(texts, langs, codes[list(self.target_cols)])
        if num_blank:
            rows = counted(num_blank, "row without a description is", "rows without a description are")
            say(f"{path}: {rows} left out.")
        if checker.num_bad:
            rows = counted(
                checker.num_bad, "row with a label that does not fit is", "rows with labels that do not fit are"
            )
            say(f"{path}: {rows} left out.")
        if self.language is None and not lang_cols:
            say(f"{path} has no column {self.language_col!r}; its language is treated as unknown (unk).")

    def _code_columns(self, file: TableFile) -> tuple[dict[str, str], bool]:
        """Return, by target column, the file's column with its codes; and whether it holds indices into the key."""
        indexed = [column for column in _INDEX_COLS if file.has(column)]
        first = self.target_cols[0]
        if self.all_needed:
            file.check(dict.fromkeys(self.target_cols, "target_cols"))
        if file.has(first) or _INDEX_COLS[0] not in indexed:
            return {t: t for t in self.target_cols if t == first or file.has(t)}, False
        if self.key is None:
            instead = "name the key file with --key" if self.rules.is_training else "codes themselves are needed"
            raise UserError(f"{file.path} has code1 … (indices into a key) instead of {first}; {instead}.")
        return dict(zip(self.target_cols, indexed, strict=False)), True


class CheckedChunk(NamedTuple):
    """A chunk of a table, checked."""

    table: Table
    codes: pd.DataFrame  # codes, of shape (n, k); see `LabelChecker.check`
    langs: pa.Array
    reasons: pa.Array  # why each row can't be used; null if it can

    @property
    def usable(self) -> pa.Array:
        return self.reasons.is_null()


def checked_chunks(
    tables: Iterable[Table],
    checker: LabelChecker,
    input_col: str,
    language_col: str | None = None,
    *,
    language: str,
    say: Callable[[str], None],
) -> Iterator[CheckedChunk]:
    """Check a table chunk by chunk, and say what was found.

    `language` is that of all rows if there is no column of languages. HTML entities in descriptions are decoded.
    """
    num_decoded = 0
    for table in tables:
        table.columns[input_col], number = decode_entities(table.columns[input_col])
        num_decoded += number
        codes, reasons = checker.check(table)
        reasons[np.asarray(table.columns[input_col].is_null())] = "no description"
        if language_col is None:
            langs = pa.repeat(pa.scalar(language_code(language)), len(table))
        else:
            coded = table.columns[language_col].fill_null("unk").dictionary_encode()
            languages = [language_code(text) for text in coded.dictionary.to_pylist()]
            langs = pa.array(languages, pa.string()).take(coded.indices)
        yield CheckedChunk(table, codes, langs, pa.array(reasons, pa.string()))
    checker.finish(say)
    if num_decoded:
        say(f"{table.file.path}: {counted(num_decoded, *DECODED)}")


def _with_targets(tables: Iterable[Table], columns: Mapping[str, str], key: Key | None) -> Iterator[Table]:
    """Add the target columns to tables, from the file's columns, which hold indices into the key if one is given."""
    for table in tables:
        for target, column in columns.items():
            table.columns[target] = table.columns[column] if key is None else _codes_of(table, column, key)
        yield table


def _codes_of(table: Table, column: str, key: Key) -> pa.Array:
    """Return the codes of a column of class indices."""
    coded = table.columns[column].dictionary_encode()
    codes: list[str | None] = []
    for text in coded.dictionary.to_pylist():
        if text.strip() in MISSING_MARKS:
            codes.append(text)  # counted by `LabelChecker`
            continue
        match = re.fullmatch(r"\s*(\d{1,9})(\.0)?\s*", text)  # columns with gaps are often saved as floats
        if match is None or int(match[1]) >= len(key.codes):
            row = np.flatnonzero(np.asarray(coded.indices.fill_null(-1)) == len(codes))
            raise UserError(
                f"{table.file.path}, line {table.lines(row[:1])[0]}, {column}: {shown(text)} is not an index into the "
                f"key, which has {len(key.codes):,} codes."
            )
        codes.append(key.codes[int(match[1])] or None)
    return pa.array(codes, pa.string()).take(coded.indices)
