"""Reads a user's table, CSV or Parquet, as text: nothing is guessed, converted or silently skipped."""

from __future__ import annotations

import codecs
import csv
import difflib
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from histocoder.errors import UserError

_CHUNK = 1 << 24
_DELIMITERS = ",;\t"


@dataclass
class Table:
    """Columns of text, and where each row stands in its file."""

    path: Path
    columns: dict[str, pa.Array]
    """Strings; null where a cell is empty or blank."""
    rows: np.ndarray
    """The position of each row among all rows of the file, from 0; blank rows are left out here."""
    notices: list[str] = field(default_factory=list)
    """What a user should know of how the file was read."""
    dialect: Dialect | None = None
    """None for Parquet."""

    def __len__(self) -> int:
        return len(self.rows)

    def lines(self, index: np.ndarray) -> np.ndarray:
        """The line (in Parquet: the row, from 1) where each of some rows begins in its file."""
        wanted = self.rows[index]
        if self.dialect is None or len(wanted) == 0:
            return wanted + 1
        starts = np.empty(int(wanted.max()) + 2, dtype=np.int64)
        with self.path.open(encoding=self.dialect.encoding, newline="") as file:
            reader = csv.reader(file, delimiter=self.dialect.delimiter)
            line = 0
            for i in range(len(starts)):  # row i - 1 of the data is row i of the file, behind the header
                starts[i] = line + 1
                next(reader, None)
                line = reader.line_num
        return starts[wanted + 1]


@dataclass(frozen=True)
class Dialect:
    """How a CSV file is written."""

    encoding: str
    delimiter: str


def read_table(path: str | Path, columns: Sequence[str]) -> Table:
    """Read some columns of a CSV or Parquet file as text.

    CSV is UTF-8, with or without a byte order mark, else cp1252; separated by comma, semicolon or tab. The string
    "nan" is a word. Blank lines are skipped.

    Parameters
    ----------
    path : path
    columns : sequence of str
        The columns to read; others are only checked for form.

    Raises
    ------
    UserError
        Where the file or a column is missing, the file is empty or has a row of another length than its header, or
        can't be read as text. The message names the line.
    """
    path = Path(path)
    _check_exists(path)
    try:
        if is_parquet(path):
            return _read_parquet(path, columns)
        return _read_csv(path, columns)
    except PermissionError as error:
        raise UserError(f"{path} can't be read: permission denied.") from error


def fingerprint(path: str | Path) -> dict[str, str | int]:
    """A file's name, size in bytes and SHA-256; errors as in `read_table`."""
    path = Path(path)
    _check_exists(path)
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def read_header(path: str | Path) -> list[str]:
    """The names of a file's columns; errors as in `read_table`."""
    path = Path(path)
    _check_exists(path)
    if is_parquet(path):
        return _parquet_columns(path)
    return _sniff(path, "utf-8-sig" if _is_utf8(path) else "cp1252", ())[0]


def iter_table(path: str | Path, columns: Sequence[str], *, chunk_rows: int) -> Iterator[pa.Table]:
    """Read all columns of a file in chunks, CSV as text; errors as in `read_table`, as far as a chunk tells.

    Parameters
    ----------
    path : path
    columns : sequence of str
        Those that must be there.
    chunk_rows : int
        Rows of a chunk; the last one may have fewer.
    """
    path = Path(path)
    _check_exists(path)
    if is_parquet(path):
        check_columns(path, columns, _parquet_columns(path))
        batches: Iterator[pa.RecordBatch] = pa.parquet.ParquetFile(path).iter_batches(batch_size=chunk_rows)
    else:
        is_utf8 = _is_utf8(path)
        header, dialect = _sniff(path, "utf-8-sig" if is_utf8 else "cp1252", columns)
        check_columns(path, columns, header)
        batches = _csv_batches(path, header, dialect, is_utf8=is_utf8)
    pending: list[pa.RecordBatch] = []
    waiting, is_empty = 0, True
    for batch in batches:
        pending.append(batch)
        is_empty &= len(batch) == 0
        waiting += len(batch)
        while waiting >= chunk_rows:
            table = pa.Table.from_batches(pending)
            yield table.slice(0, chunk_rows).combine_chunks()
            pending = table.slice(chunk_rows).to_batches()
            waiting -= chunk_rows
    if waiting:
        yield pa.Table.from_batches(pending).combine_chunks()
    if is_empty:
        raise UserError(f"{path} has columns but no rows.")


def _csv_batches(path: Path, header: list[str], dialect: Dialect, *, is_utf8: bool) -> Iterator[pa.RecordBatch]:
    ragged: list[pa.csv.InvalidRow] = []
    options = _csv_options(header, dialect, ragged, is_utf8=is_utf8, block_size=1 << 22)
    try:
        reader = pa.csv.open_csv(path, **options)
        yield from reader
    except pa.ArrowInvalid as error:
        raise _malformed(path, dialect, ragged, error) from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is neither UTF-8 nor Windows-1252 text; save it as UTF-8.") from error


def count_rows(path: str | Path) -> int:
    """The rows of a file; of a CSV file with line breaks within its cells, somewhat more."""
    path = Path(path)
    if is_parquet(path):
        return pa.parquet.read_metadata(path).num_rows
    with path.open("rb") as file:
        return max(sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(_CHUNK), b"")) - 1, 0)


def write_csv(table: pa.Table, path: Path) -> None:
    """Write a table as CSV, with quotation marks where they are needed."""
    pa.csv.write_csv(table, path, pa.csv.WriteOptions(quoting_style="needed"))


def is_parquet(path: Path) -> bool:
    return path.suffix.lower() in (".parquet", ".pq")


def _check_exists(path: Path) -> None:
    if path.is_dir():
        raise UserError(f"{path} is a folder; name a CSV or Parquet file.")
    if not path.exists():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*")], n=1)
        hint = f" Did you mean {path.parent / near[0]}?" if near else ""
        raise UserError(f"There is no file {path}.{hint}")


def check_columns(path: Path, columns: Sequence[str], existing: Sequence[str]) -> None:
    """Raise a UserError that names the first missing column, those there are, and the nearest."""
    for column in columns:
        if existing.count(column) > 1:
            raise UserError(f"{path} has {existing.count(column)} columns named {column!r}; rename all but one.")
        if column not in existing:
            near = difflib.get_close_matches(column, existing, n=1, cutoff=0.5)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise UserError(f"{path} has no column {column!r}; it has: {', '.join(existing)}.{hint}")


def _read_csv(path: Path, columns: Sequence[str]) -> Table:
    is_utf8 = _is_utf8(path)
    notices = []
    if not is_utf8:
        notices.append(f"{path} is not UTF-8; it is read as Windows-1252 (cp1252). Check that accents look right.")
    encoding = "utf-8-sig" if is_utf8 else "cp1252"
    header, dialect = _sniff(path, encoding, columns)
    check_columns(path, columns, header)

    ragged: list[pa.csv.InvalidRow] = []
    try:
        data = pa.csv.read_csv(path, **_csv_options(header, dialect, ragged, is_utf8=is_utf8, block_size=_CHUNK))
    except pa.ArrowInvalid as error:
        raise _malformed(path, dialect, ragged, error) from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is neither UTF-8 nor Windows-1252 text; save it as UTF-8.") from error
    if ragged:
        raise UserError(_describe_ragged(path, dialect, ragged[0]))
    if data.num_rows == 0:
        raise UserError(f"{path} has a header but no rows.")

    blank = np.ones(data.num_rows, dtype=bool)
    for name in dict.fromkeys(header):
        for column in (c for i, c in enumerate(data.columns) if header[i] == name):
            blank &= np.asarray(pc.equal(column, ""))
    rows = np.flatnonzero(~blank) if len(header) > 1 else np.arange(data.num_rows)
    kept = data.select(list(dict.fromkeys(columns))).take(pa.array(rows)) if len(rows) < data.num_rows else data
    return Table(path, {c: _text(kept[c]) for c in columns}, rows, notices, dialect)


def _parquet_columns(path: Path) -> list[str]:
    try:
        return pa.parquet.read_schema(path).names
    except pa.ArrowInvalid as error:
        raise UserError(f"{path} is not a Parquet file: {str(error).splitlines()[0]}") from error


def _csv_options(
    header: list[str], dialect: Dialect, ragged: list[pa.csv.InvalidRow], *, is_utf8: bool, block_size: int
) -> dict[str, Any]:
    """Arrow's options for reading text as it stands; rows of another length than the header go into `ragged`."""

    def keep(row: pa.csv.InvalidRow) -> str:
        ragged.append(row)
        return "error"

    return {
        "read_options": pa.csv.ReadOptions(
            use_threads=False, block_size=block_size, encoding="utf8" if is_utf8 else "cp1252"
        ),
        "parse_options": pa.csv.ParseOptions(
            delimiter=dialect.delimiter, newlines_in_values=True, ignore_empty_lines=False, invalid_row_handler=keep
        ),
        "convert_options": pa.csv.ConvertOptions(
            column_types={name: pa.string() for name in header}, strings_can_be_null=False, null_values=[]
        ),
    }


def _malformed(path: Path, dialect: Dialect, ragged: list[pa.csv.InvalidRow], error: pa.ArrowInvalid) -> UserError:
    if ragged:
        return UserError(_describe_ragged(path, dialect, ragged[0]))
    if "Empty CSV" in str(error):
        return UserError(f"{path} has a header but no rows.")
    reason = "a quotation mark is opened and not closed" if "straddling" in str(error) else str(error)
    return UserError(f"{path} is not a well-formed CSV file: {reason}.")


def _read_parquet(path: Path, columns: Sequence[str]) -> Table:
    check_columns(path, columns, _parquet_columns(path))
    data = pa.parquet.read_table(path, columns=list(dict.fromkeys(columns)))
    if data.num_rows == 0:
        raise UserError(f"{path} has columns but no rows.")
    columns_read = {c: _text(_as_string(data[c])) for c in columns}
    return Table(path, columns_read, np.arange(data.num_rows))


def _as_string(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if pa.types.is_floating(column.type):  # integers with gaps arrive as floats: 61110.0 means 61110
        whole = pc.all(pc.equal(pc.round(column), column), min_count=0).as_py()
        if whole:
            column = column.cast(pa.int64())
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    return column.cast(pa.string())


def _text(column: pa.ChunkedArray) -> pa.Array:
    """One array of strings, null where blank."""
    array = column.combine_chunks()
    array = array if isinstance(array, pa.Array) else pa.concat_arrays(array.chunks)
    blank = pc.equal(pc.utf8_trim_whitespace(array), "")
    return pc.if_else(blank, pa.scalar(None, pa.string()), array)


def _is_utf8(path: Path) -> bool:
    """Go through a CSV file once: whether it is UTF-8; raises UserError where it is no text."""
    decoder, is_utf8, line = codecs.getincrementaldecoder("utf-8")(), True, 1
    with path.open("rb") as file:
        head = file.read(4)
        if not head.strip():
            raise UserError(f"{path} is empty.")
        if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise UserError(f"{path} is UTF-16 text; save it as UTF-8 (in Excel: 'CSV UTF-8').")
        if head.startswith(b"PK\x03\x04"):
            raise UserError(f"{path} is a zip archive or a spreadsheet; save it as CSV (UTF-8).")
        file.seek(0)
        while chunk := file.read(_CHUNK):
            if (at := chunk.find(b"\0")) >= 0:
                line += chunk.count(b"\n", 0, at)
                raise UserError(
                    f"{path} has a NUL byte in line {line}; it is damaged or no text. Save it as UTF-8 CSV."
                )
            line += chunk.count(b"\n")
            try:
                if is_utf8:
                    decoder.decode(chunk)
            except UnicodeDecodeError:
                is_utf8 = False
    return is_utf8 and not decoder.getstate()[0]  # what is left over is a character cut off


def _sniff(path: Path, encoding: str, columns: Sequence[str]) -> tuple[list[str], Dialect]:
    """The header and the delimiter that shows most of the columns asked for (then: most columns)."""
    try:
        with path.open(encoding=encoding, newline="") as file:
            headers = {}
            for delimiter in _DELIMITERS:
                file.seek(0)
                headers[delimiter] = next(csv.reader(file, delimiter=delimiter))
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is neither UTF-8 nor Windows-1252 text; save it as UTF-8.") from error
    except (csv.Error, StopIteration) as error:
        raise UserError(f"{path} has no header that can be read: {error}.") from error
    best = max(_DELIMITERS, key=lambda d: (len(set(columns) & set(headers[d])), len(headers[d])))
    return headers[best], Dialect(encoding, best)


def _describe_ragged(path: Path, dialect: Dialect, row: pa.csv.InvalidRow) -> str:
    with path.open(encoding=dialect.encoding, newline="") as file:
        reader = csv.reader(file, delimiter=dialect.delimiter)
        for _ in range((row.number or 1) - 1):
            next(reader, None)
        line = reader.line_num + 1
    text = row.text if len(row.text) <= 60 else row.text[:57] + "..."
    return (
        f"{path}, line {line}: {row.actual_columns} fields where the header has {row.expected_columns} ({text!r}). "
        "Quote a field that holds the separator, or mend the row."
    )
