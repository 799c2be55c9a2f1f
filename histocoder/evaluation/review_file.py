"""Choose what a person should check first in a coded file."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa

from histocoder.checkpoints.run_folder import ARGS_FILE, run_settings
from histocoder.data.example_files import CHECKED_COL
from histocoder.data.languages import Language
from histocoder.data.normalize import description_keys
from histocoder.data.output import Form, check_output, write_table
from histocoder.data.table import TableFile, open_table
from histocoder.errors import UserError, counted, shown
from histocoder.files import finetune_command
from histocoder.inference.predictions import code_columns
from histocoder.log import log


@dataclass(frozen=True)
class Columns:
    """Names of the columns of a coded file and of the file to correct."""

    input_col: str = "occ1"  # column of descriptions
    language_col: str | None = None  # by default the one that `predict --language` added, if any
    target_cols: Sequence[str] = ()  # columns of codes to write, blank without a prediction; by default as predicted
    run_input_col: str | None = None  # column of descriptions to write; by default as in the coded file
    run_language_col: str | None = None  # column to write; by default "lang" for one that `predict` added


def review(
    predictions: Path,
    output: Path,
    *,
    budget: int,
    columns: Columns = Columns(),
    overwrite: bool = False,
    sheet: str | None = None,
    raw: bool = False,
) -> pd.DataFrame:
    """Write the descriptions whose check is worth most, as a CSV to correct, and return them.

    A description is worth checking by how many rows are likely wrong with it: how often it occurs, times 1 - `conf`.
    `finetune.py --corrections` takes the file, once the column `checked` marks the rows that are right.

    Parameters
    ----------
    predictions : Path
        Output of `histocoder predict`, in a mode that gives `conf`; `sheet` is that of an Excel workbook.
    output : Path
        File to write: columns of descriptions, languages, `checked` (blank), codes as predicted, their meanings and
        alternatives where the predictions have them, `conf`, and `times`. `raw` leaves texts that a spreadsheet would
        run as formulas as they are.
    budget : int
        Maximum number of descriptions.

    Raises
    ------
    UserError
        Where a column is missing, or the output exists and `overwrite` is not set.
    """
    check_output(output, num_rows=budget)
    if output.exists() and not overwrite:
        raise UserError(f"{output} already exists, and may be filled in. Add --overwrite to replace it.")
    file = open_coded(predictions, columns, sheet=sheet)
    table = in_order_of_worth(file, columns)
    chosen = table.iloc[:budget]
    written = pa.Table.from_pandas(chosen, preserve_index=False)
    for notice in write_table(output, [written], Form.like(file, raw=raw)):
        log.info(notice)
    rows, total = int(chosen["times"].sum()), int(table["times"].sum())
    wrong = (chosen["times"] * (1 - chosen["conf"])).sum()
    log.info(
        f"Wrote {counted(len(chosen), 'description', 'descriptions')} to {output}. They occur in {rows:,} of {total:,} "
        f"rows, of which about {wrong:,.0f} are likely wrong. Correct the codes, and write x in the column "
        f"{CHECKED_COL!r} of each row that is now right."
    )
    return chosen


def open_coded(predictions: Path, columns: Columns, *, sheet: str | None = None) -> TableFile:
    """Open the output of `histocoder predict`."""
    settings = {columns.input_col: "input_col", columns.language_col: "language_col"}
    named = {name: setting for name, setting in settings.items() if name}
    return open_table(predictions, named, optional=("conf", "pred_conf", "lang", "pred_lang"), sheet=sheet)


def in_order_of_worth(file: TableFile, columns: Columns) -> pd.DataFrame:
    """Return the distinct descriptions of a coded file in the order of `review`, with the columns that it writes."""
    for notice in file.notices:
        log.info(notice)
    prefix = _prefix(file.header)
    predicted = _predicted_columns(file, prefix, columns.target_cols)
    text_col, conf_col = file.column(columns.input_col), f"{prefix}conf"
    language_col = _language_col(file.header, prefix, predicted, columns.run_language_col)
    if columns.language_col:
        language_col = file.column(columns.language_col)
    by = [text_col, *([language_col] if language_col else [])]
    if text_col in (CHECKED_COL, "conf", "times", *predicted.values()):
        raise UserError(
            f"{file.path}: the file to correct gets a column {text_col!r} of its own. Rename the column of "
            "descriptions."
        )
    parts = []
    for table in file.tables([*by, *predicted, conf_col]):
        frame = pd.DataFrame({name: column.to_pandas() for name, column in table.columns.items()}, dtype=object)
        cells = frame.pop(conf_col)
        frame["conf"] = pd.to_numeric(cells.str.replace(",", "."), errors="coerce")
        if len(bad := np.flatnonzero(~frame["conf"].between(0, 1) & cells.notna())):
            where = f"{file.path}, line {table.lines(bad[:1])[0]}, {conf_col}"
            raise UserError(f"{where}: {shown(cells[bad[0]])} is not a number from 0 to 1.")
        frame = frame[frame["conf"].notna()].assign(times=1)
        parts.append(_distinct(frame, frame[by]))
    found = pd.concat(parts, ignore_index=True)
    answers = [name for name in predicted if not name.startswith(f"{prefix}alt_")]
    found = _one_spelling(_distinct(found, found[by]), by, answers)
    new_names = {**predicted, text_col: columns.run_input_col or columns.input_col}
    if language_col:
        new_names[language_col] = columns.run_language_col or columns.language_col or "lang"
    found = found.rename(columns=new_names)
    own = [predicted[name] for name in answers]
    blank = [name for name in columns.target_cols if name not in own]
    order = [*found.columns[: len(by)], CHECKED_COL, *own, *blank, *found.columns[len(by) + len(own) :]]
    found = found.assign(**dict.fromkeys([CHECKED_COL, *blank], ""))[order]
    worth = (found["times"] * (1 - found["conf"])).sort_values(ascending=False, kind="stable")
    return found.loc[worth.index].reset_index(drop=True)


def _distinct(rows: pd.DataFrame, by: pd.DataFrame) -> pd.DataFrame:
    """Return the first of the rows that are equal in `by`, with the sum of their `times`."""
    group = by.groupby(list(by), dropna=False, sort=False).ngroup()
    return rows.assign(times=rows["times"].groupby(group).transform("sum"))[~group.duplicated()]


def _one_spelling(rows: pd.DataFrame, by: list[str], answers: list[str]) -> pd.DataFrame:
    """Return the most frequent spelling of each description and answer: a correction applies to the others, too."""
    rows = rows.sort_values("times", ascending=False, kind="stable")
    text_col, *lang_cols = by
    same = rows[[*by, *answers]].assign(**{text_col: description_keys(rows[text_col].fillna("").tolist())})
    for name in lang_cols:
        same[name] = rows[name].fillna("unk").map(Language)
    return _distinct(rows, same).sort_index()


def _prefix(header: list[str]) -> str:
    """Return the prefix of the names of the last coding's columns."""
    found = [name.removesuffix("conf") for name in header if name.endswith("conf")]
    return next((prefix for prefix in reversed(found) if f"{prefix}prob_1" in header), "")


def _language_col(header: list[str], prefix: str, predicted: Iterable[str], of_run: str | None) -> str | None:
    """Return the column of languages that `predict --language` added before its codes, else lang, else the run's."""
    first = next((header.index(name) for name in predicted), 0)
    before = [name for name in header[max(first - 1, 0) : first] if f"_{name}".endswith("_lang")]
    return next((name for name in (*before, f"{prefix}lang", "lang", of_run) if name in header), None)


def _predicted_columns(file: TableFile, prefix: str, target_cols: Sequence[str]) -> dict[str, str]:
    """Return the new name of each of a coding's columns of codes, of their meanings, and of alternatives.

    A column of codes precedes its `prob_…`; raises UserError where another one does, or there is none.
    """
    names: dict[str, str] = {}
    targets = iter(target_cols)
    for code, prob in code_columns(file.header).items():
        number, own = prob.removeprefix(f"{prefix}prob_"), code.removeprefix(prefix)
        if number.isdigit():
            if own not in target_cols and not code.endswith(f"_{number}"):
                raise UserError(
                    f"The column before {prob!r} must be that of its codes, as histocoder predict writes them."
                )
            names[code] = next(targets, own)
            if (meaning := f"{prefix}desc_{number}") in file.header:
                names[meaning] = meaning.removeprefix(prefix)
    if not names:
        raise UserError(f"{file.path} has no column {prefix}prob_1; give the output of histocoder predict.")
    alternatives = (name for name in file.header if name.startswith(f"{prefix}alt_"))
    return {**names, **{name: name.removeprefix(prefix) for name in alternatives}}


def next_step(model: str, corrections: Path, run: Path) -> str:
    """Return what to do with corrections: the command that trains on them where the settings of the run are known."""
    settings = run_settings(run)
    if not settings.get("dataset"):
        return (
            "Then train on the corrections together with the model's training data: finetune.py --initial-checkpoint "
            f"{model} --corrections {corrections} --dataset …, with the flags that describe that table."
        )
    number = next(n for n in itertools.count(2) if not run.with_name(f"{run.name}-{n}").exists())
    flags: dict[str, list[str | Path]] = {
        "--config": [run / ARGS_FILE],
        "--initial-checkpoint": [model],
        "--corrections": [*(settings.get("corrections") or []), corrections],
        "--save-path": [run.with_name(f"{run.name}-{number}")],
        **({"--no-only-encoder": []} if settings.get("only_encoder") else {}),
    }
    words = [word for flag, values in flags.items() for word in (flag, *map(str, values))]
    return f"Then train on the corrections:\n{finetune_command(words)}"
