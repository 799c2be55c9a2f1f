"""Social classes and other values of codes, from a crosswalk: a table that a user has downloaded."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from histocoder.config.prediction import NONE_CELLS
from histocoder.data.cells import read_code
from histocoder.data.table import CHUNK_ROWS, TableFile, open_table, strings
from histocoder.errors import UserError

CODE_COL, QUALIFIERS = "hisco", ("status", "relation", "product")
"""Columns of a crosswalk that are matched; of the qualifiers, a later one is left out before an earlier one."""
EXACT, AGREED = "exact", "all rows of the code agree"
AMBIGUOUS, NO_VALUE, UNKNOWN, NO_CODE = "ambiguous", "no value in the table", "code not in the table", "no code"
WITHOUT_VALUE = (AMBIGUOUS, NO_VALUE, UNKNOWN, NO_CODE)
_HISCO_DIGITS = 5


class Found(NamedTuple):
    """A value, None if there is none, and how it was found or why there is none."""

    value: str | None
    how: str


class Crosswalk:
    """Values of codes by HISCO, status, relation and product.

    The most specific row whose status, relation and product are the given ones or none wins. If no row matches, a code
    has the value on which all its rows agree. Rows with the same key that disagree are ambiguous, each value by itself.

    Parameters
    ----------
    path : str or Path
        Table with the column `hisco`, and `status`, `relation` and `product` where its values depend on them.
    value_cols : sequence of str
        Columns of values; by default all others.
    none : collection of str
        Cells that mean that there is no value, status, relation or product, besides blank ones.

    Raises
    ------
    UserError
        If the table can't be read, or has no such columns.
    """

    def __init__(
        self, path: str | Path, value_cols: Sequence[str] | None = None, *, none: Collection[str] = NONE_CELLS
    ) -> None:
        self.file = open_table(path, [CODE_COL], optional=QUALIFIERS)
        self._none = none
        self.keys = {name: self.file.column(name) for name in (CODE_COL, *QUALIFIERS) if self.file.has(name)}
        if value_cols:
            values = [self.file.column(name, "value_cols") for name in value_cols]
        else:
            values = [name for name in self.file.header if name not in self.keys.values()]
        if not values:
            raise UserError(f"{path} has no columns of values, such as hisclass, beside {', '.join(self.keys)}.")
        self.value_cols = list(dict.fromkeys(values))
        self._values: dict[tuple[str | None, ...], list[set[str | None]]] = {}  # of all rows of a key, and of a code
        for table in self.file.tables([*self.keys, *self.value_cols]):
            cells = {name: column.to_pylist() for name, column in table.columns.items()}
            given = [cells.get(name, [None] * len(table)) for name in (CODE_COL, *QUALIFIERS)]
            values_of = zip(*(cells[name] for name in self.value_cols), strict=True)
            for key, row in zip(zip(*given, strict=True), values_of, strict=True):
                code, *qualifiers = self._key(*key)
                for own in ((code,), (code, *qualifiers)) if code else ():
                    for some, cell in zip(self._values.setdefault(own, [set() for _ in row]), row, strict=True):
                        some.add(self._cell(cell))

    def find(
        self, code: str | None, status: str | None = None, relation: str | None = None, product: str | None = None
    ) -> list[Found]:
        """Return the value of each of `value_cols` for cells as they are in a table; None is a blank one."""
        code, *given = self._key(code, status, relation, product)
        if code is None or (code,) not in self._values:
            return [Found(None, NO_CODE if code is None else UNKNOWN)] * len(self.value_cols)
        values, how = self._values[(code,)], AGREED
        for kept in itertools.product((True, False), repeat=len(QUALIFIERS)):  # the last one is left out first
            key = (code, *(cell if keep else None for cell, keep in zip(given, kept, strict=True)))
            if key in self._values:
                left_out = [name for name, cell, used in zip(QUALIFIERS, given, key[1:], strict=True) if cell != used]
                values, how = self._values[key], f"without {', '.join(left_out)}" if left_out else EXACT
                break
        return [_found(some, how) for some in values]

    def _cell(self, cell: str | None) -> str | None:
        text = read_code(cell or "", has_decimals=True)
        return None if text == "" or text in self._none else text

    def _key(self, code: str | None, *qualifiers: str | None) -> list[str | None]:
        """Return a code with its leading zeros, and qualifiers without; None where there is none."""
        digits = read_code(code or "")
        cells = [None if cell is None else self._cell(read_code(cell).lstrip("0")) for cell in qualifiers]
        return [(digits.zfill(_HISCO_DIGITS) if digits.isdecimal() else digits) or None, *cells]


def _found(values: set[str | None], how: str) -> Found:
    """Return the only one of the values that rows have."""
    if len(values) > 1:
        return Found(None, AMBIGUOUS)
    (value,) = values
    return Found(value, NO_VALUE if value is None else how)


@dataclass
class Classes:
    """The columns that a crosswalk adds to a table; `counts` has their rows by how each value was found."""

    crosswalk: Crosswalk
    file: TableFile
    code_cols: Sequence[str]
    qualifier_cols: Mapping[str, str]  # status, relation or product -> its column, where the table has one
    prefix: str = ""  # that of the names of the new columns
    counts: dict[str, Counter[str]] = field(init=False)

    def __post_init__(self) -> None:
        self.counts = {name: Counter() for names in self._names for name in names}

    @property
    def _names(self) -> list[list[str]]:
        """Names of the new columns of each column of codes, which have its number if there are several."""
        several = len(self.code_cols) > 1
        numbers = [f"_{number}" if several else "" for number in range(1, len(self.code_cols) + 1)]
        return [[f"{self.prefix}{value}{number}" for value in self.crosswalk.value_cols] for number in numbers]

    def blocks(self) -> Iterator[pa.Table]:
        """Yield the table in blocks, with the new columns behind its own."""
        path, columns = self.file.path, [*self.code_cols, *self.qualifier_cols.values()]
        for table in self.file.chunks(chunk_rows=CHUNK_ROWS):
            cells = {name: strings(table[name], f"{path}, column {name!r},").to_pylist() for name in columns}
            given = [cells.get(self.qualifier_cols.get(name, ""), [None] * len(table)) for name in QUALIFIERS]
            block = table
            for code_col, names in zip(self.code_cols, self._names, strict=True):
                keys = list(zip(cells[code_col], *given, strict=True))
                found = {key: self.crosswalk.find(*key) for key in set(keys)}
                for i, name in enumerate(names):
                    block = block.append_column(name, pa.array([found[key][i].value for key in keys], pa.string()))
                    self.counts[name].update(found[key][i].how for key in keys)
            yield block
