"""Files of Excel, Stata and SPSS, read as tables; they are written with codes as text."""

import itertools
import re
import warnings
import zipfile
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path
from typing import Any

import openpyxl
import pandas as pd
import pyarrow as pa
from openpyxl.cell import WriteOnlyCell
from openpyxl.cell.cell import ILLEGAL_CHARACTERS_RE
from openpyxl.utils.escape import unescape

from histocoder.data.cells import FIRST_ROWS, MOST_DIGITS, below_titles, header_row, named, nearest, plain
from histocoder.errors import UserError, shown

MAX_ROWS = 1_048_575  # largest number of rows of a sheet, below its header
_MAX_CHARACTERS = 32_767  # largest number of characters of a cell
_MAX_BYTES, _MAX_RATIO, _SMALL = 2 << 30, 200, 64 << 20
"""Limits of a workbook's unpacked size: in bytes, and as a multiple of its packed size, unless it is small."""
_ZEROS = re.compile(r"0+")
_LONGEST_NAME = {".dta": 32, ".sav": 64}
_LONGEST_TEXT = 2045  # number of characters from which Stata needs its type strL
_INTEGER = re.compile(r"-?[0-9]+")  # form of labels that are codes themselves, as Stata's `encode` makes them


def read_workbook(path: Path, sheet: str | None, columns: Collection[str]) -> tuple[pa.Table, list[str], int]:
    """Read a sheet, by default the only one with content or with all `columns`; titles may precede its header.

    Returns the table, in which columns with one type of value keep it and others are text; notices to the user; and
    Excel's number of the first row below the header.

    Raises UserError if the file is damaged, too large when unpacked or protected by a password, or several sheets
    could be meant.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
        if size > _MAX_BYTES or size > max(_SMALL, _MAX_RATIO * path.stat().st_size):
            raise UserError(
                f"{path} would unpack to {size / 2**30:,.1f} GiB, far more than a workbook of its size holds. If this "
                "is intended, save the sheet as CSV (UTF-8)."
            )
        book = openpyxl.load_workbook(path, read_only=True, data_only=True)
        try:
            found = _choose(path, book, sheet, columns)
            return _read(found), [below_titles(path, "row", found.number)] * found.has_titles, found.number + 1
        finally:
            book.close()
    except (UserError, MemoryError):
        raise
    except Exception as error:  # openpyxl raises errors of all types if a file is damaged
        raise UserError(
            f"{path} can't be read as an Excel workbook: it is damaged, protected by a password or of another kind. "
            "Save it again as .xlsx without a password."
        ) from error


@dataclass
class _Sheet:
    """A sheet with content."""

    title: str
    number: int  # row of the header
    names: dict[int, str]  # names of columns, by their indices
    rows: Iterator[tuple[int, list[Any]]]  # rows below the header, as `_rows` yields them
    has_titles: bool  # whether there is something above the header


def _choose(path: Path, book: openpyxl.Workbook, name: str | None, columns: Collection[str]) -> _Sheet:
    """Return the sheet of a name, else the only one with content, or else the only one with all columns."""
    sheets = {sheet.title: sheet for sheet in book.worksheets}
    names = ", ".join(shown(title.strip()) for title in sheets)
    if name is not None:
        if len(alike := named(name, sheets)) != 1:
            near = nearest(name, sheets)
            raise UserError(f"{path} has no sheet {shown(name)}; it has: {names}.", **({"sheet": near} if near else {}))
        sheets = {alike[0]: sheets[alike[0]]}
    filled = [found for cells in sheets.values() if (found := _below_titles(cells, columns)) is not None]
    if not filled:
        raise UserError(f"{path} is empty.")
    num_found = [sum(bool(named(column, sheet.names.values())) for column in columns) for sheet in filled]
    best = max(range(len(filled)), key=lambda i: (num_found[i], len(filled[i].names)))
    if len(filled) == 1 or (columns and num_found.count(len(columns)) == 1):
        return filled[best]
    raise UserError(f"{path} has several sheets ({names}). Name one with --sheet.", sheet=filled[best].title.strip())


def _below_titles(cells: Any, columns: Collection[str]) -> _Sheet | None:
    """Find a sheet's header; return None if it is empty."""
    rows = _rows(cells)
    if not (first := list(itertools.islice(rows, FIRST_ROWS))):
        return None
    at = header_row([[_text(value) for value in row] for _, row in first], columns)
    number, row = first[at]
    names = {i: name for i, value in enumerate(row) if (name := _text(value)) is not None}
    return _Sheet(cells.title, number, names, itertools.chain(first[at + 1 :], rows), has_titles=at > 0)


def _rows(cells: Any) -> Iterator[tuple[int, list[Any]]]:
    """Yield the number of each row with content, and what its cells show."""
    cells.reset_dimensions()  # some programs write them wrongly
    for number, row in enumerate(cells.iter_rows(max_row=MAX_ROWS + 1), start=1):
        values = [_value(cell) for cell in row]
        if any(value is not None for value in values):
            yield number, values


def _value(cell: Any) -> Any:
    """Return what a cell shows: None if it is blank; leading zeros if its format has them."""
    value = cell.value
    if isinstance(value, bool):
        return str(value).upper()
    if isinstance(value, int) and value >= 0 and _ZEROS.fullmatch(cell.number_format):
        return str(value).zfill(len(cell.number_format))
    if isinstance(value, str):
        return unescape(value) if value.strip() else None
    return value if value is None or isinstance(value, int | float | date) else str(value)


def _read(sheet: _Sheet) -> pa.Table:
    """Read the columns that have names; a blank row stays one, so that the others keep their numbers."""
    columns: dict[int, list[Any]] = {i: [] for i in sheet.names}
    passed = sheet.number
    for number, values in sheet.rows:
        for i, column in columns.items():
            column.extend([None] * (number - passed - 1))
            column.append(values[i] if i < len(values) else None)
        passed = number
    return pa.Table.from_arrays([*map(_array, columns.values())], [*sheet.names.values()])


def _array(values: list[Any]) -> pa.Array:
    """Return a column of numbers or dates if all cells are such; else of text."""
    kinds = {type(value) for value in values if value is not None}
    if kinds == {datetime}:
        return pa.array(values, pa.timestamp("s"))
    if kinds and kinds <= {int, float} and all(value is None or abs(value) < MOST_DIGITS for value in values):
        return pa.array(values, pa.int64() if kinds == {int} else pa.float64())
    return pa.array(map(_text, values), pa.string())


def _text(value: Any) -> str | None:
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, datetime) and not (value.hour or value.minute or value.second):
        return str(value.date())
    return None if value is None else str(value)


def write_workbook(path: Path, names: list[str], tables: Iterable[pa.Table]) -> int:
    """Write tables, one below the other, as a sheet; return the number of cells that were cut, or lost characters.

    Text is formatted as text, so that codes keep their zeros when people edit them, and formulas are never run.
    """
    book = openpyxl.Workbook(write_only=True)
    sheet = book.create_sheet("data")
    sheet.freeze_panes = "A2"
    model: Any = WriteOnlyCell(sheet)
    model.number_format = "@"
    num_cut = 0

    def cell_of(value: Any) -> Any:
        """Return a cell of text, or another value, which is None for NaN."""
        nonlocal num_cut
        if not isinstance(value, str):
            return None if value != value else value  # noqa: PLR0124
        fit = ILLEGAL_CHARACTERS_RE.sub("", value)[:_MAX_CHARACTERS]
        num_cut += fit != value
        cell: Any = WriteOnlyCell(sheet, fit)
        cell._style, cell.data_type = model._style, "s"  # whatever it begins with
        return cell

    sheet.append([*map(cell_of, names)])
    for table in tables:
        for row in zip(*(column.to_pylist() for column in table.columns), strict=True):
            sheet.append([*map(cell_of, row)])
    book.save(path)
    return num_cut


def read_labelled(path: Path, codes: Collection[str]) -> tuple[pa.Table, list[str]]:
    """Read a .dta or .sav file, with notices to the user: variables in `codes` as values, others as their labels.

    Raises UserError if the file is damaged, or the package that reads .sav files is not installed.
    """
    try:
        if path.suffix.lower() == ".dta":
            with pd.read_stata(path, iterator=True) as reader:
                values, sets = reader.read(convert_categoricals=False), reader.value_labels()
                labels = {name: sets.get(own, {}) for name, own in zip(reader._varlist, reader._lbllist, strict=True)}
        else:
            values, meta = pyreadstat(path).read_sav(path)
            labels = meta.variable_value_labels
    except UserError:
        raise
    except Exception as error:  # readers raise errors of all types if a file is damaged
        why = str(error).splitlines()[0][:120]
        raise UserError(f"{path} can't be read as a {path.suffix} file ({why}). Save it again, or as CSV.") from error
    labelled, own_codes = [], set(map(plain, codes))
    for name in values.columns:
        found = {_plain(value): label for value, label in labels.get(name, {}).items()}
        if found and (plain(name) not in own_codes or all(map(_INTEGER.fullmatch, found.values()))):
            values[name] = values[name].map(lambda value, found=found: found.get(_plain(value), _plain(value)))
            labelled.append(name)
    names = ", ".join(labelled)
    notices = [f"{path}: cells of these columns are read as their value labels: {names}."] if labelled else []
    return pa.Table.from_pandas(values, preserve_index=False).replace_schema_metadata(None), notices


def pyreadstat(path: Path) -> Any:
    """Return the package that reads and writes files of SPSS; raise a UserError if it is missing."""
    try:
        import pyreadstat
    except ImportError as error:
        raise UserError(
            f"{path}: files of SPSS need the package pyreadstat. Install it (pip install pyreadstat), or use CSV."
        ) from error
    return pyreadstat


def _plain(value: Any) -> str | None:
    """Return a value as text, whole numbers without decimals."""
    return None if pd.isna(value) else _text(value)


def write_labelled(path: Path, temporary: Path, table: pa.Table) -> list[str]:
    """Write a .dta or .sav file; return notices to the user."""
    kind = path.suffix.lower()
    names = _legal_names(table.column_names, longest=_LONGEST_NAME[kind])
    frame = pa.table([_storable(column) for column in table.columns], names=names).to_pandas()
    for name in names:
        if pd.api.types.is_string_dtype(frame[name].dtype) or frame[name].dtype == object:
            frame[name] = frame[name].astype(object).where(frame[name].notna(), "")
    if kind == ".sav":
        pyreadstat(path).write_sav(frame, str(temporary))
    else:
        long = [n for n in names if frame[n].dtype == object and frame[n].str.len().max() > _LONGEST_TEXT]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # integers become doubles
            frame.to_stata(temporary, version=118, write_index=False, convert_strl=long)
    changed = ", ".join(f"{old} as {new}" for old, new in zip(table.column_names, names, strict=True) if old != new)
    return [f"{path}: columns are renamed, since their names are not allowed there: {changed}."] if changed else []


def _storable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Turn dates into times, booleans, decimals and half floats into numbers, and other types into text."""
    kind = column.type
    if pa.types.is_date(kind):
        return column.cast(pa.timestamp("ms"))
    if pa.types.is_boolean(kind):
        return column.cast(pa.int8())
    if pa.types.is_decimal(kind) or pa.types.is_float16(kind):
        return column.cast(pa.float64())
    return column.cast(pa.string()) if pa.types.is_time(kind) or pa.types.is_duration(kind) else column


def _legal_names(names: list[str], *, longest: int) -> list[str]:
    """Return unique names of letters, digits and underscores that begin with a letter, as Stata and SPSS take them."""
    found: list[str] = []
    for name in names:
        legal = re.sub(r"[^0-9A-Za-z_]", "_", name)[:longest]
        legal = legal if legal[:1].isalpha() else f"v{legal}"[:longest]
        number = 2
        while legal.lower() in {other.lower() for other in found}:
            legal = f"{legal[: longest - 4]}_{number}"
            number += 1
        found.append(legal)
    return found
