"""Tables of users, read as text: nothing is guessed, converted or silently skipped."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet

from histocoder.data.dialect import CsvFile
from histocoder.data.header import named, nearest
from histocoder.data.sources import PARQUET, Arrays, Source, integers, open_source
from histocoder.errors import UserError, shown
from histocoder.files import sha256

CHUNK_ROWS = 100_000  # number of rows of a large file that are held as text at once


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
    source: CsvFile | Source

    @property
    def header(self) -> list[str]:
        return self.source.header

    @property
    def notices(self) -> list[str]:
        """Notices to the user on how the file is read."""
        return self.source.notices

    @property
    def csv(self) -> CsvFile | None:
        """The form of a CSV file; None for others."""
        return self.source if isinstance(self.source, CsvFile) else None

    @property
    def schema(self) -> pa.Schema:
        """Types of the columns; text for CSV."""
        return self.source.schema

    def has(self, name: str) -> bool:
        """Return whether a name means a column."""
        return bool(named(name, self.header))

    def column(self, name: str, setting: str = "") -> str:
        """Return the column that a name means, whatever its case, its accents and blanks around it.

        Raises a UserError if there is none, or several are like it; `setting` is the one whose value the name is.
        """
        found = named(name, self.header)
        if len(found) == 1:
            return found[0]
        flag = f"--{setting.replace('_', '-')}"
        if found and len(set(found)) == 1:
            raise UserError(f"{self.path} has {len(found)} columns named {shown(name)}; rename all but one.")
        if found:
            several = ", ".join(map(shown, found))
            raise UserError(f"{self.path} has several columns like {shown(name)} ({several}); write the one as it is.")
        names = [own if own.isprintable() and len(own) <= 60 else shown(own) for own in map(str.strip, self.header)]
        more = ", …" if len(names) > 50 else ""
        message = f"{self.path} has no column {name!r}; it has: {', '.join(names[:50])}{more}."
        near = nearest(name, self.header)
        if near is not None:
            message += f" Did you mean {shown(near)}?"
        if setting:
            message += f" Name it with {flag}."
        raise UserError(message, **({setting: {name: near}} if setting and near is not None else {}))

    def check(self, columns: Collection[str]) -> None:
        """Raise a UserError if a column is missing, occurs twice, or can't be read as text; see `open_table`."""
        settings = columns if isinstance(columns, Mapping) else dict.fromkeys(columns, "")
        for name, setting in settings.items():
            own = self.column(name, setting)
            if not _is_text(kind := self.schema.field(self.header.index(own)).type):
                raise UserError(
                    f"{self.path}, column {own!r}: its cells are of the type {kind}, which can't be read as text. "
                    "Save them as columns with one value in each cell."
                )

    def read(self, columns: Collection[str]) -> Table:
        """Return some columns as text, at once; see `tables`."""
        parts = list(self.tables(columns))
        joined = {c: pa.concat_arrays([part.columns[c] for part in parts]) for c in columns}
        return Table(self, joined, np.concatenate([part.rows for part in parts]))

    def chunks(self, *, chunk_rows: int, columns: list[str] | None = None) -> Iterator[pa.Table]:
        """Yield all columns (of Parquet: `columns`, if given) in chunks of `chunk_rows` rows, CSV as text.

        Raises UserError if the file has no rows, a row of another length than its header, or can't be read as text.
        """
        batches = self.source.batches(columns=columns, rows=chunk_rows)
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
            raise UserError(f"{self.path} has {'columns' if self.csv is None else 'a header'} but no rows.")

    def tables(self, columns: Collection[str]) -> Iterator[Table]:
        """Yield some columns in chunks, as text, under the names given; raises UserError as `check` and `chunks` do."""
        self.check(columns)
        own = {name: self.column(name) for name in columns}
        whole = _whole_numbers(self.source, own.values())
        position = 0
        for chunk in self.chunks(chunk_rows=CHUNK_ROWS, columns=[*own.values()]):
            kept, rows = chunk, np.arange(position, position + len(chunk))
            if self.source.may_have_blank_rows and chunk.num_columns > 1:
                blank = (pc.equal(pc.fill_null(column.cast(pa.string()), ""), "") for column in chunk.columns)
                if (keep := ~np.logical_and.reduce([*map(np.asarray, blank)])).all() is np.False_:
                    kept, rows = chunk.filter(pa.array(keep)), rows[keep]
            texts = {
                c: _text(kept[name], f"{self.path}, column {c!r},", is_whole=name in whole) for c, name in own.items()
            }
            yield Table(self, texts, rows)
            position += len(chunk)

    def lines(self, positions: np.ndarray) -> np.ndarray:
        """Return the line (in Parquet: the row, from 1) of each of some rows, whose positions ascend."""
        return self.source.lines(positions)


def open_table(
    path: str | Path,
    columns: Collection[str],
    *,
    optional: Collection[str] = (),
    sheet: str | None = None,
    codes: Collection[str] = (),
) -> TableFile:
    """Read the header of a file: CSV, Parquet, Excel, Stata, SPSS, or a folder of Parquet files.

    CSV is UTF-8, with or without a byte order mark, else cp1252; separated by comma, semicolon, tab or bar, whichever
    finds most of the required `columns` and the `optional` ones. A file that is UTF-8 but for some bytes is not taken
    as cp1252. The string "nan" is a word. Blank lines are skipped. Names of columns match whatever their case, accents
    and blanks around them; the header is the row that has all of the required ones. Columns in `codes` are read as
    values where these have labels, as in Stata. If `columns` is a mapping, its values are the settings that name them,
    such as "input_col", which errors mention.

    Raises UserError if the file or a column is missing, a column is not text, or the file is empty, damaged or not
    text.
    """
    path = Path(path)
    _check_readable(path)
    source = open_source(path, columns, sheet=sheet, codes=codes, optional=optional)
    file = TableFile(path, source or CsvFile(path, columns, optional))
    file.check(columns)
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
    """Return the number of rows of a file; raise a UserError where a CSV file is not well-formed."""
    return file.source.count_rows()


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


def _whole_numbers(source: CsvFile | Source, columns: Collection[str]) -> set[str]:
    """Return the float columns with integers of 64 bits only: integers with gaps are often saved so."""
    whole = {c for c in columns if pa.types.is_floating(source.schema.field(c).type)}
    for batch in source.batches(columns=sorted(whole), rows=CHUNK_ROWS) if whole else ():
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
