"""Choose what a person should check first in a coded file."""

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from histocoder.checkpoints.run_files import ARGS_FILE
from histocoder.checkpoints.run_folder import run_settings
from histocoder.checkpoints.starter import STARTER
from histocoder.data.labelled_files import CHECKED_COL
from histocoder.errors import UserError, counted, shown
from histocoder.files import finetune_command, from_here, is_same_file
from histocoder.inference.predictions import attribute_columns, code_columns
from histocoder.log import log
from histocoder.tables.output import Form, check_output, num_marked, write_frame
from histocoder.tables.table import TableFile, open_table
from histocoder.text.languages import Language
from histocoder.text.normalize import description_keys

_ANY_LANGUAGE = ""


@dataclass(frozen=True)
class Columns:
    """Names of the columns of a coded file and of the file to correct."""

    input_col: str = "occ1"  # column of descriptions
    language_col: str | None = None  # by default the one that `predict --language` added, if any
    target_cols: Sequence[
        str
    ] = ()  # columns of codes to write, blank without a prediction; by default as predicted
    run_input_col: str | None = (
        None  # column of descriptions to write; by default as in the coded file
    )
    run_language_col: str | None = (
        None  # column to write; by default "lang" for one that `predict` added
    )


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
    marked in the files `decided_in`, of the same form, are left out.

    Raises UserError where a column is missing, or the output exists and `overwrite` is not set or
    people have marked rows in it.
    """
    check_output(output, inputs=[predictions, *decided_in], num_rows=budget, overwrite=overwrite)
    file = open_coded(predictions, columns, sheet=sheet)
    table = _undecided(in_order_of_worth(file, columns), decided_in, columns)
    chosen = table.iloc[:budget]
    write_frame(output, chosen, Form.like(file, raw=raw))
    rows, total = int(chosen["times"].sum()), int(table["times"].sum())
    wrong = (chosen["times"] * (1 - chosen["conf"])).sum()
    log.info(
        f"Wrote {counted(len(chosen), 'description', 'descriptions')} to {output}. They "
        f"occur in {rows:,} of {total:,} "
        f"rows, of which about {wrong:,.0f} are likely wrong. Correct the codes, and write "
        "x in the column "
        f"{CHECKED_COL!r} of each row that is now right."
    )
    return chosen


def earlier_rounds(output: Path, run: Path) -> list[Path]:
    """Return the files in which people have decided before: the corrections of a run, and
    `output`'s earlier rounds.

    Those of `review-3.csv` are `review.csv` and `review-2.csv`.
    """
    paths = [Path(path) for path in run_settings(run).get("corrections") or []]
    name = re.fullmatch(r"(?P<stem>.+)-(?P<round>\d+)(?P<suffix>\.[a-z.]+)", output.name)
    if name:
        numbered = (
            f"{name['stem']}-{number}{name['suffix']}" for number in range(2, int(name["round"]))
        )
        paths += [
            output.with_name(round_name)
            for round_name in (f"{name['stem']}{name['suffix']}", *numbered)
        ]
    existing = [path for path in _distinct_files(paths) if path.is_file()]
    return [path for path in existing if not is_same_file(path, output) and num_marked(path)]


def _distinct_files(paths: Sequence[Path]) -> list[Path]:
    """Return each file once, whatever paths lead to it."""
    return list({path.resolve(): path for path in paths}.values())


def _undecided(table: pd.DataFrame, decided_in: Sequence[Path], columns: Columns) -> pd.DataFrame:
    """Return the rows of a table to correct whose descriptions no earlier file marks; say how many
    these mark.
    """
    if not decided_in:
        return table
    text_col = columns.run_input_col or columns.input_col
    lang_col = columns.run_language_col or columns.language_col or "lang"
    decided: set[tuple[str, str]] = set()
    for path in decided_in:
        file = open_table(path, [text_col, CHECKED_COL], optional=(lang_col,))
        names = [text_col, CHECKED_COL, *([lang_col] if file.has(lang_col) else [])]
        cells = file.read(names).columns
        is_marked = cells[CHECKED_COL].is_valid()
        langs = (
            _languages(cells[lang_col].filter(is_marked).to_pylist()) if lang_col in cells else None
        )
        keys = description_keys(cells[text_col].filter(is_marked).fill_null(""))
        decided.update(zip(keys, langs or itertools.repeat(_ANY_LANGUAGE), strict=False))

    # a decision without a language counts for all
    keys = description_keys(table[text_col].fillna("").tolist())
    langs = _languages(table[lang_col]) if lang_col in table else ["unk"] * len(table)
    pairs = zip(keys, langs, strict=True)
    is_open = np.array(
        [{(key, lang), (key, _ANY_LANGUAGE)}.isdisjoint(decided) for key, lang in pairs], bool
    )
    if not is_open.all():
        files = ", ".join(map(str, decided_in))
        log.info(
            f"{counted(int((~is_open).sum()), 'description is', 'descriptions are')} "
            f"decided in {files} and left out."
        )
    return table[is_open]


def _languages(cells: Iterable[str | None]) -> list[str]:
    return [Language(cell if isinstance(cell, str) else "unk") for cell in cells]


def open_coded(predictions: Path, columns: Columns, *, sheet: str | None = None) -> TableFile:
    """Open the output of `histocoder predict`."""
    settings = {columns.input_col: "input_col", columns.language_col: "language_col"}
    named = {name: setting for name, setting in settings.items() if name}
    return open_table(
        predictions, named, optional=("conf", "pred_conf", "lang", "pred_lang"), sheet=sheet
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
    prefix = _prefix(file)
    answers = _answers(file, columns.target_cols)
    pairs = attribute_columns(name for name in file.header if name.startswith(prefix)).items()
    names = [
        *itertools.chain(*pairs),
        *(name for name in file.header if name.startswith(f"{prefix}alt_")),
    ]
    alternatives = {name: name.removeprefix(prefix) for name in names}
    lang_col = language_column(file, columns)
    by = [columns.input_col] if lang_col is None else [columns.input_col, lang_col]
    own = (CHECKED_COL, "conf", "times", *answers.values())
    if columns.input_col in own:
        raise UserError(
            f"{file.path}: review writes a column {columns.input_col!r}. Rename the column "
            "of descriptions."
        )
    parts = []
    for table in file.tables(
        [*dict.fromkeys([*by, *answers, *alternatives, f"{prefix}conf", *beside])]
    ):
        frame = pd.DataFrame(
            {name: column.to_pandas() for name, column in table.columns.items()}, dtype=object
        )
        cells = frame[f"{prefix}conf"]
        conf = pd.to_numeric(cells.str.replace(",", "."), errors="coerce")
        if len(bad := np.flatnonzero(~conf.between(0, 1) & cells.notna())):
            where = f"{file.path}, {file.unit} {table.lines(bad[:1])[0]}, {prefix}conf"
            raise UserError(f"{where}: {shown(cells[bad[0]])} is not a number from 0 to 1.")
        others = {f"row_{name}": frame[name] for name in beside}
        frame = frame[[*by, *answers, *alternatives]].assign(**others, conf=conf, times=1)[
            conf.notna()
        ]
        parts.append(_distinct(frame, frame[by]))
    found = pd.concat(parts, ignore_index=True)
    found = _one_spelling(_distinct(found, found[by]), by, [*answers])
    order = (found["times"] * (1 - found["conf"])).sort_values(ascending=False, kind="stable").index
    names = [
        columns.run_input_col or columns.input_col,
        columns.run_language_col or columns.language_col or "lang",
    ]
    new_names = dict(zip(by, names, strict=False)) | answers | alternatives
    first = [
        *names[: len(by)],
        CHECKED_COL,
        *dict.fromkeys([*answers.values(), *columns.target_cols]),
    ]
    found = found.loc[order].rename(columns=new_names).reset_index(drop=True)
    last = ["conf", "times", *(f"row_{name}" for name in beside)]
    blank = dict.fromkeys({*first} - {*new_names.values()}, "")
    return found.reindex(columns=[*first, *alternatives.values(), *last]).fillna(blank)


def _distinct(rows: pd.DataFrame, by: pd.DataFrame) -> pd.DataFrame:
    """Return the first of the rows that are equal in `by`, with the sum of their `times`."""
    group = by.groupby(list(by), dropna=False, sort=False).ngroup()
    return rows.assign(times=rows["times"].groupby(group).transform("sum"))[~group.duplicated()]


def _one_spelling(rows: pd.DataFrame, by: list[str], answers: list[str]) -> pd.DataFrame:
    """Return the most frequent spelling of each description and answer: a correction applies to the
    others, too.
    """
    rows = rows.sort_values("times", ascending=False, kind="stable")
    text_col, *lang_cols = by
    same = rows[[*by, *answers]].assign(
        **{text_col: description_keys(rows[text_col].fillna("").tolist())}
    )
    for name in lang_cols:
        same[name] = rows[name].fillna("unk").map(Language)
    return _distinct(rows, same).sort_index()


@dataclass(frozen=True)
class AnswerColumns:
    """Names of the columns of one code of a coded file."""

    code: str
    prob: str
    meaning: str | None


def _prefix(file: TableFile) -> str:
    """Return what the columns of a file's last coding begin with; raise a UserError if it has
    none.
    """
    codings = [name.removesuffix("prob_1") for name in file.header if name.endswith("prob_1")]
    if not codings:
        raise UserError(f"{file.path} has no column prob_1; give the output of histocoder predict.")
    return codings[-1]


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
        meaning = f"{prefix}desc_{number}"
        answers.append(AnswerColumns(code, prob, meaning if meaning in file.header else None))
    return answers


def _answers(file: TableFile, target_cols: Sequence[str]) -> dict[str, str]:
    """Return the new names of a coding's columns of codes, and of their meanings."""
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
    added = [name for name in file.header if re.fullmatch("(pred_)*lang", name)][-1:]
    named = (columns.language_col, *added, columns.run_language_col)
    return next((file.column(name) for name in named if name and file.has(name)), None)


def next_step(model: str, corrections: Path, run: Path) -> str:
    """Return what to do with corrections: the command that trains on them where the settings of the
    run are known.
    """
    settings = run_settings(run)
    if run == STARTER.resolve():
        words = ["--corrections", str(corrections), "--save-path", "own-model"]
        return f"Then train a model of your own on the corrections:\n{finetune_command(words)}"
    if not settings.get("dataset"):
        return (
            "Then train on the corrections together with the model's training data: "
            "finetune.py --initial-checkpoint "
            f"{model} --corrections {corrections} --dataset …, with the flags that "
            "describe that table."
        )
    number = next(n for n in itertools.count(2) if not run.with_name(f"{run.name}-{n}").exists())
    files = _distinct_files([*map(Path, settings.get("corrections") or []), corrections])
    words = words_to_correct(model, files, run)
    save_path = from_here(run.with_name(f"{run.name}-{number}"))
    return f"Then train on the corrections:\n{finetune_command([*words, '--save-path', save_path])}"


def words_to_correct(model: str | Path, corrections: Sequence[str | Path], run: Path) -> list[str]:
    """Return the flags, but for `--save-path`, that train a model of a run further on its data and
    corrections.
    """
    flags: dict[str, Sequence[str | Path]] = {
        "--config": [run / ARGS_FILE],
        "--initial-checkpoint": [model],
        "--corrections": corrections,
        **({"--no-only-encoder": []} if run_settings(run).get("only_encoder") else {}),
    }
    return [word for flag, values in flags.items() for word in (flag, *map(from_here, values))]
