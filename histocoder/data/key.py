"""The key: the codes that the classes of the flat head stand for."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa

from histocoder.data.cells import bare
from histocoder.errors import UserError, shown
from histocoder.tables.output import write_table
from histocoder.tables.table import Table, open_table
from histocoder.text.characters import is_missing

_INDEX_COLUMNS = ("code", "index")
_CODE_COLUMNS = ("system_code", "hisco", "occ1950")
_DESC_COLUMNS = ("desc", "title", "en_hisco_text")
_NUM_DIGITS = {"hisco": 5, "occ1950": 3}
"""Column of codes whose leading zeros may be lost -> their number of digits."""


@dataclass(frozen=True)
class Key:
    """Codes in the order of the flat head's classes."""

    codes: tuple[str, ...]
    """Codes by class; one may be empty: OccCANINE's class of blank cells, which no row has here."""
    descriptions: dict[str, str] = field(default_factory=dict)
    """Code -> its meaning, if the key describes it."""

    @cached_property
    def index(self) -> dict[str, int]:
        """Code -> class."""
        return {code: i for i, code in enumerate(self.codes)}

    @classmethod
    def from_codes(cls, codes: Iterable[str]) -> "Key":
        """Return the key of all distinct codes, sorted."""
        return cls(tuple(sorted(set(codes))))

    def extended(self, codes: Iterable[str], descriptions: Mapping[str, str]) -> "Key":
        """Return the key with further codes behind its own, and descriptions of codes that have
        none.
        """
        return Key(
            (*self.codes, *sorted(set(codes) - set(self.codes))),
            dict(descriptions) | self.descriptions,
        )


def read_key(path: str | Path, *, num_digits: int | None = 0) -> Key:
    """Read a key file.

    It has a column of codes (`system_code`, or `hisco`, `occ1950`) and one of class indices from 0
    (`code` or `index`); optionally one of descriptions (`desc` or `title`). A row without code and
    index is left out, and codes in `hisco` and `occ1950` get their leading zeros back: OccCANINE's
    own key is such a file. Codes of digits in `system_code` get zeros up to `num_digits`; None: up
    to the longest.

    Raises UserError if a column is missing, a code or a blank cell occurs twice, or the indices are
    not 0, 1, 2, …
    """
    file = open_table(path, (), optional=(*_CODE_COLUMNS, *_INDEX_COLUMNS, *_DESC_COLUMNS))
    code_col = file.first_of(_CODE_COLUMNS)
    index_col = file.first_of(_INDEX_COLUMNS)
    desc_col = file.first_of(_DESC_COLUMNS)
    if code_col is None or index_col is None:
        raise UserError(
            f"The key {path} needs the columns system_code and code (its index from 0); it has: "
            f"{', '.join(file.header)}."
        )
    columns = [code_col, index_col]
    if desc_col is not None:
        columns.append(desc_col)
    table = file.read(columns)

    # a row with only one of both is a mistake, and stays to be reported
    is_blank = [
        _is_blank(row[code_col]) and _is_blank(row[index_col])
        for row in pa.table(table.columns).to_pylist()
    ]
    table = table.filter(~np.array(is_blank, dtype=bool))

    # spreadsheets drop leading zeros
    codes = _bare_cells(table, code_col)
    if num_digits is None:
        num_digits = max((len(code) for code in codes if code.isdigit()), default=0)
    num_digits = _NUM_DIGITS.get(code_col, num_digits)
    codes = [code.zfill(num_digits) if code.isdigit() else code for code in codes]

    # the order of the rows is free; that of the indices is the classes'
    indices = _bare_cells(table, index_col)
    numbers = pd.Series(map(_index_in, indices), dtype=int)
    is_odd = numbers.duplicated() | ~numbers.between(0, len(numbers) - 1)
    _check_column(
        table,
        index_col,
        indices,
        is_odd,
        rule=f"{path} must number its codes 0, 1, 2, …, each once,",
    )
    is_repeated = pd.Series(codes, dtype=object).duplicated()
    _check_column(
        table, code_col, codes, is_repeated, rule=f"{path} must have each code, and a blank, once"
    )

    descriptions = {}
    if desc_col is not None:
        texts = table.columns[desc_col].to_pylist()
        descriptions = {code: text for code, text in zip(codes, texts, strict=True) if text}
    return Key(tuple(codes[i] for i in np.argsort(numbers.to_numpy())), descriptions)


def _bare_cells(table: Table, column: str) -> list[str]:
    return [bare(cell or "") for cell in table.columns[column].to_pylist()]


def _index_in(text: str) -> int:
    if re.fullmatch(r"[0-9]{1,9}", text):
        return int(text)
    return -1


def _check_column(
    table: Table, column: str, cells: Sequence[str], is_wrong: pd.Series, *, rule: str
) -> None:
    """Raise a UserError if some cells are wrong, and name the first of them; `rule` is the path and
    what the key must do.
    """
    if is_wrong.any():
        row = np.flatnonzero(is_wrong)[:1]
        has = f"{table.file.unit} {table.lines(row)[0]} has {shown(cells[row[0]])}"
        raise UserError(f"The key {rule} in the column {column!r}; {has}.")


def _is_blank(cell: str | None) -> bool:
    text = bare(cell or "")
    return text == "" or is_missing(text)


def write_key(path: Path, key: Key) -> None:
    """Write the columns system_code, code and, if the key has descriptions, desc."""
    columns: dict[str, list[str | None] | range] = {
        "system_code": list(key.codes),
        "code": range(len(key.codes)),
    }
    if key.descriptions:
        columns["desc"] = [key.descriptions.get(code) for code in key.codes]
    write_table(path, [pa.table({name: pa.array(values) for name, values in columns.items()})])
