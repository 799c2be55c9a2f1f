"""`histocoder audit`: find labels that are likely wrong, before a model learns from them."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from tqdm import tqdm

from histocoder.cli.flags import AuditFlags, CodedTableFlags
from histocoder.config import PrepareConfig
from histocoder.data.example_files import CHECKED_COL, other_cells
from histocoder.data.examples import LANG_COL
from histocoder.data.key import read_key
from histocoder.data.normalize import description_keys
from histocoder.data.output import Form, check_output, write_table
from histocoder.data.prepare import table_files
from histocoder.errors import UserError, counted
from histocoder.evaluation.scores import code_sets, named_groups
from histocoder.evaluation.summary import percent
from histocoder.formatters import CodeSystem
from histocoder.log import log

_SAME = ["key", "lang", "codes"]
_MOST_SHOWN, _MOST_LINES = 10, 10  # groups that are printed; lines of a suspect label's rows


def run_audit(config: AuditFlags) -> None:
    """Write the most suspect labels, and how many there are of each code and group."""
    output = new_output(config.output, overwrite=config.overwrite)
    rows, _ = coded_rows(config, config.dataset, config.group_col, setting="group_col", sheet=config.sheet)
    labels = rows.groupby(_SAME, sort=False).agg(text=("text", "first"), line=("line", list), times=("text", "size"))
    labels = labels.reset_index()
    if labels["codes"].map(frozenset).nunique() < 2 or labels["key"].nunique() < 2:
        raise UserError(f"{config.dataset} has one code or description; there is nothing to compare labels with.")
    from histocoder.training.audit import neighbours, suspects  # here, since it takes a second to import

    with tqdm(total=len(labels), unit="label", disable=None, leave=False) as bar:
        labels = labels.join(suspects(labels, seed=config.seed, tell=bar.update))
    in_key = set(read_key(config.key).codes) if config.key else None
    is_outside = np.array([in_key is not None and not in_key.issuperset(codes) for codes in labels["codes"]])
    labels.loc[is_outside, ["doubt", "conf"]] = np.inf, 0.0
    num_others = labels.groupby(["key", "lang"])["times"].transform("sum") - labels["times"]
    conflict = [counted(number, "row has", "rows have") + " other codes" if number else "" for number in num_others]
    labels["note"] = np.where(is_outside, "not in the key", conflict)
    chosen = labels.sort_values("doubt", ascending=False, kind="stable").iloc[: config.budget]
    near = [labels.iloc[rows] for rows in neighbours(labels, chosen.index.to_numpy())]
    extra = {
        **_alternatives(chosen, config),
        "note": chosen["note"],
        "near": ["; ".join(f"{one.text} ({' '.join(one.codes)})" for one in some.itertuples()) for some in near],
        "lines": [" ".join(map(str, lines[:_MOST_LINES])) for lines in chosen["line"]],
    }
    write_frame(output, to_correct(chosen, config, extra), raw=config.raw)
    wrong = 1 - rows.merge(labels[[*_SAME, "conf"]], how="left", on=_SAME)["conf"]
    outside = f"; {is_outside.sum():,} are not in the key" if config.key else ""
    log.info(
        f"Of {len(rows):,} rows with codes, about {wrong.sum():,.0f} ({percent(wrong.mean())}) are likely wrong, by a "
        f"linear model that has not seen their descriptions. {int(num_others.gt(0).sum()):,} of {len(labels):,} "
        f"different labels have rows of the same description with other codes{outside}."
    )
    groups = {"code": rows["codes"].explode()}
    if config.group_col:
        groups[config.group_col] = pd.Series(named_groups(rows["other"].tolist()))
    for name, group in groups.items():
        shares = wrong.loc[group.index].groupby(group.to_numpy()).agg(rows="size", likely_wrong="sum", share="mean")
        shares = shares.sort_values("likely_wrong", ascending=False, kind="stable").rename_axis(name).reset_index()
        path = output.with_name(f"{output.stem}_by_{name}.csv")
        write_frame(path, shares.round(4), raw=config.raw)
        log.info(f"Likely wrong by {name}, in {path}:\n{shares.head(_MOST_SHOWN).round(3).to_string(index=False)}")
    likely = (chosen["times"] * (1 - chosen["conf"])).sum()
    log.info(
        f"Wrote the {len(chosen):,} most suspect labels to {output}; about {likely:,.0f} of their "
        f"{chosen['times'].sum():,} rows are likely wrong. Correct the codes, and write x in the column "
        f"{CHECKED_COL!r} of each row that is now right; then train with --corrections {output}."
    )


def _alternatives(found: pd.DataFrame, config: AuditFlags) -> dict[str, Any]:
    """Return columns of other codes and their probabilities, named as those of mode topk."""
    first, columns = len(config.target_cols) + 1, {}
    for i in range(len(found["alt"].iloc[0])):
        columns[f"alt_code_{first + i}"] = found["alt"].str[i]
        columns[f"alt_prob_{first + i}"] = found["alt_probs"].str[i].astype(float)
    return columns


def coded_rows(
    config: CodedTableFlags, path: str, other: str | None, *, setting: str, sheet: str | None = None
) -> tuple[pd.DataFrame, CodeSystem]:
    """Read the rows of a table that have codes, and say what these are like.

    The rows have `key`, `lang`, `codes` (a tuple), `text`, `line` and `other`, the cells of a further column, if any.
    """
    names = ("input_col", "target_cols", "language", "language_col", "zero_pad_codes")
    own = {name: getattr(config, name) for name in (*names, "allow_codes_shorter_than_block_size")}
    files = table_files(PrepareConfig(dataset=path, sheet=sheet, drop_bad_labels=True, **own))
    examples = files.read(say=log.info).coded()
    rows = pd.DataFrame({"key": description_keys(examples.texts), "lang": examples.langs})
    rows = rows.assign(codes=code_sets(examples.codes), text=examples.texts, line=examples.table["line"].to_numpy())
    if other is not None:
        rows["other"] = other_cells(examples, path, other, setting=setting, sheet=sheet).to_numpy(zero_copy_only=False)
    return rows, files.formatter.system


def to_correct(found: pd.DataFrame, config: CodedTableFlags, extra: dict[str, Any]) -> pd.DataFrame:
    """Return labels as a table to correct, in the form of `review`, with the probability of each code.

    `found` has `text`, `lang`, `codes`, `probs`, `conf` and `times`; `extra` are further columns.
    """
    has_langs = config.language_col is not None or config.language != "unk"
    columns = {
        config.input_col: found["text"],
        **({config.language_col or LANG_COL: found["lang"]} if has_langs else {}),
    }
    columns[CHECKED_COL] = ""
    for i, name in enumerate(config.target_cols):
        columns |= {name: found["codes"].map(lambda codes, i=i: dict(enumerate(codes)).get(i, ""))}
        columns |= {f"prob_{i + 1}": found["probs"].map(lambda probs, i=i: dict(enumerate(probs)).get(i))}
    return pd.DataFrame({**columns, **extra, "conf": found["conf"], "times": found["times"]})


def new_output(path: str, *, overwrite: bool) -> Path:
    """Return the path of an output; raise a UserError if it can't be written to, or is there already."""
    output = Path(path)
    check_output(output)
    if output.exists() and not overwrite:
        raise UserError(f"{output} already exists, and may be filled in. Add --overwrite to replace it.")
    return output


def write_frame(path: Path, table: pd.DataFrame, *, raw: bool) -> None:
    """Write a table, and say what is changed in it."""
    for notice in write_table(path, [pa.Table.from_pandas(table.round(6), preserve_index=False)], Form(raw=raw)):
        log.info(notice)
