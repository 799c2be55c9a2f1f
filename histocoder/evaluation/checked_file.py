"""Decisions of people on codes: read from the files in which they marked rows, put into a coded
file, and learned from.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from histocoder.checkpoints.run_files import ARGS_FILE
from histocoder.checkpoints.run_folder import run_settings
from histocoder.checkpoints.starter import STARTER
from histocoder.classes.class_columns import NUMBER_SUFFIXES, Classes
from histocoder.data.cells import CodeColumn
from histocoder.data.code_columns import column_of_few, count_cells
from histocoder.data.labelled_files import CHECKED_COL, checked_tables, num_checked_rows
from histocoder.errors import UserError, shown
from histocoder.evaluation.review_file import (
    ANY_LANGUAGE,
    Columns,
    answer_columns,
    language_column,
    open_coded,
    text_keys,
)
from histocoder.files import finetune_command, from_here, is_same_file
from histocoder.formatters import CodeSystem
from histocoder.log import log
from histocoder.tables.output import Form, check_kept, check_output, num_marked, write_table
from histocoder.tables.table import CHUNK_ROWS, Table, TableFile, open_table, strings

Decided: TypeAlias = Mapping[tuple[str, str], "DecidedCodes"]
"""(Key of the description, language) -> decision."""


@dataclass(frozen=True)
class DecidedCodes:
    """Codes that a person has given a description."""

    codes: tuple[str, ...]
    who: str | None = None
    at: str | None = None  # date and time

    def code(self, number: int) -> str | None:
        """Return the code of a number, from 0; None where there are fewer."""
        if number >= len(self.codes):
            return None
        return self.codes[number]


_UNDECIDED = DecidedCodes(())


def read_decisions(
    path: Path, columns: Columns, *, known: Collection[str], system: CodeSystem
) -> dict[tuple[str, str], DecidedCodes]:
    """Read the checked rows of a file that `histocoder review` wrote and a person has filled in.

    `columns` are those of the file: `run_input_col`, `run_language_col` and `target_cols`; `known`
    are the codes of the model, and `system` is their form, by which cells are read as in training.
    A checked row without a code has no occupation, and a row without a language counts for all.

    Raises UserError if a column is missing, no row is checked, or a checked cell holds no code.
    """
    text_col = columns.text_to_write
    lang_col = columns.lang_to_write
    file = open_table(
        path, [text_col, CHECKED_COL, columns.target_cols[0]], optional=(lang_col, "who")
    )
    names = [name for name in (text_col, lang_col, "who", *columns.target_cols) if file.has(name)]
    code_cols = [name for name in columns.target_cols if name in names]
    tables = list(checked_tables(file, names, log.info))

    # how the codes of all rows are written decides how a cell is read
    counts = count_cells(tables, code_cols)
    code_column = column_of_few(counts, known=known, system=system)

    # the last of several decisions on a description holds
    decisions: dict[tuple[str, str], DecidedCodes] = {}
    for table in tables:
        cells = {name: column.to_pylist() for name, column in table.columns.items()}
        reviewers = cells.get("who", [None] * len(table))
        keys = text_keys(cells[text_col], cells.get(lang_col), unknown=ANY_LANGUAGE)
        for row, (key, lang) in enumerate(keys):
            if key:  # else the row has no description
                codes = _read_codes(table, row, cells, names=code_cols, code_column=code_column)
                decisions[key, lang] = DecidedCodes(codes, who=reviewers[row])
    return decisions


def _read_codes(
    table: Table,
    row: int,
    cells: Mapping[str, Sequence[str | None]],
    *,
    names: Sequence[str],
    code_column: CodeColumn,
) -> tuple[str, ...]:
    """Return the codes of a row, in the cells of some columns of its table; raise a UserError if a
    cell holds something else.
    """
    codes: list[str] = []
    for name in names:
        text = cells[name][row] or ""
        cell = code_column.read(text)
        if cell.problem:
            file = table.file
            line = table.lines(np.array([row]))[0]
            advice = "Correct it"
            if cell.lacks_zeros:
                advice = "Write its leading zeros, too"
            raise UserError(
                f"{file.path}, {file.unit} {line}, column {name!r}: {shown(text)} {cell.problem}. "
                f"{advice}, or remove the mark."
            )
        codes.extend(cell.codes)
    return tuple(dict.fromkeys(codes))


def write_checked(
    coded: Path,
    output: Path,
    decisions: Decided,
    columns: Columns,
    *,
    titles: Mapping[str, str],
    classes: Sequence[Classes] = (),
    unknown_classes: Sequence[str] = (),
    sheet: str | None = None,
    raw: bool = False,
    overwrite: bool = False,
) -> int:
    """Write the output of `histocoder predict` with people's codes in place of the model's; return
    their rows' number.

    Rows whose description was decided on get these codes, their `titles`, and no probabilities;
    `conf` stays that of the model's codes. Behind the file's columns come `checked_by` and
    `checked_at`, who decided and when, and `model_…`, the model's codes of all rows. `classes`
    compute columns of classes again, which the file has already; the columns `unknown_classes`
    become blank beside people's codes.

    Raises UserError where a column is missing, a description has more codes than the file has
    columns, or the output exists and `overwrite` is not set.
    """
    check_output(output, inputs=[coded], overwrite=overwrite)
    file = open_coded(coded, columns, sheet=sheet)
    check_kept(file, output)
    writer = _Writer(file, decisions, columns, titles, classes, unknown_classes)
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
        unknown_classes: Sequence[str],
    ) -> None:
        self._file = file
        self._decisions = decisions
        self._titles = titles
        self._classes = classes
        self._unknown_classes = unknown_classes
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
        decisions = self._decisions_on(block)
        is_decided = pa.array([decision is not _UNDECIDED for decision in decisions], pa.bool_())
        self.num_rows += pc.sum(is_decided).as_py() or 0

        # the codes that people gave and their meanings; the probabilities are of the model's codes
        model_codes = {}
        for number, answer in enumerate(self._answers):
            model_codes[f"model_{answer.code}"] = strings(block[answer.code])
            codes = [decision.code(number) for decision in decisions]
            block = _with_texts(block, answer.code, is_decided, codes)
            block = _with_blanks(block, answer.prob, is_decided)
            if answer.meaning is not None:
                meanings = [self._titles.get(code or "") for code in codes]
                block = _with_texts(block, answer.meaning, is_decided, meanings)
        block = self._with_classes(block, is_decided)

        # who, when, and beside them what the model said
        for name, field in (("checked_by", "who"), ("checked_at", "at")):
            cells = [getattr(decision, field) for decision in decisions]
            block = block.append_column(self._free(name), pa.array(cells, pa.string()))
        for name, column in model_codes.items():
            block = block.append_column(self._free(name), column)
        return block

    def _decisions_on(self, block: pa.Table) -> list[DecidedCodes]:
        """Return the decision on each row's description: one in its language, else one for all
        languages.
        """
        texts = strings(block[self._text_col]).to_pylist()
        langs = None
        if self._lang_col is not None:
            langs = strings(block[self._lang_col]).to_pylist()
        decisions = []
        for key, lang in text_keys(texts, langs):
            for_all = self._decisions.get((key, ANY_LANGUAGE), _UNDECIDED)
            decisions.append(self._decisions.get((key, lang), for_all))
        return decisions

    def _with_classes(self, block: pa.Table, is_decided: pa.Array) -> pa.Table:
        """Return a block with classes of the new codes; unknown ones, and expected values, which
        rest on the model, become blank.
        """
        names_of_classes = list(self._unknown_classes)
        for name in self._unknown_classes:
            block = _with_texts(block, name, is_decided, [None] * len(block))
        for classes in self._classes:
            names = [field.name for field in classes.fields]
            values = classes.append(block.filter(is_decided).drop_columns(names))

            # the row of `values` that each row of the block has; null where nobody decided
            positions = pc.subtract(pc.cumulative_sum(pc.cast(is_decided, pa.int64())), 1)
            rows = pc.if_else(is_decided, positions, None)
            for name in names:
                cells = values[name].take(rows).to_pylist()
                block = _with_texts(block, name, is_decided, cells)
            names_of_classes += names

        for name in names_of_classes:
            for suffix in NUMBER_SUFFIXES:
                if f"{name}_{suffix}" in block.column_names:
                    block = _with_blanks(block, f"{name}_{suffix}", is_decided)
        return block

    def _free(self, name: str) -> str:
        """Return a name that no column of the file has."""
        while name in self._file.header:
            name = f"final_{name}"
        return name


def _with_texts(
    block: pa.Table, name: str, mask: pa.Array, cells: Sequence[str | None]
) -> pa.Table:
    """Return a block with a column of text that has other cells where a mask says so.

    The column has one type in all blocks, whether they have such rows or not.
    """
    index = block.column_names.index(name)
    column = pc.if_else(mask, pa.array(cells, pa.string()), strings(block[index]))
    return block.set_column(index, name, column)


def _with_blanks(block: pa.Table, name: str, mask: pa.Array) -> pa.Table:
    """Return a block with a column, of the same type, that is blank where a mask says so."""
    index = block.column_names.index(name)
    blanks = pa.nulls(len(block), block.schema.types[index])
    return block.set_column(index, name, pc.if_else(mask, blanks, block[index]))


def earlier_rounds(output: Path, run: Path) -> list[Path]:
    """Return the files in which people have decided before: the corrections of a run, and
    `output`'s earlier rounds.

    Those of `review-3.csv` are `review.csv` and `review-2.csv`.
    """
    paths = _corrections_of(run)

    # review.csv, review-2.csv and so on are rounds of one review
    name = re.fullmatch(r"(?P<stem>.+)-(?P<round>\d+)(?P<suffix>\.[a-z.]+)", output.name)
    if name:
        paths.append(output.with_name(f"{name['stem']}{name['suffix']}"))
        for number in range(2, int(name["round"])):
            paths.append(output.with_name(f"{name['stem']}-{number}{name['suffix']}"))

    # those in which people have checked rows; what is not a table has no marks
    rounds = []
    for path in _distinct_files(paths):
        is_earlier = path.is_file() and not is_same_file(path, output)
        if is_earlier and num_marked(path) and num_checked_rows(path):
            rounds.append(path)
    return rounds


def _corrections_of(run: Path) -> list[Path]:
    return [Path(path) for path in run_settings(run).get("corrections") or []]


def _distinct_files(paths: Sequence[Path]) -> list[Path]:
    """Return each file once, whatever paths lead to it."""
    return list({path.resolve(): path for path in paths}.values())


def next_step(model: str, corrections: Path, run: Path, *, written_cols: Sequence[str]) -> str:
    """Return what to do with corrections: the command that trains on them, and on those of earlier
    rounds, where the settings of the run are known; see `words_to_correct`.
    """
    # of several corrections of a description, training takes the last
    paths = [*_corrections_of(run), *earlier_rounds(corrections, run), corrections]
    rounds = _distinct_files(paths)
    if run.resolve() == STARTER.resolve():
        save_path = from_here(_free_folder(Path("own-model")))
        words = ["--corrections", *map(from_here, rounds), "--save-path", save_path]
        return f"Then train a model of your own on them:\n{finetune_command(words)}"
    dataset = run_settings(run).get("dataset")
    if not dataset:
        return (
            "Then train on the corrections together with the model's training data: "
            "finetune.py --initial-checkpoint "
            f"{model} --corrections {' '.join(map(str, rounds))} --dataset …, with the flags that "
            "describe that table."
        )

    # a model that was trained from the box has the first round as its table
    new_rounds = [path for path in rounds if path.resolve() != Path(dataset).resolve()]
    words = words_to_correct(model, new_rounds, run, written_cols=written_cols)
    words += ["--save-path", from_here(_free_folder(run))]
    return f"Then train on the corrections:\n{finetune_command(words)}"


def _free_folder(folder: Path) -> Path:
    """Return a folder that does not exist: this one, or with the first number that is free."""
    number = 1
    free = folder
    while free.exists():
        number += 1
        free = folder.with_name(f"{folder.name}-{number}")
    return free


def words_to_correct(
    model: str | Path,
    corrections: Sequence[str | Path],
    run: Path,
    *,
    written_cols: Sequence[str] = (),
) -> list[str]:
    """Return the flags, but for `--save-path`, that train a model of a run further on its data and
    corrections; `written_cols` are the columns of codes that the model writes.
    """
    words = ["--config", from_here(run / ARGS_FILE), "--initial-checkpoint", from_here(model)]
    words.append("--corrections")
    words += map(from_here, corrections)

    # corrections may have more codes than the run's table has columns
    if len(written_cols) > len(run_settings(run).get("target_cols") or written_cols):
        words += ["--target-cols", *written_cols]
    if run_settings(run).get("only_encoder"):
        words.append("--no-only-encoder")
    return words
