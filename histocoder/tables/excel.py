"""Excel workbooks: what their cells show, as a table; text is written as text."""

import itertools
import re
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import openpyxl
import pyarrow as pa
from openpyxl.cell import WriteOnlyCell
from openpyxl.cell.cell import ILLEGAL_CHARACTERS_RE
from openpyxl.utils.escape import unescape

from histocoder.errors import UserError, shown
from histocoder.tables.header import FIRST_ROWS, below_titles, header_row, named, nearest

MAX_ROWS = 1_048_575  # largest number of rows of a sheet, below its header
MOST_DIGITS = 2**53  # largest integer up to which its numbers, doubles, tell all integers apart
_MAX_CHARACTERS = 32_767  # largest number of characters of a cell
_MAX_BYTES, _MAX_RATIO, _SMALL = 2 << 30, 200, 64 << 20
"""Limits of a workbook's unpacked size: in bytes, and as a multiple of its packed size, unless it is small."""
_ZEROS = re.compile(r"0+")


def read_workbook(path: Path, sheet: str | None, columns: Collection[str]) -> tuple[pa.Table, list[str], int]:
    """Read a sheet, by default the only one with content or with all `columns`; titles may precede its header.

    If no flag names a sheet, `columns` are no mapping to flags, and the sheet with most of them is read by default.
    Returns the table, in which columns of numbers keep their type and others are text; notices to the user; and
    Excel's number of the first row below the header.

    Raises UserError if the file is damaged, too large when unpacked or protected by a password, or several sheets
    could be meant.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
        if size > _MAX_BYTES or size > max(_SMALL, _MAX_RATIO * path.stat().st_size):
            raise UserError(f"{path} would unpack to {size / 2**30:,.1f} GiB; save the sheet as CSV (UTF-8).")
        book = openpyxl.load_workbook(path, read_only=True, data_only=True)
        try:
            return _read(path, _choose(path, book, sheet, columns), columns)
        finally:
            book.close()
    except (UserError, MemoryError):
        raise
    except Exception as error:  # openpyxl raises errors of all types if a file is damaged
        raise UserError(
            f"{path} can't be read as an Excel workbook: it is damaged, protected by a password or of another kind. "
            "Save it again as .xlsx without a password."
        ) from error


def _choose(path: Path, book: openpyxl.Workbook, name: str | None, columns: Collection[str]) -> Any:
    """Return the sheet of a name, or the one that `read_workbook` reads by default."""
    names = ", ".join(shown(title.strip()) for title in book.sheetnames)
    if name is not None:
        if len(alike := named(name, book.sheetnames)) != 1:
            near = nearest(name, book.sheetnames)
            raise UserError(f"{path} has no sheet {shown(name)}; it has: {names}.", **({"sheet": near} if near else {}))
        return book[alike[0]]
    headers = {sheet: list(filter(None, _header(sheet, columns)[1])) for sheet in book.worksheets}
    found = {sheet: sum(bool(named(n, header)) for n in columns) for sheet, header in headers.items() if header}
    if not found:
        raise UserError(f"{path} is empty.")
    has_flag = isinstance(columns, Mapping)
    meant = [sheet for sheet in found if found[sheet] == (len(columns) if has_flag else max(found.values()))]
    if len(found) == 1 or len(meant) == 1:
        return (meant or [*found])[0]
    way = "Name one with --sheet." if has_flag else "Keep the one to read, or save it as a file of its own."
    best = max(found, key=lambda sheet: (found[sheet], len(headers[sheet]))).title.strip()
    raise UserError(f"{path} has several sheets ({names}). {way}", **({"sheet": best} if has_flag else {}))


def _read(path: Path, sheet: Any, columns: Collection[str]) -> tuple[pa.Table, list[str], int]:
    """Read the columns that have names; a blank row stays one, so that the others keep their numbers."""
    header, names, has_titles = _header(sheet, columns)
    if not names:
        raise UserError(f"{path} is empty.")
    cells: dict[int, list[Any]] = {i: [] for i, value in enumerate(names) if value is not None}
    last = header
    for number, values in itertools.dropwhile(lambda row: row[0] <= header, _rows(sheet)):
        for i, column in cells.items():
            column += [*[None] * (number - last - 1), values[i] if i < len(values) else None]
        last = number
    table = pa.Table.from_arrays([*map(_array, cells.values())], [*filter(None, names)])
    return table, [below_titles(path, "row", header)] if has_titles else [], header + 1


def _header(sheet: Any, columns: Collection[str]) -> tuple[int, list[str | None], bool]:
    """Return the number of the header's row, its names by column, and whether titles precede it; no names if empty."""
    rows = [(number, [*map(_text, values)]) for number, values in itertools.islice(_rows(sheet), FIRST_ROWS)]
    at = header_row([row for _, row in rows], columns) if rows else 0
    return (*rows[at], at > 0) if rows else (0, [], False)


def _rows(sheet: Any) -> Iterator[tuple[int, list[Any]]]:
    """Yield the number of each row with content, and what its cells show."""
    sheet.reset_dimensions()  # some programs write them wrongly
    for number, row in enumerate(sheet.iter_rows(max_row=MAX_ROWS + 1), start=1):
        values = [_value(cell) for cell in row]
        if any(value is not None for value in values):
            yield number, values


def _value(cell: Any) -> Any:
    """Return what a cell shows, a number or text: None if it is blank; leading zeros if its format has them."""
    value = cell.value
    if isinstance(value, bool):
        return str(value).upper()
    if isinstance(value, int) and value >= 0 and _ZEROS.fullmatch(cell.number_format):
        return str(value).zfill(len(cell.number_format))
    if isinstance(value, str):
        return unescape(value) if value.strip() else None
    if isinstance(value, datetime) and not (value.hour or value.minute or value.second):
        return str(value.date())
    return value if value is None or isinstance(value, int | float) else str(value)


def _array(values: list[Any]) -> pa.Array:
    """Return a column of numbers if all cells are such; else of text."""
    kinds = {type(value) for value in values if value is not None}
    if kinds and kinds <= {int, float} and all(value is None or abs(value) < MOST_DIGITS for value in values):
        return pa.array(values, pa.int64() if kinds == {int} else pa.float64())
    return pa.array(map(_text, values), pa.string())


def _text(value: Any) -> str | None:
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return None if value is None else str(value)


def write_workbook(path: Path, names: list[str], tables: Iterable[pa.Table]) -> None:
    """Write tables, one below the other, as a sheet; cells that are too long for Excel are truncated.

    Text is formatted as text, so that codes keep their zeros when people edit them, and formulas are never run.
    """
    book = openpyxl.Workbook(write_only=True)
    sheet = book.create_sheet("data")
    sheet.freeze_panes = "A2"
    model: Any = WriteOnlyCell(sheet)
    model.number_format = "@"

    def cell_of(value: Any) -> Any:
        """Return a cell of text, or another value, which is None for NaN."""
        if not isinstance(value, str):
            return None if value != value else value  # noqa: PLR0124
        cell: Any = WriteOnlyCell(sheet, ILLEGAL_CHARACTERS_RE.sub("", value)[:_MAX_CHARACTERS])
        cell._style, cell.data_type = model._style, "s"  # whatever it begins with
        return cell

    sheet.append([*map(cell_of, names)])
    for table in tables:
        for row in zip(*(column.to_pylist() for column in table.columns), strict=True):
            sheet.append([*map(cell_of, row)])
    book.save(path)
