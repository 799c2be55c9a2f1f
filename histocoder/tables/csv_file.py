"""CSV files: encoding, separator, header, decimal mark, and errors that name the line.

An apostrophe is before cells that a spreadsheet would run as formulas.
"""

import csv
import gzip
import io
import re
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from histocoder.errors import Notice, UserError, counted, shown, warn_user
from histocoder.tables.header import FIRST_ROWS, MAX_COLUMNS, below_titles, header_row, named
from histocoder.tables.text_file import MAX_LINE_BYTES, TextFile

_DELIMITERS = ",;\t| "
_DELIMITER_LINE = re.compile(rb'"?sep=(.)"?,*')  # Excel's first line
_BREAK = r"\r\n|\n|\r"
# first characters of cells which a spreadsheet would run as formulas, and such cells
_FORMULA_BEGINNINGS = pa.array(list("'=+-@\t\r\n＝＋－＠"))
_FORMULA = r"(?s)^'*[=+\-@\t\r\n＝＋－＠].*[\pL\pN]"
# numbers with signs, which it shows as they are: -1, -2 and -3 are codes
_NUMBER = r"^[+-]?[0-9][0-9.,]*([eE][+-]?[0-9]+)?$"


class _CsvHeader(NamedTuple):
    """A header, as one separator finds it."""

    delimiter: str
    names: list[str]
    end: int  # number of lines to its end
    notices: list[str]
    num_matches: int  # number of the columns looked for that it has


@dataclass(frozen=True)
class Quotes:
    """Parts of a CSV that are in quotation marks even where they don't need them."""

    header: bool = True
    text: bool = True  # columns of text
    numbers: bool = False  # columns of other types
    bare: frozenset[str] = frozenset()  # columns of text without quotation marks


class CsvFile:
    """A CSV file: all of it tells the encoding, and its first rows the rest of its form.

    The separator is the one that finds most of `columns` and `optional`. `encoding` is as in
    `TextFile`.

    Raises UserError if the file is not text, is damaged, or is empty.
    """

    def __init__(
        self,
        path: Path,
        columns: Collection[str],
        optional: Collection[str],
        encoding: str | None = None,
    ) -> None:
        self.path = path
        self._num_skipped = 0
        self._num_read = 0
        # the row of each line break within cells; the first array is for files without any, since
        # an empty list can't be concatenated
        self._rows_of_breaks = [np.zeros(0, np.int64)]
        # Arrow refuses rows of another length than the header; those that lose nothing by being
        # cut or filled are here, by position
        self._uneven_rows: dict[int, list[str]] = {}

        # only the header tells the separator: each is tried
        try:
            self._text = TextFile(path, encoding)
            self._escape = "\\" if self._text.has_escapes else None
            headers = [self._header(mark, columns, optional) for mark in self._delimiters()]
        except csv.Error as error:
            raise UserError(f"{path} has no header that can be read: {error}.") from error
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UserError(
                f"{path} is damaged, or not a gzip file ({error}). Compress it again."
            ) from error
        header = max(headers, key=lambda header: (header.num_matches, len(header.names)))
        self.delimiter = header.delimiter
        self.header = as_meant(pa.array(header.names, pa.string())).to_pylist()
        self.schema = pa.schema([(name, pa.string()) for name in self.header])
        self._num_skipped = header.end
        self._as_written = header.names

        # what is written beside the file looks like it, so that the same programs open both
        self.excel = self._text.has_mark
        self.quotes = self._quotes()
        self.line_break = self._text.line_break
        self.decimal = "," if self.delimiter == ";" else "."

        self.notices = self._text.notices + header.notices
        if self._escape:
            self.notices.append(
                f"{path}: quotation marks are escaped with backslashes, as R writes them."
            )
        if self._repeats:
            lines = ", ".join(f"{line:,}" for line in self._text.repeated_lines[:5])
            if self._text.repeated_lines[5:]:
                lines += " and others"
            self.notices.append(
                f"{path}: the header is repeated in line {lines}, as in files that were joined; "
                "these rows are read as blank."
            )

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield all columns as text, formulas without their apostrophe; raise a UserError where the
        form is broken.
        """
        num_passed = 0
        last_cell = ""
        has_warned = False
        self._uneven_rows.clear()
        try:
            for arrow_batch in self._arrow_reader():
                batch = self._with_uneven_rows(arrow_batch, num_passed)

                # a file may be read several times, but its line breaks are counted once
                breaks = _line_breaks(batch)
                if breaks and num_passed >= self._num_read:
                    num_breaks = np.sum(list(breaks.values()), axis=0)
                    rows = np.arange(num_passed, num_passed + len(batch))
                    self._rows_of_breaks.append(np.repeat(rows, num_breaks))
                if not has_warned:
                    has_warned = self._warn_of_rows_in_cell(batch, breaks, num_passed)

                num_passed += len(batch)
                self._num_read = max(num_passed, self._num_read)
                if len(batch):
                    last_cell = batch.columns[-1][-1].as_py()
                columns = map(as_meant, self._without_repeats(batch.columns))
                yield pa.RecordBatch.from_arrays(list(columns), self.header)
        except pa.ArrowInvalid as error:
            if "Empty CSV" in str(error) or "Could not skip" in str(error):
                raise UserError(f"{self.path} has a header but no rows.") from error
            raise self._first_fault(str(error)) from error

        # Arrow takes all that follows an open quotation mark as one cell, and doesn't complain
        if re.search(_BREAK, last_cell) and not self._text.ends_with_quote:
            raise self._first_fault("a quotation mark is not closed")

    def _arrow_reader(self) -> pa.csv.CSVStreamingReader:
        """Open the file behind the header with Arrow, which guesses neither types nor nulls.

        Columns are named by position, since names of the header may repeat.
        """
        names = list(map(str, range(len(self.header))))
        read_options = pa.csv.ReadOptions(
            use_threads=False,
            block_size=MAX_LINE_BYTES,
            skip_rows=self._num_skipped,
            column_names=names,
        )
        parse_options = pa.csv.ParseOptions(
            delimiter=self.delimiter,
            escape_char=self._escape or False,
            newlines_in_values=True,
            ignore_empty_lines=False,
            invalid_row_handler=self._keep_uneven,
        )
        convert_options = pa.csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()),
            strings_can_be_null=False,
            null_values=[],
        )
        return pa.csv.open_csv(self._stream(), read_options, parse_options, convert_options)

    def lines(self, positions: np.ndarray) -> np.ndarray:
        """Return the first line of each of some rows that were read, which are counted from 0
        behind the header.
        """
        num_breaks_above = np.searchsorted(np.concatenate(self._rows_of_breaks), positions)
        return self._num_skipped + 1 + positions + num_breaks_above

    @property
    def _repeats(self) -> bool:
        """Whether rows may be the header again."""
        return bool(self._text.repeated_lines) and len(self.header) > 1 and self._num_skipped == 1

    def _stream(self) -> pa.NativeFile:
        """Open the file for Arrow, which unpacks it and reads it in C if it is UTF-8."""
        if not self._text.is_plain:
            return pa.PythonFile(self._text.open(), mode="r")
        is_packed = self.path.suffix.lower() == ".gz"
        return pa.input_stream(self.path, compression="gzip" if is_packed else None)

    def _delimiters(self) -> str:
        """Return the separators that are possible: a blank only if texts are in quotation marks, as
        R writes them.
        """
        first = self._first_line()
        if match := _DELIMITER_LINE.fullmatch(first):
            return match[1].decode("latin-1")
        if first.startswith(b'"'):
            return _DELIMITERS
        return _DELIMITERS.rstrip()

    def _first_line(self) -> bytes:
        """Return the first line with content; empty where it is far below."""
        return b"".join(self._text.first_lines[:1])

    @contextmanager
    def _reader(self, delimiter: str) -> Iterator[Any]:
        """Open Python's reader behind the header; cells may be as long as Arrow reads them."""
        usual_limit = csv.field_size_limit(MAX_LINE_BYTES)
        try:
            with io.TextIOWrapper(self._text.open(), encoding="utf-8-sig", newline="") as text:
                for _ in range(self._num_skipped):
                    text.readline()
                yield csv.reader(text, delimiter=delimiter, escapechar=self._escape)
        finally:
            csv.field_size_limit(usual_limit)

    def _header(
        self, delimiter: str, columns: Collection[str], optional: Collection[str]
    ) -> _CsvHeader:
        """Return the header that a separator finds; titles may precede it, and R's names of rows be
        behind it.
        """
        rows: list[list[str]] = []
        ends: list[int] = []
        try:
            with self._reader(delimiter) as reader:
                for row in reader:
                    if any(map(str.strip, row)):
                        rows.append(row)
                        ends.append(reader.line_num)
                    if len(rows) == FIRST_ROWS:
                        break
        except csv.Error:
            # a cell is longer than a block, which may be behind the header
            if not rows:
                raise
        if not rows:
            raise UserError(f"{self.path} is empty.")

        index = header_row(rows, columns)
        names = rows[index]
        if len(names) > MAX_COLUMNS:
            raise UserError(
                f"{self.path} has {len(names):,} columns, and {MAX_COLUMNS:,} are the most. Save "
                "those you need."
            )
        notices = []
        if index > bool(_DELIMITER_LINE.fullmatch(self._first_line())):
            notices.append(below_titles(self.path, "line", ends[index]))

        # R writes names of rows below no name; other programs end each row with a separator
        rows_below = rows[index + 1 :]
        if {len(row) for row in rows_below} == {len(names) + 1}:
            if not any(row[-1].strip() for row in rows_below):
                names.append("")
            elif self._have_names([row[0] for row in rows_below]):
                names.insert(0, "")
                notices.append(
                    f"{self.path}: rows have one cell more than the header, as R writes names of "
                    "rows; the first one is taken as a column without a name."
                )
        num_matches = sum(bool(named(name, names)) for name in {*columns, *optional})
        return _CsvHeader(delimiter, names, ends[index], notices, num_matches)

    def _have_names(self, cells: list[str]) -> bool:
        """Return whether the first cells of rows are names that R has given them: numbers, or all
        texts are quoted.
        """
        if len(set(cells)) < len(cells):
            return False
        are_quoted = all(line.startswith(b'"') for line in self._text.first_lines)
        return are_quoted or all(map(str.isdecimal, cells))

    def _quotes(self) -> Quotes:
        """Return what is in quotation marks in the first lines, without a need of them.

        Cells without content, and lines that do not have a cell for each column, tell nothing.
        """
        if self._escape:
            return Quotes()

        # a cell in quotation marks may hold separators, and doubled marks
        mark = re.escape(self.delimiter).encode()
        cell = re.compile(rb'("(?:[^"]|"")*"|[^"' + mark + rb"]*)(?:" + mark + rb"|$)")
        needs_quotes = re.compile(rb'[\r\n"' + mark + rb"]")
        in_header: set[bool] = set()
        in_columns: list[set[bool]] = [set() for _ in self.header]
        for line in self._text.first_lines[:FIRST_ROWS]:
            cells = cell.findall(line)[: len(self.header)]
            contents = [text.removeprefix(b'"').removesuffix(b'"') for text in cells]
            are_quoted = [content != text for content, text in zip(contents, cells, strict=True)]

            # what is above the header are titles, whose quotation marks tell nothing of the rows
            if [content.decode("utf-8", "replace") for content in contents] == self._as_written:
                in_header = set(are_quoted)
                in_columns = [set() for _ in self.header]
            elif len(cells) == len(self.header):
                for column, content, is_quoted in zip(
                    in_columns, contents, are_quoted, strict=True
                ):
                    if content.strip() and not needs_quotes.search(content):
                        column.add(is_quoted)

        columns = zip(self.header, in_columns, strict=True)
        bare = frozenset(name for name, marks in columns if False in marks)
        has_quoted = {True} in in_columns
        return Quotes(
            header=in_header == {True} or (has_quoted and not in_header),
            text=has_quoted,
            numbers=has_quoted and not bare,
            bare=bare,
        )

    def _keep_uneven(self, row: pa.csv.InvalidRow) -> str:
        """Keep a row that has more cells than the header, or fewer, if these have no content; tell
        Arrow to skip it.
        """
        text = io.StringIO(row.text, newline="")
        reader = csv.reader(text, delimiter=self.delimiter, escapechar=self._escape)
        try:
            cells = next(reader, [])
        except csv.Error:
            return "error"
        if not self._is_readable(cells):
            return "error"

        num_columns = len(self.header)
        blanks = [""] * (num_columns - len(cells))
        self._uneven_rows[row.number - self._num_skipped - 1] = cells[:num_columns] + blanks
        return "skip"

    def _is_readable(self, cells: list[str]) -> bool:
        """Return whether a row of another length than the header is blank, or blank behind the last
        column.
        """
        if len(cells) >= len(self.header):
            cells = cells[len(self.header) :]
        return not any(map(str.strip, cells))

    def _with_uneven_rows(self, batch: pa.RecordBatch, num_passed: int) -> pa.RecordBatch:
        """Return a batch with the uneven rows that Arrow has skipped, where they were.

        `num_passed` is the number of rows of the file above the batch.
        """
        # Arrow reads ahead: later rows belong to later batches
        positions: list[int] = []
        for position in sorted(self._uneven_rows):
            if position <= num_passed + len(batch) + len(positions):
                positions.append(position)
        if not positions:
            return batch

        rows = [self._uneven_rows.pop(position) for position in positions]
        columns = [pa.array(cells, pa.string()) for cells in zip(*rows, strict=True)]
        uneven = pa.RecordBatch.from_arrays(columns, schema=batch.schema)

        # `np.insert` counts positions without the rows that it inserts
        counter = np.arange(len(positions))
        insert_at = np.array(positions) - num_passed - counter
        order = np.insert(np.arange(len(batch)), insert_at, len(batch) + counter)
        return pa.Table.from_batches([batch, uneven]).take(order).combine_chunks().to_batches()[0]

    def _without_repeats(self, columns: list[pa.Array]) -> list[pa.Array]:
        """Return columns whose rows are blank that are the header again."""
        if not self._repeats:
            return columns
        first = self._as_written[0]
        are_repeats = pc.is_in(columns[0], pa.array([first, f"\ufeff{first}", f'\ufeff"{first}"']))
        for column, name in zip(columns[1:], self._as_written[1:], strict=True):
            are_repeats = pc.and_(are_repeats, pc.equal(column, name))
        return [pc.if_else(are_repeats, "", column) for column in columns]

    def _first_fault(self, error: str) -> UserError:
        """Return what is wrong with the first row of another length than the header, or the last
        row; the `error` of the parser if nothing is.
        """
        row: list[str] = []
        num_lines_above = 0
        num_lines = 0
        with self._reader(self.delimiter) as reader:
            try:
                for row in reader:
                    num_lines_above = num_lines
                    num_lines = reader.line_num
                    if len(row) not in (0, len(self.header)) and not self._is_readable(row):
                        break

                # an open quotation mark takes in all that follows, so its row is the last
                is_last = next(reader, None) is None
                has_breaks = re.search(_BREAK, "".join(row)) is not None
                is_open = is_last and has_breaks and not self._text.ends_with_quote
            except csv.Error:
                # a row is longer than a block, as if a quotation mark were open
                num_lines_above = num_lines
                is_open = True

        # the number of fields means nothing where a quotation mark is open
        where = f"{self.path}, line {self._num_skipped + num_lines_above + 1}"
        if is_open:
            return UserError(
                f"{where}: a quotation mark is opened and not closed. Close it, or remove it."
            )
        if len(row) in (0, len(self.header)):
            return UserError(f"{self.path} is not a well-formed CSV file: {error}.")
        return UserError(
            f"{where}: {len(row)} fields where the header has {len(self.header)} "
            f"({shown(self.delimiter.join(row))}). "
            "Quote a field that contains the separator, or fix the row."
        )

    def _warn_of_rows_in_cell(
        self, batch: pa.RecordBatch, breaks: dict[str, np.ndarray], num_passed: int
    ) -> bool:
        """Issue a notice on the first cell whose line breaks end as many separators as a row has,
        if there is one.

        Two stray quotation marks make one cell of all rows between them.
        """
        for name, num_breaks in breaks.items():
            num_marks = np.asarray(pc.count_substring(batch[name], self.delimiter))
            is_like_rows = (num_breaks > 0) & (num_marks == num_breaks * (batch.num_columns - 1))
            indices = np.flatnonzero(is_like_rows)[:1]
            if len(indices):
                line = self.lines(indices + num_passed)[0]
                number = counted(int(num_breaks[indices[0]]), "line break", "line breaks")
                notice = (
                    f"{self.path}, line {line}: one cell holds {number} and looks like rows of "
                    "the table. If there is a quotation mark too few or too many, these rows are "
                    "lost: fix it, and start again."
                )
                warn_user(Notice(notice))
                return True
        return False


def content_of(column: pa.Array) -> bytes:
    """Return the bytes of all cells of a column of text; a look at them is much faster than one at
    each cell.
    """
    buffer = column.buffers()[2]
    return buffer.to_pybytes() if buffer else b""


def _line_breaks(batch: pa.RecordBatch) -> dict[str, np.ndarray]:
    """Return the number of line breaks in each cell of the columns that have any, by name."""
    breaks: dict[str, np.ndarray] = {}
    for name in batch.schema.names:
        content = content_of(batch[name])
        if b"\n" in content or b"\r" in content:
            breaks[name] = np.asarray(pc.count_substring_regex(batch[name], _BREAK))
    return breaks


def are_formulas(cells: pa.ChunkedArray | pa.Array) -> pa.ChunkedArray | pa.Array:
    """Return which of some texts a spreadsheet would run.

    A transcribed "=1+1" or "-daughter of the above" is text here, and a formula in Excel; a
    malicious one can run programs. See https://owasp.org/www-community/attacks/CSV_Injection.
    """
    beginnings = pc.utf8_slice_codeunits(cells, 0, 1)
    may_be_formula = pc.is_in(beginnings, value_set=_FORMULA_BEGINNINGS.cast(cells.type))

    # regular expressions are slow, and most columns need none
    if not pc.any(may_be_formula, min_count=0).as_py():
        return may_be_formula
    is_number = pc.match_substring_regex(cells, _NUMBER)
    return pc.and_not(pc.match_substring_regex(cells, _FORMULA), is_number)


def without_formulas(cells: pa.ChunkedArray | pa.Array) -> tuple[pa.ChunkedArray | pa.Array, int]:
    """Put an apostrophe before each text that a spreadsheet would run; return how many have one."""
    is_formula = are_formulas(cells)
    number = pc.sum(is_formula, min_count=0).as_py()
    if not number:
        return cells, 0
    quoted = pc.binary_join_element_wise(
        pa.scalar("'", cells.type), cells, pa.scalar("", cells.type)
    )
    return pc.if_else(is_formula, quoted, cells), number


def as_meant(cells: pa.Array) -> pa.Array:
    """Undo `without_formulas`."""
    has_apostrophe = pc.starts_with(cells, "'")
    if not pc.any(has_apostrophe, min_count=0).as_py():
        return cells
    formulas = pc.utf8_slice_codeunits(cells, 1)
    return pc.if_else(pc.and_(has_apostrophe, are_formulas(formulas)), formulas, cells)
