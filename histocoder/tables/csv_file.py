"""CSV files: encoding, separator, header, decimal mark, and errors that name the line.

An apostrophe is before cells that a spreadsheet would run as formulas.
"""

import csv
import gzip
import io
import itertools
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
from histocoder.tables.header import FIRST_ROWS, below_titles, check_number, header_row, named
from histocoder.tables.text_file import MAX_LINE_BYTES, TextFile

_DELIMITERS = ",;\t| "
_DELIMITER_LINE = re.compile(rb'"?sep=(.)"?,*')  # Excel's first line
_BREAK = r"\r\n|\n|\r"
_FIRST = pa.array(
    [*"'=+-@\t\r\n＝＋－＠"]
)  # characters that begin cells which a spreadsheet would run
_RUN = r"(?s)^'*[=+\-@\t\r\n＝＋－＠].*[\pL\pN]"  # begin of such a cell
# numbers, which it shows as they are: -1, -2 and -3 are codes
_SHOWN = r"^[+-]?[0-9][0-9.,]*([eE][+-]?[0-9]+)?$"


class _CsvHeader(NamedTuple):
    """A header, as one separator finds it."""

    delimiter: str
    names: list[str]
    end: int  # number of lines to its end
    notices: list[str]
    num_found: int  # number of columns that are looked for


@dataclass(frozen=True)
class Quotes:
    """Parts of CSV that are in quotation marks, whether or not they need them."""

    header: bool = True
    text: bool = True  # columns of text
    numbers: bool = False  # columns of other types
    bare: frozenset[str] = frozenset()  # columns of text that are not


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
        self._breaks = [(np.zeros(0, np.int64), np.zeros(0, np.int64))]
        self._uneven_rows: dict[int, list[str]] = {}
        """Rows by position that have cells without content too many, and that Arrow would refuse."""
        try:
            self._text = TextFile(path, encoding)
            headers = [
                self._header(delimiter, columns, optional) for delimiter in self._delimiters()
            ]
        except csv.Error as error:
            raise UserError(f"{path} has no header that can be read: {error}.") from error
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UserError(
                f"{path} is damaged, or not a gzip file ({error}). Compress it again."
            ) from error
        header = max(headers, key=lambda header: (header.num_found, len(header.names)))
        self.delimiter = header.delimiter
        self.header = as_meant(pa.array(header.names, pa.string())).to_pylist()
        self.notices = self._text.notices + header.notices
        self._num_skipped = header.end
        self._as_written = header.names
        self.excel = self._text.has_mark
        self._escape = "\\" if self._text.has_escapes else None
        self.quotes = self._quotes()
        self.line_break = self._text.line_break
        self.decimal = "," if self.delimiter == ";" else "."
        self.schema = pa.schema([(name, pa.string()) for name in self.header])
        if self._text.has_escapes:
            self.notices.append(
                f"{path}: quotation marks are escaped with backslashes, as R writes them."
            )
        if self._repeats:
            lines = ", ".join(f"{line:,}" for line in self._text.repeated_lines[:5])
            more = " and others" if self._text.repeated_lines[5:] else ""
            self.notices.append(
                f"{path}: the header is repeated in line {lines}{more}, as in files that "
                "were joined; "
                "these rows are read as blank."
            )

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield all columns as text, formulas without their apostrophe; raise a UserError where the
        form is broken.
        """
        names = [str(i) for i in range(len(self.header))]
        num_passed = 0
        last = ""
        is_told = False
        self._uneven_rows.clear()
        parse = {
            "delimiter": self.delimiter,
            "escape_char": self._escape or False,
            "newlines_in_values": True,
        }
        unchanged = {
            "column_types": dict.fromkeys(names, pa.string()),
            "strings_can_be_null": False,
            "null_values": [],
        }
        try:
            for read in pa.csv.open_csv(
                self._stream(),
                pa.csv.ReadOptions(
                    use_threads=False,
                    block_size=MAX_LINE_BYTES,
                    skip_rows=self._num_skipped,
                    column_names=names,
                ),
                pa.csv.ParseOptions(
                    ignore_empty_lines=False, invalid_row_handler=self._keep_uneven, **parse
                ),
                pa.csv.ConvertOptions(**unchanged),
            ):
                batch = self._with_uneven_rows(read, num_passed)
                breaks = {
                    name: num for name in names if (num := _line_breaks(batch[name])) is not None
                }
                if breaks and num_passed >= self._num_read:
                    num_breaks = np.sum([*breaks.values()], axis=0)
                    rows = np.flatnonzero(num_breaks)
                    self._breaks.append((rows + num_passed, num_breaks[rows]))
                if not is_told:
                    is_told = self._tell_rows_in_cell(batch, breaks, num_passed)
                num_passed += len(batch)
                self._num_read = max(num_passed, self._num_read)
                last = batch.columns[-1][-1].as_py() if len(batch) else last
                columns = self._without_repeats(batch.columns)
                yield pa.RecordBatch.from_arrays(
                    [as_meant(column) for column in columns], self.header
                )
        except pa.ArrowInvalid as error:
            if "Empty CSV" in str(error) or "Could not skip" in str(error):
                raise UserError(f"{self.path} has a header but no rows.") from error
            raise self._first_fault(str(error)) from error
        if re.search(_BREAK, last) and not self._text.ends_with_quote:
            raise self._first_fault("a quotation mark is not closed")

    def lines(self, positions: np.ndarray) -> np.ndarray:
        """Return the first line of each of some rows that were read, which are counted from 0
        behind the header.
        """
        rows, num_breaks = map(np.concatenate, zip(*self._breaks, strict=True))
        before = np.concatenate([[0], np.cumsum(num_breaks)])[np.searchsorted(rows, positions)]
        return self._num_skipped + 1 + positions + before

    @property
    def _repeats(self) -> bool:
        """Whether rows may be the header again."""
        return bool(self._text.repeated_lines) and len(self.header) > 1 and self._num_skipped == 1

    def _stream(self) -> pa.NativeFile:
        """Open the file for Arrow, which unpacks it and reads it in C if it is UTF-8."""
        if not self._text.is_plain:
            return pa.PythonFile(self._text.open(), mode="r")
        return pa.input_stream(
            self.path, compression="gzip" if self.path.suffix.lower() == ".gz" else None
        )

    def _delimiters(self) -> str:
        """Return the separators that are possible: a blank only if texts are in quotation marks, as
        R writes them.
        """
        first = self._text.first_lines[0] if self._text.first_lines else b""
        if match := _DELIMITER_LINE.fullmatch(first):
            return match[1].decode("latin-1")
        return _DELIMITERS if first.startswith(b'"') else _DELIMITERS.rstrip()

    @contextmanager
    def _reader(self, delimiter: str) -> Iterator[Any]:
        """Open Python's reader behind the header; cells may be as long as Arrow reads them."""
        before = csv.field_size_limit(MAX_LINE_BYTES)
        escape = "\\" if self._text.has_escapes else None
        try:
            with io.TextIOWrapper(self._text.open(), encoding="utf-8-sig", newline="") as text:
                for _ in range(self._num_skipped):
                    text.readline()
                yield csv.reader(text, delimiter=delimiter, escapechar=escape)
        finally:
            csv.field_size_limit(before)

    def _header(
        self, delimiter: str, columns: Collection[str], optional: Collection[str]
    ) -> _CsvHeader:
        """Return the header that a separator finds; titles may precede it, and R's names of rows be
        behind it.
        """
        rows: list[tuple[list[str], int]] = []
        try:
            with self._reader(delimiter) as reader:
                with_content = (
                    (row, reader.line_num) for row in reader if any(map(str.strip, row))
                )
                rows.extend(itertools.islice(with_content, FIRST_ROWS))
        except csv.Error:  # a cell is longer than a block, which may be behind the header
            if not rows:
                raise
        if not rows:
            raise UserError(f"{self.path} is empty.")
        at = header_row([row for row, _ in rows], columns)
        names, end = rows[at]
        check_number(self.path, len(names))
        notices = []
        if at > (_DELIMITER_LINE.fullmatch(self._text.first_lines[0]) is not None):
            notices.append(below_titles(self.path, "line", end))
        below = [row for row, _ in rows[at + 1 :]]
        if below and all(len(row) == len(names) + 1 for row in below):
            if not any(row[-1].strip() for row in below):
                names = [*names, ""]
            elif self._have_names([row[0] for row in below]):
                names = ["", *names]
                notices.append(
                    f"{self.path}: rows have one cell more than the header, as R writes "
                    "names of rows; the first one "
                    "is taken as a column without a name."
                )
        num_found = sum(bool(named(name, names)) for name in {*columns, *optional})
        return _CsvHeader(delimiter, names, end, notices, num_found)

    def _have_names(self, cells: list[str]) -> bool:
        """Return whether the first cells of rows are names that R has given them: numbers, or all
        texts are quoted.
        """
        are_quoted = all(line.startswith(b'"') for line in self._text.first_lines)
        return len(set(cells)) == len(cells) and (are_quoted or all(map(str.isdecimal, cells)))

    def _quotes(self) -> Quotes:
        """Return what is in quotation marks in the first lines, without a need of them.

        Cells without content, and lines that do not have a cell for each column, tell nothing.
        """
        if self._text.has_escapes:
            return Quotes()
        mark = re.escape(self.delimiter).encode()
        cell = re.compile(rb'("(?:[^"]|"")*"|[^"' + mark + rb"]*)(?:" + mark + rb"|$)")
        needs_quotes = re.compile(rb'[\r\n"' + mark + rb"]")
        in_header: set[bool] = set()
        in_columns: list[set[bool]] = [set() for _ in self.header]
        for line in self._text.first_lines[:FIRST_ROWS]:
            cells = cell.findall(line)[: len(self.header)]
            contents = [text.removeprefix(b'"').removesuffix(b'"') for text in cells]
            are_quoted = [content != text for content, text in zip(contents, cells, strict=True)]
            if [content.decode("utf-8", "replace") for content in contents] == self._as_written:
                in_header = {*are_quoted}
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
        try:
            cells = next(
                csv.reader(io.StringIO(row.text, newline=""), delimiter=self.delimiter), []
            )
        except csv.Error:
            return "error"
        if not self._is_readable(cells):
            return "error"
        num_columns = len(self.header)
        filled = [*cells[:num_columns], *[""] * (num_columns - len(cells))]
        self._uneven_rows[row.number - self._num_skipped - 1] = filled
        return "skip"

    def _is_readable(self, cells: list[str]) -> bool:
        """Return whether a row of another length than the header is blank, or blank behind the last
        column.
        """
        has_columns = len(cells) >= len(self.header)
        return not any(map(str.strip, cells[len(self.header) :] if has_columns else cells))

    def _with_uneven_rows(self, batch: pa.RecordBatch, num_passed: int) -> pa.RecordBatch:
        """Return a batch behind some rows with the uneven ones that Arrow has skipped, where they
        were.
        """
        positions: list[int] = []
        for position in sorted(self._uneven_rows):
            if position <= num_passed + len(batch) + len(positions):
                positions.append(position)
        if not positions:
            return batch
        rows = [self._uneven_rows.pop(position) for position in positions]
        uneven = pa.RecordBatch.from_arrays(
            [pa.array(cells, pa.string()) for cells in zip(*rows, strict=True)], schema=batch.schema
        )
        places = np.array(positions) - num_passed - np.arange(len(positions))
        order = np.insert(np.arange(len(batch)), places, len(batch) + np.arange(len(positions)))
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
        """Return what is wrong with the first row of another length than the header, or the last;
        else the error.
        """
        begin = passed = 0
        row: list[str] = []
        with self._reader(self.delimiter) as reader:
            try:
                for row in reader:
                    begin, passed = passed, reader.line_num
                    if len(row) not in (0, len(self.header)) and not self._is_readable(row):
                        break
                is_last = next(reader, None) is None
                is_open = (
                    is_last
                    and re.search(_BREAK, "".join(row)) is not None
                    and not self._text.ends_with_quote
                )
            except csv.Error:  # the row is longer than a block
                begin, is_open = passed, True
        where = f"{self.path}, line {self._num_skipped + begin + 1}"
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

    def _tell_rows_in_cell(
        self, batch: pa.RecordBatch, breaks: dict[str, np.ndarray], passed: int
    ) -> bool:
        """Issue a notice on the first cell whose line breaks end as many separators as a row has,
        if there is one.

        Two stray quotation marks make one cell of all rows between them.
        """
        for name, num_breaks in breaks.items():
            num_marks = np.asarray(pc.count_substring(batch[name], self.delimiter))
            found = np.flatnonzero(
                (num_breaks > 0) & (num_marks == num_breaks * (batch.num_columns - 1))
            )
            if len(found):
                line = self.lines(found[:1] + passed)[0]
                number = counted(int(num_breaks[found[0]]), "line break", "line breaks")
                notice = (
                    f"{self.path}, line {line}: one cell holds {number} and looks like "
                    "rows of the table. If there is "
                    "a quotation mark too few or too many, these rows are lost: fix it, "
                    "and start again."
                )
                warn_user(Notice(notice))
                return True
        return False


def _line_breaks(column: pa.Array) -> np.ndarray | None:
    """Return the number of line breaks in each cell; None if there are none, which is much faster
    to find out.
    """
    content = column.buffers()[2].to_pybytes() if column.buffers()[2] else b""
    has_breaks = b"\n" in content or b"\r" in content
    return np.asarray(pc.count_substring_regex(column, _BREAK)) if has_breaks else None


def are_formulas(cells: pa.ChunkedArray | pa.Array) -> pa.ChunkedArray | pa.Array:
    """Return which of some texts a spreadsheet would run.

    A transcribed "=1+1" or "-daughter of the above" is text here, and a formula in Excel; a
    malicious one can run programs. See https://owasp.org/www-community/attacks/CSV_Injection.
    """
    is_run = pc.is_in(pc.utf8_slice_codeunits(cells, 0, 1), value_set=_FIRST.cast(cells.type))
    if pc.any(is_run, min_count=0).as_py():
        is_run = pc.and_not(
            pc.match_substring_regex(cells, _RUN), pc.match_substring_regex(cells, _SHOWN)
        )
    return is_run


def without_formulas(cells: pa.ChunkedArray | pa.Array) -> tuple[pa.ChunkedArray | pa.Array, int]:
    """Put an apostrophe before each text that a spreadsheet would run; return how many have one."""
    found = are_formulas(cells)
    if not (number := pc.sum(found, min_count=0).as_py()):
        return cells, 0
    quote, nothing = (pa.scalar(text, cells.type) for text in ("'", ""))
    return pc.if_else(found, pc.binary_join_element_wise(quote, cells, nothing), cells), number


def as_meant(cells: pa.Array) -> pa.Array:
    """Undo `without_formulas`."""
    if not pc.any(pc.starts_with(cells, "'"), min_count=0).as_py():
        return cells
    rest = pc.utf8_slice_codeunits(cells, 1)
    return pc.if_else(pc.and_(pc.starts_with(cells, "'"), are_formulas(rest)), rest, cells)
