"""Chooses what a person should check first in a coded file."""

from __future__ import annotations

import itertools
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from histocoder.data.corrections import CHECKED_COL
from histocoder.data.output import Output
from histocoder.data.table import open_table
from histocoder.errors import UserError, shown
from histocoder.files import replacing

_CHUNK_ROWS = 200_000


def review(
    predictions: Path,
    output: Path,
    *,
    budget: int,
    input_col: str = "occ1",
    language_col: str | None = None,
    target_cols: Sequence[str] = (),
    renamed: Mapping[str, str] | None = None,
    overwrite: bool = False,
    sheet: str | None = None,
    raw: bool = False,
    say: Callable[[str], None] = print,
) -> pd.DataFrame:
    """Write the descriptions whose check is worth most, as a CSV to correct.

    A description is worth checking by the number of rows that are likely wrong with it: how often it occurs, times
    1 - `conf`. Where the codes are right, or made so, a mark in the column `checked` says it, and
    `finetune.py --corrections` takes the file.

    Parameters
    ----------
    predictions : Path
        What `histocoder predict` wrote, in a mode that gives `conf`.
    output : Path
        With the columns of description and language; `checked`, which is blank; codes as predicted, with what they
        mean if the predictions say so; alternatives, if there are; and `conf`, `times`.
    budget : int
        Maximum number of descriptions.
    input_col, language_col : str
        Columns of descriptions and, if there is one, of languages; by default that which `predict --language` added.
    target_cols : sequence of str
        What the columns of codes are called, those that are not predicted being blank; by default as predicted.
    renamed : mapping, optional
        What the columns of descriptions and languages are called, where it is not as in the predictions.
    overwrite : bool
        Whether to replace an existing output.
    sheet : str, optional
        Of the predictions, if they are an Excel workbook with several.
    raw : bool
        Whether texts that a spreadsheet would run as formulas are written as they are.
    say : callable
        Receives each notice to the user.

    Returns
    -------
    DataFrame
        What was written.

    Raises
    ------
    UserError
        Where a column is missing, or the output exists already.
    """
    if budget < 1:
        raise UserError(f"--budget is {budget}; it must be 1 or more.")
    Output(output).check(budget)
    if output.exists() and not overwrite:
        raise UserError(f"{output} exists already, perhaps filled in. Add --overwrite to replace it.")
    table = _read(
        predictions, input_col, language_col, target_cols=target_cols, renamed=renamed or {}, sheet=sheet, say=say
    )
    worth = (table["times"] * (1 - table["conf"])).sort_values(ascending=False, kind="stable")
    chosen = table.loc[worth.index[:budget]].reset_index(drop=True)
    with replacing(output) as temporary:
        rows_to_check = pa.Table.from_pandas(chosen, preserve_index=False)
        notices = Output(output, raw=raw).write(temporary, rows_to_check.schema, [rows_to_check])
    for notice in notices:
        say(notice)
    rows, total, wrong = int(chosen["times"].sum()), int(table["times"].sum()), worth.iloc[:budget].sum()
    say(
        f"Wrote {len(chosen):,} descriptions to {output}. They stand for {rows:,} of {total:,} rows, of which about "
        f"{wrong:,.0f} are likely wrong. Correct the codes, and write x in the column {CHECKED_COL!r} of each row that "
        "is right now."
    )
    return chosen


def _read(
    predictions: Path,
    input_col: str,
    language_col: str | None,
    *,
    target_cols: Sequence[str],
    renamed: Mapping[str, str],
    sheet: str | None,
    say: Callable[[str], None],
) -> pd.DataFrame:
    """Return the distinct descriptions of a coded file, in the columns that `review` writes."""
    file = open_table(
        predictions,
        [c for c in (input_col, language_col) if c],
        optional=("conf", "pred_conf", "lang", "pred_lang"),
        sheet=sheet,
    )
    for notice in file.notices:
        say(notice)
    prefix = _prefix(file.header)
    language_col = language_col or next((name for name in (f"{prefix}lang", "lang") if name in file.header), None)
    by = [input_col, *([language_col] if language_col else [])]
    predicted = _predicted_columns(file.header, prefix, target_cols)
    columns = [*by, *predicted, f"{prefix}conf"]
    file.check(columns)
    parts, passed = [], 0
    for chunk in file.chunks(chunk_rows=_CHUNK_ROWS, columns=columns):
        frame = chunk.select(columns).to_pandas()
        cells = frame.pop(f"{prefix}conf")
        frame["conf"] = pd.to_numeric(cells, errors="coerce")
        if len(bad := np.flatnonzero(frame["conf"].isna() & cells.notna() & (cells != ""))):
            line = file.lines(bad[:1] + passed)[0]
            raise UserError(f"{predictions}, line {line}, {prefix}conf: {shown(cells[bad[0]])} is not a number.")
        passed += len(frame)
        parts.append(_distinct(frame[frame["conf"].notna()].assign(times=1), by))
    names = {**({f"{prefix}lang": "lang"} if prefix else {}), **predicted, **renamed}
    table = _distinct(pd.concat(parts, ignore_index=True), by).rename(columns=names)
    own = [name for name in predicted.values() if not name.startswith("alt_")]
    blank = [name for name in target_cols if name not in own]
    order = [*table.columns[: len(by)], CHECKED_COL, *own, *blank, *table.columns[len(by) + len(own) :]]
    return table.assign(**dict.fromkeys([CHECKED_COL, *blank], ""))[order]


def _distinct(rows: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Return the first row of each description, with the sum of `times`."""
    times = rows.groupby(by, dropna=False)["times"].transform("sum")
    return rows.assign(times=times).drop_duplicates(by)


def _prefix(header: list[str]) -> str:
    """Return what the names of the last coding's columns begin with."""
    found = [name.removesuffix("conf") for name in header if name.endswith("conf")]
    return next((prefix for prefix in reversed(found) if f"{prefix}prob_1" in header), "")


def _predicted_columns(header: list[str], prefix: str, target_cols: Sequence[str]) -> dict[str, str]:
    """Return what a coding's columns of codes, of what they mean, and of alternatives are to be called.

    A column of codes stands before a `prob_…` of the same number.
    """
    names: dict[str, str] = {}
    targets = iter(target_cols)
    for before, name in itertools.pairwise(header):
        number = name.removeprefix(f"{prefix}prob_")
        if number != name and before.endswith(f"_{number}"):
            names[before] = next(targets, before.removeprefix(prefix))
            if (meaning := f"{prefix}desc_{number}") in header:
                names[meaning] = meaning.removeprefix(prefix)
    alternatives = (name for name in header if name.startswith(f"{prefix}alt_"))
    return {**names, **{name: name.removeprefix(prefix) for name in alternatives}}


def next_step(model: str, corrections: Path, run: Path, settings: Mapping[str, Any]) -> str:
    """Return what there is to do with what has been corrected: where the model's run is known, a command as it is.

    Parameters
    ----------
    model : str
        That coded the file.
    corrections : Path
        What `review` wrote.
    run : Path
        The folder of the model's run.
    settings : mapping
        What the run's `args.yaml` holds; nothing where there is none.
    """
    if not settings.get("dataset"):
        return (
            f"Then train on, beside the data that the model was trained on: finetune.py --initial-checkpoint {model} "
            f"--corrections {corrections} --dataset …, with the flags that tell what these data look like."
        )
    number = next(n for n in itertools.count(2) if not run.with_name(f"{run.name}-{n}").exists())
    flags: dict[str, list[str | Path]] = {
        "--config": [run / "args.yaml"],
        "--initial-checkpoint": [model],
        "--corrections": [*(settings.get("corrections") or []), corrections],
        "--save-path": [run.with_name(f"{run.name}-{number}")],
        **({"--no-only-encoder": []} if settings.get("only_encoder") else {}),
    }
    words = [word for flag, values in flags.items() for word in (flag, *(_from_here(value) for value in values))]
    script = Path(__file__).parents[2] / "finetune.py"
    program = [_from_here(script)] if script.is_file() else ["-m", "histocoder.cli.finetune"]
    return "Then train on:\n" + shlex.join([_from_here(sys.executable), *program, *words])


def _from_here(path: str | Path) -> str:
    """Return a path as it is shortest: within the current folder without that."""
    absolute = Path(path).absolute()
    return str(absolute.relative_to(Path.cwd()) if absolute.is_relative_to(Path.cwd()) else path)
