"""Choose what a person should check first in a coded file."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from histocoder.data.labelled_files import CHECKED_COL, checked_tables
from histocoder.errors import UserError, counted, shown
from histocoder.inference.predictions import attribute_columns, code_columns
from histocoder.log import log
from histocoder.tables.output import Form, check_output, write_frame
from histocoder.tables.table import Table, TableFile, open_table
from histocoder.text.languages import Language
from histocoder.text.normalize import description_keys

ANY_LANGUAGE = ""  # of a decision that counts for a description in all languages


@dataclass(frozen=True)
class Columns:
    """Names of the columns of a coded file and of the file to correct."""

    input_col: str = "occ1"  # column of descriptions
    language_col: str | None = None  # by default the one that `predict --language` added, if any
    # columns of codes to write, blank without a prediction; by default as predicted
    target_cols: Sequence[str] = ()
    # columns to write: by default as in the coded file, and "lang" for one that `predict` added
    run_input_col: str | None = None
    run_language_col: str | None = None

    @property
    def text_to_write(self) -> str:
        """Column of descriptions in the file to correct."""
        return self.run_input_col or self.input_col

    @property
    def lang_to_write(self) -> str:
        """Column of languages in the file to correct."""
        return self.run_language_col or self.language_col or "lang"


def review(
    predictions: Path,
    output: Path,
    *,
    budget: int,
    columns: Columns = Columns(),
    overwrite: bool = False,
    sheet: str | None = None,
    raw: bool = False,
    decided_in: Sequence[Path] = (),
) -> pd.DataFrame:
    """Write the descriptions whose check is worth most, at most `budget`, as a table to correct,
    and return them.

    A description is worth checking by how many rows are likely wrong with it: how often it occurs,
    times 1 - `conf`. `finetune.py --corrections` takes the file, once the column `checked` marks
    the rows that are right. It has columns of descriptions, languages, `checked` (blank), codes as
    predicted, their meanings, attributes and alternatives where the predictions have them, `conf`,
    and `times`. `raw` leaves texts as they are that a spreadsheet would run. Descriptions that are
    checked in the files `decided_in`, of the same form, are left out.

    Raises UserError where a column is missing, no description is left to check, or the output exists
    and `overwrite` is not set or people have marked rows in it.
    """
    inputs = [predictions, *decided_in]
    check_output(output, inputs=inputs, num_rows=budget, overwrite=overwrite)
    file = open_coded(predictions, columns, sheet=sheet)
    coded = in_order_of_worth(file, columns)
    if coded.empty:
        raise UserError(
            f"No row of {predictions} has codes: code the file again with the column that holds its "
            "descriptions."
        )
    table = _undecided(coded, decided_in, columns)
    if table.empty:
        names = ", ".join(map(str, decided_in))
        raise UserError(
            f"All descriptions of {predictions} are checked in {names}: there is nothing to write."
        )
    chosen = table.iloc[:budget]
    write_frame(output, chosen, Form.like(file, raw=raw))

    # how much work it is, and what it is worth
    num_rows = int(chosen["times"].sum())
    num_all_rows = int(table["times"].sum())
    num_wrong = (chosen["times"] * (1 - chosen["conf"])).sum()
    log.info(
        f"Wrote {counted(len(chosen), 'description', 'descriptions')} to {output}. They occur in "
        f"{num_rows:,} of {num_all_rows:,} rows, of which about {num_wrong:,.0f} are likely wrong. "
        f"Correct the codes, and write x in the column {CHECKED_COL!r} of each row that is now "
        "right."
    )
    return chosen


def _undecided(table: pd.DataFrame, decided_in: Sequence[Path], columns: Columns) -> pd.DataFrame:
    """Return the rows of a table to correct whose descriptions are checked in no earlier file; say
    how many are.
    """
    if not decided_in:
        return table
    text_col = columns.text_to_write
    lang_col = columns.lang_to_write

    # checked rows are decided, whatever their codes
    decided: set[tuple[str, str]] = set()
    for path in decided_in:
        file = open_table(path, [text_col, CHECKED_COL], optional=(lang_col,))
        names = [name for name in (text_col, lang_col) if file.has(name)]
        for rows in checked_tables(file, names, lambda _: None):
            langs = None
            if lang_col in names:
                langs = rows.columns[lang_col].to_pylist()
            texts = rows.columns[text_col].to_pylist()
            decided.update(text_keys(texts, langs, unknown=ANY_LANGUAGE))

    # a decision without a language counts for all
    texts = _cells_or_none(table[text_col])
    langs = None
    if lang_col in table:
        langs = _cells_or_none(table[lang_col])
    is_open = []
    for key, lang in text_keys(texts, langs):
        is_open.append((key, lang) not in decided and (key, ANY_LANGUAGE) not in decided)
    num_decided = is_open.count(False)
    if num_decided:
        files = ", ".join(map(str, decided_in))
        log.info(
            f"{counted(num_decided, 'description is', 'descriptions are')} decided in {files} and "
            "left out."
        )
    return table[np.array(is_open, dtype=bool)]


def _cells_or_none(column: pd.Series) -> list[str | None]:
    return column.where(column.notna(), None).tolist()


def text_keys(
    texts: Sequence[str | None], langs: Sequence[str | None] | None, *, unknown: str = "unk"
) -> list[tuple[str, str]]:
    """Return the key and the language of each description; `unknown` where it has none."""
    keys = description_keys([text or "" for text in texts])
    if langs is None:
        return [(key, unknown) for key in keys]
    pairs = []
    for key, lang in zip(keys, langs, strict=True):
        language = str(Language(lang or "unk"))
        if language == "unk":
            language = unknown
        pairs.append((key, language))
    return pairs


def open_coded(predictions: Path, columns: Columns, *, sheet: str | None = None) -> TableFile:
    """Open the output of `histocoder predict`."""
    settings = {columns.input_col: "input_col"}
    if columns.language_col:
        settings[columns.language_col] = "language_col"
    return open_table(
        predictions, settings, optional=("conf", "pred_conf", "lang", "pred_lang"), sheet=sheet
    )


def in_order_of_worth(
    file: TableFile, columns: Columns, *, beside: Sequence[str] = ()
) -> pd.DataFrame:
    """Return the distinct descriptions of a coded file in the order of `review`, with the columns
    that it writes.

    Behind them come the columns `beside`, each under the name `row_…`, of the first row of a
    description.
    """
    for notice in file.notices:
        log.info(notice)

    # columns of the coded file -> their names in the file to correct
    key_names = {columns.input_col: columns.text_to_write}
    lang_col = language_column(file, columns)
    if lang_col is not None:
        key_names[lang_col] = columns.lang_to_write
    answer_names = _answer_names(file, columns.target_cols)
    extra_names = _extra_names(file)
    added = {CHECKED_COL, "conf", "times"}.union(answer_names.values())
    if columns.input_col in added:
        raise UserError(
            f"{file.path}: review writes a column {columns.input_col!r}. Rename the column "
            "of descriptions."
        )

    # distinct descriptions of each block, then of the file; of like ones the commonest spelling
    key_cols = list(key_names)
    answer_cols = list(answer_names)
    conf_col = f"{_prefix(file)}conf"
    names = key_cols + answer_cols + list(extra_names)
    names_to_read = dict.fromkeys(itertools.chain(names, [conf_col], beside))
    parts = []
    for table in file.tables(list(names_to_read)):
        cells = {name: table.columns[name].to_pandas() for name in names}
        rows = pd.DataFrame(cells, dtype=object)
        for name in beside:
            rows[f"row_{name}"] = table.columns[name].to_pandas()
        rows["conf"] = _confidences(table, conf_col)
        rows["times"] = 1
        rows = rows[rows["conf"].notna()]
        parts.append(_distinct(rows, rows[key_cols]))
    rows = pd.concat(parts, ignore_index=True)
    rows = _one_spelling(_distinct(rows, rows[key_cols]), key_cols, answer_cols)

    # those first of which most rows are likely wrong
    num_wrong = rows["times"] * (1 - rows["conf"])
    rows = rows.loc[num_wrong.sort_values(ascending=False, kind="stable").index]
    rows = rows.rename(columns=key_names | answer_names | extra_names).reset_index(drop=True)

    # the columns of the file to correct, of which `checked` and further codes are blank
    layout = list(key_names.values())
    layout.append(CHECKED_COL)
    layout += dict.fromkeys(itertools.chain(answer_names.values(), columns.target_cols))
    layout += extra_names.values()
    layout += ["conf", "times"]
    for name in layout:
        if name not in rows:
            rows[name] = ""
    return rows[layout + [f"row_{name}" for name in beside]]


def _extra_names(file: TableFile) -> dict[str, str]:
    """Return the new names of the columns of a file's last coding that help to judge its codes: its
    attributes and alternatives.
    """
    prefix = _prefix(file)
    coding = [name for name in file.header if name.startswith(prefix)]
    names = itertools.chain.from_iterable(attribute_columns(coding).items())
    alternatives = [name for name in coding if name.startswith(f"{prefix}alt_")]
    return {name: name.removeprefix(prefix) for name in itertools.chain(names, alternatives)}


def _confidences(table: Table, conf_col: str) -> pd.Series:
    """Return a column of confidences as numbers; raise a UserError if a cell is not one."""
    cells = table.columns[conf_col].to_pandas()
    conf = pd.to_numeric(cells.str.replace(",", "."), errors="coerce")
    wrong_rows = np.flatnonzero(~conf.between(0, 1) & cells.notna())
    if len(wrong_rows):
        where = f"{table.file.path}, {table.file.unit} {table.lines(wrong_rows[:1])[0]}, {conf_col}"
        raise UserError(f"{where}: {shown(cells[wrong_rows[0]])} is not a number from 0 to 1.")
    return conf


def _distinct(rows: pd.DataFrame, by: pd.DataFrame) -> pd.DataFrame:
    """Return the first of the rows that are equal in `by`, with the sum of their `times`."""
    group = by.groupby(list(by), dropna=False, sort=False).ngroup()
    times = rows["times"].groupby(group).transform("sum")
    return rows.assign(times=times)[~group.duplicated()]


def _one_spelling(rows: pd.DataFrame, key_cols: list[str], answer_cols: list[str]) -> pd.DataFrame:
    """Return the most frequent spelling of each description and answer: a correction applies to the
    others, too.
    """
    rows = rows.sort_values("times", ascending=False, kind="stable")

    # what makes descriptions one: their words, their language as it is read, and the answer
    text_col = key_cols[0]
    same = rows[key_cols + answer_cols].copy()
    same[text_col] = description_keys(rows[text_col].fillna("").tolist())
    for lang_col in key_cols[1:]:
        same[lang_col] = rows[lang_col].fillna("unk").map(Language)
    return _distinct(rows, same).sort_index()


@dataclass(frozen=True)
class AnswerColumns:
    """Names of the columns of one code of a coded file."""

    code: str
    prob: str
    meaning: str | None = None


def _prefix(file: TableFile) -> str:
    """Return what the columns of a file's last coding begin with; raise a UserError if it has
    none.
    """
    for name in reversed(file.header):
        if name.endswith("prob_1"):
            return name.removesuffix("prob_1")
    raise UserError(f"{file.path} has no column prob_1; give the output of histocoder predict.")


def answer_columns(file: TableFile, target_cols: Sequence[str] = ()) -> list[AnswerColumns]:
    """Return the columns of codes of a file's last coding, which precede their `prob_…`, the first
    code's first.
    """
    prefix = _prefix(file)
    answers: list[AnswerColumns] = []
    for code, prob in code_columns(file.header).items():
        number = prob.removeprefix(f"{prefix}prob_")
        if not number.isdigit():
            continue
        if code.removeprefix(prefix) not in target_cols and not code.endswith(f"_{number}"):
            raise UserError(
                f"The column before {prob!r} must be that of its codes, as predict writes them."
            )
        answer = AnswerColumns(code, prob)
        if f"{prefix}desc_{number}" in file.header:
            answer = replace(answer, meaning=f"{prefix}desc_{number}")
        answers.append(answer)
    return answers


def _answer_names(file: TableFile, target_cols: Sequence[str]) -> dict[str, str]:
    """Return the new names of the columns of codes of a file's last coding, and of their meanings."""
    prefix = _prefix(file)
    names: dict[str, str] = {}
    targets = iter(target_cols)
    for answer in answer_columns(file, target_cols):
        names[answer.code] = next(targets, answer.code.removeprefix(prefix))
        if answer.meaning is not None:
            names[answer.meaning] = answer.meaning.removeprefix(prefix)
    return names


def language_column(file: TableFile, columns: Columns) -> str | None:
    """Return the column of each row's language: the one that is named, or that `predict --language`
    has added.
    """
    added_cols = [name for name in file.header if re.fullmatch("(pred_)*lang", name)]
    for name in (columns.language_col, *added_cols[-1:], columns.run_language_col):
        if name and file.has(name):
            return file.column(name)
    return None
