"""Files of Stata and SPSS, whose numbers have labels: read as these, except codes; and written so."""

import re
import warnings
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from histocoder.data.header import plain
from histocoder.data.sheets import for_sheets
from histocoder.errors import UserError

_SEVERAL = "code of several lengths"
_CODES = re.compile(rf"code of ([0-9]+) characters|{_SEVERAL}")
"""Label of a variable of codes that `write_labelled` wrote; its number tells how many leading zeros to restore."""
_LONGEST_NAME = {".dta": 32, ".sav": 64}
_MAX_LABEL_BYTES = 120
"""Limit of SPSS; Stata takes more."""
_LONGEST_TEXT = 2045
"""Number of characters from which Stata needs its type strL."""
_INTEGER = re.compile(r"-?[0-9]+")
"""Form of labels that are codes themselves, as Stata's `encode` makes them."""
_NUMBER = re.compile(r"-[0-9]{1,8}|[0-9]{0,9}")
"""Form of integers that can have labels in Stata, or of blank cells."""


def read_labelled(path: Path, codes: Collection[str]) -> tuple[pa.Table, list[str]]:
    """Read a .dta or .sav file, with notices to the user: variables in `codes` as values, others as their labels.

    Raises UserError if the file is damaged, or the package that reads .sav files is not installed.
    """
    read = _read_stata if path.suffix.lower() == ".dta" else _read_spss
    try:
        values, value_labels, titles = read(path)
    except UserError:
        raise
    except Exception as error:  # readers raise errors of all types if a file is damaged
        raise UserError(
            f"{path} can't be read as a {path.suffix} file ({str(error).splitlines()[0][:120]}). Save it again, or as "
            "CSV."
        ) from error
    labelled, own = [], set(map(plain, codes))
    for name in values.columns:
        match = _CODES.fullmatch(titles.get(name) or "")
        if match is not None:
            values[name] = values[name].map(lambda value, length=int(match[1] or 0): _code(value, length))
        elif value_labels.get(name) and (
            plain(name) not in own or all(map(_INTEGER.fullmatch, value_labels[name].values()))
        ):
            labels = {_text(value): label for value, label in value_labels[name].items()}
            values[name] = values[name].map(lambda value, labels=labels: labels.get(_text(value), _text(value)))
            labelled.append(str(name))
    table = pa.Table.from_pandas(values, preserve_index=False).replace_schema_metadata(None)
    is_text = [pa.types.is_large_string(kind) or pa.types.is_null(kind) for kind in table.schema.types]
    fields = [
        field.with_type(pa.string()) if text else field for field, text in zip(table.schema, is_text, strict=True)
    ]
    notices = (
        [f"{path}: cells of these columns are read as their value labels: {', '.join(labelled)}."] if labelled else []
    )
    return table.cast(pa.schema(fields)), notices


def _read_stata(path: Path) -> tuple[pd.DataFrame, dict[str, dict], dict[str, str]]:
    with pd.read_stata(path, iterator=True) as reader:
        titles = reader.variable_labels()
        has_labels = bool(reader.value_labels())
    values = pd.read_stata(path, convert_categoricals=False)
    if not has_labels:
        return values, {}, titles
    try:
        labels = pd.read_stata(path, order_categoricals=False)
    except ValueError as error:
        raise UserError(
            f"{path} has a value label that is used for two values; make labels unique, or drop them (label drop _all)."
        ) from error
    found = {}
    for name in labels.columns:
        if isinstance(labels[name].dtype, pd.CategoricalDtype):
            pairs = pd.DataFrame({"value": values[name], "label": labels[name].astype(object)}).dropna()
            found[name] = {row.value: _text(row.label) for row in pairs.drop_duplicates().itertuples()}
    return values, found, titles


def _read_spss(path: Path) -> tuple[pd.DataFrame, dict[str, dict], dict[str, str]]:
    values, meta = _pyreadstat(path).read_sav(path)
    return values, meta.variable_value_labels, meta.column_names_to_labels


def _pyreadstat(path: Path) -> Any:
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


def _code(value: Any, length: int) -> str | None:
    text = _text(value)
    return text.zfill(length) if text is not None and text.isdigit() else text


def check_labelled(path: Path) -> None:
    """Raise a UserError if the package that writes a file of this suffix is missing."""
    if path.suffix.lower() == ".sav":
        _pyreadstat(path)


def write_labelled(
    path: Path, temporary: Path, table: pa.Table, *, codes: Collection[str], titles: Mapping[str, str]
) -> list[str]:
    """Write a .dta or .sav file, codes with their titles as labels; return notices to the user.

    Stata has labels of numbers only: codes with titles are stored as numbers there, if they are numbers.
    """
    kind = path.suffix.lower()
    names = _legal_names(table.column_names, longest=_LONGEST_NAME[kind])
    columns = [_storable(column) for column in table.columns]
    frame = pa.table(columns, names=names).to_pandas()
    labels: dict[str, dict] = {}
    variable_labels: dict[str, str] = {}
    for old, name in zip(table.column_names, names, strict=True):
        is_text = pd.api.types.is_string_dtype(frame[name].dtype) or frame[name].dtype == object
        if is_text:
            frame[name] = frame[name].astype(object).where(frame[name].notna(), "")
        if old not in codes or not titles:
            continue
        found = {code: titles[code] for code in sorted(set(frame[name])) if code in titles}
        times = Counter(found.values())  # a label of two values can't be read
        found = {code: title if times[title] == 1 else f"{title} ({code})" for code, title in found.items()}
        lengths = {len(code) for code in set(frame[name]) if code.isdigit()}
        if kind == ".dta":
            if not all(_NUMBER.fullmatch(code) for code in set(frame[name])) or len(lengths) > 1:
                continue
            frame[name] = pd.to_numeric(frame[name], errors="coerce")
            labels[name] = {int(code): title for code, title in found.items()}
        else:
            labels[name] = {
                code: title.encode()[:_MAX_LABEL_BYTES].decode(errors="ignore") for code, title in found.items()
            }
        # with codes of several lengths, zeros that one does not have would be added when it is read
        variable_labels[name] = f"code of {max(lengths, default=1)} characters" if len(lengths) < 2 else _SEVERAL
    if kind == ".dta":
        long = [n for n in names if frame[n].dtype == object and frame[n].str.len().max() > _LONGEST_TEXT]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # integers become doubles
            frame.to_stata(
                temporary,
                write_index=False,
                version=118,
                convert_strl=long,
                value_labels=labels,
                variable_labels=variable_labels,
            )
    else:
        _pyreadstat(path).write_sav(frame, str(temporary), column_labels=variable_labels, variable_value_labels=labels)
    changed = [f"{old} as {new}" for old, new in zip(table.column_names, names, strict=True) if old != new]
    return (
        [f"{path}: columns are renamed, since their names are not allowed there: {', '.join(changed)}."]
        if changed
        else []
    )


def _storable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Turn dates into times, booleans, decimals and half floats into numbers, and other types into text."""
    column = for_sheets(column)
    kind = column.type
    if pa.types.is_date(kind):
        return column.cast(pa.timestamp("ms"))
    if pa.types.is_boolean(kind):
        return column.cast(pa.int8())
    if pa.types.is_decimal(kind) or pa.types.is_float16(kind):
        return column.cast(pa.float64())
    is_bytes = pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
    return column.cast(pa.string()) if is_bytes or pa.types.is_time(kind) or pa.types.is_duration(kind) else column


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
