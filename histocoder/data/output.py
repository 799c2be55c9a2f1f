"""The one writer of tables, in the format that the suffix of a file's name says."""

import codecs
import itertools
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from histocoder.data.cells import MOST_DIGITS
from histocoder.data.formulas import without_formulas
from histocoder.data.table import EXCEL, LABELLED, PARQUET, TableFile, is_bytes, kind_of, strings
from histocoder.errors import UserError, counted
from histocoder.files import replacing

_FIRST_YEAR = 1901  # first year whose dates Excel has right: it has none before 1900, and a 29 February then


@dataclass(frozen=True)
class Form:
    """Form of a table to write, where its format leaves a choice."""

    delimiter: str = ","  # that of CSV
    decimal: str = "."  # decimal mark of CSV
    excel: bool = False  # whether CSV has a byte order mark, by which Excel recognises UTF-8
    raw: bool = False  # whether CSV has texts that a spreadsheet would run as formulas as they are
    codes: Mapping[str, str] = field(default_factory=dict)  # columns of codes -> names without --columns

    @classmethod
    def like(cls, file: TableFile, **form: Any) -> "Form":
        """Return the form of a table that was read."""
        own = {} if file.csv is None else {name: getattr(file.csv, name) for name in ("delimiter", "decimal", "excel")}
        return cls(**{**own, **form})


def check_output(path: Path, *, excel: bool = False, num_rows: int = 0) -> None:
    """Raise a UserError if a path can't be written to, or a table of so many rows not in the format of its suffix."""
    kind = kind_of(path, doing="written")
    if excel and kind in (*PARQUET, *EXCEL, *LABELLED):
        raise UserError("--excel is for CSV; choose an --output that ends in .csv.")
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is a folder or a device; name a file to write to.")
    if kind in EXCEL:
        from histocoder.data.foreign import MAX_ROWS

        if num_rows > MAX_ROWS:
            raise UserError(f"{path}: {num_rows:,} rows are more than Excel's {MAX_ROWS:,}; choose .csv or .parquet.")
    if kind == ".sav":
        from histocoder.data.foreign import pyreadstat

        pyreadstat(path)


def write_table(path: Path, tables: Iterable[pa.Table], form: Form = Form()) -> list[str]:
    """Write tables, at least one, one below the other, whole or not at all; return notices to the user.

    In CSV, texts that a spreadsheet would run as formulas get an apostrophe, unless `form.raw`; in workbooks text is
    never run.
    """
    kind, rest = path.suffix.lower(), iter(tables)
    first = next(rest)
    tables = itertools.chain([first], rest)
    with replacing(path) as temporary, ExitStack() as stack:
        if kind in PARQUET:
            parquet = stack.enter_context(pa.parquet.ParquetWriter(temporary, first.schema))
            for table in tables:
                parquet.write_table(table)
            return []
        tables = (_storable(table, kind) for table in tables)
        if kind in LABELLED:
            from histocoder.data.foreign import write_labelled

            return write_labelled(path, temporary, _storable(pa.concat_tables(tables), kind))
        if kind in EXCEL:
            from histocoder.data.foreign import write_workbook

            num_cut = write_workbook(temporary, first.column_names, tables)
            cells = counted(num_cut, "cell is", "cells are")
            return [f"{path}: {cells} truncated to the length that Excel allows."] if num_cut else []
        if ".tsv" in path.suffixes[-2:]:
            form = replace(form, delimiter="\t")
        file = stack.enter_context(temporary.open("wb"))
        if kind == ".gz":
            file = stack.enter_context(pa.CompressedOutputStream(file, "gzip"))
        file.write(codecs.BOM_UTF8 if form.excel else b"")
        writer = stack.enter_context(CsvWriter(file, _storable(first, kind).schema, form))
        for table in tables:
            writer.write(table)
    cells = counted(writer.num_formulas, "cell begins like a formula and was", "cells begin like formulas and were")
    mark = f"{path}: {cells} written with a leading apostrophe, which histocoder removes when it reads the file."
    return [mark] if writer.num_formulas else []


class CsvWriter:
    """Writes tables to a CSV file, with quotation marks where they are needed."""

    def __init__(self, file: object, schema: pa.Schema, form: Form = Form()) -> None:
        self._form, self.num_formulas = form, 0
        options = pa.csv.WriteOptions(quoting_style="needed", delimiter=form.delimiter)
        self._writer = pa.csv.CSVWriter(file, self._written(schema.empty_table()).schema, write_options=options)

    def __enter__(self) -> "CsvWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()

    def write(self, rows: pa.Table | pa.RecordBatch) -> None:
        self._writer.write_table(self._written(pa.table(rows)))

    def _written(self, table: pa.Table) -> pa.Table:
        for i, one in enumerate(table.schema):
            if self._form.decimal != "." and pa.types.is_floating(one.type):
                texts = pc.replace_substring(table[i].cast(pa.string()), ".", self._form.decimal)
                table = table.set_column(i, one.name, texts)
        if not self._form.raw:
            table, number = without_formulas(table)
            self.num_formulas += number
        return table


def _storable(table: pa.Table, kind: str) -> pa.Table:
    """Return a table with text in place of bytes.

    For formats whose numbers are doubles, integers that these can't tell apart become text too, and times with a zone
    what clocks showed there; for Excel, dates that it has wrong.
    """
    for i, one in enumerate(table.schema):
        column = table[i]
        if is_bytes(one.type):
            column = strings(column, f"The column {one.name!r}")
        if kind in (*EXCEL, *LABELLED):
            if pa.types.is_timestamp(one.type) and one.type.tz is not None:
                column = pc.local_timestamp(column)
            if pa.types.is_integer(one.type):
                ends = [end.as_py() or 0 for end in pc.min_max(column).values()]
                column = column.cast(pa.string()) if max(map(abs, ends)) > MOST_DIGITS else column
        has_dates = kind in EXCEL and (pa.types.is_timestamp(one.type) or pa.types.is_date(one.type))
        if has_dates and (pc.min(pc.year(column)).as_py() or _FIRST_YEAR) < _FIRST_YEAR:
            column = pc.replace_substring_regex(column.cast(pa.string()), r" 00:00:00(\.0+)?$", "")
        table = table.set_column(i, one.name, column)
    return table
