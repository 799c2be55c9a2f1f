"""Tables of users, read as text: nothing is guessed, converted or silently skipped."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet

from histocoder.data.dialect import Dialect, csv_batches, find_lines, opened, sniff
from histocoder.data.sources import PARQUET, Arrays, Source, integers, open_source
from histocoder.errors import UserError, shown
from histocoder.files import sha256

CHUNK_ROWS = 100_000  # number of rows of a large file that are held as text at once
_BLOCK_BYTES = 1 << 24


@dataclass
class Table:
    """Columns of text, and the position of each row in its file."""

    file: TableFile
    columns: dict[str, pa.Array]  # columns of strings; null where a cell is empty or blank
    rows: np.ndarray  # position of each row among all rows of the file, from 0; blank rows are not in the table

    def __len__(self) -> int:
        return len(self.rows)

    def filter(self, mask: np.ndarray) -> Table:
        columns = {name: column.filter(pa.array(mask)) for name, column in self.columns.items()}
        return Table(self.file, columns, self.rows[mask])

    def lines(self, index: np.ndarray) -> np.ndarray:
        """Return the line of each of some rows, as `TableFile.lines` does."""
        return self.file.lines(self.rows[index])


@dataclass(frozen=True)
class TableFile:
    """A file whose header was read; see `open_table`."""

    path: Path
    header: list[str]
    dialect: Dialect | None  # dialect of a CSV file; None for others
    source: Source | None = None  # source of the rows of other files

    @property
    def notices(self) -> list[str]:
        """Notices to the user on how the file is read."""
        if self.dialect is None:
            return [] if self.source is None else list(self.source.notices)
        notices = []
        if not self.dialect.is_utf8:
            notices.append(
                f"{self.path} is not UTF-8; it is read as Windows-1252 (cp1252). Check that accents look right."
            )
        if self.dialect.is_utf8 and self.dialect.twice_encoded:
            notices.append(
                f"{self.path}, line {self.dialect.twice_encoded}: accented letters are written as 'Ã' and a sign: "
                "UTF-8 was read as Windows-1252 once. Open the original as UTF-8, and save it again."
            )
        if self.dialect.escape:
            notices.append(
                f"{self.path}: quotation marks are escaped with backslashes, as R writes them, and are read as such."
            )
        return notices

    @property
    def schema(self) -> pa.Schema:
        """Types of the columns; text for CSV."""
        if self.source is not None:
            return self.source.rows.schema
        return pa.schema([(name, pa.string()) for name in self.header])

    def check(self, columns: Sequence[str]) -> None:
        """Raise a UserError if a column is missing, occurs twice, or can't be read as text."""
        for column in columns:
            if (times := self.header.count(column)) > 1:
                raise UserError(f"{self.path} has {times} columns named {shown(column)}; rename all but one.")
            if times == 0:
                near = difflib.get_close_matches(column, self.header, n=1, cutoff=0.5)
                hint = f" Did you mean {shown(near[0])}?" if near else ""
                names = [name if name.isprintable() and len(name) <= 60 else shown(name) for name in self.header]
                more = ", …" if len(names) > 50 else ""
                raise UserError(f"{self.path} has no column {column!r}; it has: {', '.join(names[:50])}{more}.{hint}")
        schema = self.schema
        for column in columns:
            if not _is_text(kind := schema.field(column).type):
                raise UserError(
                    f"{self.path}, column {column!r}: its cells are of the type {kind}, which can't be read as text. "
                    "Save them as columns with one value in each cell."
                )

    def read(self, columns: Sequence[str]) -> Table:
        """Return some columns as text, at once; see `tables`."""
        parts = list(self.tables(columns))
        joined = {c: pa.concat_arrays([part.columns[c] for part in parts]) for c in columns}
        return Table(self, joined, np.concatenate([part.rows for part in parts]))

    def chunks(self, *, chunk_rows: int, columns: list[str] | None = None) -> Iterator[pa.Table]:
        """Yield all columns (of Parquet: `columns`, if given) in chunks of `chunk_rows` rows, CSV as text.

        Raises UserError if the file has no rows, a row of another length than its header, or can't be read as text.
        """
        if self.dialect is not None:
            batches = csv_batches(self.path, self.header, self.dialect)
        elif is_parquet(self.path) and self.path.is_file():
            batches = pa.parquet.ParquetFile(self.path).iter_batches(batch_size=chunk_rows, columns=columns)
        else:
            assert self.source is not None
            batches = _batches(self.source, columns, chunk_rows)
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
            raise UserError(f"{self.path} has {'columns' if self.dialect is None else 'a header'} but no rows.")

    def tables(self, columns: Sequence[str]) -> Iterator[Table]:
        """Yield some columns in chunks, as text; raises UserError as `check` and `chunks` do."""
        self.check(columns)
        whole = _whole_numbers(self.source, columns) if self.source is not None else set()
        position = 0
        for chunk in self.chunks(chunk_rows=CHUNK_ROWS, columns=list(columns)):
            keep = np.ones(len(chunk), dtype=bool)
            if self.dialect is not None and len(self.header) > 1:
                keep = ~np.logical_and.reduce([np.asarray(pc.equal(column, "")) for column in chunk.columns])
            kept = chunk if keep.all() else chunk.filter(pa.array(keep))
            texts = {c: _text(kept[c], f"{self.path}, column {c!r},", is_whole=c in whole) for c in columns}
            yield Table(self, texts, position + np.flatnonzero(keep))
            position += len(chunk)

    def lines(self, positions: np.ndarray) -> np.ndarray:
        """Return the line (in Parquet: the row, from 1) of each of some rows, whose positions ascend."""
        if self.source is not None:
            return positions + self.source.first_row
        assert self.dialect is not None
        return find_lines(self.path, self.dialect, positions)


def open_table(
    path: str | Path,
    columns: Sequence[str],
    *,
    optional: Sequence[str] = (),
    sheet: str | None = None,
    codes: Sequence[str] = (),
) -> TableFile:
    """Read the header of a file: CSV, Parquet, Excel, Stata, SPSS, or a folder of Parquet files.

    CSV is UTF-8, with or without a byte order mark, else cp1252; separated by comma, semicolon or tab, whichever finds
    most of the required `columns` and the `optional` ones. A file that is UTF-8 but for some bytes is not taken as
    cp1252. The string "nan" is a word. Blank lines are skipped. Columns in `codes` are read as values where these have
    labels, as in Stata.

    Raises UserError if the file or a column is missing, a column is not text, or the file is empty, damaged or not
    text.
    """
    path = Path(path)
    known = (*columns, *optional)
    _check_readable(path)
    source = open_source(path, sheet=sheet, codes=codes, known=known)
    header, dialect = (source.rows.schema.names, None) if source is not None else sniff(path, known)
    file = TableFile(path, header, dialect, source)
    file.check(columns)
    if dialect is not None and dialect.has_odd_quotes:
        for _ in csv_batches(path, header, dialect, warn=False):
            pass  # an open quotation mark raises an error here, before any row is worked on
    return file


def fingerprint(path: str | Path) -> str:
    """Return the SHA-256 of a user's file or folder; raises UserError if it can't be read."""
    path = Path(path)
    _check_readable(path)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        names = "\n".join(f"{file.relative_to(path)} {sha256(file)}" for file in files)
        return hashlib.sha256(names.encode()).hexdigest()
    return sha256(path)


def count_rows(file: TableFile) -> int:
    """Return the number of rows of a file; more for a CSV file with line breaks within its cells."""
    if file.source is not None:
        return file.source.rows.count_rows()
    with opened(file.path) as content:
        return max(sum(chunk.count(b"\n") for chunk in iter(lambda: content.read(_BLOCK_BYTES), b"")) - 1, 0)


def strings(array: Arrays, where: str = "A column") -> Arrays:
    """Return cells as text, null where they are null or NaN; raise a UserError for bytes that are not UTF-8."""
    if pa.types.is_dictionary(array.type):
        array = array.cast(array.type.value_type)
    if pa.types.is_floating(array.type):
        array = pc.if_else(pc.is_nan(array), None, array)  # so pandas and others write missing values
    try:
        return array.cast(pa.string())
    except pa.ArrowInvalid as error:
        raise UserError(f"{where} holds bytes that are not UTF-8 text. Save it as a column of text.") from error


def is_bytes(kind: pa.DataType) -> bool:
    """Return whether cells of a type are bytes, as which some programs write text to Parquet."""
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind)


def is_parquet(path: Path) -> bool:
    return path.suffix.lower() in PARQUET


def _check_readable(path: Path) -> None:
    if path.is_dir():
        if any(map(is_parquet, path.rglob("*"))):
            return
        raise UserError(f"{path} is a folder without Parquet files; name a CSV, Parquet, Excel or Stata file.")
    if not path.exists():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*")], n=1)
        hint = f" Did you mean {path.parent / near[0]}?" if near else ""
        raise UserError(f"File not found: {path}.{hint}")
    try:
        path.open("rb").close()
    except PermissionError as error:
        raise UserError(f"{path} can't be read: permission denied.") from error


def _batches(source: Source, columns: list[str] | None, rows: int) -> Iterator[pa.RecordBatch]:
    """Yield rows in their order, reading few ahead."""
    return source.rows.to_batches(columns=columns, batch_size=rows, batch_readahead=1, fragment_readahead=1)


def _whole_numbers(source: Source, columns: Sequence[str]) -> set[str]:
    """Return the float columns with integers of 64 bits only: integers with gaps are often saved so."""
    whole = {c for c in columns if pa.types.is_floating(source.rows.schema.field(c).type)}
    for batch in _batches(source, sorted(whole), CHUNK_ROWS) if whole else ():
        whole = {c for c in whole if integers(batch[c]) is not None}
    return whole


def _text(column: pa.ChunkedArray, where: str, *, is_whole: bool) -> pa.Array:
    """Return one array of strings, null where blank."""
    array = column.combine_chunks()
    array = array if isinstance(array, pa.Array) else pa.concat_arrays(array.chunks)
    whole = integers(array) if is_whole else None
    array = strings(array if whole is None else whole, where)
    blank = pc.equal(pc.utf8_trim_whitespace(array), "")
    return pc.if_else(blank, pa.scalar(None, pa.string()), array)


def _is_text(kind: pa.DataType) -> bool:
    """Return whether cells of a type can be read as text."""
    try:
        strings(pa.nulls(0, kind))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return False
    return True
