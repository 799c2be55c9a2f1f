"""The one writer of tables, in the format that the suffix of a file's name says."""

import codecs
import itertools
import re
from collections.abc import Collection, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from histocoder.errors import UserError, counted
from histocoder.files import is_same_file, replacing
from histocoder.log import log
from histocoder.tables.csv_file import Quotes, content_of, without_formulas
from histocoder.tables.stata import write_stata
from histocoder.tables.table import EXCEL, PARQUET, STATA, TableFile, kind_of, open_table, strings


@dataclass(frozen=True)
class Form:
    """Form of a table to write, where its format leaves a choice."""

    delimiter: str = ","  # that of CSV
    decimal: str = "."  # decimal mark of CSV
    excel: bool = False  # whether CSV has a byte order mark, by which Excel recognises UTF-8
    raw: bool = False  # whether CSV has texts that a spreadsheet would run as formulas as they are
    quotes: Quotes = field(default_factory=Quotes)
    line_break: str = "\n"

    @classmethod
    def like(cls, file: TableFile, **changes: Any) -> "Form":
        """Return the form of a table that was read, with some changes."""
        form = cls()
        if file.csv is not None:
            form = cls(
                delimiter=file.csv.delimiter,
                decimal=file.csv.decimal,
                excel=file.csv.excel,
                quotes=file.csv.quotes,
                line_break=file.csv.line_break,
            )
        return replace(form, **changes)


_HEADER_BYTES = 1 << 16
MARK_COL = "checked"
"""Column in which people mark the rows that are right."""


def check_output(
    path: Path,
    *,
    inputs: Iterable[object] = (),
    excel: bool = False,
    num_rows: int = 0,
    overwrite: bool | None = None,
) -> None:
    """Raise a UserError if a path is one of `inputs`, can't be written to, or its format can't hold
    so many rows.

    `overwrite` says whether a table there may be replaced, unless people have marked rows in it;
    None, that this has been looked at before.
    """
    kind = kind_of(path, doing="written")
    for source in inputs:
        if source and path.exists() and is_same_file(path, str(source)):
            raise UserError(f"--output is the input itself, {source}; choose another.")

    # marks are hours of work, which no flag may delete
    if overwrite is not None and path.is_file() and (number := num_marked(path)):
        rows = counted(number, "row that a person has marked", "rows that a person has marked")
        raise UserError(
            f"{path} holds {rows} in the column {MARK_COL!r}, and is not replaced, also with "
            f"--overwrite. Add --output {free_path(path)}."
        )
    if path.exists() and overwrite is False:
        raise UserError(
            f"{path} already exists. Add --overwrite to replace it, or choose another --output."
        )
    if excel and kind in PARQUET + EXCEL + STATA:
        raise UserError("--excel is for CSV; choose an --output that ends in .csv.")
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is a folder or a device; name a file to write to.")

    # better now than after hours, when the rows are written
    if kind in EXCEL:
        from histocoder.tables.excel import MAX_ROWS

        if num_rows > MAX_ROWS:
            raise UserError(
                f"{path}: {num_rows:,} rows are more than Excel's {MAX_ROWS:,}; choose .csv or "
                ".parquet."
            )


def num_marked(path: Path) -> int:
    """Return how many rows of a table people have marked, in whatever way; 0 for what is not a
    table with such a column.
    """
    try:
        file = open_table(path, (), optional=(MARK_COL,))
        if not file.has(MARK_COL):
            return 0
        number = 0
        for table in file.tables((MARK_COL,)):
            marks = table.columns[MARK_COL]
            number += len(marks) - marks.null_count
        return number
    except UserError:
        # a table that somebody has spoilt while marking it is kept, too
        with path.open("rb") as content:
            return int(MARK_COL.encode() in content.readline(_HEADER_BYTES))


def free_path(path: Path) -> Path:
    """Return the next path that is free: `review-2.csv` for `review.csv`, `review-3.csv` for
    `review-2.csv`.
    """
    suffix = path.suffix
    if suffix.lower() == ".gz":
        suffix = "".join(path.suffixes[-2:])
    stem = re.sub(r"-\d+$", "", path.name.removesuffix(suffix))
    number = 2
    while path.with_name(f"{stem}-{number}{suffix}").exists():
        number += 1
    return path.with_name(f"{stem}-{number}{suffix}")


def check_new_columns(
    names: Iterable[str], *, path: object, taken: Collection[str], prefix: str
) -> None:
    """Raise a UserError, which suggests a prefix, if new columns of the table at a path are among
    those `taken`.
    """
    new: set[str] = set()
    for name in names:
        if name in taken:
            raise UserError(
                f"{path} already has a column {name!r}. Choose a prefix for new ones: "
                f"--columns {prefix}."
            )
        if name in new:
            raise UserError(
                f"Two new columns would be called {name!r}, one of the table of classes and a "
                "group. Rename the former, or omit --levels."
            )
        new.add(name)


def check_kept(file: TableFile, output: Path) -> None:
    """Raise a UserError if a table can't be written to `output` with its columns."""
    kind = kind_of(output)
    repeated = [name for name in file.header if file.header.count(name) > 1]
    if repeated and kind in PARQUET + STATA:
        raise UserError(
            f"{file.path} has several columns {repeated[0]!r}; rename them, or let --output end in "
            ".csv."
        )

    # what CSV can't hold, such as cells of several values, other formats than Parquet can't either
    try:
        if kind not in PARQUET:
            pa.csv.write_csv(file.schema.empty_table(), pa.BufferOutputStream())
    except pa.ArrowInvalid as error:
        form = kind or ".csv"
        raise UserError(
            f"{file.path} does not fit into {form} ({error}). Let --output end in .parquet."
        ) from error


def check_values(table: pa.Table, output: Path) -> None:
    """Raise a UserError if a table has bytes that can't be written to `output`, since they are not
    UTF-8.
    """
    if kind_of(output) not in PARQUET:
        _without_bytes(table)


def write_table(path: Path, tables: Iterable[pa.Table], form: Form = Form()) -> list[str]:
    """Write tables, at least one, one below the other, whole or not at all; return notices to the
    user.

    In CSV, texts that a spreadsheet would run as formulas get an apostrophe, unless `form.raw`; in
    other formats text is never run.
    """
    kind = path.suffix.lower()
    iterator = iter(tables)
    first = next(iterator)
    tables = itertools.chain([first], iterator)
    num_formulas = 0
    is_renamed = False
    with replacing(path) as temporary:
        if kind in PARQUET:
            with pa.parquet.ParquetWriter(temporary, first.schema) as parquet:
                for table in tables:
                    parquet.write_table(table)
        elif kind in EXCEL:
            from histocoder.tables.excel import write_workbook

            write_workbook(temporary, first.column_names, map(_as_doubles_hold, tables))
        elif kind in STATA:
            is_renamed = write_stata(temporary, _as_doubles_hold(pa.concat_tables(tables)))
        else:
            if ".tsv" in path.suffixes[-2:]:
                form = replace(form, delimiter="\t")
            num_formulas = _write_csv(temporary, first, tables, form, is_packed=kind == ".gz")

    notices: list[str] = []
    if is_renamed:
        notices.append(f"{path}: names of columns that Stata does not allow are changed.")
    if num_formulas:
        cells = counted(
            num_formulas, "cell begins like a formula and was", "cells begin like formulas and were"
        )
        notices.append(
            f"{path}: {cells} written with a leading apostrophe, which histocoder removes when it "
            "reads the file."
        )
    return notices


def _write_csv(
    path: Path, first: pa.Table, tables: Iterable[pa.Table], form: Form, *, is_packed: bool
) -> int:
    """Write tables, of which `first` has the header, as CSV; return how many cells were formulas."""
    num_formulas = 0
    with ExitStack() as stack:
        file = stack.enter_context(path.open("wb"))
        if is_packed:
            file = stack.enter_context(pa.CompressedOutputStream(file, "gzip"))
        if form.excel:
            file.write(codecs.BOM_UTF8)
        header, _ = _as_csv(first.slice(0, 0), form)
        labels = [pa.array([name], pa.large_string()) for name in header.column_names]
        file.write(_lines(labels, [form.quotes.header] * len(labels), form))

        # whether a column is text is asked before its numbers become text, with a decimal comma
        for table in tables:
            are_quoted = _are_quoted(table, form.quotes)
            texts, number = _as_csv(table, form)
            num_formulas += number
            for batch in texts.to_batches():
                columns = [column.cast(pa.large_string()) for column in batch.columns]
                file.write(_lines(columns, are_quoted, form))
    return num_formulas


def _is_text(column: pa.Field) -> bool:
    """Return whether a column is of text, each distinct one stored once or not."""
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def write_frame(path: Path, frame: pd.DataFrame, form: Form = Form()) -> None:
    """Write a DataFrame, and tell the user the notices."""
    for notice in write_table(path, [pa.Table.from_pandas(frame, preserve_index=False)], form):
        log.info(notice)


def _are_quoted(table: pa.Table, quotes: Quotes) -> list[bool]:
    """Return which columns have quotation marks around all of their cells."""
    are_quoted: list[bool] = []
    for column in table.schema:
        is_quoted = quotes.numbers
        if _is_text(column):
            is_quoted = quotes.text and column.name not in quotes.bare
        are_quoted.append(is_quoted)
    return are_quoted


def _lines(columns: list[pa.Array], are_quoted: list[bool], form: Form) -> bytes:
    """Return the lines of CSV that have some columns of text."""
    mark = pa.scalar('"', pa.large_string())
    nothing = pa.scalar("", pa.large_string())
    needs_marks = f'["\r\n{re.escape(form.delimiter)}]'
    special = [b'"', b"\r", b"\n", form.delimiter.encode()]
    cells: list[pa.Array] = []
    for column, is_quoted in zip(columns, are_quoted, strict=True):
        content = content_of(column)
        if not is_quoted and not any(character in content for character in special):
            cells.append(column)
            continue
        doubled = pc.replace_substring(column, '"', '""')
        quoted = pc.binary_join_element_wise(mark, doubled, mark, nothing)
        if not is_quoted:
            quoted = pc.if_else(pc.match_substring_regex(column, needs_marks), quoted, column)
        cells.append(quoted)

    delimiter = pa.scalar(form.delimiter, pa.large_string())
    lines = pc.binary_join_element_wise(
        *cells, delimiter, null_handling="replace", null_replacement=""
    )
    return form.line_break.join([*lines.to_pylist(), ""]).encode()


def _as_csv(table: pa.Table, form: Form) -> tuple[pa.Table, int]:
    """Return a table with text in place of bytes, its decimal mark, and formulas quoted; and the
    number of these.
    """
    table = _without_bytes(table)
    num_formulas = 0
    for i, column in enumerate(table.schema):
        if pa.types.is_floating(column.type):
            texts = strings(table[i])  # an identifier such as 12345678901.0 has all of its digits
            if form.decimal != ".":
                texts = pc.replace_substring(texts, ".", form.decimal)
            table = table.set_column(i, column.name, texts)
        elif not form.raw and _is_text(column):
            texts, number = without_formulas(strings(table[i]))
            table = table.set_column(i, column.name, texts)
            num_formulas += number
    if form.raw:
        return table, num_formulas

    # a name of a column is a cell of the first line, and may be a formula as well
    names, _ = without_formulas(pa.array(table.column_names, pa.string()))
    return table.rename_columns(names.to_pylist()), num_formulas


def _as_doubles_hold(table: pa.Table) -> pa.Table:
    """Return a table with text in place of bytes, of integers that doubles can't tell apart, and of
    dates.

    Excel has no dates before 1900, and a 29 February then.
    """
    from histocoder.tables.excel import MAX_EXACT_INTEGER

    table = _without_bytes(table)
    for i, column in enumerate(table.schema):
        cells = table[i]
        if pa.types.is_timestamp(column.type) or pa.types.is_date(column.type):
            if getattr(column.type, "tz", None) is not None:
                cells = pc.local_timestamp(cells)
            texts = pc.replace_substring_regex(cells.cast(pa.string()), r" 00:00:00(\.0+)?$", "")
            table = table.set_column(i, column.name, texts)
        elif pa.types.is_integer(column.type):
            ends = [end.as_py() or 0 for end in pc.min_max(cells).values()]
            if max(map(abs, ends)) > MAX_EXACT_INTEGER:
                table = table.set_column(i, column.name, cells.cast(pa.string()))
    return table


def _without_bytes(table: pa.Table) -> pa.Table:
    """Return a table with text in place of bytes, as which some programs write text to Parquet."""
    checks = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary)
    for i, column in enumerate(table.schema):
        if any(is_bytes(column.type) for is_bytes in checks):
            texts = strings(table[i], f"The column {column.name!r}")
            table = table.set_column(i, column.name, texts)
    return table
