"""Files of users with a description, a language and codes in each row, read as checked rows."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from histocoder.data.cells import CodeColumn, is_short, read_code
from histocoder.data.code_columns import column_of, count_cells, count_codes, fit_codes
from histocoder.data.examples import (
    ATTRIBUTES_PREFIX,
    CODES_PREFIX,
    LANG_COL,
    TEXT_COL,
    Examples,
    row_schema,
)
from histocoder.data.key import Key
from histocoder.data.labels import LabelChecker, LabelRules
from histocoder.errors import UserError, counted, shown
from histocoder.formatters import Formatter
from histocoder.tables.output import MARK_COL
from histocoder.tables.table import Table, TableFile, map_distinct, open_table, without_blanks
from histocoder.text.characters import is_missing
from histocoder.text.languages import Language
from histocoder.text.normalize import decode_entities

_INDEX_COLS = tuple(f"code{i}" for i in range(1, 6))  # indices into a key
_INDEX = re.compile(r"\s*(\d{1,9})(\.0)?\s*")  # columns with gaps are often saved as floats
CHECKED_COL = MARK_COL
"""Column in which a person marks the rows that are right; of a file that has one, these count
alone.
"""
_YES = set("x ✓ ✔ 1 1.0 true y yes ok j ja já jo s sí si sì sim oui ναι kyllä tak".split())


@dataclass(frozen=True)
class LabelledFiles:
    """Files with a description, a language and codes in each row, which are read one after the
    other.

    Every method that reads them raises `UserError` for mistakes in them, with the file and the
    line.
    """

    paths: tuple[Path, ...]
    target_cols: tuple[str, ...]
    """Columns of codes, first code first. A file may have the first few of them only."""
    formatter: Formatter
    needed: Mapping[str, str] = field(default_factory=dict)
    """Columns that a file must have, beside `input_col`, and the settings that name them."""
    input_col: str = TEXT_COL
    language_col: str = LANG_COL
    """Column of languages; all rows of a file without it are "unk"."""
    language: str | None = None
    """Language of all rows, if given, instead of `language_col`."""
    key: Key | None = None
    """Key whose codes alone are allowed; None: all codes that fit."""
    known: Collection[str] = ()
    """Codes of a model, which are read as they are even if they look like marks of missing values,
    or numbers.
    """
    rules: LabelRules = field(default_factory=LabelRules)
    """Rules for codes that do not fit."""
    column: CodeColumn | None = None
    """Rules by which cells of codes are read, by those of all files; None: by those of each file."""
    attribute_cols: tuple[str, ...] = ()
    """Columns of attributes, which a file may lack."""
    sheet: str | None = None
    """Sheet of Excel workbooks; None: the only one with content."""
    encoding: str | None = None
    """Encoding of text files; None: the one that `open_table` finds."""
    opened: dict[Path, TableFile] = field(default_factory=dict, repr=False, compare=False)
    """Files whose headers were read before."""
    counted: dict[tuple[Path, tuple[str, ...]], Counter[str]] = field(
        default_factory=dict, repr=False, compare=False
    )
    """Number of cells of each text in columns of files that were counted before."""

    @property
    def known_codes(self) -> frozenset[str]:
        """Codes of the key and of the model; "", which stands for no code, is none."""
        codes_of_key = () if self.key is None else self.key.codes
        return frozenset(self.known).union(codes_of_key) - {""}

    @property
    def schema(self) -> pa.Schema:
        """Columns of the checked rows."""
        return row_schema(self.target_cols, self.attribute_cols)

    def rows(self, *, say: Callable[[str], None] = lambda _: None) -> Iterator[pa.RecordBatch]:
        """Yield all rows, chunk by chunk, with the columns of `row_schema`, and say what was found.

        HTML entities in descriptions are decoded. Labels that do not fit raise an error at the end
        of a file.
        """
        is_empty = True
        for path in self.paths:
            for batch in self._file_rows(path, say):
                is_empty &= batch["reason"].null_count == 0
                yield batch
        if is_empty:
            raise UserError(
                f"{', '.join(map(str, self.paths))}: no row has a description and codes that fit."
            )

    def chunks(self, *, say: Callable[[str], None] = lambda _: None) -> Iterator[Examples]:
        """Yield the rows that are kept, in chunks."""
        for batch in self.rows(say=say):
            yield Examples(pa.Table.from_batches([batch.filter(batch["reason"].is_null())]))

    def read(self, *, say: Callable[[str], None] = lambda _: None) -> Examples:
        return Examples.join(list(self.chunks(say=say)))

    def count_cells(self) -> Counter[str]:
        """Count the cells of codes of each text in all files, for `column_of`."""
        counts: Counter[str] = Counter()
        for path in self.paths:
            counts += self._count_cells_of(path)
        return counts

    def _count_cells_of(self, path: Path) -> Counter[str]:
        file = self._open(path)
        columns = tuple(self._code_columns(file).values())
        if (path, columns) not in self.counted:
            tables = checked_tables(file, columns, lambda _: None)
            self.counted[path, columns] = count_cells(tables, columns)
        return self.counted[path, columns]

    def column_for(self, cells: Mapping[str, int]) -> CodeColumn:
        """Return how the codes of a file are read, from the number of its cells of each text."""
        system = self.formatter.system
        column = column_of(
            cells, known=self.known_codes, system=system, code_sep=self.rules.code_sep
        )
        if self.column is not None:
            # another file, such as corrections, may join codes where the table has one a cell
            column = replace(self.column, separator=self.column.separator or column.separator)
        has_short = any(is_short(code, system) for code in self.known)
        return replace(
            column,
            system=system,
            has_key=self.key is not None,
            zero_pad=self.rules.zero_pad,
            allow_short=self.rules.allow_short or has_short,
        )

    def fitted(self) -> "LabelledFiles":
        """Return the files with the formatter that their codes need; see `fit_codes`.

        Codes are those of the key and of the model that is trained further; without a key those of
        the files as well.
        """
        # how cells are written decides which codes they hold
        cells = self.count_cells()
        column = column_of(
            cells,
            known=self.known_codes,
            system=self.formatter.system,
            code_sep=self.rules.code_sep,
        )
        counts = Counter(self.known_codes)
        if self.key is None:
            counts += count_codes(cells, column)

        # the codes of a key are right; those of a table may be mistakes
        fit = fit_codes(
            counts,
            self.formatter,
            are_right=self.key is not None,
            allow_short=self.rules.allow_short,
        )
        rules = replace(self.rules, allow_short=fit.allow_short)
        return replace(self, formatter=fit.formatter, rules=rules, column=column)

    def _open(self, path: Path) -> TableFile:
        if path not in self.opened:
            self.opened[path] = open_table(
                path,
                {self.input_col: "input_col"} | dict(self.needed),
                optional=[
                    self.language_col,
                    *self.target_cols,
                    *self.attribute_cols,
                    *_INDEX_COLS,
                ],
                sheet=self.sheet,
                encoding=self.encoding,
            )
        return self.opened[path]

    def _code_columns(self, file: TableFile) -> dict[str, str]:
        """Return the file's column of each target column: that of its name, or OccCANINE's `code1`
        and so on.
        """
        first = self.target_cols[0]
        index_cols = [name for name in _INDEX_COLS if file.has(name)]
        if index_cols and self.key is not None and not file.has(first):
            return dict(zip(self.target_cols, index_cols, strict=False))
        return {name: name for name in self.target_cols if name == first or file.has(name)}

    def _file_rows(self, path: Path, say: Callable[[str], None]) -> Iterator[pa.RecordBatch]:
        file = self._open(path)
        for notice in file.notices:
            say(notice)

        # columns that the file lacks are null in the checked rows
        code_columns = self._code_columns(file)
        columns = [self.input_col]
        columns.extend(code_columns.values())
        columns.extend(filter(file.has, self.attribute_cols))
        if self._has_languages(file):
            columns.append(self.language_col)
        checker = LabelChecker(
            file,
            self.target_cols,
            self.formatter,
            self.rules,
            column=self.column_for(self._count_cells_of(path)),
            is_checked=_checked_column(file) is not None,
        )

        # a chunk at a time, since tables may be larger than memory
        num_dropped = 0
        num_decoded = 0
        for table in checked_tables(file, columns, say):
            for target, column in code_columns.items():
                if target != column:
                    table.columns[target] = _codes_of(table, column, self.key)
            rows = self._checked_rows(table, checker)
            num_dropped += len(rows) - rows["reason"].null_count
            is_decoded = pc.not_equal(rows["text"], table.columns[self.input_col])
            num_decoded += pc.sum(is_decoded, min_count=0).as_py()
            yield rows

        # labels that do not fit are an error, beside which the counts say nothing
        checker.finish(say)
        if num_dropped:
            number = counted(num_dropped, "row is", "rows are")
            say(f"{path}: {number} left out, without a description or without a code that fits.")
        if num_decoded:
            number = counted(num_decoded, "description has", "descriptions have")
            say(f"{path}: {number} HTML entities, such as &amp;, which are decoded.")
        if self.language is None and not self._has_languages(file):
            say(
                f"{path} has no column {self.language_col!r}; its language is treated as "
                "unknown (unk)."
            )

    def _has_languages(self, file: TableFile) -> bool:
        """Return whether the languages of rows are those in a column of the file."""
        return self.language is None and file.has(self.language_col)

    def _checked_rows(self, table: Table, checker: LabelChecker) -> pa.RecordBatch:
        """Return a chunk with the columns of `row_schema`, dropped rows with the reasons."""
        nothing = pa.nulls(len(table), pa.string())
        # what entities stand for may be blank, as &nbsp; is
        texts = without_blanks(decode_entities(table.columns[self.input_col]))
        codes, reasons = checker.check(table)
        reasons[np.asarray(texts.is_null())] = "no description"
        reason = pa.array(reasons, pa.string())
        langs = pa.repeat(self.language or "", len(table))
        if self._has_languages(table.file):
            langs = table.columns[self.language_col]
        rows = {
            "row": table.positions,
            "line": table.file.lines(table.positions),
            "text": texts,
            "lang": map_distinct(langs, Language),
            "reason": reason,
        }

        # what a dropped row holds is kept for people to read
        for name in self.target_cols:
            cells = table.columns.get(name, nothing)
            checked = pa.array(codes[name], pa.string())
            rows[f"{CODES_PREFIX}{name}"] = pc.if_else(reason.is_null(), checked, cells)
        for name in self.attribute_cols:
            categories = nothing
            if table.file.has(name):
                categories = map_distinct(table.columns[name], read_code)
            rows[f"{ATTRIBUTES_PREFIX}{name}"] = categories
        return pa.RecordBatch.from_pydict(rows, schema=self.schema)


def other_cells(
    examples: Examples,
    path: str,
    name: str,
    *,
    setting: str,
    sheet: str | None = None,
    encoding: str | None = None,
) -> pa.Array:
    """Return the cells of another column of the file that rows were read from, of shape (n,); null
    where blank.

    Raises UserError if there is no such column; `setting` is the one that names it.
    """
    table = open_table(path, {name: setting}, sheet=sheet, encoding=encoding).read([name])
    return table.columns[name].take(examples.table["row"].combine_chunks())


def checked_tables(
    file: TableFile, columns: Collection[str], say: Callable[[str], None]
) -> Iterator[Table]:
    """Yield columns as `TableFile.tables` does; of a file with a column `checked`, the checked
    rows, and say how many.

    Raises UserError if no row is checked.
    """
    name = _checked_column(file)
    if name is None:
        yield from file.tables(columns)
        return

    num_rows = num_checked = 0
    for table in file.tables([*columns, name]):
        is_checked = _are_checked(table.columns[name])
        num_rows += len(table)
        num_checked += int(is_checked.sum())
        yield table.filter(is_checked)

    # a file without any mark was not filled in yet
    if not num_checked:
        raise UserError(
            f"{file.path}: no row is checked. Write x in the column {name!r} of each row "
            "that is right."
        )
    used = counted(num_checked, "checked row is used", "checked rows are used")
    unchecked = num_rows - num_checked
    ignored = counted(unchecked, "unchecked row is ignored", "unchecked rows are ignored")
    say(f"{file.path}: {used}; {ignored}.")


def num_checked_rows(path: Path) -> int:
    """Return how many rows of a table are checked; 0 for one without a column `checked`."""
    file = open_table(path, (), optional=(CHECKED_COL,))
    name = _checked_column(file)
    if name is None:
        return 0
    return sum(int(_are_checked(table.columns[name]).sum()) for table in file.tables([name]))


def _are_checked(column: pa.Array) -> np.ndarray:
    """Return which of n marks mean that their row is checked, of shape (n,)."""
    # marks differ between people, and are compared whatever their case
    coded = column.fill_null("").dictionary_encode()
    marks = [mark.strip().casefold() for mark in coded.dictionary.to_pylist()]
    return np.array([mark in _YES for mark in marks], dtype=bool)[coded.indices]


def _checked_column(file: TableFile) -> str | None:
    return next((name for name in file.header if name.strip().casefold() == CHECKED_COL), None)


def _codes_of(table: Table, column: str, key: Key | None) -> pa.Array:
    """Return the codes of a column of indices into a key."""
    assert key is not None
    coded = table.columns[column].dictionary_encode()
    codes: list[str | None] = []
    for i, text in enumerate(coded.dictionary.to_pylist()):
        match = _INDEX.fullmatch(text)
        if is_missing(text.strip()):
            codes.append(text)  # counted by `LabelChecker`
        elif match is not None and int(match[1]) < len(key.codes):
            codes.append(key.codes[int(match[1])] or None)
        else:
            first = np.flatnonzero(pc.equal(coded.indices, i).fill_null(False))[:1]
            place = f"{table.file.path}, {table.file.unit} {table.lines(first)[0]}, {column}"
            raise UserError(
                f"{place}: {shown(text)} is not an index into the key, which has "
                f"{len(key.codes):,} codes."
            )
    return pa.array(codes, pa.string()).take(coded.indices)
