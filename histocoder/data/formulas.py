"""Cells that a spreadsheet would run as formulas: written with an apostrophe before them, and read without it.

A transcribed "=1+1" or "-daughter of the above" is text here, and a formula in Excel; a malicious one can run programs.
See https://owasp.org/www-community/attacks/CSV_Injection.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

_RUN = r"(?s)^'*[=+\-@\t\r\n＝＋－＠].*[\pL\pN]"
_NUMBER = r"^[+-]?[0-9][0-9.,]*([eE][+-]?[0-9]+)?$"
"""Which a spreadsheet shows as it is: -1, -2 and -3 are codes."""


def are_formulas(cells: pa.ChunkedArray | pa.Array) -> pa.ChunkedArray | pa.Array:
    """Return which of some texts a spreadsheet would run; null where they are null."""
    return pc.and_not(pc.match_substring_regex(cells, _RUN), pc.match_substring_regex(cells, _NUMBER))


def without_formulas(rows: pa.Table) -> tuple[pa.Table, int]:
    """Put an apostrophe before each formula, names of columns included; return how many cells have one."""
    columns, num_changed = [], 0
    for column in rows.columns:
        is_text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
        found = are_formulas(column) if is_text else pa.nulls(len(column), pa.bool_())
        number = pc.sum(found, min_count=0).as_py()
        columns.append(pc.if_else(found, _quoted(column), column) if number else column)
        num_changed += number
    return pa.Table.from_arrays(columns, schema=_renamed(rows.schema)), num_changed


def harmless(text: str) -> str:
    """Return one text as `without_formulas` writes it."""
    return f"'{text}" if are_formulas(pa.array([text]))[0].as_py() else text


def _quoted(cells: pa.ChunkedArray) -> pa.ChunkedArray:
    quote, nothing = (pa.scalar(text, cells.type) for text in ("'", ""))
    return pc.binary_join_element_wise(quote, cells, nothing)


def _renamed(schema: pa.Schema) -> pa.Schema:
    is_formula = are_formulas(pa.array(schema.names, pa.string())).to_pylist()
    return pa.schema(
        [field.with_name(f"'{field.name}") if one else field for field, one in zip(schema, is_formula, strict=True)]
    )


def as_meant(cells: pa.Array) -> pa.Array:
    """Undo `without_formulas` in some texts."""
    if not pc.any(pc.starts_with(cells, "'"), min_count=0).as_py():
        return cells
    rest = pc.utf8_slice_codeunits(cells, 1)
    return pc.if_else(pc.and_(pc.starts_with(cells, "'"), are_formulas(rest)), rest, cells)


def notice(num_changed: int, path: object) -> str:
    """Return a notice to the user on formulas in a file that was written."""
    cells = (
        "1 cell begins like a formula and was"
        if num_changed == 1
        else f"{num_changed:,} cells begin like formulas and were"
    )
    return f"{path}: {cells} written with an apostrophe before it, which histocoder takes off when it reads the file."
