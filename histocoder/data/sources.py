"""Tables that are not CSV: Parquet, Excel, Stata and SPSS."""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset

from histocoder.data.header import plain
from histocoder.errors import UserError

Arrays = TypeVar("Arrays", pa.Array, pa.ChunkedArray)

PARQUET = (".parquet", ".pq")
EXCEL = (".xlsx", ".xlsm")
LABELLED = (".dta", ".sav")
_TEXT = (".csv", ".tsv", ".txt", ".tab", ".dat", "")
_INSTEAD = {
    ".xls": "Open it in Excel and save it as .xlsx.",
    ".ods": "Save it as .xlsx.",
    ".rds": "In R, write it with write.csv(…, row.names = FALSE) or arrow::write_parquet().",
    ".zip": "Unpack it first.",
}


class Source(NamedTuple):
    """A table that is not CSV."""

    rows: pa.dataset.Dataset
    notices: list[str]
    first_row: int = 1  # number of the first row in messages
    may_have_blank_rows: bool = False

    @property
    def header(self) -> list[str]:
        return self.rows.schema.names

    @property
    def schema(self) -> pa.Schema:
        return self.rows.schema

    def batches(self, *, columns: list[str] | None, rows: int) -> Iterator[pa.RecordBatch]:
        """Yield rows in their order, reading few ahead."""
        if self.may_have_blank_rows:
            columns = None
        return self.rows.to_batches(columns=columns, batch_size=rows, batch_readahead=1, fragment_readahead=1)

    def count_rows(self) -> int:
        return self.rows.count_rows()

    def lines(self, positions: np.ndarray) -> np.ndarray:
        """Return the numbers of some rows in messages."""
        return positions + self.first_row


def kind_of(path: Path, *, doing: str = "read") -> str:
    """Return the suffix of a table's name in lower case, without .gz; raise a UserError if there are no such tables."""
    kind = path.suffix.lower()
    kinds = {*_TEXT, *PARQUET, *EXCEL, *LABELLED} - ({".xlsm"} if doing == "written" else set())  # it has no macros
    if kind == ".gz":
        kind, kinds = Path(path.stem).suffix.lower(), {*_TEXT[:-1]}
    if kind in kinds:
        return kind
    instead = "Save the table as .csv, .parquet, .xlsx, .dta or .sav."
    if doing == "written":
        instead = "Choose a name that ends in .csv, .csv.gz, .tsv, .parquet, .xlsx, .dta or .sav."
    instead = _INSTEAD.get(kind, instead) if doing == "read" else instead
    raise UserError(f"{path}: {path.suffix} files can't be {doing}. {instead}")


def open_source(
    path: Path, columns: Collection[str], *, optional: Collection[str], sheet: str | None, codes: Collection[str]
) -> Source | None:
    """Open a file of Parquet, Excel, Stata or SPSS, or a folder of Parquet files; return None for CSV.

    Raises UserError if it can't be read.
    """
    kind = ".parquet" if path.is_dir() else kind_of(path)
    if sheet is not None and kind not in EXCEL:
        raise UserError(f"--sheet is for Excel workbooks; {path} is not one. Omit it.")
    if kind in PARQUET:
        return Source(_parquet(path), [])
    first_row = 1
    if kind in EXCEL:
        from histocoder.data.excel import read_workbook

        table, first_row, notices = read_workbook(path, sheet, columns)
    elif kind in LABELLED:
        from histocoder.data.labelled import read_labelled

        table, notices = read_labelled(path, codes)
    else:
        return None
    notices += _lost_zeros(path, table, {*columns, *optional})
    return Source(pa.dataset.dataset(table), notices, first_row, may_have_blank_rows=kind in EXCEL)


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
    wanted = set(map(plain, columns))
    for name, column in zip(table.column_names, table.columns, strict=True):
        if plain(name) not in wanted:
            continue
        numbers = integers(column) if pa.types.is_floating(column.type) else column  # all numbers of SPSS are floats
        if numbers is not None and pa.types.is_integer(numbers.type):
            digits = pc.unique(pc.utf8_length(pc.abs(numbers.filter(pc.greater(numbers, 9))).cast(pa.string())))
            lengths = sorted(digits.drop_null().to_pylist())
            if len(lengths) > 1:
                notices.append(
                    f"{path}: the column {name!r} is stored as numbers, of {lengths[0]} to {lengths[-1]} digits. If "
                    "they are codes, the shorter ones have lost leading zeros; --zero-pad-codes restores them."
                )
    return notices
