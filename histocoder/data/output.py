"""Output tables, in the form that the suffix of a file's name says."""

import codecs
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet

from histocoder.data.sheets import formulas_notice, without_formulas
from histocoder.data.sources import EXCEL, LABELLED
from histocoder.data.table import check_output, csv_writer, is_bytes, is_parquet, strings
from histocoder.errors import UserError


@dataclass(frozen=True)
class Output:
    """A file to write."""

    path: Path
    delimiter: str = ","  # that of CSV
    excel: bool = False  # whether CSV has a byte order mark, by which Excel recognises UTF-8
    raw: bool = False  # whether texts that a spreadsheet would run as formulas are written as they are
    codes: Mapping[str, str] = field(default_factory=dict)  # columns of codes -> of their probabilities
    titles: Mapping[str, str] = field(default_factory=dict)  # of codes, their labels in Stata and SPSS

    def check(self, num_rows: int) -> None:
        """Raise a UserError if so many rows can't be written in this form, or a package for it is missing."""
        check_output(self.path, excel=self.excel)
        if self._kind in EXCEL and num_rows > (most := 1_048_575):
            raise UserError(f"{self.path}: {num_rows:,} rows are more than Excel's {most:,}; choose .csv or .parquet.")
        if self._kind in LABELLED:
            from histocoder.data.labelled import check_labelled

            check_labelled(self.path)

    @property
    def _kind(self) -> str:
        return self.path.suffix.lower()

    def write(self, temporary: Path, schema: pa.Schema, tables: Iterable[pa.Table]) -> list[str]:
        """Write tables, one below the other, to a temporary path; return notices to the user."""
        if is_parquet(self.path):
            with pa.parquet.ParquetWriter(temporary, schema) as writer:
                for table in tables:
                    writer.write_table(table)
            return []
        schema, tables = _as_text(schema.empty_table()).schema, map(_as_text, tables)
        if self._kind in EXCEL:
            from histocoder.data.excel import write_workbook

            num_formulas, num_cut = write_workbook(temporary, schema, tables, raw=self.raw)
            notices = (
                [f"{self.path}: {num_cut:,} cells are truncated to the length that Excel allows."] if num_cut else []
            )
            return [*notices, formulas_notice(num_formulas, self.path)] if num_formulas else notices
        if self._kind in LABELLED:
            from histocoder.data.labelled import write_labelled

            table = pa.concat_tables(tables)
            return write_labelled(self.path, temporary, table, codes=self.codes, titles=self.titles)
        return self._write_csv(temporary, schema, tables)

    def _write_csv(self, temporary: Path, schema: pa.Schema, tables: Iterable[pa.Table]) -> list[str]:
        num_changed = 0
        if not self.raw:
            schema = without_formulas(schema.empty_table())[0].schema
        delimiter = "\t" if ".tsv" in self.path.suffixes[-2:] else self.delimiter
        with ExitStack() as stack:
            file = stack.enter_context(temporary.open("wb"))
            if self._kind == ".gz":
                file = stack.enter_context(pa.CompressedOutputStream(file, "gzip"))
            file.write(codecs.BOM_UTF8 if self.excel else b"")
            with csv_writer(file, schema, delimiter=delimiter) as writer:
                for table in tables:
                    changed, number = (table, 0) if self.raw else without_formulas(table)
                    writer.write_table(changed)
                    num_changed += number
        return [formulas_notice(num_changed, self.path)] if num_changed else []


def _as_text(table: pa.Table) -> pa.Table:
    """Return a table with text in place of bytes."""
    for i, name in enumerate(table.column_names):
        if is_bytes(table[i].type):
            table = table.set_column(i, name, strings(table[i], f"The column {name!r}"))
    return table
