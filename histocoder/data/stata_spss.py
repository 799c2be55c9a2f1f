"""Files of Stata and SPSS, whose numbers may have labels, which are read in their place; codes are written as text."""

import re
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from histocoder.data.cells import plain
from histocoder.errors import UserError

_LONGEST_NAME = {".dta": 32, ".sav": 64}
_LONGEST_TEXT = 2045  # number of characters from which Stata needs its type strL
_INTEGER = re.compile(r"-?[0-9]+")  # form of labels that are codes themselves, as Stata's `encode` makes them


def read_labelled(path: Path, codes: Collection[str]) -> tuple[pa.Table, list[str]]:
    """Read a .dta or .sav file, with notices to the user: variables in `codes` as values, others as their labels.

    Raises UserError if the file is damaged, or the package that reads .sav files is not installed.
    """
    try:
        if path.suffix.lower() == ".dta":
            with pd.read_stata(path, iterator=True) as reader:
                values, sets = reader.read(convert_categoricals=False), reader.value_labels()
                labels = {name: sets.get(own, {}) for name, own in zip(reader._varlist, reader._lbllist, strict=True)}
        else:
            values, meta = pyreadstat(path).read_sav(path)
            labels = meta.variable_value_labels
    except UserError:
        raise
    except Exception as error:  # readers raise errors of all types if a file is damaged
        why = str(error).splitlines()[0][:120]
        raise UserError(f"{path} can't be read as a {path.suffix} file ({why}). Save it again, or as CSV.") from error
    labelled, own_codes = [], set(map(plain, codes))
    for name in values.columns:
        found = {_text(value): label for value, label in labels.get(name, {}).items()}
        if found and (plain(name) not in own_codes or all(map(_INTEGER.fullmatch, found.values()))):
            values[name] = values[name].map(lambda value, found=found: found.get(_text(value), _text(value)))
            labelled.append(name)
    names = ", ".join(labelled)
    notices = [f"{path}: cells of these columns are read as their value labels: {names}."] if labelled else []
    return pa.Table.from_pandas(values, preserve_index=False).replace_schema_metadata(None), notices


def pyreadstat(path: Path) -> Any:
    """Return the package that reads and writes files of SPSS; raise a UserError if it is missing."""
    try:
        import pyreadstat
    except ImportError as error:
        raise UserError(
            f"{path}: files of SPSS need the package pyreadstat. Install it (pip install pyreadstat), or use CSV."
        ) from error
    return pyreadstat


def _text(value: Any) -> str | None:
    """Return a value as text, whole numbers without decimals."""
    if pd.isna(value):
        return None
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def write_labelled(path: Path, temporary: Path, table: pa.Table) -> list[str]:
    """Write a .dta or .sav file; return notices to the user."""
    kind = path.suffix.lower()
    names = _legal_names(table.column_names, longest=_LONGEST_NAME[kind])
    frame = pa.table([_storable(column) for column in table.columns], names=names).to_pandas()
    for name in names:
        if pd.api.types.is_string_dtype(frame[name].dtype) or frame[name].dtype == object:
            frame[name] = frame[name].astype(object).where(frame[name].notna(), "")
    if kind == ".sav":
        pyreadstat(path).write_sav(frame, str(temporary))
    else:
        long = [n for n in names if frame[n].dtype == object and frame[n].str.len().max() > _LONGEST_TEXT]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # integers become doubles
            frame.to_stata(temporary, version=118, write_index=False, convert_strl=long)
    changed = ", ".join(f"{old} as {new}" for old, new in zip(table.column_names, names, strict=True) if old != new)
    return [f"{path}: columns are renamed, since their names are not allowed there: {changed}."] if changed else []


def _storable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Turn dates into times, booleans, decimals and half floats into numbers, and other types into text."""
    kind = column.type
    if pa.types.is_date(kind):
        return column.cast(pa.timestamp("ms"))
    if pa.types.is_boolean(kind):
        return column.cast(pa.int8())
    if pa.types.is_decimal(kind) or pa.types.is_float16(kind):
        return column.cast(pa.float64())
    return column.cast(pa.string()) if pa.types.is_time(kind) or pa.types.is_duration(kind) else column


def _legal_names(names: list[str], *, longest: int) -> list[str]:
    """Return unique names of letters, digits and underscores that begin with a letter, as Stata and SPSS take them."""
    found: list[str] = []
    for name in names:
        legal = re.sub(r"[^0-9A-Za-z_]", "_", name)[:longest]
        legal = legal if legal[:1].isalpha() else f"v{legal}"[:longest]
        number = 2
        while legal.lower() in {other.lower() for other in found}:
            legal = f"{legal[: longest - 4]}_{number}"
            number += 1
        found.append(legal)
    return found
