"""Put what people have decided into a coded file, with the model's codes beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from histocoder.classes.class_columns import Classes
from histocoder.data.code_columns import column_of
from histocoder.data.labelled_files import CHECKED_COL, checked_tables
from histocoder.errors import UserError, shown
from histocoder.evaluation.review_file import Columns, answer_columns, language_column, open_coded
from histocoder.log import log
from histocoder.tables.output import Form, check_kept, check_output, write_table
from histocoder.tables.table import CHUNK_ROWS, TableFile, open_table, strings
from histocoder.text.languages import Language
from histocoder.text.normalize import description_keys

ANY_LANGUAGE = ""  # language of a decision that counts for a description in all languages
Decided: TypeAlias = Mapping[
    tuple[str, str], "DecidedCodes"
]  # (key of the description, language) -> decision


@dataclass(frozen=True)
class DecidedCodes:
    """Codes that a person has given a description."""

    codes: tuple[str, ...]
    who: str | None = None
    at: str | None = None  # date and time

    def code(self, number: int) -> str | None:
        """Return the code of a number, from 0; None where there are fewer."""
        return self.codes[number] if number < len(self.codes) else None


def read_decisions(
    path: Path, columns: Columns, known: Collection[str]
) -> dict[tuple[str, str], DecidedCodes]:
    """Read the checked rows of a file that `histocoder review` wrote and a person has filled in.

    `columns` are those of the file: `run_input_col`, `run_language_col` and `target_cols`; `known`
    are the codes of the model, beside which cells are read as in training. A checked row without a
    code has no occupation, and a row without a language counts for all.

    Raises UserError if a column is missing, no row is checked, or a checked cell holds no code.
    """
    text_col = columns.text_to_write
    lang_col = columns.lang_to_write
    file = open_table(
        path, [text_col, CHECKED_COL, columns.target_cols[0]], optional=(lang_col, "who")
    )
    code_cols = [name for name in columns.target_cols if file.has(name)]
    optional_cols = [name for name in (lang_col, "who") if file.has(name)]
    tables = list(checked_tables(file, [text_col, *code_cols, *optional_cols], log.info))
    written = Counter(
        cell for table in tables for name in code_cols for cell in table.columns[name].to_pylist()
    )
    del written[None]
    code_column = column_of(written, known=known)

    decisions: dict[tuple[str, str], DecidedCodes] = {}
    for table in tables:
        cells = {name: column.to_pylist() for name, column in table.columns.items()}
        keys = description_keys(table.columns[text_col].fill_null(""))
        langs = cells.get(lang_col) or [None] * len(table)
        whos = cells.get("who") or [None] * len(table)
        for row, key in enumerate(keys):
            if not key:  # the row has no description
                continue
            codes: list[str] = []
            for name in code_cols:
                cell = code_column.read(cells[name][row] or "")
                if cell.problem:
                    where = f"{path}, {table.file.unit} {table.lines(np.array([row]))[0]}, column {name!r}"
                    raise UserError(
                        f"{where}: {shown(cells[name][row])} {cell.problem}. Correct it, "
                        "or remove the mark."
                    )
                codes += cell.codes
            lang = str(Language(langs[row] or "unk"))
            decisions[key, ANY_LANGUAGE if lang == "unk" else lang] = DecidedCodes(
                tuple(codes), who=whos[row]
            )
    return decisions


def write_checked(
    coded: Path,
    output: Path,
    decisions: Decided,
    columns: Columns,
    *,
    titles: Mapping[str, str],
    classes: Sequence[Classes] = (),
    sheet: str | None = None,
    raw: bool = False,
    overwrite: bool = False,
) -> int:
    """Write the output of `histocoder predict` with people's codes in place of the model's; return
    their rows' number.

    Rows whose description was decided on get these codes, their `titles`, and no probabilities;
    `conf` stays that of the model's codes. Behind the file's columns come `checked_by` and
    `checked_at`, who decided and when, and `model_…`, the model's codes of all rows. `classes`
    compute columns of classes again, which the file has already.

    Raises UserError where a column is missing, a description has more codes than the file has
    columns, or the output exists and `overwrite` is not set.
    """
    check_output(output, inputs=[coded], overwrite=overwrite)
    file = open_coded(coded, columns, sheet=sheet)
    check_kept(file, output)
    writer = _Writer(file, decisions, columns, titles, classes)
    write_table(output, writer.blocks(), Form.like(file, raw=raw))
    return writer.num_rows


class _Writer:
    """The blocks of a coded file with decisions in them, and the number of rows that have one."""

    def __init__(
        self,
        file: TableFile,
        decisions: Decided,
        columns: Columns,
        titles: Mapping[str, str],
        classes: Sequence[Classes],
    ) -> None:
        self._file = file
        self._decisions = decisions
        self._titles = titles
        self._classes = classes
        self._text_col = file.column(columns.input_col)
        self._lang_col = language_column(file, columns)
        self._answers = answer_columns(file, columns.target_cols)
        self.num_rows = 0
        most = max((len(decision.codes) for decision in decisions.values()), default=0)
        if most > len(self._answers):
            raise UserError(
                f"A description was given {most} codes, and {file.path} has "
                f"{len(self._answers)} columns of codes. "
                "Code the file again with a model of as many."
            )

    def blocks(self) -> Iterator[pa.Table]:
        """Yield the file's blocks with people's codes."""
        for block in self._file.chunks(chunk_rows=CHUNK_ROWS):
            yield self._with_decisions(block)

    def _with_decisions(self, block: pa.Table) -> pa.Table:
        decided = self._decided(block)
        is_decided = pa.array([decision is not None for decision in decided], pa.bool_())
        self.num_rows += pc.sum(is_decided).as_py() or 0
        model_codes = [strings(block[answer.code]) for answer in self._answers]

        # the codes that people gave, their meanings, and no probabilities, which are of the model's
        # codes
        for number, answer in enumerate(self._answers):
            codes = [None if decision is None else decision.code(number) for decision in decided]
            block = _replaced(block, answer.code, is_decided, codes)
            block = _replaced(block, answer.prob, is_decided, [None] * len(block))
            if answer.meaning is not None:
                block = _replaced(
                    block,
                    answer.meaning,
                    is_decided,
                    [self._titles.get(code or "") for code in codes],
                )
        block = self._with_classes(block, is_decided)

        # who, when, and beside them what the model said
        whos = [None if decision is None else decision.who for decision in decided]
        times = [None if decision is None else decision.at for decision in decided]
        block = block.append_column(self._free("checked_by"), pa.array(whos, pa.string()))
        block = block.append_column(self._free("checked_at"), pa.array(times, pa.string()))
        for answer, codes in zip(self._answers, model_codes, strict=True):
            block = block.append_column(self._free(f"model_{answer.code}"), codes)
        return block

    def _decided(self, block: pa.Table) -> list[DecidedCodes | None]:
        """Return the decision on each row's description: one in its language, else one for all
        languages.
        """
        keys = description_keys(pc.fill_null(strings(block[self._text_col]).combine_chunks(), ""))
        langs = ["unk"] * len(block)
        if self._lang_col is not None:
            langs = [
                str(Language(lang or "unk")) for lang in strings(block[self._lang_col]).to_pylist()
            ]
        decisions = self._decisions
        return [
            decisions.get((key, lang)) or decisions.get((key, ANY_LANGUAGE))
            for key, lang in zip(keys, langs, strict=True)
        ]

    def _with_classes(self, block: pa.Table, is_decided: pa.Array) -> pa.Table:
        """Return a block with classes of the new codes; expected values, which rest on the model,
        become blank.
        """
        for classes in self._classes:
            names = [field.name for field in classes.fields]
            values = classes.append(block.filter(is_decided).drop_columns(names))
            rows = pc.if_else(
                is_decided, pc.subtract(pc.cumulative_sum(pc.cast(is_decided, pa.int64())), 1), None
            )
            for name in names:
                block = _replaced(block, name, is_decided, values[name].take(rows).to_pylist())
            for name in block.column_names:
                if any(
                    name == f"{own}_{end}"
                    for own in names
                    for end in ("prob", "mean", "sd", "share")
                ):
                    block = _replaced(block, name, is_decided, [None] * len(block))
        return block

    def _free(self, name: str) -> str:
        """Return a name that no column of the file has."""
        while name in self._file.header:
            name = f"final_{name}"
        return name


def _replaced(block: pa.Table, name: str, mask: pa.Array, cells: Sequence[str | None]) -> pa.Table:
    """Return a block with other cells of a column where a mask says so."""
    index = block.column_names.index(name)
    kind = block.schema.types[index]
    if kind != pa.string() and any(cell is not None for cell in cells):
        kind = pa.string()
    column = strings(block[index]) if kind == pa.string() else block[index]
    return block.set_column(index, name, pc.if_else(mask, pa.array(cells, kind), column))
