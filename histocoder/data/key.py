"""The key: which code each class of the flat head stands for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pyarrow as pa

from histocoder.data.table import read_header, read_table, write_csv
from histocoder.errors import UserError
from histocoder.files import replacing

_INDEX_COLUMNS = ("code", "index")
_CODE_COLUMNS = ("system_code", "hisco", "occ1950")
_DESC_COLUMNS = ("desc", "title", "en_hisco_text")


@dataclass(frozen=True)
class Key:
    """Codes in the order of the flat head's classes."""

    codes: tuple[str, ...]
    descriptions: dict[str, str] = field(default_factory=dict)
    """What codes mean, of those that the key describes."""

    @cached_property
    def index(self) -> dict[str, int]:
        """Code -> class."""
        return {code: i for i, code in enumerate(self.codes)}

    @classmethod
    def from_codes(cls, codes: Iterable[str]) -> Key:
        """The key of all distinct codes, sorted."""
        return cls(tuple(sorted(set(codes))))


def read_key(path: str | Path) -> Key:
    """Read a key file.

    Parameters
    ----------
    path : path
        CSV with a column of codes (`system_code`, or `hisco`, `occ1950`) and one of class indices from 0 (`code` or
        `index`); optionally one of descriptions (`desc` or `title`).

    Raises
    ------
    UserError
        Where a column is missing, a code stands twice, or the indices are not 0, 1, 2, …
    """
    path = Path(path)
    header = read_header(path)
    found = {
        role: next((name for name in names if name in header), None)
        for role, names in (("code", _CODE_COLUMNS), ("index", _INDEX_COLUMNS), ("desc", _DESC_COLUMNS))
    }
    code_col, index_col, desc_col = found["code"], found["index"], found["desc"]
    if code_col is None or index_col is None:
        raise UserError(
            f"The key {path} needs the columns system_code and code (its index from 0); it has: {', '.join(header)}."
        )
    table = read_table(path, [c for c in (code_col, index_col, desc_col) if c is not None])
    codes, indices = table.columns[code_col].to_pylist(), table.columns[index_col].to_pylist()
    numbers = [int(text) if text is not None and text.strip().isdigit() else -1 for text in indices]
    if sorted(numbers) != list(range(len(numbers))):
        raise UserError(f"The key {path} must number its codes 0, 1, 2, … in the column {index_col!r}, each once.")
    if None in codes or len(set(codes)) < len(codes):
        raise UserError(f"The key {path} has an empty or a repeated code in the column {code_col!r}.")
    order = sorted(range(len(codes)), key=numbers.__getitem__)
    texts = table.columns[desc_col].to_pylist() if desc_col is not None else [None] * len(codes)
    ordered = tuple(codes[i].strip() for i in order)
    return Key(ordered, {code.strip(): text for code, text in zip(codes, texts, strict=True) if text is not None})


def write_key(path: Path, key: Key) -> None:
    """Write `system_code,code` and, where the key has any, `desc`."""
    columns: dict[str, list[str | None] | range] = {"system_code": list(key.codes), "code": range(len(key.codes))}
    if key.descriptions:
        columns["desc"] = [key.descriptions.get(code) for code in key.codes]
    with replacing(path) as temporary:
        write_csv(pa.table({name: pa.array(values) for name, values in columns.items()}), temporary)
