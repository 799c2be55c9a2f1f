"""Cells that a spreadsheet would run, which are written with an apostrophe before them, and read without it."""

import pyarrow as pa
import pyarrow.compute as pc

_RUN = r"(?s)^'*[=+\-@\t\r\n＝＋－＠].*[\pL\pN]"
_NUMBER = r"^[+-]?[0-9][0-9.,]*([eE][+-]?[0-9]+)?$"  # shown by spreadsheets as they are: -1, -2 and -3 are codes


def are_formulas(cells: pa.ChunkedArray | pa.Array) -> pa.ChunkedArray | pa.Array:
    """Return which of some texts a spreadsheet would run; null where they are null.

    A transcribed "=1+1" or "-daughter of the above" is text here, and a formula in Excel; a malicious one can run
    programs. See https://owasp.org/www-community/attacks/CSV_Injection.
    """
    return pc.and_not(pc.match_substring_regex(cells, _RUN), pc.match_substring_regex(cells, _NUMBER))


def without_formulas(rows: pa.Table) -> tuple[pa.Table, int]:
    """Put an apostrophe before each formula, names of columns included; return how many cells have one."""
    num_changed = 0
    for i, column in enumerate(rows.columns):
        is_text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
        if is_text and (number := pc.sum(found := are_formulas(column), min_count=0).as_py()):
            quote, nothing = (pa.scalar(text, column.type) for text in ("'", ""))
            changed = pc.if_else(found, pc.binary_join_element_wise(quote, column, nothing), column)
            rows = rows.set_column(i, rows.field(i), changed)
            num_changed += number
    are_run = are_formulas(pa.array(rows.column_names, pa.string())).to_pylist()
    names = [f"'{name}" if is_run else name for name, is_run in zip(rows.column_names, are_run, strict=True)]
    return rows.rename_columns(names), num_changed


def as_meant(cells: pa.Array) -> pa.Array:
    """Undo `without_formulas` in some texts."""
    if not pc.any(pc.starts_with(cells, "'"), min_count=0).as_py():
        return cells
    rest = pc.utf8_slice_codeunits(cells, 1)
    return pc.if_else(pc.and_(pc.starts_with(cells, "'"), are_formulas(rest)), rest, cells)
