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
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from histocoder.errors import Notice, UserError, counted, shown, warn_user
from histocoder.tables.header import FIRST_ROWS, below_titles, header_row, named

_BLOCK_BYTES = 1 << 22  # number of bytes that Arrow reads at once; a row must fit in
_CHECK_BYTES = 1 << 24
_DELIMITERS = ",;\t|"
_BREAK = r"\r\n|\n|\r"
_NOT_UTF8 = re.compile("[\udc80-\udcff]")  # as Python decodes such bytes
_UNDEFINED = b"\x81\x8d\x8f\x90\x9d"  # bytes that Windows-1252 lacks
_BOM = b"\xef\xbb\xbf"
_ESCAPED = re.compile(rb'[,;\t\n]"[^"\n]*\\"[^",;\t\r\n]')  # a quotation mark with a backslash before it, not doubled
_FIRST = pa.array([*"'=+-@\t\r\n＝＋－＠"])  # characters that begin cells which a spreadsheet would run
_RUN = r"(?s)^'*[=+\-@\t\r\n＝＋－＠].*[\pL\pN]"  # begin of such a cell
_SHOWN = r"^[+-]?[0-9][0-9.,]*([eE][+-]?[0-9]+)?$"  # numbers, which it shows as they are: -1, -2 and -3 are codes


class CsvFile:
    """A CSV file: all of it tells the encoding, and its first rows the rest of its form.

    The separator is the one that finds most of `columns` and `optional`.

    Raises UserError if the file is not text in UTF-8 or cp1252, is damaged UTF-8, or is empty.
    """

    def __init__(self, path: Path, columns: Collection[str], optional: Collection[str]) -> None:
        self.path = path
        self.notices: list[str] = []
        self._num_skipped = 0
        self._num_read, self._breaks = 0, [(np.zeros(0, np.int64), np.zeros(0, np.int64))]
        forms = []
        try:
            self._scan()
            for self.delimiter in _DELIMITERS:
                header, end, has_titles = self._header(columns)
                num_found = sum(bool(named(name, header)) for name in {*columns, *optional})
                forms.append(((num_found, len(header)), self.delimiter, header, end, has_titles))
        except csv.Error as error:
            raise UserError(f"{path} has no header that can be read: {error}.") from error
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UserError(f"{path} is damaged, or not a gzip file ({error}). Compress it again.") from error
        _, self.delimiter, self.header, self._num_skipped, has_titles = max(forms, key=lambda form: form[0])
        self.notices += [below_titles(path, "line", self._num_skipped)] if has_titles else []
        self.decimal = "," if self.delimiter == ";" else "."
        self.schema = pa.schema([(name, pa.string()) for name in self.header])

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield all columns as text, formulas without their apostrophe; raise a UserError where the form is broken."""
        names, passed, last, is_told = [str(i) for i in range(len(self.header))], 0, "", False
        read = {"block_size": _BLOCK_BYTES, "skip_rows": self._num_skipped, "column_names": names}
        parse = {"delimiter": self.delimiter, "escape_char": self._escape or False, "newlines_in_values": True}
        unchanged = {"column_types": dict.fromkeys(names, pa.string()), "strings_can_be_null": False, "null_values": []}
        try:
            for batch in pa.csv.open_csv(
                pa.input_stream(self.path, compression="gzip" if self.path.suffix.lower() == ".gz" else None),
                pa.csv.ReadOptions(use_threads=False, encoding=self._encoding.removesuffix("-sig"), **read),
                pa.csv.ParseOptions(ignore_empty_lines=False, **parse),
                pa.csv.ConvertOptions(**unchanged),
            ):
                breaks = {name: num for name in names if (num := _line_breaks(batch[name])) is not None}
                if breaks and passed >= self._num_read:
                    num_breaks = np.sum([*breaks.values()], axis=0)
                    rows = np.flatnonzero(num_breaks)
                    self._breaks.append((rows + passed, num_breaks[rows]))
                if not is_told:
                    is_told = self._tell_rows_in_cell(batch, breaks, passed)
                passed += len(batch)
                self._num_read = max(passed, self._num_read)
                last = batch.columns[-1][-1].as_py() if len(batch) else last
                yield pa.RecordBatch.from_arrays([as_meant(column) for column in batch.columns], self.header)
        except pa.ArrowInvalid as error:
            if "Empty CSV" in str(error) or "Could not skip" in str(error):
                raise UserError(f"{self.path} has a header but no rows.") from error
            raise self._first_fault(str(error)) from error
        if re.search(_BREAK, last) and not self._ends_with_quote:
            raise self._first_fault("a quotation mark is not closed")

    def lines(self, positions: np.ndarray) -> np.ndarray:
        """Return the first line of each of some rows that were read, which are counted from 0 behind the header."""
        rows, num_breaks = map(np.concatenate, zip(*self._breaks, strict=True))
        before = np.concatenate([[0], np.cumsum(num_breaks)])[np.searchsorted(rows, positions)]
        return self._num_skipped + 1 + positions + before

    @contextmanager
    def _reader(self) -> Iterator[Any]:
        """Open Python's reader behind the header; cells may be as long as Arrow reads them."""
        before = csv.field_size_limit(_BLOCK_BYTES)
        try:
            with io.TextIOWrapper(_opened(self.path), encoding=self._encoding, newline="") as text:
                for _ in range(self._num_skipped):
                    text.readline()
                yield csv.reader(text, delimiter=self.delimiter, escapechar=self._escape)
        finally:
            csv.field_size_limit(before)

    def _header(self, columns: Collection[str]) -> tuple[list[str], int, bool]:
        """Return the header, as it was meant, the number of lines to its end, and whether titles precede it."""
        found: list[tuple[list[str], int]] = []
        try:
            with self._reader() as reader:
                rows = ((row, reader.line_num) for row in reader if any(map(str.strip, row)))
                found.extend(itertools.islice(rows, FIRST_ROWS))
        except csv.Error:  # a cell is longer than a block, which may be behind the header
            if not found:
                raise
        if not found:
            raise UserError(f"{self.path} is empty.")
        at = header_row([row for row, _ in found], columns)
        row, end = found[at]
        return as_meant(pa.array(row, pa.string())).to_pylist(), end, at > 0

    def _first_fault(self, error: str) -> UserError:
        """Return what is wrong with the first row of another length than the header, or the last; else the error."""
        begin = passed = 0
        row: list[str] = []
        with self._reader() as reader:
            try:
                for row in reader:
                    begin, passed = passed, reader.line_num
                    if len(row) not in (0, len(self.header)):
                        break
                is_last = next(reader, None) is None
                is_open = is_last and re.search(_BREAK, "".join(row)) is not None and not self._ends_with_quote
            except csv.Error:  # the row is longer than a block
                begin, is_open = passed, True
        where = f"{self.path}, line {self._num_skipped + begin + 1}"
        if is_open:
            return UserError(f"{where}: a quotation mark is opened and not closed. Close it, or remove it.")
        if len(row) in (0, len(self.header)):
            return UserError(f"{self.path} is not a well-formed CSV file: {error}.")
        return UserError(
            f"{where}: {len(row)} fields where the header has {len(self.header)} ({shown(self.delimiter.join(row))}). "
            "Quote a field that contains the separator, or fix the row."
        )

    def _tell_rows_in_cell(self, batch: pa.RecordBatch, breaks: dict[str, np.ndarray], passed: int) -> bool:
        """Issue a notice on the first cell whose line breaks end as many separators as a row has, if there is one.

        Two stray quotation marks make one cell of all rows between them.
        """
        for name, num_breaks in breaks.items():
            num_marks = np.asarray(pc.count_substring(batch[name], self.delimiter))
            found = np.flatnonzero((num_breaks > 0) & (num_marks == num_breaks * (batch.num_columns - 1)))
            if len(found):
                line = self.lines(found[:1] + passed)[0]
                number = counted(int(num_breaks[found[0]]), "line break", "line breaks")
                notice = (
                    f"{self.path}, line {line}: one cell holds {number} and looks like rows of the table. If there is "
                    "a quotation mark too few or too many, these rows are lost: fix it, and start again."
                )
                warn_user(Notice(notice))
                return True
        return False

    def _scan(self) -> None:
        """Find the encoding and the escape of quotation marks; raise a UserError unless all of the file is text."""
        line, num_good, num_bad, has_escapes, tail = 1, 0, 0, False, b""
        first, is_cp1252 = "", True
        with _opened(self.path) as file:
            self.excel = file.read(3) == _BOM
            file.seek(0)
            while chunk := file.read(_CHECK_BYTES) + file.readline():
                if b"\0" in chunk:
                    line += chunk[: chunk.index(b"\0")].count(b"\n")
                    raise UserError(
                        f"{self.path} has a NUL byte in line {line}: it is damaged, UTF-16 text or a workbook. Save it "
                        "as UTF-8 CSV (in Excel: 'CSV UTF-8')."
                    )
                if not chunk.isascii():
                    try:
                        text, bad = chunk.decode("utf-8"), []
                    except UnicodeDecodeError:
                        text = chunk.decode("utf-8", "surrogateescape")
                        bad = _NOT_UTF8.findall(text)
                    if bad and not first:
                        first_line = line + text[: text.index(bad[0])].count("\n")
                        first = f"line {first_line}: the byte 0x{ord(bad[0]) - 0xDC00:02X}"
                    num_bad += len(bad)
                    num_good += len(text) - len(text.encode("ascii", "ignore")) - len(bad)
                    is_cp1252 &= len(chunk.translate(None, _UNDEFINED)) == len(chunk)
                has_escapes = has_escapes or (b'\\"' in chunk and _ESCAPED.search(chunk) is not None)
                line += chunk.count(b"\n")
                tail = chunk[-64:]
        if num_bad and (self.excel or num_good > num_bad):
            raise UserError(f"{self.path}, {first} is not UTF-8, unlike most of the file. Fix it, or save as UTF-8.")
        if num_bad and not is_cp1252:
            raise UserError(f"{self.path} is neither UTF-8 nor Windows-1252 text; save it as UTF-8.")
        self._ends_with_quote = tail.rstrip().endswith(b'"')
        self._encoding, self._escape = "cp1252" if num_bad else "utf-8-sig", "\\" if has_escapes else None
        if num_bad:
            self.notices.append(f"{self.path} is not UTF-8; it is read as Windows-1252 (cp1252). Check its accents.")
        if has_escapes:
            self.notices.append(f"{self.path}: quotation marks are escaped with backslashes, as R writes them.")


def _opened(path: Path) -> BinaryIO:
    """Open a file to read its bytes, unpacked if its name ends in .gz."""
    return cast(BinaryIO, gzip.open(path, "rb")) if path.suffix.lower() == ".gz" else path.open("rb")


def _line_breaks(column: pa.Array) -> np.ndarray | None:
    """Return the number of line breaks in each cell; None if there are none, which is much faster to find out."""
    content = column.buffers()[2].to_pybytes() if column.buffers()[2] else b""
    has_breaks = b"\n" in content or b"\r" in content
    return np.asarray(pc.count_substring_regex(column, _BREAK)) if has_breaks else None


def are_formulas(cells: pa.ChunkedArray | pa.Array) -> pa.ChunkedArray | pa.Array:
    """Return which of some texts a spreadsheet would run.

    A transcribed "=1+1" or "-daughter of the above" is text here, and a formula in Excel; a malicious one can run
    programs. See https://owasp.org/www-community/attacks/CSV_Injection.
    """
    is_run = pc.is_in(pc.utf8_slice_codeunits(cells, 0, 1), value_set=_FIRST.cast(cells.type))
    if pc.any(is_run, min_count=0).as_py():
        is_run = pc.and_not(pc.match_substring_regex(cells, _RUN), pc.match_substring_regex(cells, _SHOWN))
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
