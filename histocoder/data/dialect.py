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
from typing import Any, BinaryIO, TextIO, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from histocoder.data.header import FIRST_ROWS, below_titles, header_row, named
from histocoder.data.sheets import as_meant
from histocoder.errors import Notice, UserError, shown, warn_user

_BLOCK_BYTES = 1 << 22  # number of bytes that Arrow reads at once; a row must fit in
_CHECK_BYTES = 1 << 24
_DELIMITERS = ",;\t|"
_DECLARED = re.compile(r'"?sep=([^"\w]|\t)"?\s*', re.IGNORECASE)  # first line that tells spreadsheets the delimiter
_BREAK = re.compile(r"\r\n|\n|\r")
_DECIMAL = re.compile(r"[+-]?[0-9]+([.,])[0-9]+")
_ESCAPED = re.compile(r'[,;\t\n]"[^"\n]*\\"[^",;\t\r\n]')
"""A quotation mark within a quoted cell that has a backslash before it, and is not doubled."""
_NOT_UTF8 = re.compile("[\udc80-\udcff]")  # as Python decodes such bytes
_NUL = re.compile("\0")
_TWICE_ENCODED = re.compile("Ã[\xa0-\xbf]")  # "Ã¤" in place of "ä": UTF-8 that was read as cp1252, and written again

_OTHERS = {
    codecs.BOM_UTF16_LE: "UTF-16 text; save it as UTF-8 (in Excel: 'CSV UTF-8').",
    codecs.BOM_UTF16_BE: "UTF-16 text; save it as UTF-8 (in Excel: 'CSV UTF-8').",
    b"PK\x03\x04": "a zip archive or a spreadsheet; the name of an Excel workbook must end in .xlsx.",
}
"""First bytes of files that are not CSV."""
_UNCLOSED = "{path}, line {line}: a quotation mark is opened and not closed. Close it, or remove it."


class RowsInCellWarning(Notice):
    """A cell of a CSV file looks like rows."""

    def __init__(self, path: Path, line: int, count: int) -> None:
        super().__init__(
            f"{path}, line {line}: one cell holds {count:,} line breaks and looks like rows of the table. If there "
            "is a quotation mark too few or too many, these rows are lost: fix it, and start again."
        )


def opened(path: Path) -> BinaryIO:
    """Open a file to read its bytes, unpacked if its name ends in .gz."""
    return cast(BinaryIO, gzip.open(path, "rb")) if path.suffix.lower() == ".gz" else path.open("rb")


class CsvFile:
    """A CSV file: all of it tells the encoding, and its first rows the rest of its form.

    The separator is that of a first line `sep=…`, else the one that finds most columns.

    Parameters
    ----------
    path : Path
    columns, optional : collection of str
        Columns that the header has, and that it may have.

    Raises
    ------
    UserError
        If the file is not text in UTF-8 or cp1252, is damaged UTF-8, or has no header.
    """

    def __init__(self, path: Path, columns: Collection[str], optional: Collection[str]) -> None:
        self.path = path
        self.notices: list[str] = []
        self.header: list[str] = []
        self.delimiter, self.decimal, self._num_skipped = ",", ".", 0
        try:
            self._scan()
            with self._text() as text:
                declared = _DECLARED.fullmatch(text.readline(20))
            forms = []
            for delimiter in _DELIMITERS if declared is None else declared[1]:
                rows, ends = self._first_rows(delimiter, num_skipped=0 if declared is None else 1)
                at = header_row(rows, columns)
                header = as_meant(pa.array(rows[at], pa.string())).to_pylist()
                num_found = sum(bool(named(name, header)) for name in {*columns, *optional})
                forms.append((num_found, len(header), delimiter, header, rows[at:], ends[at], at))
        except UnicodeDecodeError as error:
            raise self._no_text() from error
        except csv.Error as error:
            raise UserError(f"{path} has no header that can be read: {error}.") from error
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UserError(f"{path} is damaged, or not a gzip file ({error}). Compress it again.") from error
        best = max(forms, key=lambda form: form[:2])
        _, _, self.delimiter, self.header, rows, self._num_skipped, at = best
        marks = {match[1] for cell in itertools.chain(*rows) if (match := _DECIMAL.fullmatch(cell.strip()))}
        if self.delimiter != "," and ("," in marks or (self.delimiter == ";" and not marks)):
            self.decimal = ","
        if at:
            self.notices.append(below_titles(path, "line", self._num_skipped))

    may_have_blank_rows = True

    @property
    def schema(self) -> pa.Schema:
        return pa.schema([(name, pa.string()) for name in self.header])

    def batches(
        self, *, columns: list[str] | None = None, rows: int | None = None, warn: bool = True
    ) -> Iterator[pa.RecordBatch]:
        """Yield all columns as text, formulas without their apostrophe; raise a UserError where the form is broken."""
        ragged: list[pa.csv.InvalidRow] = []
        num_rows, is_warned, last = 0, not warn, ""
        try:
            for batch in pa.csv.open_csv(self.path, **self._options(ragged)):
                if not is_warned and (found := _rows_in_cell(batch, self.delimiter)):
                    warn_user(RowsInCellWarning(self.path, self.lines(np.array([num_rows + found[0]]))[0], found[1]))
                    is_warned = True
                num_rows += len(batch)
                last = batch.columns[-1][-1].as_py() if len(batch) else last
                yield pa.RecordBatch.from_arrays([as_meant(column) for column in batch.columns], self.header)
        except pa.ArrowInvalid as error:
            raise UserError(self._malformed(ragged, error)) from error
        except UnicodeDecodeError as error:
            raise self._no_text() from error
        if _BREAK.search(last) and not self._ends_with_quote:
            raise UserError(_UNCLOSED.format(path=self.path, line=self._last_row()))

    def count_rows(self) -> int:
        """Return the number of rows; raise a UserError where the form is broken."""
        return sum(map(len, self.batches(warn=False)))

    def lines(self, positions: np.ndarray) -> np.ndarray:
        """Return the first line of each of some rows, which are counted from 0 behind the header and ascend."""
        lines = np.empty(len(positions), dtype=np.int64)
        with self._reader(self.delimiter, self._num_skipped) as reader:
            passed = 0
            for i, position in enumerate(positions.tolist()):
                next(itertools.islice(reader, position - passed, position - passed), None)
                passed = position
                lines[i] = self._num_skipped + reader.line_num + 1
        return lines

    def _text(self) -> TextIO:
        return io.TextIOWrapper(opened(self.path), encoding=self._encoding, newline="")

    @contextmanager
    def _reader(self, delimiter: str, num_skipped: int) -> Iterator[Any]:
        """Open a reader of rows after some lines, which takes cells as long as Arrow does."""
        before = csv.field_size_limit(_BLOCK_BYTES)
        try:
            with self._text() as text:
                for _ in range(num_skipped):
                    text.readline()
                yield csv.reader(text, delimiter=delimiter, escapechar=self._escape)
        finally:
            csv.field_size_limit(before)

    def _first_rows(self, delimiter: str, *, num_skipped: int) -> tuple[list[list[str]], list[int]]:
        """Return the first rows with content, and the number of lines up to the end of each."""
        rows: list[list[str]] = []
        ends: list[int] = []
        with self._reader(delimiter, num_skipped) as reader:
            try:
                while len(rows) < FIRST_ROWS and (row := next(reader, None)) is not None:
                    if any(map(str.strip, row)):
                        rows.append(row)
                        ends.append(num_skipped + reader.line_num)
            except csv.Error:
                if not rows:
                    raise
        if not rows:
            raise UserError(f"{self.path} is empty.")
        return rows, ends

    def _options(self, ragged: list[pa.csv.InvalidRow]) -> dict[str, Any]:
        """Return Arrow's options to read cells unchanged; rows of another length than the header go into `ragged`."""

        def keep(row: pa.csv.InvalidRow) -> str:
            ragged.append(row)
            return "error"

        names = [str(i) for i in range(len(self.header))]
        return {
            "read_options": pa.csv.ReadOptions(
                use_threads=False,
                block_size=_BLOCK_BYTES,
                skip_rows=self._num_skipped,
                column_names=names,
                encoding="cp1252" if self._encoding == "cp1252" else "utf8",
            ),
            "parse_options": pa.csv.ParseOptions(
                delimiter=self.delimiter,
                escape_char=self._escape or False,
                newlines_in_values=True,
                ignore_empty_lines=False,
                invalid_row_handler=keep,
            ),
            "convert_options": pa.csv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False, null_values=[]
            ),
        }

    def _malformed(self, ragged: list[pa.csv.InvalidRow], error: pa.ArrowInvalid) -> str:
        if ragged:
            row = ragged[0]
            line = self.lines(np.array([row.number - 1 - self._num_skipped]))[0]
            if row.text.count('"') % 2 and f'{self.delimiter}"' in self.delimiter + row.text:
                return _UNCLOSED.format(path=self.path, line=line)
            return (
                f"{self.path}, line {line}: {row.actual_columns} fields where the header has {row.expected_columns} "
                f"({shown(row.text)}). Quote a field that contains the separator, or fix the row."
            )
        if "Empty CSV" in str(error) or "Could not skip" in str(error):
            return f"{self.path} has a header but no rows."
        if "straddling" in str(error):
            return _UNCLOSED.format(path=self.path, line=self._last_row())
        return f"{self.path} is not a well-formed CSV file: {error}."

    def _last_row(self) -> int:
        """Return the line of the last row, or of the first one that is longer than a block."""
        start = passed = 0
        with self._reader(self.delimiter, self._num_skipped) as reader:
            try:
                for _ in reader:
                    start, passed = passed, reader.line_num
            except csv.Error:
                start = passed
        return self._num_skipped + start + 1

    def _scan(self) -> None:
        """Find the encoding, and what notices tell; raise a UserError unless all of the file is text."""
        found: dict[re.Pattern[str], tuple[int, int, str]] = {}  # line, byte and text of the first match
        decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        line, num_read, num_characters, num_bad, chunk, tail = 1, 0, 0, 0, b"x", b""
        with opened(self.path) as file:
            head = file.read(4)
            for start, what in _OTHERS.items():
                if head.startswith(start):
                    raise UserError(f"{self.path} is {what}")
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
        self.excel = head.startswith(codecs.BOM_UTF8)
        self._ends_with_quote = tail.rstrip().endswith(b'"')
        self._encoding = "cp1252" if num_bad else "utf-8-sig"
        self._escape = "\\" if _ESCAPED in found else None
        if num_bad:
            line, number, byte = found[_NOT_UTF8]
            # in cp1252 there are characters of UTF-8 by accident only, as "É»" in "«CAFÉ»"
            if num_characters > num_bad or self.excel:
                raise UserError(
                    f"{self.path}, line {line}: the byte 0x{ord(byte) - 0xDC00:02X} (byte {number} of the file) is not "
                    "UTF-8, but most of the file is. Fix that line, or save the file as UTF-8 again."
                )
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


def _rows_in_cell(batch: pa.RecordBatch, delimiter: str) -> tuple[int, int] | None:
    """Return the row of a cell that looks like rows, and its number of line breaks; None if there is none.

    Two stray quotation marks make one cell of all rows between them, with as many delimiters as these rows have.
    """
    for column in filter(_may_have_breaks, batch.columns):
        for row in np.flatnonzero(pc.match_substring_regex(column, _BREAK.pattern)):
            text = column[int(row)].as_py()
            num_breaks = len(_BREAK.findall(text))
            if text.count(delimiter) == num_breaks * (batch.num_columns - 1):
                return int(row), num_breaks
    return None


def _may_have_breaks(column: pa.StringArray) -> bool:
    """Return whether cells may hold line breaks; looks through the array's buffer at once, not at each string."""
    characters = column.buffers()[2]
    content = b"" if characters is None else characters.to_pybytes()
    return b"\n" in content or b"\r" in content
