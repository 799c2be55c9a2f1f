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

from histocoder.data.sheets import formulas_notice, without_formulas
from histocoder.data.sources import EXCEL, LABELLED, PARQUET, kind_of
from histocoder.data.table import TableFile, is_bytes, is_parquet, strings
from histocoder.errors import UserError, counted
from histocoder.files import replacing

MAX_ROWS = 1_048_575  # largest number of rows of an Excel sheet, below its header


@dataclass(frozen=True)
class Form:
    """Form of a table to write, where its format leaves a choice."""

    delimiter: str = ","  # that of CSV
    decimal: str = "."  # decimal mark of CSV
    excel: bool = False  # whether CSV has a byte order mark, by which Excel recognises UTF-8
    raw: bool = False  # whether texts that a spreadsheet would run as formulas are written as they are
    codes: Mapping[str, str] = field(default_factory=dict)  # columns of codes -> of their probabilities
    titles: Mapping[str, str] = field(default_factory=dict)  # of codes, their labels in Stata and SPSS

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
    if path.is_dir():
        raise UserError(f"{path} is a folder; name a file in it to write to.")
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is a device or a pipe; name a file to write to.")
    if kind in EXCEL and num_rows > MAX_ROWS:
        raise UserError(f"{path}: {num_rows:,} rows are more than Excel's {MAX_ROWS:,}; choose .csv or .parquet.")
    if kind in LABELLED:
        from histocoder.data.labelled import check_labelled

        check_labelled(path)


def write_table(path: Path, tables: Iterable[pa.Table], form: Form = Form()) -> list[str]:
    """Write tables, at least one, one below the other, whole or not at all; return notices to the user.

    In CSV and Excel, texts that a spreadsheet would run as formulas get an apostrophe, unless `form.raw`.
    """
    kind, rest = path.suffix.lower(), iter(tables)
    first = next(rest)
    tables = itertools.chain([first], rest)
    with replacing(path) as temporary:
        if is_parquet(path):
            with pa.parquet.ParquetWriter(temporary, first.schema) as parquet:
                for table in tables:
                    parquet.write_table(table)
            return []
        tables = map(_as_text, tables)
        if kind in EXCEL:
            from histocoder.data.excel import write_workbook

            num_formulas, num_cut = write_workbook(temporary, _as_text(first).schema, tables, raw=form.raw)
            notices = (
                [f"{path}: {counted(num_cut, 'cell is', 'cells are')} truncated to the length that Excel allows."]
                if num_cut
                else []
            )
            return [*notices, *formulas_notice(num_formulas, path)]
        if kind in LABELLED:
            from histocoder.data.labelled import write_labelled

            return write_labelled(path, temporary, pa.concat_tables(tables), codes=form.codes, titles=form.titles)
        if ".tsv" in path.suffixes[-2:]:
            form = replace(form, delimiter="\t")
        with ExitStack() as stack:
            file = stack.enter_context(temporary.open("wb"))
            if kind == ".gz":
                file = stack.enter_context(pa.CompressedOutputStream(file, "gzip"))
            file.write(codecs.BOM_UTF8 if form.excel else b"")
            writer = stack.enter_context(CsvWriter(file, _as_text(first).schema, form))
            for table in tables:
                writer.write(table)
        return formulas_notice(writer.num_formulas, path)


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
        if self._form.decimal != ".":
            for i, one in enumerate(table.schema):
                if pa.types.is_floating(one.type):
                    texts = pc.replace_substring(table[i].cast(pa.string()), ".", self._form.decimal)
                    table = table.set_column(i, one.name, texts)
        if self._form.raw:
            return table
        table, number = without_formulas(table)
        self.num_formulas += number
        return table


def _as_text(table: pa.Table) -> pa.Table:
    """Return a table with text in place of bytes."""
    for i, name in enumerate(table.column_names):
        if is_bytes(table[i].type):
            table = table.set_column(i, name, strings(table[i], f"The column {name!r}"))
    return table
