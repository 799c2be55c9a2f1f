"""Cells that a spreadsheet would run as formulas, which are written with an apostrophe before them."""

import pyarrow as pa
import pyarrow.compute as pc

_FIRST = pa.array([*"'=+-@\t\r\n＝＋－＠"])  # characters that begin cells which a spreadsheet would run
_RUN = r"(?s)^'*[=+\-@\t\r\n＝＋－＠].*[\pL\pN]"  # begin of such a cell
_SHOWN = r"^[+-]?[0-9][0-9.,]*([eE][+-]?[0-9]+)?$"  # numbers, which it shows as they are: -1, -2 and -3 are codes


def are_formulas(cells: pa.ChunkedArray | pa.Array) -> pa.ChunkedArray | pa.Array:
    """Return which of some texts a spreadsheet would run.

    A transcribed "=1+1" or "-daughter of the above" is text here, and a formula in Excel; a malicious one can run
    programs. See https://owasp.org/www-community/attacks/CSV_Injection.
    """
    is_run = pc.is_in(pc.utf8_slice_codeunits(cells, 0, 1), value_set=_FIRST.cast(cells.type))
    if pc.any(is_run, min_count=0).as_py():
        is_run = pc.and_not(pc.match_substring_regex(cells, _RUN), pc.match_substring_regex(cells, _SHOWN))
    return is_run


def without_formulas(cells: pa.ChunkedArray | pa.Array) -> tuple[pa.ChunkedArray | pa.Array, int]:
    """Put an apostrophe before each text that a spreadsheet would run; return how many have one."""
    found = are_formulas(cells)
    if not (number := pc.sum(found, min_count=0).as_py()):
        return cells, 0
    quote, nothing = (pa.scalar(text, cells.type) for text in ("'", ""))
    return pc.if_else(found, pc.binary_join_element_wise(quote, cells, nothing), cells), number


def as_meant(cells: pa.Array) -> pa.Array:
    """Undo `without_formulas`."""
    if not pc.any(pc.starts_with(cells, "'"), min_count=0).as_py():
        return cells
    rest = pc.utf8_slice_codeunits(cells, 1)
    return pc.if_else(pc.and_(pc.starts_with(cells, "'"), are_formulas(rest)), rest, cells)
