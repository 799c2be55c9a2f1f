"""Values of codes from a crosswalk, such as social classes: a table that a user has downloaded."""

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import pyarrow as pa

from histocoder.config.prediction import QUALIFIERS, ClassOptions
from histocoder.data.cells import CodeColumn, read_code
from histocoder.errors import UserError
from histocoder.tables.table import fingerprint, open_table

CODE_COL = "hisco"
"""Column of a crosswalk that is matched, as are those of `QUALIFIERS`, of which a later one is left
out first.
"""
EXACT = "exact"
"""Way in which a value was found: by a row of the code and of all qualifiers."""
AGREED = "all rows of the code agree"
AMBIGUOUS = "ambiguous"
NO_VALUE = "no value in the table"
UNKNOWN = "code not in the table"
NO_CODE = "no code"
WITHOUT_VALUE = (AMBIGUOUS, NO_VALUE, UNKNOWN, NO_CODE)

_VALUES = CodeColumn(has_decimals=True)  # of classes and scales
_NUMBER = re.compile(r"-?\d+([.,]\d+)?")


class Match(NamedTuple):
    """The value of a code, None if there is none, and how it was found or why there is none."""

    value: str | None
    way: str


class CodeKey(NamedTuple):
    """A code, and the qualifiers on which its values depend; None where there is none."""

    code: str | None
    status: str | None
    relation: str | None
    product: str | None


RowValues: TypeAlias = dict[str, set[str | None]]
"""Column of values -> the values of all rows of a key, or of a code."""


def code_in(cell: str | None) -> str | None:
    """Return the code in a cell, one of digits with HISCO's leading zeros; None if there is
    none.
    """
    code = read_code(cell or "")
    if code.isdecimal():
        code = code.zfill(5)
    return code or None


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
        self.identity = {"table": self.file.path.name, "sha256": fingerprint(path)}
        self._none = options.none
        key_cols = [name for name in (CODE_COL, *QUALIFIERS) if self.file.has(name)]
        self.value_cols = self._value_cols(options.value_cols, key_cols)

        self._by_code: dict[str, RowValues] = {}
        self._by_key: dict[CodeKey, RowValues] = {}
        for table in self.file.tables([*key_cols, *self.value_cols]):
            for row in pa.table(table.columns).to_pylist():
                self._add(row)

        scale_cols = options.scale_cols
        if scale_cols is None:
            scale_cols = tuple(filter(self._is_scale, self.value_cols))
        self.scales = [self.file.column(name, "scale_cols") for name in scale_cols]
        self.classes = [name for name in self.value_cols if name not in self.scales]

    def _value_cols(self, names: Sequence[str] | None, key_cols: Sequence[str]) -> list[str]:
        """Return the columns of values: those named, else all that are not matched."""
        if names:
            return list(dict.fromkeys(self.file.column(name, "value_cols") for name in names))
        matched = [self.file.column(name) for name in key_cols]
        value_cols = [name for name in self.file.header if name not in matched]
        if not value_cols:
            raise UserError(
                f"{self.file.path} has no columns of values, such as hisclass, beside "
                f"{', '.join(key_cols)}."
            )
        return value_cols

    def _add(self, row: Mapping[str, str | None]) -> None:
        """Add the values of a row of the table to those of its code and key."""
        key = self._key(row[CODE_COL], *map(row.get, QUALIFIERS))
        if key.code is None:
            return
        code_values = self._by_code.setdefault(key.code, {})
        key_values = self._by_key.setdefault(key, {})
        for name in self.value_cols:
            value = self._value(row[name])
            code_values.setdefault(name, set()).add(value)
            key_values.setdefault(name, set()).add(value)

    def _is_scale(self, name: str) -> bool:
        """Return whether a column holds numbers, of which some have decimals unless it is a HISCAM."""
        rows = self._by_code.values()
        values = {value for row in rows for value in row[name] if value is not None}
        has_decimals = any("." in value or "," in value for value in values)
        may_be_scale = has_decimals or name.lower().startswith("hiscam")
        return may_be_scale and all(map(_NUMBER.fullmatch, values))

    def find(
        self,
        code: str | None,
        status: str | None = None,
        relation: str | None = None,
        product: str | None = None,
    ) -> list[Match]:
        """Return the value of each of `value_cols` for cells as they are in a table; None is a
        blank one.
        """
        key = self._key(code, status, relation, product)
        if key.code is None:
            return [Match(None, NO_CODE)] * len(self.value_cols)
        if key.code not in self._by_code:
            return [Match(None, UNKNOWN)] * len(self.value_cols)
        values, way = self._most_specific(key)

        # rows of one key may disagree about a value
        matches = []
        for name in self.value_cols:
            if len(values[name]) > 1:
                matches.append(Match(None, AMBIGUOUS))
                continue
            (value,) = values[name]
            if value is None:
                matches.append(Match(None, NO_VALUE))
            else:
                matches.append(Match(value, way))
        return matches

    def _most_specific(self, key: CodeKey) -> tuple[RowValues, str]:
        """Return the values of the most specific rows that match, and how these were found."""
        # qualifiers are left out in the order of binary numbers: none, the last one, the one before
        # it, these two, and so on
        stated = [name for name in QUALIFIERS if getattr(key, name) is not None]
        for is_left_out in itertools.product((False, True), repeat=len(stated)):
            left_out = list(itertools.compress(stated, is_left_out))
            values = self._by_key.get(key._replace(**dict.fromkeys(left_out)))
            if values is not None:
                return values, f"without {', '.join(left_out)}" if left_out else EXACT
        return self._by_code[key.code or ""], AGREED

    def _value(self, cell: str | None) -> str | None:
        text = read_code(cell or "", _VALUES)
        if text == "" or text in self._none:
            return None
        return text

    def _key(self, code: str | None, *qualifiers: str | None) -> CodeKey:
        """Return a code with its leading zeros, and qualifiers without."""
        cells = [self._value(read_code(cell or "").lstrip("0")) for cell in qualifiers]
        return CodeKey(code_in(code), *cells)
