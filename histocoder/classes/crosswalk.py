"""Social classes and other values of codes, from a crosswalk: a table that a user has
downloaded.
"""

import itertools
import re
from pathlib import Path
from typing import NamedTuple

from histocoder.config.prediction import QUALIFIERS, ClassOptions
from histocoder.data.cells import CodeColumn, read_code
from histocoder.errors import UserError
from histocoder.tables.table import fingerprint, open_table

CODE_COL = "hisco"
"""Column of a crosswalk that is matched, as are those of `QUALIFIERS`, of which a later one is left
out first.
"""
EXACT, AGREED = "exact", "all rows of the code agree"
AMBIGUOUS, NO_VALUE, UNKNOWN, NO_CODE = (
    "ambiguous",
    "no value in the table",
    "code not in the table",
    "no code",
)
WITHOUT_VALUE = (AMBIGUOUS, NO_VALUE, UNKNOWN, NO_CODE)

_VALUES = CodeColumn(has_decimals=True)  # of classes and scales
_NUMBER = re.compile(r"-?\d+([.,]\d+)?")


def code_in(cell: str | None) -> str | None:
    """Return the code in a cell, one of digits with HISCO's leading zeros; None if there is
    none.
    """
    digits = read_code(cell or "")
    return (digits.zfill(5) if digits.isdecimal() else digits) or None


class Found(NamedTuple):
    """A value, None if there is none, and how it was found or why there is none."""

    value: str | None
    how: str


class Crosswalk:
    """Values of codes by HISCO, status, relation and product.

    The most specific row whose status, relation and product are the given ones or none wins. If no
    row matches, a code has the value on which all its rows agree. Rows with the same key that
    disagree are ambiguous, each value by itself.

    The table at `path` has the column `hisco`, and `status`, `relation` and `product` where its
    values depend on them. Of the options `value_cols`, `scale_cols` and `none` count.

    Raises UserError if the table can't be read, or has no such columns.
    """

    qualifiers = QUALIFIERS

    def __init__(self, path: str | Path, options: ClassOptions) -> None:
        self.file = open_table(path, [CODE_COL], optional=QUALIFIERS)
        self.notices = self.file.notices
        self._none, value_cols, scale_cols = options.none, options.value_cols, options.scale_cols
        self.keys = {
            name: self.file.column(name) for name in (CODE_COL, *QUALIFIERS) if self.file.has(name)
        }
        if value_cols:
            values = [self.file.column(name, "value_cols") for name in value_cols]
        else:
            values = [name for name in self.file.header if name not in self.keys.values()]
        if not values:
            raise UserError(
                f"{path} has no columns of values, such as hisclass, beside {', '.join(self.keys)}."
            )
        self.value_cols = list(dict.fromkeys(values))
        self._values: dict[
            tuple[str | None, ...], list[set[str | None]]
        ] = {}  # of all rows of a key, and of a code
        for table in self.file.tables([*self.keys, *self.value_cols]):
            cells = {name: column.to_pylist() for name, column in table.columns.items()}
            given = [cells.get(name, [None] * len(table)) for name in (CODE_COL, *QUALIFIERS)]
            values_of = zip(*(cells[name] for name in self.value_cols), strict=True)
            for key, row in zip(zip(*given, strict=True), values_of, strict=True):
                code, *qualifiers = self._key(*key)
                for own in ((code,), (code, *qualifiers)) if code else ():
                    for some, cell in zip(
                        self._values.setdefault(own, [set() for _ in row]), row, strict=True
                    ):
                        some.add(self._cell(cell))
        self.identity = {"table": self.file.path.name, "sha256": fingerprint(path)}
        scales = filter(self._is_scale, self.value_cols) if scale_cols is None else scale_cols
        self.scales = [self.file.column(name, "scale_cols") for name in scales]
        self.classes = [name for name in self.value_cols if name not in self.scales]

    def _is_scale(self, name: str) -> bool:
        i = self.value_cols.index(name)
        cells = {cell for values in self._values.values() for cell in values[i] if cell is not None}
        has_decimals = any("." in cell or "," in cell for cell in cells)
        return (name.lower().startswith("hiscam") or has_decimals) and all(
            map(_NUMBER.fullmatch, cells)
        )

    def find(
        self,
        code: str | None,
        status: str | None = None,
        relation: str | None = None,
        product: str | None = None,
    ) -> list[Found]:
        """Return the value of each of `value_cols` for cells as they are in a table; None is a
        blank one.
        """
        code, *given = self._key(code, status, relation, product)
        if code is None or (code,) not in self._values:
            return [Found(None, NO_CODE if code is None else UNKNOWN)] * len(self.value_cols)
        values, how = self._values[(code,)], AGREED
        for kept in itertools.product(
            (True, False), repeat=len(QUALIFIERS)
        ):  # the last one is left out first
            key = (code, *(cell if keep else None for cell, keep in zip(given, kept, strict=True)))
            if key in self._values:
                left_out = [
                    name
                    for name, cell, used in zip(QUALIFIERS, given, key[1:], strict=True)
                    if cell != used
                ]
                values, how = (
                    self._values[key],
                    f"without {', '.join(left_out)}" if left_out else EXACT,
                )
                break
        found = []
        for some in values:  # those that the rows have
            value = next(iter(some)) if len(some) == 1 else None
            found.append(
                Found(value, AMBIGUOUS if len(some) > 1 else NO_VALUE if value is None else how)
            )
        return found

    def _cell(self, cell: str | None) -> str | None:
        text = read_code(cell or "", _VALUES)
        return None if text == "" or text in self._none else text

    def _key(self, code: str | None, *qualifiers: str | None) -> list[str | None]:
        """Return a code with its leading zeros, and qualifiers without; None where there is
        none.
        """
        cells = [
            None if cell is None else self._cell(read_code(cell).lstrip("0")) for cell in qualifiers
        ]
        return [code_in(code), *cells]
