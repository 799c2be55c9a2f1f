"""CSV files: encoding, separator, header, decimal mark, and errors that name the line."""

import codecs
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

from histocoder.data.formulas import as_meant
from histocoder.data.header import FIRST_ROWS, below_titles, header_row, named
from histocoder.errors import Notice, UserError, shown, warn_user

_BLOCK_BYTES = 1 << 22  # number of bytes that Arrow reads at once; a row must fit in
_CHECK_BYTES = 1 << 24
_DELIMITERS = ",;\t|"
_DECLARED = re.compile(r'"?sep=([^"\w]|\t)"?\s*', re.IGNORECASE)  # first line that tells spreadsheets the delimiter
_BREAK = r"\r\n|\n|\r"
_DECIMAL = re.compile(r"\s*[+-]?[0-9]+([.,])[0-9]+\s*")
_NUL, _NOT_UTF8 = re.compile("\0"), re.compile("[\udc80-\udcff]")  # the latter as Python decodes such bytes
_TWICE_ENCODED = re.compile("Ã[\xa0-\xbf]")  # "Ã¤" in place of "ä": UTF-8 that was read as cp1252, and written again
_ESCAPED = re.compile(r'[,;\t\n]"[^"\n]*\\"[^",;\t\r\n]')  # a quotation mark with a backslash before it, not doubled
_OTHERS = {
    codecs.BOM_UTF16_LE: "UTF-16 text; save it as UTF-8 (in Excel: 'CSV UTF-8')",
    codecs.BOM_UTF16_BE: "UTF-16 text; save it as UTF-8 (in Excel: 'CSV UTF-8')",
    b"PK\x03\x04": "a zip archive or a spreadsheet; the name of an Excel workbook must end in .xlsx",
}
"""First bytes of files that are not CSV."""


class CsvFile:
    """A CSV file: all of it tells the encoding, and its first rows the rest of its form.

    The separator is that of a first line `sep=…`, else the one that finds most of `columns` and `optional`.

    Raises UserError if the file is not text in UTF-8 or cp1252, is damaged UTF-8, or is empty.
    """

    def __init__(self, path: Path, columns: Collection[str], optional: Collection[str]) -> None:
        self.path = path
        self.notices: list[str] = []
        self.delimiter, self._num_skipped = ",", 0
        self._num_read, self._breaks = 0, [(np.zeros(0, np.int64), np.zeros(0, np.int64))]
        try:
            self._scan()
            with self._reader() as reader:
                declared = _DECLARED.fullmatch(",".join(next(reader, []))[:20])
            forms = []
            for delimiter in declared[1] if declared else _DELIMITERS:
                self.delimiter, self._num_skipped = delimiter, 1 if declared else 0
                rows, ends = self._first_rows()
                at = header_row(rows, columns)
                header = as_meant(pa.array(rows[at], pa.string())).to_pylist()
                num_found = sum(bool(named(name, header)) for name in {*columns, *optional})
                forms.append(((num_found, len(header)), delimiter, header, rows[at:], ends[at], at))
        except UnicodeDecodeError as error:
            raise self._no_text() from error
        except csv.Error as error:
            raise UserError(f"{path} has no header that can be read: {error}.") from error
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UserError(f"{path} is damaged, or not a gzip file ({error}). Compress it again.") from error
        _, self.delimiter, self.header, rows, self._num_skipped, at = max(forms, key=lambda form: form[0])
        marks = {match[1] for cell in itertools.chain(*rows) if (match := _DECIMAL.fullmatch(cell))}
        has_commas = "," in marks or (self.delimiter == ";" and not marks)
        self.decimal = "," if has_commas and self.delimiter != "," else "."
        self.schema = pa.schema([(name, pa.string()) for name in self.header])
        self.notices += [below_titles(path, "line", self._num_skipped)] if at else []

    def batches(self, *, warn: bool = True) -> Iterator[pa.RecordBatch]:
        """Yield all columns as text, formulas without their apostrophe; raise a UserError where the form is broken."""
        names, passed, last = [str(i) for i in range(len(self.header))], 0, ""
        encoding = "cp1252" if self._encoding == "cp1252" else "utf8"
        read = {"block_size": _BLOCK_BYTES, "skip_rows": self._num_skipped, "column_names": names, "encoding": encoding}
        parse = {"delimiter": self.delimiter, "escape_char": self._escape or False, "newlines_in_values": True}
        unchanged = {"column_types": dict.fromkeys(names, pa.string()), "strings_can_be_null": False, "null_values": []}
        try:
            for batch in pa.csv.open_csv(
                self.path,
                pa.csv.ReadOptions(use_threads=False, **read),
                pa.csv.ParseOptions(ignore_empty_lines=False, **parse),
                pa.csv.ConvertOptions(**unchanged),
            ):
                breaks = {name: num for name in names if (num := _line_breaks(batch[name])) is not None}
                if breaks and passed >= self._num_read:
                    num_breaks = np.sum([*breaks.values()], axis=0)
                    rows = np.flatnonzero(num_breaks)
                    self._breaks.append((rows + passed, num_breaks[rows]))
                if warn and (found := self._rows_in_cell(batch, breaks, passed)):
                    warn_user(Notice(found))
                    warn = False
                passed += len(batch)
                self._num_read = max(passed, self._num_read)
                last = batch.columns[-1][-1].as_py() if len(batch) else last
                yield pa.RecordBatch.from_arrays([as_meant(column) for column in batch.columns], self.header)
        except pa.ArrowInvalid as error:
            if "Empty CSV" in str(error) or "Could not skip" in str(error):
                raise UserError(f"{self.path} has a header but no rows.") from error
            raise self._first_fault(str(error)) from error
        except UnicodeDecodeError as error:
            raise self._no_text() from error
        if re.search(_BREAK, last) and not self._ends_with_quote:
            raise self._first_fault("a quotation mark is not closed")

    def count_rows(self) -> int:
        """Return the number of rows; raise a UserError where the form is broken."""
        return sum(map(len, self.batches(warn=False)))

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

    def _first_rows(self) -> tuple[list[list[str]], list[int]]:
        """Return the first rows with content, and the number of lines up to the end of each."""
        found: list[tuple[list[str], int]] = []
        try:
            with self._reader() as reader:
                rows = ((row, self._num_skipped + reader.line_num) for row in reader if any(map(str.strip, row)))
                found.extend(itertools.islice(rows, FIRST_ROWS))
        except csv.Error:  # a cell is longer than a block, which may be behind the header
            if not found:
                raise
        if not found:
            raise UserError(f"{self.path} is empty.")
        return [row for row, _ in found], [end for _, end in found]

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

    def _rows_in_cell(self, batch: pa.RecordBatch, breaks: dict[str, np.ndarray], passed: int) -> str | None:
        """Return a notice on the first cell whose line breaks end as many separators as a row has.

        Two stray quotation marks make one cell of all rows between them.
        """
        for name, num_breaks in breaks.items():
            num_marks = np.asarray(pc.count_substring(batch[name], self.delimiter))
            found = np.flatnonzero((num_breaks > 0) & (num_marks == num_breaks * (batch.num_columns - 1)))
            if len(found):
                line, number = self.lines(found[:1] + passed)[0], f"{num_breaks[found[0]]:,} line breaks"
                return (
                    f"{self.path}, line {line}: one cell holds {number} and looks like rows of the table. If there is "
                    "a quotation mark too few or too many, these rows are lost: fix it, and start again."
                )
        return None

    def _scan(self) -> None:
        """Find the encoding, and what notices tell; raise a UserError unless all of the file is text."""
        found: dict[re.Pattern[str], tuple[int, int, str]] = {}  # line, byte and text of the first match
        decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        line, num_read, num_characters, num_bad, chunk, tail = 1, 0, 0, 0, b"x", b""
        with _opened(self.path) as file:
            head = file.read(4)
            for start, what in _OTHERS.items():
                if head.startswith(start):
                    raise UserError(f"{self.path} is {what}.")
            file.seek(0)
            while chunk and _NUL not in found:
                chunk = file.read(_CHECK_BYTES)
                first = num_read - len(decoder.getstate()[0])  # byte of the text, which may begin in the last chunk
                text = decoder.decode(chunk, final=not chunk)
                patterns = [_NUL] if text.isascii() else [_NUL, _NOT_UTF8, _TWICE_ENCODED]
                for pattern in [*patterns, _ESCAPED] if '\\"' in text else patterns:
                    if pattern not in found and (match := pattern.search(text)):
                        before = text[: match.start()]
                        number = first + len(before.encode("utf-8", "surrogateescape")) + 1
                        found[pattern] = line + before.count("\n"), number, match[0]
                if not text.isascii():
                    num_here = len(_NOT_UTF8.findall(text))
                    num_bad += num_here
                    num_characters += len(text) - len(text.encode("ascii", "ignore")) - num_here
                line += text.count("\n")
                num_read += len(chunk)
                tail = (tail + chunk)[-64:]
        if _NUL in found:
            raise UserError(
                f"{self.path} has a NUL byte in line {found[_NUL][0]}; it is damaged or not text. Save it as UTF-8 CSV."
            )
        self.excel, self._ends_with_quote = head.startswith(codecs.BOM_UTF8), tail.rstrip().endswith(b'"')
        self._encoding, self._escape = "cp1252" if num_bad else "utf-8-sig", "\\" if _ESCAPED in found else None
        if num_bad and (
            num_characters > num_bad or self.excel
        ):  # cp1252 has such by accident only, as "É»" in "«CAFÉ»"
            line, number, byte = found[_NOT_UTF8]
            raise UserError(
                f"{self.path}, line {line}: the byte 0x{ord(byte) - 0xDC00:02X} (byte {number} of the file) is not "
                "UTF-8, but most of the file is. Fix that line, or save the file as UTF-8 again."
            )
        if num_bad:
            self.notices.append(
                f"{self.path} is not UTF-8; it is read as Windows-1252 (cp1252). Check that accents look right."
            )
        elif _TWICE_ENCODED in found:
            self.notices.append(
                f"{self.path}, line {found[_TWICE_ENCODED][0]}: accented letters are written as 'Ã' and a sign: UTF-8 "
                "was read as Windows-1252 once. Open the original as UTF-8, and save it again."
            )
        if self._escape:
            self.notices.append(
                f"{self.path}: quotation marks are escaped with backslashes, as R writes them, and are read as such."
            )

    def _no_text(self) -> UserError:
        return UserError(f"{self.path} is neither UTF-8 nor Windows-1252 text; save it as UTF-8.")


def _opened(path: Path) -> BinaryIO:
    """Open a file to read its bytes, unpacked if its name ends in .gz."""
    return cast(BinaryIO, gzip.open(path, "rb")) if path.suffix.lower() == ".gz" else path.open("rb")


def _line_breaks(column: pa.Array) -> np.ndarray | None:
    """Return the number of line breaks in each cell; None if there are none, which is much faster to find out."""
    content = column.buffers()[2].to_pybytes() if column.buffers()[2] else b""
    has_breaks = b"\n" in content or b"\r" in content
    return np.asarray(pc.count_substring_regex(column, _BREAK)) if has_breaks else None
