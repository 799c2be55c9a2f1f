"""Excel workbooks: what their cells show, as a table; text is written as text."""

import itertools
import re
import zipfile
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import openpyxl
import pyarrow as pa
from openpyxl.cell import WriteOnlyCell
from openpyxl.cell.cell import ILLEGAL_CHARACTERS_RE
from openpyxl.cell.read_only import ReadOnlyCell
from openpyxl.utils import get_column_letter
from openpyxl.utils.escape import unescape
from openpyxl.worksheet._reader import FORMULA_TAG, WorkSheetParser
from openpyxl.worksheet.cell_range import CellRange
from python_calamine import CalamineWorkbook, SheetTypeEnum, SheetVisibleEnum

from histocoder.errors import UserError, counted, shown
from histocoder.tables.header import FIRST_ROWS, below_titles, header_row, named, nearest

MAX_ROWS = 1_048_575  # largest number of rows of a sheet, below its header
MAX_EXACT_INTEGER = 2**53  # largest integer up to which doubles, as its numbers are, are exact
_MAX_CHARACTERS = 32_767  # largest number of characters of a cell
_MAX_BYTES = 2 << 30  # largest unpacked size of a workbook
# largest ratio of the unpacked size to the packed one, of more than `_SMALL_BYTES`
_MAX_RATIO = 200
_SMALL_BYTES = 64 << 20
# largest number of cells, blank ones included, of a sheet that is mostly blank
_MAX_AREA = 20_000_000
_MAX_BLANKS_PER_CELL = 50
_MAX_BLANK_ROWS = 10_000  # largest number of blank rows that are kept where most are blank
NO_VALUE = object()  # content of a formula that was not computed
_ZEROS = re.compile(r"0+")
_REPEATED_ROWS = re.compile(rb'\A[^>]*number-rows-repeated="(\d+)"')
_REPEATED_CELLS = re.compile(rb'number-columns-repeated="(\d+)"')
_ROW = re.compile(rb"<table:table-row(?=[\s/>])")
_CELL = re.compile(rb"<table:(?:covered-)?table-cell(?=[\s/>])([^>]*)>")
_SPANNED_ROWS = re.compile(rb'number-rows-spanned="(\d+)"')
_SPANNED_COLUMNS = re.compile(rb'number-columns-spanned="(\d+)"')


class Workbook(NamedTuple):
    """A sheet that was read."""

    table: pa.Table  # columns of numbers keep their type, and others are text
    notices: list[str]
    row_numbers: np.ndarray  # Excel's number of each row


class _Row(NamedTuple):
    """A row of a sheet: what each of its cells with content shows, a number or text, by its column
    from 1.
    """

    number: int
    cells: dict[int, Any]


class _SheetParser(WorkSheetParser):
    """openpyxl's parser of a sheet, which also tells formulas without a stored value.

    Programs that write formulas without computing them ask Excel to do so on opening: openpyxl and
    R leave the value out, and XlsxWriter writes 0. A formula that gives an empty text has the type
    of a text.
    """

    computes_on_opening = False

    def parse_cell(self, element: Any) -> dict[str, Any]:
        cell: dict[str, Any] = super().parse_cell(element)
        has_no_value = cell["value"] is None and cell["data_type"] != "str"
        may_be_uncomputed = has_no_value or (self.computes_on_opening and cell["value"] == 0)
        if may_be_uncomputed and element.find(FORMULA_TAG) is not None:
            cell["value"] = NO_VALUE
        return cell


class _Sheet:
    """A sheet of an .xlsx file, of which only the cells with content are in memory."""

    def __init__(self, path: Path, sheet: Any) -> None:
        self.path = path
        self._sheet = sheet
        self.title: str = sheet.title
        self.is_hidden = sheet.sheet_state != "visible"
        self.merged: list[Any] = []  # ranges of merged cells, once all rows are read

    def rows(self) -> Iterator[_Row]:
        """Yield the rows with content."""
        book = self._sheet.parent
        formats: dict[int, str] = {}
        with self._sheet._get_source() as source:
            parser = _SheetParser(
                source,
                self._sheet._shared_strings,
                data_only=True,
                epoch=book.epoch,
                date_formats=book._date_formats,
                timedelta_formats=book._timedelta_formats,
            )
            parser.computes_on_opening = getattr(book.calculation, "fullCalcOnLoad", False)

            # a cell's format is looked up once a style, since that takes longer than its value
            for number, cells in parser.parse():
                shown_cells: dict[int, Any] = {}
                for cell in cells:
                    style = cell["style_id"]
                    if style not in formats:
                        formats[style] = ReadOnlyCell(self._sheet, **cell).number_format
                    value = _value(cell["value"], formats[style])
                    if value is not None:
                        shown_cells[cell["column"]] = value
                if shown_cells:
                    yield _Row(number, shown_cells)

            # merged cells are listed behind the rows
            if parser.merged_cells:
                self.merged = parser.merged_cells.mergeCell


class _CalamineSheet:
    """A sheet of an .xls or .ods file."""

    def __init__(self, path: Path, sheet: Any, *, is_hidden: bool, content: bytes) -> None:
        self.path = path
        self._sheet = sheet
        self.title: str = sheet.name
        self.is_hidden = is_hidden

        # calamine gives those of .xls, counted from 0, and none of .ods
        self.merged = _merged_ranges(content)
        for (top, left), (bottom, right) in sheet.merged_cell_ranges or []:
            self.merged.append(CellRange(None, left + 1, top + 1, right + 1, bottom + 1))

    def rows(self) -> Iterator[_Row]:
        """Yield the rows with content."""
        for number, values in enumerate(self._sheet.to_python(skip_empty_area=False), start=1):
            cells: dict[int, Any] = {}
            for column, content in enumerate(values, start=1):
                value = _value(content, "")
                if value not in (None, ""):
                    cells[column] = value
            if cells:
                yield _Row(number, cells)


def read_workbook(
    path: Path, name: str | None, columns: Collection[str], optional: Collection[str]
) -> Workbook:
    """Read a sheet, by default the only one with content or with all `columns`; titles may precede
    its header.

    If no flag names a sheet, `columns` are no mapping to flags, and the sheet with most of them is
    read by default. A column without a name has its letter as one. A cell that is merged with those
    below it is repeated there.

    Raises UserError if the file is damaged, too large when unpacked or protected by a password, if
    several sheets could be meant, or if one of `columns` and `optional` has formulas without
    values.
    """
    with _reading(path), ExitStack() as stack:
        headers = {sheet: _header(sheet, columns) for sheet in _sheets(path, stack)}
        sheet = _choose(path, headers, name, columns)
        book = _read(path, sheet, headers[sheet], {*columns, *optional})

    # nobody would notice from the output that rows of other sheets are missing
    unread = [item.title for item in headers if headers[item].names and item is not sheet]
    if unread and name is None:
        titles = ", ".join(map(shown, unread))
        book.notices.append(
            f"{path}: the sheet {shown(sheet.title)} is read, and others are not: {titles}."
        )
    return book


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn what readers raise for damaged files, which are errors of all types, into a sentence."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        raise UserError(
            f"{path} can't be read as a workbook: it is damaged, protected by a password or of "
            "another kind. Save it again as .xlsx without a password."
        ) from error


class Sheets(NamedTuple):
    """The sheets of a workbook that have content, and which of them is probably meant."""

    names: list[str]
    likeliest: str


def sheets_of(path: Path, columns: Collection[str]) -> Sheets:
    """Return the sheets of a workbook that are shown, or all if none is; the likeliest has most of
    the `columns`.

    Raises UserError if the workbook is empty or can't be read.
    """
    with _reading(path), ExitStack() as stack:
        headers = {sheet: _header(sheet, columns) for sheet in _sheets(path, stack)}
        num_columns = _num_columns(path, headers, columns)
    return Sheets([sheet.title for sheet in num_columns], _likeliest(num_columns, headers).title)


def _num_columns(
    path: Path, headers: Mapping[Any, "_SheetHeader"], columns: Collection[str]
) -> dict[Any, int]:
    """Return how many of the columns each sheet with content has, of those that are shown if there
    are any.
    """
    with_content = [sheet for sheet in headers if headers[sheet].names]
    if not with_content:
        raise UserError(f"{path} is empty.")
    num_columns: dict[Any, int] = {}
    for sheet in [sheet for sheet in with_content if not sheet.is_hidden] or with_content:
        names = headers[sheet].names.values()
        num_columns[sheet] = sum(bool(named(column, names)) for column in columns)
    return num_columns


def _likeliest(num_columns: Mapping[Any, int], headers: Mapping[Any, "_SheetHeader"]) -> Any:
    """Return the sheet that has most of the columns, and of several the one with most columns at
    all.
    """
    return max(num_columns, key=lambda sheet: (num_columns[sheet], len(headers[sheet].names)))


def _sheets(path: Path, stack: ExitStack) -> list[Any]:
    """Open the sheets of a workbook."""
    suffix = path.suffix.lower()
    content = b""  # of an .ods file

    # a file of some kilobytes may unpack to all of memory
    if suffix != ".xls":
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
            max_size = min(_MAX_BYTES, max(_SMALL_BYTES, _MAX_RATIO * path.stat().st_size))
            is_large = size > max_size
            if suffix == ".ods" and not is_large:
                content = archive.read("content.xml")
        if is_large or _area(content) > _MAX_AREA:
            raise UserError(
                f"{path} would unpack to more than memory may hold; save the sheet as CSV (UTF-8)."
            )

    # `data_only` gives the values of formulas in place of their text
    if suffix not in (".xls", ".ods"):
        book = openpyxl.load_workbook(path, read_only=True, data_only=True)
        stack.callback(book.close)
        return [_Sheet(path, sheet) for sheet in book.worksheets]

    # openpyxl reads neither .xls nor .ods
    calamine_book = stack.enter_context(CalamineWorkbook.from_path(path))
    contents = content.split(b"<table:table ")[1:]
    sheets: list[Any] = []
    for i, metadata in enumerate(calamine_book.sheets_metadata):
        if metadata.typ == SheetTypeEnum.WorkSheet:
            sheet = calamine_book.get_sheet_by_name(metadata.name)
            is_hidden = metadata.visible != SheetVisibleEnum.Visible
            sheet_content = contents[i] if i < len(contents) else b""
            sheets.append(_CalamineSheet(path, sheet, is_hidden=is_hidden, content=sheet_content))
    return sheets


def _area(content: bytes) -> int:
    """Return how many cells the largest sheet of an .ods file has, which repeats rows and cells by
    a number alone.
    """
    area = 0
    for sheet in content.split(b"<table:table ")[1:]:
        num_rows = height = width = 0
        for row in sheet.split(b"<table:table-row")[1:]:
            # what follows the last text of a row is blank, however often it is repeated
            cells = row[: row.rfind(b"</text:p>") + 1]
            num_rows += _number(_REPEATED_ROWS, row)
            if cells:
                repeats = map(int, _REPEATED_CELLS.findall(cells))
                height = num_rows
                width = max(width, cells.count(b"<table:table-cell") + sum(repeats))
        area = max(area, height * width)
    return area


def _merged_ranges(content: bytes) -> list[CellRange]:
    """Return the ranges of merged cells of a sheet of an .ods file."""
    ranges: list[CellRange] = []
    top = 1
    for row in _ROW.split(content)[1:]:
        left = 1
        for cell in _CELL.findall(row):
            bottom = top + _number(_SPANNED_ROWS, cell) - 1
            right = left + _number(_SPANNED_COLUMNS, cell) - 1
            if bottom > top or right > left:
                ranges.append(CellRange(min_row=top, min_col=left, max_row=bottom, max_col=right))
            left += _number(_REPEATED_CELLS, cell)
        top += _number(_REPEATED_ROWS, row)
    return ranges


def _number(attribute: re.Pattern[bytes], tag: bytes) -> int:
    """Return the number that an attribute of a tag gives, 1 by default."""
    match = attribute.search(tag)
    return int(match[1]) if match else 1


def _choose(
    path: Path, headers: Mapping[Any, "_SheetHeader"], name: str | None, columns: Collection[str]
) -> Any:
    """Return the sheet of a name, or the one that `read_workbook` reads by default: if it can, one
    that is shown.
    """
    titles = {sheet.title: sheet for sheet in headers}
    names = ", ".join(shown(title.strip()) for title in titles)
    if name is not None:
        matches = named(name, titles)
        if len(matches) == 1:
            return titles[matches[0]]
        message = f"{path} has no sheet {shown(name)}; it has: {names}."
        near = nearest(name, titles)
        if near:
            raise UserError(message, sheet=near)
        raise UserError(message)

    # a flag can name a sheet where it can name columns: then only one with all of them will do
    num_columns = _num_columns(path, headers, columns)
    has_flag = isinstance(columns, Mapping)
    num_wanted = max(num_columns.values())
    if has_flag:
        num_wanted = len(columns)
    matches = [sheet for sheet in num_columns if num_columns[sheet] == num_wanted]
    if len(matches) == 1:
        return matches[0]
    if len(num_columns) == 1:
        return next(iter(num_columns))

    message = f"{path} has several sheets ({names})."
    if not has_flag:
        raise UserError(f"{message} Keep the one to read, or save it as a file of its own.")
    best = _likeliest(num_columns, headers).title.strip()
    raise UserError(f"{message} Name one with --sheet.", sheet=best)


class _SheetHeader(NamedTuple):
    """The row of a header, and its names by column; no names if the sheet is empty."""

    number: int
    names: dict[int, str]
    notices: list[str]


def _header(sheet: Any, columns: Collection[str]) -> _SheetHeader:
    rows = list(itertools.islice(sheet.rows(), FIRST_ROWS))
    if not rows:
        return _SheetHeader(0, {}, [])
    names = [{column: str(_text(value)) for column, value in row.cells.items()} for row in rows]

    # a blank first cell counts, since programs write row numbers below one
    with_first_cell = [{1: None} | row for row in names]
    texts = [list(row.values()) for row in with_first_cell]
    index = header_row(texts, columns)
    header = _SheetHeader(rows[index].number, names[index], [])
    if index:
        header.notices.append(below_titles(sheet.path, "row", header.number))
    return header


class _Cells(NamedTuple):
    """The cells below a header, of the rows with content, which alone are in memory."""

    values: dict[int, list[Any]]  # by column; lists end with the last cell that has content
    formulas: dict[int, list[int]]  # numbers of rows that have formulas without values, by column
    row_numbers: list[int]


def _read(path: Path, sheet: Any, header: _SheetHeader, wanted: Collection[str]) -> Workbook:
    """Read the cells below the header; a blank row stays one unless most of them are blank."""
    if not header.names:
        raise UserError(f"{path} is empty.")
    cells = _read_cells(path, sheet, header)
    names = _column_names(header, sorted(cells.values))
    notices = header.notices + _notices_of_formulas(path, cells.formulas, names, wanted)

    # ranges are known only once all rows are read
    ranges = _fill_merged(sheet.merged, header.number, cells.values, cells.row_numbers)
    if ranges:
        addresses = ranges[0]
        if ranges[1:]:
            addresses += f" and {len(ranges) - 1:,} more"
        notices.append(
            f"{path}: cells are merged ({addresses}); each is read in all rows and the first "
            "column of its range."
        )

    # blank rows are kept, so that rows stay beside those of the file, unless most rows are blank
    numbers = np.array(cells.row_numbers, np.int64)
    row_numbers = numbers
    index = np.arange(len(numbers))
    last = cells.row_numbers[-1] if cells.row_numbers else header.number
    if last - header.number <= 2 * len(numbers) + _MAX_BLANK_ROWS:
        row_numbers = np.arange(header.number + 1, last + 1)
        index = np.full(len(row_numbers), -1)
        index[numbers - header.number - 1] = np.arange(len(numbers))
    else:
        notices.append(f"{path}: blank rows are left out; the last row with content is {last:,}.")

    # lists end with the last cell that has content; -1 is a blank row
    rows_or_null = pa.array(index, mask=index < 0)
    arrays: list[pa.Array] = []
    for column in names:
        values = cells.values[column]
        values.extend([None] * (len(numbers) - len(values)))
        arrays.append(_array(values).take(rows_or_null))
    return Workbook(pa.Table.from_arrays(arrays, list(names.values())), notices, row_numbers)


def _read_cells(path: Path, sheet: Any, header: _SheetHeader) -> _Cells:
    """Read the cells below the header; raise a UserError if blank ones would fill memory."""
    cells = _Cells({column: [] for column in header.names}, {}, [])
    num_cells = 0
    for row in itertools.dropwhile(lambda row: row.number <= header.number, sheet.rows()):
        for column, value in row.cells.items():
            values = cells.values.setdefault(column, [])
            values.extend([None] * (len(cells.row_numbers) - len(values)))
            values.append(None if value is NO_VALUE else value)
            if value is NO_VALUE:
                cells.formulas.setdefault(column, []).append(row.number)
        cells.row_numbers.append(row.number)
        num_cells += len(row.cells)

        # a few cells far to the right, in a file of some kilobytes, make columns of blanks
        num_rows = len(cells.row_numbers)
        num_columns = len(cells.values)
        if num_rows * num_columns > max(_MAX_AREA, _MAX_BLANKS_PER_CELL * num_cells):
            raise UserError(
                f"{path}, sheet {shown(sheet.title)}: the first {num_rows:,} rows and "
                f"{num_columns:,} columns have only {num_cells:,} cells with content. "
                "Delete columns, or save the table as CSV (UTF-8)."
            )
    return cells


def _column_names(header: _SheetHeader, columns: Iterable[int]) -> dict[int, str]:
    """Return the names of columns; those without one are named by their letter."""
    names: dict[int, str] = {}
    taken = set(header.names.values())
    for column in columns:
        letter = get_column_letter(column)
        if letter in taken:
            letter = f"column {letter}"
        names[column] = header.names.get(column) or letter
    return names


def _notices_of_formulas(
    path: Path, formulas: Mapping[int, list[int]], names: Mapping[int, str], wanted: Collection[str]
) -> list[str]:
    """Return notices on formulas without values; raise a UserError if a column that is wanted has
    any.
    """
    notices: list[str] = []
    for column, rows in formulas.items():
        number = counted(len(rows), "formula", "formulas")
        notice = (
            f"{path}: the column {shown(names[column])} has {number} without a stored value, as "
            f"programs write them, the first in {get_column_letter(column)}{rows[0]}. "
            "Open the file in Excel and save it, to have the values."
        )
        if any(names[column] in named(name, names.values()) for name in wanted):
            raise UserError(notice)
        notices.append(notice)
    return notices


def _fill_merged(
    ranges: Iterable[Any], header: int, cells: Mapping[int, list[Any]], numbers: list[int]
) -> list[str]:
    """Repeat merged cells in the rows with content below them; return the ranges that are merged,
    by address.
    """
    addresses: list[str] = []
    # last row of a range in each column, since ranges of a damaged file may overlap
    ends: Counter[int] = Counter()
    for merged in sorted(ranges, key=lambda merged: (merged.min_row, merged.min_col)):
        if merged.min_row <= max(header, ends[merged.min_col]):
            continue
        values = cells.get(merged.min_col, [])
        start = bisect_left(numbers, merged.min_row)
        end = bisect_right(numbers, merged.max_row)
        if start < len(values) and values[start] is not None:
            ends[merged.min_col] = merged.max_row
            values[start:end] = [values[start]] * (end - start)
            addresses.append(merged.coord)
    return addresses


def _value(value: Any, number_format: str) -> Any:
    """Return what a cell shows, a number or text: None if it is blank; leading zeros if its format
    has them.
    """
    if isinstance(value, bool):
        return str(value).upper()
    if isinstance(value, int) and value >= 0 and _ZEROS.fullmatch(number_format):
        return str(value).zfill(len(number_format))
    if isinstance(value, str):
        return unescape(value) if value.strip() else None
    if isinstance(value, datetime) and not (value.hour or value.minute or value.second):
        return str(value.date())
    if value is None or value is NO_VALUE or isinstance(value, int | float):
        return value
    return str(value)


def _array(values: list[Any]) -> pa.Array:
    """Return a column of numbers if all cells are such; else of text."""
    with_content = [value for value in values if value is not None]
    types = set(map(type, with_content))
    are_numbers = bool(types) and types <= {int, float}

    # larger numbers, such as long identifiers, lose digits as doubles
    if are_numbers and all(abs(number) < MAX_EXACT_INTEGER for number in with_content):
        return pa.array(values, pa.int64() if types == {int} else pa.float64())
    return pa.array(map(_text, values), pa.string())


def _text(value: Any) -> str | None:
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return None if value is None else str(value)


def write_workbook(path: Path, names: list[str], tables: Iterable[pa.Table]) -> None:
    """Write tables, one below the other, as a sheet; cells that are too long for Excel are
    truncated.

    Text is formatted as text, so that codes keep their zeros when people edit them, and formulas
    are never run.
    """
    book = openpyxl.Workbook(write_only=True)
    sheet = book.create_sheet("data")
    sheet.freeze_panes = "A2"
    text_cell: Any = WriteOnlyCell(sheet)
    text_cell.number_format = "@"

    def cell_of(value: Any) -> Any:
        """Return a cell of text, or another value, which is None for NaN."""
        # NaN alone differs from itself
        if value != value:  # noqa: PLR0124
            return None
        if not isinstance(value, str):
            return value
        cell: Any = WriteOnlyCell(sheet, ILLEGAL_CHARACTERS_RE.sub("", value)[:_MAX_CHARACTERS])
        cell._style = text_cell._style
        cell.data_type = "s"  # whatever it begins with
        return cell

    sheet.append(list(map(cell_of, names)))
    for table in tables:
        columns = [column.to_pylist() for column in table.columns]
        for row in zip(*columns, strict=True):
            sheet.append(list(map(cell_of, row)))
    book.save(path)
