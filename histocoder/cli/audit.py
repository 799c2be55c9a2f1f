"""`histocoder audit` and `agreement`: find codes that are likely wrong, and those on which two
coders differ.
"""

import re
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from tqdm import tqdm

from histocoder.cli.flags import AgreementFlags, AuditFlags, CodedTableFlags
from histocoder.config import PrepareConfig, settings_of
from histocoder.data.cells import read_code
from histocoder.data.code_columns import column_of
from histocoder.data.examples import LANG_COL
from histocoder.data.key import read_key
from histocoder.data.labelled_files import CHECKED_COL, LabelledFiles, other_cells
from histocoder.data.prepare import table_files
from histocoder.errors import UserError, counted
from histocoder.evaluation.scores import agreement, code_sets, to_settle
from histocoder.evaluation.summary import percent, table_of_shares
from histocoder.formatters import CodeSystem
from histocoder.log import log
from histocoder.tables.output import Form, check_output, write_frame
from histocoder.tables.table import open_table
from histocoder.text.languages import Language
from histocoder.text.normalize import description_keys

_LABEL_COLS = ["key", "lang", "codes"]
_COUNT_COLS = ("code", "rows", "suspect", "share")  # columns of the tables of counts
_MAX_LINES = 10  # of the table, in a cell of the output


class CodedRows(NamedTuple):
    """The rows of a table that have codes, and what these are like."""

    # columns `key`, `lang`, `codes` (a tuple), `text`, `line`, `place` (see `_places`), and `other`,
    # cells of a further column
    rows: pd.DataFrame
    system: CodeSystem


def run_audit(config: AuditFlags) -> None:
    """Write the most suspect labels, and how many there are of each code and group."""
    output = Path(config.output)
    paths = _paths_of_counts(config)
    for path in (output, *paths.values()):
        check_output(path, inputs=(config.dataset, config.key), overwrite=config.overwrite)
    rows = coded_rows(config, config.dataset, config.group_col, "group_col").rows
    labels = _judged_labels(rows, config.dataset)

    # a code that the key lacks is wrong for certain
    codes: Iterable[str] = rows["codes"].explode()
    if config.key:
        codes = read_key(config.key, num_digits=None if config.zero_pad_codes else 0).codes
    is_outside = ~labels["codes"].map(set(codes).issuperset)
    labels.loc[is_outside, ["doubt", "conf"]] = np.inf, 0.0

    # what the reader of a suspect label should know of its other rows
    times_of_description = labels.groupby(["key", "lang"])["times"].transform("sum")
    num_others = times_of_description - labels["times"]
    labels["note"] = (num_others.astype(str) + " with other codes").where(num_others > 0, "")
    labels["note"] = labels["note"].mask(is_outside, "not in the key")
    chosen = labels.sort_values("doubt", ascending=False, kind="stable").iloc[: config.budget]
    further_columns = _evidence(chosen, labels, first_number=len(config.target_cols) + 1)
    write_frame(output, to_correct(chosen, config, further_columns), Form(raw=config.raw))

    # a row is as likely wrong as its label
    prob_wrong = 1 - rows.merge(labels[[*_LABEL_COLS, "conf"]], how="left", on=_LABEL_COLS)["conf"]
    end = "."
    if config.key:
        end = f"; {sum(is_outside):,} are not in the key."
    log.info(
        f"Some {prob_wrong.sum():,.0f} of {len(rows):,} rows with codes "
        f"({percent(prob_wrong.mean())}) are as suspect as rows with random codes. Of "
        f"{len(labels):,} different labels, {sum(num_others > 0):,} have rows of the same "
        f"description with other codes{end}"
    )

    # a row counts for each of its codes, and for the group that it is in
    for name, path in paths.items():
        groups = rows["codes"].explode()
        if name != "code":
            groups = rows["other"].fillna("(blank)")
        _write_counts(path, name, prob_wrong.loc[groups.index], groups, raw=config.raw)
    log.info(
        f"Wrote the {len(chosen):,} most suspect labels to {output}. Correct the codes, "
        f"write x in the column {CHECKED_COL!r} of each row that is now right, and train with "
        f"--corrections {output}."
    )


def _paths_of_counts(config: AuditFlags) -> dict[str, Path]:
    """Return the files of counts, by the name of the column that they count by."""
    names = ["code"]
    if config.group_col:
        # the column's own name, unless the table of counts has another of that name
        is_taken = config.group_col.casefold() in _COUNT_COLS
        names.append(f"{config.group_col}_group" if is_taken else config.group_col)
    output = Path(config.output)
    paths = {}
    for name in names:
        name_in_path = re.sub(r"[^\w. -]", "_", name)
        paths[name] = output.with_name(f"{output.stem}_by_{name_in_path}.csv")
    return paths


def _judged_labels(rows: pd.DataFrame, path: str) -> pd.DataFrame:
    """Return the distinct labels of coded rows, with the columns of `suspects`.

    Raises UserError if there are not at least two codes and two descriptions.
    """
    groups = rows.groupby(_LABEL_COLS, sort=False)
    labels = groups.agg(text=("text", "first"), line=("line", list), times=("text", "size"))
    labels = labels.reset_index()
    if labels["codes"].nunique() < 2 or labels["key"].nunique() < 2:
        raise UserError(
            f"{path} has one code or description; there is nothing to compare labels with."
        )
    # here, since it takes a second to import
    from histocoder.evaluation.suspects import suspects

    with tqdm(total=len(labels), unit="label", disable=None, leave=False) as bar:
        return labels.join(suspects(labels, on_progress=bar.update))


def _evidence(chosen: pd.DataFrame, labels: pd.DataFrame, *, first_number: int) -> dict[str, Any]:
    """Return columns that help to judge labels: likelier codes, numbered from `first_number`, and
    like descriptions with other codes.
    """
    from histocoder.evaluation.suspects import nearest_with_other_codes

    columns: dict[str, Any] = {}
    for i in range(len(chosen["alt"].iloc[0])):
        columns[f"alt_code_{first_number + i}"] = chosen["alt"].str[i]
        columns[f"alt_prob_{first_number + i}"] = chosen["alt_probs"].str[i]
    columns["note"] = chosen["note"]

    labels_in_words = labels["text"] + " (" + labels["codes"].map(" ".join) + ")"
    indices = nearest_with_other_codes(labels, chosen.index.to_numpy())
    columns["near"] = ["; ".join(labels_in_words.iloc[neighbours]) for neighbours in indices]
    columns["lines"] = [" ".join(map(str, lines[:_MAX_LINES])) for lines in chosen["line"]]
    return columns


def _write_counts(
    path: Path, name: str, prob_wrong: pd.Series, groups: pd.Series, *, raw: bool
) -> None:
    """Write how many rows of each group are suspect, the groups with most of them first."""
    by_group = prob_wrong.groupby(groups.to_numpy())
    counts = by_group.agg(rows="size", suspect="sum", share="mean")
    counts = counts.sort_values("suspect", ascending=False, kind="stable")
    counts = counts.rename_axis(name).reset_index()
    write_frame(path, counts.round(4), Form(raw=raw))
    first_lines = counts.head(10).round(3).to_string(index=False)
    log.info(f"Suspect rows by {name}, all in {path}:\n{first_lines}")


def run_agreement(config: AgreementFlags) -> None:
    """Print how far two coders agree, and write what they have to settle."""
    output = Path(config.output)
    check_output(output, inputs=config.files, overwrite=config.overwrite)
    first, second = (
        coded_rows(config, path, config.id_col, "id_col", has_blank=True) for path in config.files
    )
    both = _rows_of_both(first.rows, second.rows, by_id=config.id_col is not None)
    names = " and ".join(config.files)
    if both.empty:
        raise UserError(
            f"{names} have no row in common; check --input-col, --language-col and --id-col."
        )

    # codes that are labels have no digits, and whole codes are compared in any case
    digits = 0
    if first.system.labels is None:
        digits = first.system.block_size - 1
    levels = agreement(both["first"], both["second"], both["text"].tolist(), digits=digits)
    unmatched = " and ".join(f"{len(table.rows) - len(both):,}" for table in (first, second))
    log.info(
        f"{len(both):,} rows have codes in both files; {unmatched} rows of {names} have no "
        "counterpart."
    )
    log.info(
        table_of_shares([asdict(level) | {"digits": level.digits or "all"} for level in levels])
    )

    # the first coder's codes are to be corrected, the second's are in columns of their own
    differences = to_settle(both, digits=digits)
    further_columns: dict[str, Any] = {}
    for i, name in enumerate(config.target_cols):
        further_columns[f"other_{name}"] = differences["second"].str.get(i)
    further_columns["same_digits"] = differences["digits"]
    labels = differences.rename(columns={"first": "codes"})
    labels["conf"] = 0.5  # one of the two coders has decided so
    labels["probs"] = labels["codes"].map(lambda codes: (0.5,) * len(codes))
    write_frame(output, to_correct(labels, config, further_columns), Form(raw=config.raw))
    log.info(
        f"Wrote {len(labels):,} descriptions on which they differ to {output}, with the codes of "
        f"{config.files[0]}; those of {config.files[1]} are behind them. Correct the former, and "
        f"write x in the column {CHECKED_COL!r} of what is settled."
    )


def _rows_of_both(first: pd.DataFrame, second: pd.DataFrame, *, by_id: bool) -> pd.DataFrame:
    """Return the rows that two coders have both coded, with their codes `first` and `second`.

    Rows are matched by their ids or descriptions; of several of one description, each with the one
    of its place among them, rows without codes included.
    """
    by = ["other"] if by_id else ["key", "lang"]
    second = second.assign(second=_as_first(second["codes"], first["codes"]))
    both = first.merge(second[[*by, "place", "second"]], on=[*by, "place"])
    return both.rename(columns={"codes": "first"})


def _as_first(second: pd.Series, first: pd.Series) -> pd.Series:
    """Return sets of codes as the first coder spells them, who may write words in other case or
    blanks.
    """
    column = column_of({}, known=dict.fromkeys(first.explode().dropna()))
    spellings = {}
    for code in second.explode().dropna().unique():
        spellings[code] = "".join(column.read(code).codes) or code
    return second.map(lambda codes: tuple(spellings[code] for code in codes))


def coded_rows(
    config: CodedTableFlags,
    path: str,
    further_col: str | None,
    setting: str,
    *,
    has_blank: bool = False,
) -> CodedRows:
    """Return the rows of a table that have codes; with `has_blank` also checked ones without.

    `further_col` is a further column, and `setting` the flag that names it: in one of ids, rows with a
    blank cell are left out.
    """
    values: dict[str, Any] = {}
    for option in settings_of(PrepareConfig):
        if hasattr(config, option.name):
            values[option.name] = getattr(config, option.name)
    values |= {"dataset": path, "drop_bad_labels": True}
    files = table_files(PrepareConfig(**values))
    examples = files.read(say=log.info)
    if not has_blank:
        examples = examples.coded()
    rows = pd.DataFrame({"key": description_keys(examples.texts), "lang": examples.langs})
    by_id = further_col if setting == "id_col" else None
    rows["place"] = _places(files, by_id=by_id)[examples.table["row"].to_numpy()]

    # codes in another order are the same label, and are written as they first occur
    first_orders: dict[frozenset[str], tuple[str, ...]] = {}
    rows["codes"] = [
        first_orders.setdefault(frozenset(codes), codes) for codes in code_sets(examples.codes)
    ]
    rows["text"] = examples.texts
    rows["line"] = examples.table["line"].to_numpy()
    if further_col is None:
        return CodedRows(rows, files.formatter.system)

    cells = other_cells(
        examples, path, further_col, setting=setting, sheet=files.sheet, encoding=files.encoding
    )
    rows["other"] = cells.to_pandas()
    if setting == "id_col":
        rows["other"] = rows["other"].fillna("").map(read_code)
        has_id = rows["other"] != ""
        rows = rows[has_id]
        if num_without := int((~has_id).sum()):
            number = counted(num_without, "row without an id is", "rows without an id are")
            log.info(f"{path}: {number} left out.")
    return CodedRows(rows, files.formatter.system)


def _places(files: LabelledFiles, *, by_id: str | None) -> np.ndarray:
    """Return the place of each row of a file, from 0, among those of its description and language,
    or of its id; of shape (n,).
    """
    path = files.paths[0]
    optional = [files.language_col] if by_id is None and files.language is None else []
    file = open_table(
        path,
        [by_id or files.input_col],
        optional=optional,
        sheet=files.sheet,
        encoding=files.encoding,
    )
    columns = file.read([by_id or files.input_col, *filter(file.has, optional)]).columns
    cells = [column.fill_null("").to_pylist() for column in columns.values()]
    if by_id is not None:
        ids = pd.Series(list(map(read_code, cells[0])))
        return ids.groupby(ids).cumcount().to_numpy()

    rows = pd.DataFrame({"key": description_keys(cells[0])})
    rows["lang"] = list(map(Language, cells[1])) if len(cells) > 1 else ""
    return rows.groupby(["key", "lang"]).cumcount().to_numpy()


def to_correct(
    labels: pd.DataFrame, config: CodedTableFlags, further_columns: dict[str, Any]
) -> pd.DataFrame:
    """Return labels in the form of `review`, each code with its probability, and further columns
    behind the codes.

    `labels` has `text`, `lang`, `codes`, `probs`, `conf` and `times`.
    """
    columns = {
        config.input_col: labels["text"],
        config.language_col or LANG_COL: labels["lang"],
        CHECKED_COL: "",
    }
    for i, name in enumerate(config.target_cols):
        columns[name] = labels["codes"].str.get(i)
        columns[f"prob_{i + 1}"] = labels["probs"].str.get(i).astype(float)
    columns |= further_columns
    columns |= {"conf": labels["conf"], "times": labels["times"]}
    return pd.DataFrame(columns).round(4)
