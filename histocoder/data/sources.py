"""Tables that are not CSV: Parquet, Excel, Stata and SPSS."""

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset

from histocoder.errors import UserError

Arrays = TypeVar("Arrays", pa.Array, pa.ChunkedArray)

PARQUET = (".parquet", ".pq")
EXCEL = (".xlsx", ".xlsm")
LABELLED = (".dta", ".sav")
_INSTEAD = {
    ".xls": "Open it in Excel and save it as .xlsx.",
    ".ods": "Save it as .xlsx.",
    ".rds": "In R, write it with write.csv(…, row.names = FALSE) or arrow::write_parquet().",
}


class Source(NamedTuple):
    """A table that is not CSV."""

    rows: pa.dataset.Dataset
    first_row: int = 1  # number of the first row in messages
    notices: tuple[str, ...] = ()


def open_source(path: Path, *, sheet: str | None, codes: Collection[str], known: Collection[str]) -> Source | None:
    """Open a file of Parquet, Excel, Stata or SPSS, or a folder of Parquet files; return None for others.

    Raises UserError if it can't be read.
    """
    kind = path.suffix.lower()
    if kind in _INSTEAD:
        raise UserError(f"{path}: {kind} files can't be read. {_INSTEAD[kind]}")
    if sheet is not None and kind not in EXCEL:
        raise UserError(f"--sheet is for Excel workbooks; {path} is not one. Omit it.")
    if path.is_dir() or kind in PARQUET:
        return Source(_parquet(path))
    if kind in EXCEL:
        from histocoder.data.excel import read_workbook

        table, first_row, notices = read_workbook(path, sheet)
    elif kind in LABELLED:
        from histocoder.data.labelled import read_labelled

        (table, notices), first_row = read_labelled(path, codes), 1
    else:
        return None
    return Source(pa.dataset.dataset(table), first_row, (*notices, *_lost_zeros(path, table, known)))


def integers(floats: Arrays) -> Arrays | None:
    """Return floats as integers of 64 bits, null for NaN; None if some are not integers."""
    numbers = pc.if_else(pc.is_nan(floats), None, floats).cast(pa.float64())
    fits = pc.and_(pc.equal(pc.round(numbers), numbers), pc.less(pc.abs(numbers), 2.0**63))
    return numbers.cast(pa.int64()) if pc.all(fits, min_count=0).as_py() else None


def _parquet(path: Path) -> pa.dataset.Dataset:
    """Open a file, or all files of a folder, in which folders such as year=1880 are a column."""
    try:
        if path.is_file():
            return pa.dataset.dataset(path, format="parquet")
        files = sorted(str(file) for file in path.rglob("*") if file.suffix.lower() in PARQUET)
        rows = pa.dataset.dataset(
            files, format="parquet", partitioning=pa.dataset.partitioning(flavor="hive"), partition_base_dir=str(path)
        )
        schemas = [rows.schema, *(fragment.physical_schema for fragment in rows.get_fragments())]
        return rows.replace_schema(pa.unify_schemas(schemas, promote_options="permissive"))
    except (pa.ArrowTypeError, pa.ArrowInvalid, OSError) as error:
        what = "is not a Parquet file" if path.is_file() else "holds Parquet files that do not fit together"
        raise UserError(f"{path} {what}: {str(error).splitlines()[0]}") from error


def _lost_zeros(path: Path, table: pa.Table, columns: Collection[str]) -> list[str]:
    """Return notices on columns of numbers of several lengths, which may be codes without their zeros."""
    notices = []
    for name in dict.fromkeys(columns):
        numbers = table[name] if table.column_names.count(name) == 1 else None
        if numbers is not None and pa.types.is_floating(numbers.type):  # all numbers of SPSS are
            numbers = integers(numbers)
        if numbers is not None and pa.types.is_integer(numbers.type):
            digits = pc.unique(pc.utf8_length(pc.abs(numbers.filter(pc.greater(numbers, 9))).cast(pa.string())))
            lengths = sorted(digits.drop_null().to_pylist())
            if len(lengths) > 1:
                notices.append(
                    f"{path}: the column {name!r} is stored as numbers, of {lengths[0]} to {lengths[-1]} digits. If "
                    "they are codes, the shorter ones have lost leading zeros; --zero-pad-codes restores them."
                )
    return notices
