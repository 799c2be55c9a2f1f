"""Examples: descriptions, languages and codes, read from files."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

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


ROW = pa.schema(
    [
        ("row", pa.int64()),  # position in its file, from 0
        ("line", pa.int64()),  # its first line there; in Parquet the row, from 1
        ("text", pa.string()),  # description
        ("lang", pa.string()),
        ("reason", pa.string()),  # why it is dropped; null if it is kept
    ]
)
"""First columns of checked rows; behind them are those of codes, which a dropped row has as the file does."""
CODES = "codes."
"""Begin of the names of columns of codes."""


@dataclass
class Examples:
    """Descriptions with languages and codes, of n rows."""

    texts: list[str]
    langs: list[str]
    codes: pd.DataFrame  # codes, of shape (n, k): strings, None where there is none

    def __len__(self) -> int:
        return len(self.texts)

    @classmethod
    def from_rows(cls, rows: pa.RecordBatch) -> Examples:
        """Take checked rows from their columns."""
        names = filter(is_codes, rows.schema.names)
        codes = {name.removeprefix(CODES): rows[name].to_numpy(zero_copy_only=False) for name in names}
        return cls(rows["text"].to_pylist(), rows["lang"].to_pylist(), pd.DataFrame(codes, dtype=object))

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

    def rows(self, *, say: Callable[[str], None] = lambda _: None) -> Iterator[pa.RecordBatch]:
        """Yield all rows as `checked_rows` does; labels that do not fit raise an error at the end."""
        is_empty = True
        for path in self.paths:
            for batch in self._file_rows(path, say):
                is_empty &= batch["reason"].null_count == 0
                yield batch
        if is_empty:
            raise UserError(f"{', '.join(map(str, self.paths))}: no row has a description and codes that fit.")

    def chunks(self, *, say: Callable[[str], None] = lambda _: None) -> Iterator[Examples]:
        """Yield the rows that are kept, in chunks."""
        for batch in self.rows(say=say):
            yield Examples.from_rows(batch.filter(batch["reason"].is_null()))

    def read(self, *, say: Callable[[str], None] = lambda _: None) -> Examples:
        return Examples.join(list(self.chunks(say=say)))

    def count_codes(self) -> Counter[str]:
        """Count the codes in all files, for `fit_codes`."""
        files = map(self._open, self.paths)
        return sum((count_codes(file, [*self._code_columns(file)[0].values()]) for file in files), Counter[str]())

    def _open(self, path: Path) -> TableFile:
        codes = (*self.target_cols, *_INDEX_COLS)
        optional, columns = [self.language_col, *codes], {self.input_col: "input_col"}
        return open_table(path, columns, optional=optional, sheet=self.sheet, codes=codes)

    def _file_rows(self, path: Path, say: Callable[[str], None]) -> Iterator[pa.RecordBatch]:
        file = self._open(path)
        code_columns, use_index = self._code_columns(file)
        lang_cols = [self.language_col] if self.language is None and file.has(self.language_col) else []
        for notice in file.notices:
            say(notice)
        checker = LabelChecker(file, [*code_columns], self.formatter, self.rules, key=self.key, known=self.known)
        columns = [self.input_col, *lang_cols, *code_columns.values()]
        tables = _with_targets(checked_tables(file, columns, say), code_columns, self.key if use_index else None)
        schema, num_blank = row_schema(self.target_cols), 0
        language = self.language or "unk"
        for batch in checked_rows(tables, checker, self.input_col, *lang_cols, language=language, say=say):
            num_blank += batch["text"].null_count
            columns = [
                batch[name] if name in batch.schema.names else pa.nulls(len(batch), pa.string())
                for name in schema.names
            ]
            yield pa.RecordBatch.from_arrays(columns, schema=schema)
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


def row_schema(target_cols: Sequence[str]) -> pa.Schema:
    """Return the columns of checked rows."""
    return pa.schema([*ROW, *((f"{CODES}{name}", pa.string()) for name in target_cols)])


def is_codes(name: str) -> bool:
    """Return whether a column of checked rows is one of codes."""
    return name.startswith(CODES)


def checked_rows(
    tables: Iterable[Table],
    checker: LabelChecker,
    input_col: str,
    language_col: str | None = None,
    *,
    language: str,
    say: Callable[[str], None],
) -> Iterator[pa.RecordBatch]:
    """Check a table chunk by chunk; yield all rows with the columns of `ROW` and the codes, and say what was found.

    `language` is that of all rows if there is no column of languages. HTML entities in descriptions are decoded.
    """
    num_decoded = 0
    for table in tables:
        texts, number = decode_entities(table.columns[input_col])
        num_decoded += number
        cleaned, reasons = checker.check(table)
        reasons[np.asarray(texts.is_null())] = "no description"
        if language_col is None:
            langs = pa.repeat(pa.scalar(language_code(language)), len(table))
        else:
            coded = table.columns[language_col].fill_null("unk").dictionary_encode()
            languages = [language_code(text) for text in coded.dictionary.to_pylist()]
            langs = pa.array(languages, pa.string()).take(coded.indices)
        reason = pa.array(reasons, pa.string())
        codes = [
            pc.if_else(reason.is_null(), pa.array(column, pa.string()), table.columns[name])
            for name, column in cleaned.items()
        ]
        lines = table.file.lines(table.rows)
        columns = [pa.array(table.rows), pa.array(lines), texts, langs, reason, *codes]
        yield pa.RecordBatch.from_arrays(columns, schema=row_schema([*cleaned]))
    checker.finish(say)
    if num_decoded:
        say(f"{checker.file.path}: {counted(num_decoded, *DECODED)}")


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
