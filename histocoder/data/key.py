"""The key: which code each class of the flat head stands for."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa

from histocoder.data.cells import MISSING_MARKS
from histocoder.data.table import Table, csv_writer, open_table
from histocoder.errors import UserError, shown
from histocoder.files import replacing

T = TypeVar("T")
_INDEX_COLUMNS = ("code", "index")
_CODE_COLUMNS = ("system_code", "hisco", "occ1950")
_DESC_COLUMNS = ("desc", "title", "en_hisco_text")
_NUM_DIGITS = {"hisco": 5, "occ1950": 3}
"""Of codes in columns of these names, whose leading zeros may be lost."""


@dataclass(frozen=True)
class Key:
    """Codes in the order of the flat head's classes."""

    codes: tuple[str, ...]
    """One may be empty: the class that OccCANINE has for blank cells, which no row is given here."""
    descriptions: dict[str, str] = field(default_factory=dict)
    """What codes mean, of those that the key describes."""

    @cached_property
    def index(self) -> dict[str, int]:
        """Code -> class."""
        return {code: i for i, code in enumerate(self.codes)}

    @classmethod
    def from_codes(cls, codes: Iterable[str]) -> Key:
        """Return the key of all distinct codes, sorted."""
        return cls(tuple(sorted(set(codes))))

    def extended(self, codes: Iterable[str], descriptions: Mapping[str, str]) -> Key:
        """This key with further codes behind its own, and what codes mean that it does not describe."""
        return Key((*self.codes, *sorted(set(codes) - set(self.codes))), {**descriptions, **self.descriptions})


def read_key(path: str | Path) -> Key:
    """Read a key file.

    Parameters
    ----------
    path : path
        CSV with a column of codes (`system_code`, or `hisco`, `occ1950`) and one of class indices from 0 (`code` or
        `index`); optionally one of descriptions (`desc` or `title`). A row without code and index is left out, and
        codes in `hisco` and `occ1950` get their leading zeros back: OccCANINE's own key is such a file.

    Raises
    ------
    UserError
        If a column is missing, a code or a blank cell occurs twice, or the indices are not 0, 1, 2, …
    """
    path = Path(path)
    file = open_table(path, (), optional=(*_CODE_COLUMNS, *_INDEX_COLUMNS, *_DESC_COLUMNS))
    found = {
        role: next((name for name in names if name in file.header), None)
        for role, names in (("code", _CODE_COLUMNS), ("index", _INDEX_COLUMNS), ("desc", _DESC_COLUMNS))
    }
    code_col, index_col, desc_col = found["code"], found["index"], found["desc"]
    if code_col is None or index_col is None:
        raise UserError(
            f"The key {path} needs the columns system_code and code (its index from 0); it has: "
            f"{', '.join(file.header)}."
        )
    table = file.read([c for c in (code_col, index_col, desc_col) if c is not None])
    is_empty = [
        all(not cell or cell.strip() in MISSING_MARKS for cell in cells)
        for cells in zip(*(table.columns[c].to_pylist() for c in (code_col, index_col)), strict=True)
    ]
    kept = pa.array(np.flatnonzero(~np.array(is_empty, dtype=bool)))
    table = Table(file, {name: column.take(kept) for name, column in table.columns.items()}, table.rows[kept])
    codes, indices = table.columns[code_col].to_pylist(), table.columns[index_col].to_pylist()
    numbers = [_index(text) for text in indices]
    if (row := _first_odd(numbers, allowed=range(len(numbers)))) is not None:
        raise UserError(
            f"The key {path} must number its codes 0, 1, 2, … in the column {index_col!r}, each once; line "
            f"{table.lines(np.array([row]))[0]} has {shown(indices[row] or '')}."
        )
    stripped = [(code or "").strip() for code in codes]
    stripped = [
        code.zfill(_NUM_DIGITS[code_col]) if code_col in _NUM_DIGITS and code.isdigit() else code for code in stripped
    ]
    if (row := _first_odd(stripped, allowed=set(stripped))) is not None:
        raise UserError(
            f"The key {path} has a repeated code, or two blanks, in the column {code_col!r}, line "
            f"{table.lines(np.array([row]))[0]}: {shown(stripped[row])}."
        )
    order = sorted(range(len(codes)), key=numbers.__getitem__)
    texts = table.columns[desc_col].to_pylist() if desc_col is not None else [None] * len(codes)
    ordered = tuple(stripped[i] for i in order)
    return Key(ordered, {code: text for code, text in zip(stripped, texts, strict=True) if text is not None})


def _index(text: str | None) -> int:
    """Return the class that a cell names; -1 where it names none."""
    text = (text or "").strip()
    return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else -1


def _first_odd(values: Sequence[T], *, allowed: Container[T]) -> int | None:
    """Return the first place of a value that is not allowed or stood there before."""
    seen: set[T] = set()
    for i, value in enumerate(values):
        if value in seen or value not in allowed:
            return i
        seen.add(value)
    return None


def write_key(path: Path, key: Key) -> None:
    """Write `system_code,code` and, where the key has any, `desc`."""
    columns: dict[str, list[str | None] | range] = {"system_code": list(key.codes), "code": range(len(key.codes))}
    if key.descriptions:
        columns["desc"] = [key.descriptions.get(code) for code in key.codes]
    table = pa.table({name: pa.array(values) for name, values in columns.items()})
    with replacing(path) as temporary, csv_writer(temporary, table.schema) as writer:
        writer.write_table(table)
