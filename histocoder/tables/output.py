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
from histocoder.tables.csv_file import Quotes, without_formulas
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
    def like(cls, file: TableFile, **form: Any) -> "Form":
        """Return the form of a table that was read."""
        if file.csv is not None:
            for name in ("delimiter", "decimal", "excel", "quotes", "line_break"):
                form.setdefault(name, getattr(file.csv, name))
        return cls(**form)


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
    if path.exists() and (own := [one for one in inputs if one and is_same_file(path, str(one))]):
        raise UserError(f"--output is the input itself, {own[0]}; choose another.")
    if overwrite is not None and path.is_file() and (number := num_marked(path)):
        raise UserError(
            f"{path} holds "
            f"{counted(number, 'row that a person has marked', 'rows that a person has marked')} in the "
            f"column {MARK_COL!r}, and is not replaced, also with --overwrite. Add "
            f"--output {free_path(path)}."
        )
    if path.exists() and overwrite is False:
        raise UserError(
            f"{path} already exists. Add --overwrite to replace it, or choose another --output."
        )
    if excel and kind in (*PARQUET, *EXCEL, *STATA):
        raise UserError("--excel is for CSV; choose an --output that ends in .csv.")
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is a folder or a device; name a file to write to.")
    if kind in EXCEL:
        from histocoder.tables.excel import MAX_ROWS

        if num_rows > MAX_ROWS:
            raise UserError(
                f"{path}: {num_rows:,} rows are more than Excel's {MAX_ROWS:,}; choose "
                ".csv or .parquet."
            )


def num_marked(path: Path) -> int:
    """Return how many rows of a table people have marked as right; 0 for what is not a table with
    such a column.
    """
    try:
        file = open_table(path, (), optional=(MARK_COL,))
        if not file.has(MARK_COL):
            return 0
        marks = (table.columns[MARK_COL] for table in file.tables((MARK_COL,)))
        return sum(len(column) - column.null_count for column in marks)
    except UserError:  # a table that somebody has spoilt while marking it is kept, too
        with path.open("rb") as content:
            return int(MARK_COL.encode() in content.readline(_HEADER_BYTES))


def free_path(path: Path) -> Path:
    """Return the next path that is free: `review-2.csv` for `review.csv`, `review-3.csv` for
    `review-2.csv`.
    """
    suffix = "".join(path.suffixes[-2:]) if path.suffix.lower() == ".gz" else path.suffix
    stem = re.sub(r"-\d+$", "", path.name.removesuffix(suffix))
    names = (path.with_name(f"{stem}-{number}{suffix}") for number in itertools.count(2))
    return next(name for name in names if not name.exists())


def check_new_columns(
    names: Iterable[str], *, path: object, taken: Collection[str], prefix: str
) -> None:
    """Raise a UserError, which suggests a prefix, if new columns of the table at a path are among
    those `taken`.
    """
    if clash := [name for name in names if name in taken]:
        raise UserError(
            f"{path} already has a column {clash[0]!r}. Choose a prefix for new ones: "
            f"--columns {prefix}."
        )


def check_kept(file: TableFile, output: Path) -> None:
    """Raise a UserError if a table can't be written to `output` with its columns."""
    kind, repeated = kind_of(output), [name for name in file.header if file.header.count(name) > 1]
    if repeated and kind in (*PARQUET, *STATA):
        raise UserError(
            f"{file.path} has several columns {repeated[0]!r}; rename them, or let "
            "--output end in .csv."
        )
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
    kind, rest = path.suffix.lower(), iter(tables)
    first = next(rest)
    tables, num_formulas = itertools.chain([first], rest), 0
    with replacing(path) as temporary, ExitStack() as stack:
        if kind in PARQUET:
            parquet = stack.enter_context(pa.parquet.ParquetWriter(temporary, first.schema))
            for table in tables:
                parquet.write_table(table)
            return []
        if kind in EXCEL:
            from histocoder.tables.excel import write_workbook

            write_workbook(temporary, first.column_names, map(_as_doubles_hold, tables))
            return []
        if kind in STATA:
            is_renamed = write_stata(temporary, _as_doubles_hold(pa.concat_tables(tables)))
            return (
                [f"{path}: names of columns that Stata does not allow are changed."]
                if is_renamed
                else []
            )
        if ".tsv" in path.suffixes[-2:]:
            form = replace(form, delimiter="\t")
        file = stack.enter_context(temporary.open("wb"))
        if kind == ".gz":
            file = stack.enter_context(pa.CompressedOutputStream(file, "gzip"))
        file.write(codecs.BOM_UTF8 if form.excel else b"")
        header, _ = _as_csv(first.slice(0, 0), form)
        labels = [pa.array([name], pa.large_string()) for name in header.column_names]
        file.write(_lines(labels, [form.quotes.header] * len(labels), form))
        for table in tables:
            written, number = _as_csv(table, form)
            num_formulas += number
            for batch in written.to_batches():
                texts = [column.cast(pa.large_string()) for column in batch.columns]
                file.write(_lines(texts, _are_quoted(table, form.quotes), form))
    cells = counted(
        num_formulas, "cell begins like a formula and was", "cells begin like formulas and were"
    )
    mark = (
        f"{path}: {cells} written with a leading apostrophe, which histocoder removes when "
        "it reads the file."
    )
    return [mark] if num_formulas else []


def write_frame(path: Path, frame: pd.DataFrame, form: Form = Form()) -> None:
    """Write a DataFrame, and tell the user the notices."""
    for notice in write_table(path, [pa.Table.from_pandas(frame, preserve_index=False)], form):
        log.info(notice)


def _are_quoted(table: pa.Table, quotes: Quotes) -> list[bool]:
    """Return which columns have quotation marks around all of their cells."""
    are_quoted: list[bool] = []
    for column in table.schema:
        is_text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
        are_quoted.append(
            quotes.text and column.name not in quotes.bare if is_text else quotes.numbers
        )
    return are_quoted


def _lines(columns: list[pa.Array], are_quoted: list[bool], form: Form) -> bytes:
    """Return the lines of CSV that have some columns of text."""
    mark, delimiter, line_break, nothing = (
        pa.scalar(text, pa.large_string()) for text in ('"', form.delimiter, form.line_break, "")
    )
    cells: list[pa.Array] = []
    for column, is_quoted in zip(columns, are_quoted, strict=True):
        # a look at all bytes is much faster than one at each cell
        content = column.buffers()[2].to_pybytes() if column.buffers()[2] else b""
        has_marks = b'"' in content
        if (
            not is_quoted
            and not has_marks
            and not any(character.encode() in content for character in (form.delimiter, *"\r\n"))
        ):
            cells.append(column)
            continue
        doubled = pc.replace_substring(column, '"', '""') if has_marks else column
        quoted = pc.binary_join_element_wise(mark, doubled, mark, nothing)
        if not is_quoted:
            needs_marks = f'["\r\n{re.escape(form.delimiter)}]'
            quoted = pc.if_else(pc.match_substring_regex(column, needs_marks), quoted, column)
        cells.append(quoted)

    blanks = {"null_handling": "replace", "null_replacement": ""}
    lines = pc.binary_join_element_wise(*cells, delimiter, **blanks)
    return "".join(pc.binary_join_element_wise(lines, line_break, nothing).to_pylist()).encode()


def _as_csv(table: pa.Table, form: Form) -> tuple[pa.Table, int]:
    """Return a table with text in place of bytes, its decimal mark, and formulas quoted; and the
    number of these.
    """
    table, num_formulas = _without_bytes(table), 0
    for i, one in enumerate(table.schema):
        if form.decimal != "." and pa.types.is_floating(one.type):
            texts = pc.replace_substring(table[i].cast(pa.string()), ".", form.decimal)
            table = table.set_column(i, one.name, texts)
        elif not form.raw and (pa.types.is_string(one.type) or pa.types.is_large_string(one.type)):
            texts, number = without_formulas(table[i])
            table = table.set_column(i, one.name, texts)
            num_formulas += number
    names = pa.array(table.column_names, pa.string())
    return table.rename_columns(
        (names if form.raw else without_formulas(names)[0]).to_pylist()
    ), num_formulas


def _as_doubles_hold(table: pa.Table) -> pa.Table:
    """Return a table with text in place of bytes, of integers that doubles can't tell apart, and of
    dates.

    Excel has no dates before 1900, and a 29 February then.
    """
    from histocoder.tables.excel import MOST_DIGITS

    table = _without_bytes(table)
    for i, one in enumerate(table.schema):
        if pa.types.is_timestamp(one.type) or pa.types.is_date(one.type):
            shown = (
                pc.local_timestamp(table[i])
                if getattr(one.type, "tz", None) is not None
                else table[i]
            )
            texts = pc.replace_substring_regex(shown.cast(pa.string()), r" 00:00:00(\.0+)?$", "")
            table = table.set_column(i, one.name, texts)
        elif pa.types.is_integer(one.type):
            ends = [end.as_py() or 0 for end in pc.min_max(table[i]).values()]
            if max(map(abs, ends)) > MOST_DIGITS:
                table = table.set_column(i, one.name, table[i].cast(pa.string()))
    return table


def _without_bytes(table: pa.Table) -> pa.Table:
    """Return a table with text in place of bytes, as which some programs write text to Parquet."""
    is_bytes = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary)
    for i, one in enumerate(table.schema):
        if any(check(one.type) for check in is_bytes):
            table = table.set_column(i, one.name, strings(table[i], f"The column {one.name!r}"))
    return table
