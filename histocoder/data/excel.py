"""Excel workbooks: a sheet is read as a table; a table is written with codes as text."""

import itertools
import re
import zipfile
from collections.abc import Collection, Iterable, Iterator
from datetime import date, datetime
from pathlib import Path
from typing import Any, NamedTuple

import openpyxl
import pyarrow as pa
import pyarrow.compute as pc
from openpyxl.cell import WriteOnlyCell
from openpyxl.cell.cell import ILLEGAL_CHARACTERS_RE
from openpyxl.cell.read_only import EMPTY_CELL
from openpyxl.utils.escape import unescape

from histocoder.data.cells import MOST_DIGITS
from histocoder.data.header import FIRST_ROWS, below_titles, header_row, named, nearest
from histocoder.errors import UserError, counted, shown

MAX_ROWS = 1_048_575  # largest number of rows of a sheet, below its header
_MAX_CHARACTERS = 32_767  # largest number of characters of a cell
_OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"  # first bytes of old workbooks, and of new ones with a password
_MAX_BYTES, _MAX_RATIO, _SMALL = 2 << 30, 200, 64 << 20
"""Limits of a workbook's unpacked size: in bytes, and as a multiple of its packed size, unless it is small."""
_FIRST_YEAR = 1901  # first year whose dates Excel has right: it has none before 1900, and a 29 February then
_UNSAVED = re.compile(rb'<c (?![^>]*t="str")[^>]*>\s*<f(\s[^>]*)?(/>|>[^<]*</f>)\s*(<v\s*/>|<v>\s*</v>|</c>)')
"""A cell with a formula whose value is not stored; that of an empty text is."""
_ZEROS = re.compile(r"0+")
_ESCAPED = re.compile(r"_(?=x[0-9A-Fa-f]{4}_)")  # a character in Excel's notation, such as _x000D_


def read_workbook(path: Path, sheet: str | None, columns: Collection[str]) -> tuple[pa.Table, list[str], int]:
    """Read a sheet, by default the only one with content or with all `columns`; titles may precede its header.

    Returns the table, in which columns with one type of value keep it and others are text; notices to the user; and
    Excel's number of the first row below the header.

    Raises UserError if the file is damaged, too large when unpacked or protected by a password, or several sheets could
    be meant.
    """
    _check_archive(path)
    try:
        book = openpyxl.load_workbook(path, read_only=True, data_only=True)
        try:
            return _read_sheet(path, _sheet(path, book, sheet, columns))
        finally:
            book.close()
    except (UserError, MemoryError):
        raise
    except Exception as error:  # openpyxl raises errors of all types if a file is damaged
        raise UserError(
            f"{path} can't be read as an Excel workbook; it is damaged, or of another kind. Save it again as .xlsx."
        ) from error


def _check_archive(path: Path) -> None:
    with path.open("rb") as file:
        if file.read(8) == _OLE:
            raise UserError(
                f"{path} is protected by a password, or is an old .xls workbook. Open it in Excel and save it as .xlsx "
                "without a password."
            )
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
    except (zipfile.BadZipFile, OSError) as error:
        raise UserError(f"{path} is damaged, or not an Excel workbook. Save it again as .xlsx.") from error
    if size > _MAX_BYTES or size > max(_SMALL, _MAX_RATIO * path.stat().st_size):
        raise UserError(
            f"{path} would unpack to {size / 2**30:,.1f} GiB, far more than a workbook of its size holds. If this "
            "is intended, save the sheet as CSV (UTF-8)."
        )


class _Sheet(NamedTuple):
    """A sheet with content."""

    cells: Any  # openpyxl's sheet
    title: str
    number: int  # row of the header
    names: dict[int, str]  # names of columns, by their places
    rows: Iterator[tuple[int, dict[int, Any]]]  # rows below the header, as `_rows` yields them
    has_titles: bool  # whether there is something above the header


def _sheet(path: Path, book: openpyxl.Workbook, name: str | None, columns: Collection[str]) -> _Sheet:
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
    at = header_row([[*map(_text, row.values())] for _, row in first], columns)
    number, values = first[at]
    names = {i: _text(value) for i, value in values.items()}
    return _Sheet(cells, cells.title, number, names, itertools.chain(first[at + 1 :], rows), has_titles=at > 0)


def _rows(cells: Any) -> Iterator[tuple[int, dict[int, Any]]]:
    """Yield the number of each row with content, and its values by their columns."""
    cells.reset_dimensions()  # some programs write them wrongly
    for number, row in enumerate(cells.iter_rows(max_row=MAX_ROWS + 1), start=1):
        values = ((i, _value(cell)) for i, cell in enumerate(row) if cell is not EMPTY_CELL)
        if filled := {i: value for i, value in values if value is not None}:
            yield number, filled


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


def _read_sheet(path: Path, sheet: _Sheet) -> tuple[pa.Table, list[str], int]:
    columns: dict[int, list[Any]] = {i: [] for i in sheet.names}
    num_beside, passed = 0, sheet.number
    for number, values in sheet.rows:
        blank = [None] * (number - passed - 1)  # rows
        for i, column in columns.items():
            column.extend(blank)
            column.append(values.pop(i, None))
        num_beside += len(values)
        passed = number
    with sheet.cells._get_source() as source:
        num_unsaved = sum(1 for _ in _UNSAVED.finditer(source.read()))
    notices = [below_titles(path, "row", sheet.number)] if sheet.has_titles else []
    if num_beside:
        cells = counted(num_beside, "cell is", "cells are")
        notices.append(f"{path}: {cells} ignored, beside the columns that have names.")
    if num_unsaved:
        notices.append(
            f"{path}: formulas without a stored value ({num_unsaved:,}) are read as blank cells. Open the workbook in "
            "Excel or LibreOffice and save it there, which stores them."
        )
    arrays = [_array(column) for column in columns.values()]
    return pa.Table.from_arrays(arrays, [*sheet.names.values()]), notices, sheet.number + 1


def _array(values: list[Any]) -> pa.Array:
    """Return a column of numbers or dates if all cells are such; else of text."""
    kinds = {type(value) for value in values if value is not None}
    if kinds == {datetime}:
        return pa.array(values, pa.timestamp("s"))
    if kinds and kinds <= {int, float} and all(value is None or abs(value) < MOST_DIGITS for value in values):
        return pa.array(values, pa.int64() if kinds == {int} else pa.float64())
    return pa.array([None if value is None else _text(value) for value in values], pa.string())


def _text(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, datetime) and not (value.hour or value.minute or value.second):
        return str(value.date())
    return str(value)


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
        cell: Any = WriteOnlyCell(sheet, _ESCAPED.sub("_x005F_", fit))
        cell._style, cell.data_type = model._style, "s"  # whatever it begins with
        return cell

    def column_of(values: pa.ChunkedArray) -> list[Any]:
        has_years = pa.types.is_timestamp(values.type) or pa.types.is_date(values.type)
        if has_years and (pc.min(pc.year(values)).as_py() or _FIRST_YEAR) < _FIRST_YEAR:
            values = pc.replace_substring_regex(values.cast(pa.string()), r" 00:00:00(\.0+)?$", "")
        return values.to_pylist()

    sheet.append([*map(cell_of, names)])
    for table in tables:
        for row in zip(*map(column_of, table.columns), strict=True):
            sheet.append([*map(cell_of, row)])
    book.save(path)
    return num_cut
