"""CSV files: encoding, separator, lines of rows, and errors in their form."""

import codecs
import csv
import gzip
import io
import itertools
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from histocoder.data.sheets import as_meant
from histocoder.errors import Notice, UserError, shown, warn_user

_BLOCK_BYTES = 1 << 22  # number of bytes that Arrow reads at once; a row must fit in
_CHECK_BYTES = 1 << 24
_DELIMITERS = ",;\t"
_DECLARED = re.compile(r'"?sep=([^"\w]|\t)"?\s*', re.IGNORECASE)  # first line that tells spreadsheets the delimiter
_BREAK = re.compile(r"\r\n|\n|\r")
_UNCLOSED = "{path}, line {line}: a quotation mark is opened and not closed. Close it, or remove it."
_NOT_ASCII = bytes(range(128, 256))
_ESCAPED = re.compile(rb'[,;\t\n]"[^"\n]*\\"[^",;\t\r\n]')
"""A quotation mark within a quoted cell that has a backslash before it, and is not doubled."""
_TWICE_ENCODED = re.compile(rb"\xc3\x83\xc2[\xa0-\xbf]")
"""An accented letter in UTF-8 that was read as cp1252, and written in UTF-8 again: "Ã¤" in place of "ä"."""


@dataclass(frozen=True)
class Dialect:
    """Form of a CSV file."""

    encoding: str
    delimiter: str
    num_skipped: int = 0
    """Number of lines before the header."""
    escape: str | None = None
    """Character before quotation marks within cells, as R's write.table has it; None: they are doubled."""
    has_odd_quotes: bool = False
    """Whether the number of quotation marks is odd, so that one may be opened and not closed."""
    twice_encoded: int = 0
    """First line with a letter that was encoded twice; 0: none."""

    @property
    def is_utf8(self) -> bool:
        """Whether it is UTF-8; else cp1252."""
        return self.encoding != "cp1252"


def sniff(path: Path, columns: Sequence[str]) -> tuple[list[str], Dialect]:
    """Return the header and the dialect of a CSV file.

    The delimiter is that of a first line `sep=…`, else the one that finds most of `columns`, then most columns.

    Raises UserError if the file is not text in UTF-8 or cp1252, is damaged UTF-8, or has no header.
    """
    try:
        is_utf8, has_escapes, has_odd_quotes, twice_encoded = _scan(path)
        encoding, escape = "utf-8-sig" if is_utf8 else "cp1252", "\\" if has_escapes else None
        with _text_of(path, encoding) as file, _long_cells():
            headers = {}
            declared = _DECLARED.fullmatch(file.readline(20))
            num_skipped = 0 if declared is None else 1
            for delimiter in _DELIMITERS if declared is None else declared[1]:
                _rewind(file, num_skipped)
                names = next(csv.reader(file, delimiter=delimiter, escapechar=escape))
                headers[delimiter] = as_meant(pa.array(names, pa.string())).to_pylist()
    except UnicodeDecodeError as error:
        raise _no_text(path) from error
    except (csv.Error, StopIteration) as error:
        raise UserError(f"{path} has no header that can be read: {error}.") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path} is damaged, or not a gzip file ({error}). Compress it again.") from error
    best = max(headers, key=lambda d: (len(set(columns) & set(headers[d])), len(headers[d])))
    return headers[best], Dialect(encoding, best, num_skipped, escape, has_odd_quotes, twice_encoded)


def opened(path: Path) -> BinaryIO:
    """Open a file to read its bytes, unpacked if its name ends in .gz."""
    return cast(BinaryIO, gzip.open(path, "rb")) if path.suffix.lower() == ".gz" else path.open("rb")


def _text_of(path: Path, encoding: str) -> TextIO:
    return io.TextIOWrapper(opened(path), encoding=encoding, newline="")


def _rewind(file: TextIO, num_skipped: int) -> None:
    """Seek to the line of the header."""
    file.seek(0)
    for _ in range(num_skipped):
        file.readline()


class RowsInCellWarning(Notice):
    """A cell of a CSV file looks like rows."""

    def __init__(self, path: Path, line: int, count: int) -> None:
        super().__init__(
            f"{path}, line {line}: one cell holds {count:,} line breaks and looks like rows of the table. If there "
            "is a quotation mark too few or too many, these rows are lost: fix it, and start again."
        )


def csv_batches(path: Path, header: list[str], dialect: Dialect, *, warn: bool = True) -> Iterator[pa.RecordBatch]:
    """Yield all columns as text, without `without_formulas`' apostrophes; raises UserError where the form is broken."""
    ragged: list[pa.csv.InvalidRow] = []
    num_rows, is_warned, last = 0, not warn, ""
    try:
        for batch in pa.csv.open_csv(path, **_csv_options(header, dialect, ragged)):
            if not is_warned and (found := _rows_in_cell(batch, dialect.delimiter)):
                line = find_lines(path, dialect, np.array([num_rows + found[0]]))[0]
                warn_user(RowsInCellWarning(path, line, found[1]))
                is_warned = True
            num_rows += len(batch)
            last = batch.columns[-1][-1].as_py() if len(batch) else last
            yield pa.RecordBatch.from_arrays([as_meant(column) for column in batch.columns], header)
    except pa.ArrowInvalid as error:
        raise UserError(_malformed(path, dialect, ragged, error)) from error
    except UnicodeDecodeError as error:
        raise _no_text(path) from error
    if _BREAK.search(last) and not _ends_with_quote(path):
        raise UserError(_unclosed(path, dialect))


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


def _ends_with_quote(path: Path) -> bool:
    tail = b""
    with opened(path) as file:
        while chunk := file.read(_CHECK_BYTES):
            tail = (tail + chunk)[-64:]
    return tail.rstrip().endswith(b'"')


def find_lines(path: Path, dialect: Dialect, positions: np.ndarray) -> np.ndarray:
    """Return the first line of each of some rows, which are counted from 0 behind the header and ascend."""
    lines = np.empty(len(positions), dtype=np.int64)
    with _text_of(path, dialect.encoding) as file, _long_cells():
        _rewind(file, dialect.num_skipped)
        reader = csv.reader(file, delimiter=dialect.delimiter, escapechar=dialect.escape)
        passed = 0
        for i, position in enumerate(positions.tolist()):
            ahead = position + 1 - passed  # counting the header
            next(itertools.islice(reader, ahead, ahead), None)
            passed = position + 1
            lines[i] = dialect.num_skipped + reader.line_num + 1
    return lines


@contextmanager
def _long_cells() -> Iterator[None]:
    """Let Python's CSV reader take cells of more than 131,072 characters, as Arrow's does."""
    before = csv.field_size_limit(_BLOCK_BYTES)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _csv_options(header: list[str], dialect: Dialect, ragged: list[pa.csv.InvalidRow]) -> dict[str, Any]:
    """Return Arrow's options to read cells unchanged; rows of another length than the header go into `ragged`."""

    def keep(row: pa.csv.InvalidRow) -> str:
        ragged.append(row)
        return "error"

    return {
        "read_options": pa.csv.ReadOptions(
            use_threads=False,
            block_size=_BLOCK_BYTES,
            skip_rows=dialect.num_skipped,
            encoding="utf8" if dialect.is_utf8 else "cp1252",
        ),
        "parse_options": pa.csv.ParseOptions(
            delimiter=dialect.delimiter,
            escape_char=dialect.escape or False,
            newlines_in_values=True,
            ignore_empty_lines=False,
            invalid_row_handler=keep,
        ),
        "convert_options": pa.csv.ConvertOptions(
            column_types={written: pa.string() for name in header for written in (name, f"'{name}")},
            strings_can_be_null=False,
            null_values=[],
        ),
    }


def _malformed(path: Path, dialect: Dialect, ragged: list[pa.csv.InvalidRow], error: pa.ArrowInvalid) -> str:
    if ragged:
        row = ragged[0]
        line = find_lines(path, dialect, np.array([row.number - 2 - dialect.num_skipped]))[0]
        if row.text.count('"') % 2 and f'{dialect.delimiter}"' in dialect.delimiter + row.text:
            return _UNCLOSED.format(path=path, line=line)
        return (
            f"{path}, line {line}: {row.actual_columns} fields where the header has {row.expected_columns} "
            f"({shown(row.text)}). Quote a field that contains the separator, or fix the row."
        )
    if "Empty CSV" in str(error):
        return f"{path} has a header but no rows."
    if "straddling" in str(error):
        return _unclosed(path, dialect)
    return f"{path} is not a well-formed CSV file: {error}."


def _unclosed(path: Path, dialect: Dialect) -> str:
    """Return what is wrong with a file whose last row, or first one longer than a block, opens a quotation mark."""
    start = passed = 0
    with _text_of(path, dialect.encoding) as file, _long_cells():
        _rewind(file, dialect.num_skipped)
        reader = csv.reader(file, delimiter=dialect.delimiter, escapechar=dialect.escape)
        try:
            for _ in reader:
                start, passed = passed, reader.line_num
        except csv.Error:
            start = passed
    return _UNCLOSED.format(path=path, line=dialect.num_skipped + start + 1)


def _no_text(path: Path) -> UserError:
    return UserError(f"{path} is neither UTF-8 nor Windows-1252 text; save it as UTF-8.")


def _scan(path: Path) -> tuple[bool, bool, bool, int]:
    """Return whether a CSV file is UTF-8, whether quotation marks in its cells have backslashes before them, and the
    last two fields of `Dialect`.

    Raises UserError if it is not text, or damaged UTF-8.
    """
    has_escapes, num_quotes, twice_encoded = False, 0, 0
    decoder, line, passed = codecs.getincrementaldecoder("utf-8")(), 1, 0
    damage = ""  # description of the first byte that is not UTF-8
    with opened(path) as file:
        head = file.read(4)
        if not head.removeprefix(codecs.BOM_UTF8).strip():
            raise UserError(f"{path} is empty.")
        if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise UserError(f"{path} is UTF-16 text; save it as UTF-8 (in Excel: 'CSV UTF-8').")
        if head.startswith(b"PK\x03\x04"):
            raise UserError(
                f"{path} is a zip archive or a spreadsheet; the name of an Excel workbook must end in .xlsx."
            )
        file.seek(0)
        is_over = False
        while not is_over:
            chunk = file.read(_CHECK_BYTES)
            is_over = not chunk
            if (at := chunk.find(b"\0")) >= 0:
                line += chunk.count(b"\n", 0, at)
                raise UserError(
                    f"{path} has a NUL byte in line {line}; it is damaged or not text. Save it as UTF-8 CSV."
                )
            try:
                if not damage:
                    decoder.decode(chunk, final=is_over)
            except UnicodeDecodeError as error:
                read, at = error.object, error.start  # the chunk, behind an incomplete character of the one before
                in_line = line + read.count(b"\n", 0, at)
                number = passed + len(chunk) - len(read) + at + 1
                damage = f"line {in_line}: the byte 0x{read[at]:02X} (byte {number} of the file)"
            has_escapes |= b'\\"' in chunk and _ESCAPED.search(chunk) is not None
            num_quotes += chunk.count(b'"')
            if not twice_encoded and (match := _TWICE_ENCODED.search(chunk)):
                twice_encoded = line + chunk.count(b"\n", 0, match.start())
            line += chunk.count(b"\n")
            passed += len(chunk)
    if damage and (head.startswith(codecs.BOM_UTF8) or _is_mostly_utf8(path)):
        raise UserError(
            f"{path}, {damage} is not UTF-8, but most of the file is. Fix that line, or save the file as UTF-8 again."
        )
    return not damage, has_escapes, num_quotes % 2 == 1, twice_encoded


def _is_mostly_utf8(path: Path) -> bool:
    """Return whether UTF-8 characters of several bytes outnumber the bytes that are not UTF-8.

    Text in cp1252 has such characters by accident only, as "É»" in "«CAFÉ»".
    """
    decoder, num_characters, num_bad = codecs.getincrementaldecoder("utf-8")("ignore"), 0, 0
    with opened(path) as file:
        while chunk := file.read(_CHECK_BYTES):
            text = decoder.decode(chunk)
            num_characters += len(text) - len(chunk.translate(None, _NOT_ASCII))
            num_bad += len(chunk) - len(text.encode())
    return num_characters > num_bad
