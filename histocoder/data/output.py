"""Writes tables that people open, in the form that the suffix of a file's name says."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet

from histocoder.data import formulas
from histocoder.data.table import csv_writer, is_parquet


@dataclass(frozen=True)
class Output:
    """A file to write."""

    path: Path
    delimiter: str = ","
    """Of CSV."""
    excel: bool = False
    """Whether CSV is marked as UTF-8, as Excel expects it."""
    raw: bool = False
    """Whether texts that a spreadsheet would run as formulas are written as they are."""

    def write(self, temporary: Path, schema: pa.Schema, tables: Iterable[pa.Table]) -> list[str]:
        """Write tables, one below the other, to where the file is made; return notices to the user."""
        if is_parquet(self.path):
            with pa.parquet.ParquetWriter(temporary, schema) as writer:
                for table in tables:
                    writer.write_table(table)
            return []
        return self._write_csv(temporary, schema, tables)

    def _write_csv(self, temporary: Path, schema: pa.Schema, tables: Iterable[pa.Table]) -> list[str]:
        num_changed = 0
        if not self.raw:
            schema = formulas.without_formulas(schema.empty_table())[0].schema
        with temporary.open("wb") as file:
            file.write(codecs.BOM_UTF8 if self.excel else b"")
            with csv_writer(file, schema, delimiter=self.delimiter) as writer:
                for table in tables:
                    if self.raw:
                        writer.write_table(table)
                    else:
                        changed, number = formulas.without_formulas(table)
                        writer.write_table(changed)
                        num_changed += number
        return [formulas.notice(num_changed, self.path)] if num_changed else []
