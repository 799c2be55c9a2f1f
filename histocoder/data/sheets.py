"""Cells as spreadsheets and statistics programs can hold them, and those that a spreadsheet would run as formulas.

A transcribed "=1+1" or "-daughter of the above" is text here, and a formula in Excel; a malicious one can run programs.
It is written with an apostrophe before it, and read without.
See https://owasp.org/www-community/attacks/CSV_Injection.
"""

import pyarrow as pa
import pyarrow.compute as pc

MOST_DIGITS = 2**53  # largest integer up to which doubles tell all integers apart
_RUN = r"(?s)^'*[=+\-@\t\r\n＝＋－＠].*[\pL\pN]"
_NUMBER = r"^[+-]?[0-9][0-9.,]*([eE][+-]?[0-9]+)?$"  # shown by spreadsheets as they are: -1, -2 and -3 are codes


def are_formulas(cells: pa.ChunkedArray | pa.Array) -> pa.ChunkedArray | pa.Array:
    """Return which of some texts a spreadsheet would run; null where they are null."""
    return pc.and_not(pc.match_substring_regex(cells, _RUN), pc.match_substring_regex(cells, _NUMBER))


def without_formulas(rows: pa.Table) -> tuple[pa.Table, int]:
    """Put an apostrophe before each formula, names of columns included; return how many cells have one."""
    columns, num_changed = [], 0
    for column in rows.columns:
        is_text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
        if is_text and (number := pc.sum(found := are_formulas(column), min_count=0).as_py()):
            quote, nothing = (pa.scalar(text, column.type) for text in ("'", ""))
            columns.append(pc.if_else(found, pc.binary_join_element_wise(quote, column, nothing), column))
            num_changed += number
        else:
            columns.append(column)
    names = [f"'{name}" if are_formulas(pa.array([name]))[0].as_py() else name for name in rows.schema.names]
    return pa.Table.from_arrays(columns, names), num_changed


def as_meant(cells: pa.Array) -> pa.Array:
    """Undo `without_formulas` in some texts."""
    if not pc.any(pc.starts_with(cells, "'"), min_count=0).as_py():
        return cells
    rest = pc.utf8_slice_codeunits(cells, 1)
    return pc.if_else(pc.and_(pc.starts_with(cells, "'"), are_formulas(rest)), rest, cells)


def formulas_notice(num_changed: int, path: object) -> list[str]:
    """Return a notice to the user on formulas in a file that was written, if there are any."""
    cells = (
        "1 cell begins like a formula and was"
        if num_changed == 1
        else f"{num_changed:,} cells begin like formulas and were"
    )
    notice = f"{path}: {cells} written with a leading apostrophe, which histocoder removes when it reads the file."
    return [notice] if num_changed else []


def for_sheets(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Turn times with a zone into what clocks showed there, and integers that doubles can't tell apart into text."""
    kind = column.type
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return pc.local_timestamp(column)
    if pa.types.is_integer(kind) and max(abs(end.as_py() or 0) for end in pc.min_max(column).values()) > MOST_DIGITS:
        return column.cast(pa.string())
    return column
