"""Tables of users, read as text: nothing is guessed, converted or silently skipped."""

import difflib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset

from histocoder.errors import UserError, shown
from histocoder.files import sha256
from histocoder.tables.csv_file import CsvFile
from histocoder.tables.header import named, nearest
from histocoder.tables.stata import StataFile
from histocoder.text.characters import without_blanks

_MAX_NAMES_SHOWN = 50  # columns that a message lists
CHUNK_ROWS = 100_000  # number of rows of a large file that are held as text at once
PARQUET = (".parquet", ".pq")
EXCEL = (".xlsx", ".xlsm", ".xls", ".ods")
STATA = (".dta", ".sav")
READ_ONLY = {".xlsm": ".xlsx", ".xls": ".xlsx", ".ods": ".xlsx", ".sav": ".dta"}
"""Suffixes of tables that can't be written, and of those that are alike and can be."""
TEXT = (".csv", ".tsv", ".txt", ".tab", ".dat")
_Cells = TypeVar("_Cells", pa.Array, pa.ChunkedArray)


@dataclass
class Table:
    """Columns of text, and the position of each row in its file."""

    file: "TableFile"
    columns: dict[str, pa.Array]  # columns of strings; null where a cell is empty or blank
    positions: np.ndarray  # position of each row among all rows of the file, from 0

    def __len__(self) -> int:
        return len(self.positions)

    def filter(self, mask: np.ndarray) -> "Table":
        columns = {name: column.filter(pa.array(mask)) for name, column in self.columns.items()}
        return Table(self.file, columns, self.positions[mask])

    def lines(self, index: np.ndarray) -> np.ndarray:
        """Return the line of each of some rows, as `TableFile.lines` does."""
        return self.file.lines(self.positions[index])


@dataclass(frozen=True)
class TableFile:
    """A file whose header was read; see `open_table`."""

    path: Path
    source: CsvFile | StataFile | pa.Table | pa.dataset.Dataset  # whatever reads its rows
    notices: list[str]  # notices to the user on how the file is read
    # number of each row in messages; None: its line, or counted from 1
    row_numbers: np.ndarray | None = None

    @property
    def schema(self) -> pa.Schema:
        """Types of the columns; text for CSV."""
        return self.source.schema

    @property
    def header(self) -> list[str]:
        return self.schema.names

    @property
    def csv(self) -> CsvFile | None:
        """The form of a CSV file; None for others."""
        return self.source if isinstance(self.source, CsvFile) else None

    @property
    def unit(self) -> str:
        """Name of a row in messages: a CSV may have several lines in one."""
        return "row" if self.csv is None else "line"

    def has(self, name: str) -> bool:
        """Return whether a name means a column."""
        return bool(named(name, self.header))

    def first_of(self, names: Iterable[str]) -> str | None:
        """Return the first of several names that means a column; None if none does."""
        return next(filter(self.has, names), None)

    def column(self, name: str, setting: str = "") -> str:
        """Return the column that a name means, whatever its case, its accents and blanks around it.

        Raises a UserError if there is none, or several are like it; `setting` is the one whose
        value the name is.
        """
        matches = named(name, self.header)
        if len(matches) == 1:
            return matches[0]
        if matches:
            several = ", ".join(map(shown, matches))
            raise UserError(
                f"{self.path} has several columns like {shown(name)} ({several}); rename all but "
                "one."
            )

        # a file with another separator may have a name that is a whole line
        names: list[str] = []
        for column in map(str.strip, self.header[:_MAX_NAMES_SHOWN]):
            is_short = column.isprintable() and len(column) <= 60
            names.append(column if is_short else shown(column))
        if self.header[_MAX_NAMES_SHOWN:]:
            names.append("…")

        message = f"{self.path} has no column {name!r}; it has: {', '.join(names)}."
        settings: dict[str, Any] = {}
        near = nearest(name, self.header)
        if near is not None:
            message += f" Did you mean {shown(near)}?"
        if setting:
            message += f" Name it with --{setting.replace('_', '-')}."
        if setting and near is not None:
            settings = {setting: {name: near}}
        raise UserError(message, **settings)

    def read(self, columns: Collection[str]) -> Table:
        """Return some columns as text, at once; see `tables`."""
        parts = list(self.tables(columns))
        joined = {c: pa.concat_arrays([part.columns[c] for part in parts]) for c in columns}
        return Table(self, joined, np.concatenate([part.positions for part in parts]))

    def chunks(self, *, chunk_rows: int, columns: list[str] | None = None) -> Iterator[pa.Table]:
        """Yield all columns (of Parquet: `columns`, if given) in chunks of `chunk_rows` rows, CSV
        as text.

        Raises UserError if the file has no rows, a row of another length than its header, or can't
        be read as text.
        """
        batches: Iterator[pa.RecordBatch]
        if isinstance(self.source, CsvFile | StataFile):
            batches = self.source.batches()
        elif isinstance(self.source, pa.Table):
            batches = iter(self.source.to_batches(max_chunksize=chunk_rows))
        else:
            # little is read ahead, to save memory
            batches = self.source.to_batches(
                columns=columns, batch_size=chunk_rows, batch_readahead=1, fragment_readahead=1
            )

        # a full chunk waits until a row follows it, so that the last one is never empty
        pending = self.schema.empty_table()
        for batch in batches:
            table = pa.Table.from_batches([batch])
            pending = pa.concat_tables([pending, table]) if len(pending) else table
            while len(pending) > chunk_rows:
                yield pending.slice(0, chunk_rows).combine_chunks()
                pending = pending.slice(chunk_rows)
        if not len(pending):
            names = "a header" if self.csv else "columns"
            raise UserError(f"{self.path} has {names} but no rows.")
        yield pending.combine_chunks()

    def tables(self, columns: Collection[str]) -> Iterator[Table]:
        """Yield some columns in chunks, as text, under the names given; raise what `column` and
        `chunks` raise.
        """
        names = {column: self.column(column) for column in columns}
        num_passed = 0
        for chunk in self.chunks(
            chunk_rows=CHUNK_ROWS, columns=list(dict.fromkeys(names.values()))
        ):
            texts: dict[str, pa.Array] = {}
            for column, name in names.items():
                cells = strings(chunk[name], f"{self.path}, column {column!r},")
                texts[column] = without_blanks(cells.combine_chunks())
            yield Table(self, texts, np.arange(num_passed, num_passed + len(chunk)))
            num_passed += len(chunk)

    def lines(self, positions: np.ndarray) -> np.ndarray:
        """Return the line (in Parquet: the row, from 1) of each of some rows, whose positions
        ascend.
        """
        if self.csv is not None:
            return self.csv.lines(positions)
        if self.row_numbers is not None:
            return self.row_numbers[positions]
        return positions + 1


def open_table(
    path: str | Path,
    columns: Collection[str],
    *,
    optional: Collection[str] = (),
    sheet: str | None = None,
    encoding: str | None = None,
) -> TableFile:
    """Read the header of a file: CSV, Parquet, Excel, Stata or SPSS.

    `columns` are those that are needed, and may be a mapping to the settings that name them, which
    errors mention, as they do --sheet and --file-encoding; by these and `optional` ones the
    separator, the header and the sheet of a workbook are chosen. `encoding` is that of a text file,
    if the user names it. Names match whatever their case, accents and blanks around them. The
    string "nan" is a word.

    Raises UserError if the file or a column is missing, or the file is empty, damaged or not text.
    """
    path = Path(path)
    _check_readable(path)
    kind = kind_of(path)
    if sheet is not None and kind not in EXCEL:
        raise UserError(f"--sheet is for Excel workbooks; {path} is not one. Omit it.")
    if encoding is not None and kind in PARQUET + EXCEL:
        raise UserError(f"--file-encoding is for text files; {path} is not one. Omit it.")

    if kind in PARQUET:
        try:
            file = TableFile(path, pa.dataset.dataset(path, format="parquet"), [])
        except (pa.ArrowInvalid, OSError) as error:
            raise UserError(
                f"{path} is not a Parquet file: {str(error).splitlines()[0]}"
            ) from error
    elif kind in EXCEL:
        from histocoder.tables.excel import read_workbook

        # an empty mapping stays one, since it tells that flags can name a sheet
        wanted = columns if isinstance(columns, Mapping) else columns or optional
        book = read_workbook(path, sheet, wanted, optional)
        file = TableFile(path, book.table, book.notices, book.row_numbers)
    elif kind in STATA:
        stata = StataFile(path, encoding)
        file = TableFile(path, stata, stata.notices)
    else:
        csv = CsvFile(path, columns, optional, encoding)
        file = TableFile(path, csv, csv.notices)

    # a missing column is an error before anything is computed
    for name in columns:
        file.column(name, columns[name] if isinstance(columns, Mapping) else "")
    return file


def kind_of(path: Path, *, doing: str = "read") -> str:
    """Return the suffix of a table's name in lower case, without .gz; raise a UserError if there
    are no such tables.
    """
    kind = path.suffix.lower()
    kinds = {""}.union(TEXT, PARQUET, EXCEL, STATA)
    if doing == "written":
        kinds -= set(READ_ONLY)
    if kind == ".gz":
        kind = Path(path.stem).suffix.lower()
        kinds = set(TEXT)
    if kind in kinds:
        return kind
    forms = ".csv, .csv.gz, .tsv, .parquet, .xlsx or .dta"
    raise UserError(
        f"{path}: {path.suffix} files can't be {doing}. Use one of the formats {forms}."
    )


def fingerprint(path: str | Path) -> str:
    """Return the SHA-256 of a user's file; raises UserError if it can't be read."""
    _check_readable(Path(path))
    return sha256(Path(path))


def strings(array: _Cells, where: str = "A column") -> _Cells:
    """Return cells as text: whole numbers without decimals, null where they are null or NaN.

    Raises UserError for bytes that are not UTF-8, and cells of several values.
    """
    if pa.types.is_dictionary(array.type):
        array = array.cast(array.type.value_type)
    if pa.types.is_floating(array.type):
        # pandas and others write missing values as NaN
        array = pc.if_else(pc.is_nan(array), None, array)
        doubles = array.cast(pa.float64())
        is_whole = pc.and_(pc.equal(pc.round(doubles), doubles), pc.less(pc.abs(doubles), 2.0**63))

        # as text, a large double would be 1e+11, and an integer is not
        integers = pc.if_else(is_whole, doubles, 0.0).cast(pa.int64())
        return pc.if_else(is_whole, integers.cast(pa.string()), array.cast(pa.string()))
    try:
        return array.cast(pa.string())
    except pa.ArrowInvalid as error:
        raise UserError(
            f"{where} holds bytes that are not UTF-8 text. Save it as a column of text."
        ) from error
    except pa.ArrowNotImplementedError as error:
        raise UserError(
            f"{where} holds cells of the type {array.type}, which can't be read as text. Save them "
            "as columns with one value in each cell."
        ) from error


def map_distinct(column: pa.Array, function: Callable[[str], str]) -> pa.Array:
    """Return a function's text for each cell of a column, where a blank cell is ""; each distinct
    cell is computed once.
    """
    coded = column.fill_null("").dictionary_encode()
    texts = map(function, coded.dictionary.to_pylist())
    return pa.array(texts, pa.string()).take(coded.indices)


def _check_readable(path: Path) -> None:
    if path.is_dir():
        raise UserError(f"{path} is a folder; name a CSV, Parquet, Excel, Stata or SPSS file.")
    if path.exists() and not path.is_file():
        raise UserError(
            f"{path} is a pipe or a device, which can't be read twice; save it to a file first."
        )
    if not path.exists():
        message = f"File not found: {path}."
        names = [sibling.name for sibling in path.parent.glob("*")]
        near = difflib.get_close_matches(path.name, names, n=1)
        if near:
            message += f" Did you mean {path.parent / near[0]}?"
        raise UserError(message)
    try:
        path.open("rb").close()
    except PermissionError as error:
        raise UserError(f"{path} can't be read: permission denied.") from error
