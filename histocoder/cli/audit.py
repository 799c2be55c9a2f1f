"""`histocoder audit` and `agreement`: find codes that are likely wrong, and those on which two
coders differ.
"""

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from tqdm import tqdm

from histocoder.cli.flags import AgreementFlags, AuditFlags, CodedTableFlags
from histocoder.config import PrepareConfig, settings_of
from histocoder.data.cells import read_code
from histocoder.data.code_columns import column_of
from histocoder.data.examples import LANG_COL
from histocoder.data.key import read_key
from histocoder.data.labelled_files import CHECKED_COL, other_cells
from histocoder.data.prepare import table_files
from histocoder.errors import UserError, counted
from histocoder.evaluation.scores import agreement, code_sets, to_settle
from histocoder.evaluation.summary import percent, table_of_shares
from histocoder.formatters import CodeSystem
from histocoder.log import log
from histocoder.tables.output import Form, check_output, write_frame
from histocoder.text.normalize import description_keys

_LABEL = ["key", "lang", "codes"]


def run_audit(config: AuditFlags) -> None:
    """Write the most suspect labels, and how many there are of each code and group."""
    output, group = Path(config.output), config.group_col or ""
    group += (
        "_group" if group.casefold() in ("code", "rows", "suspect", "share") else ""
    )  # a column beside these
    names = {name: re.sub(r"[^\w. -]", "_", name) for name in ("code", group) if name}
    paths = {name: output.with_name(f"{output.stem}_by_{end}.csv") for name, end in names.items()}
    for path in (output, *paths.values()):
        check_output(path, inputs=(config.dataset, config.key), overwrite=config.overwrite)
    rows, _ = coded_rows(config, config.dataset, config.group_col, "group_col")
    found = rows.groupby(_LABEL, sort=False).agg(
        text=("text", "first"), line=("line", list), times=("text", "size")
    )
    labels = found.reset_index()
    if labels["codes"].nunique() < 2 or labels["key"].nunique() < 2:
        raise UserError(
            f"{config.dataset} has one code or description; there is nothing to compare "
            "labels with."
        )
    # here, since it takes a second to import
    from histocoder.evaluation.suspects import nearest_with_other_codes, suspects

    with tqdm(total=len(labels), unit="label", disable=None, leave=False) as bar:
        labels = labels.join(suspects(labels, on_progress=bar.update))
    num_digits = None if config.zero_pad_codes else 0
    key = set(
        read_key(config.key, num_digits=num_digits).codes if config.key else rows["codes"].explode()
    )
    is_outside = ~labels["codes"].map(key.issuperset)
    labels.loc[is_outside, ["doubt", "conf"]] = np.inf, 0.0
    others = labels.groupby(["key", "lang"])["times"].transform("sum") - labels["times"]
    labels["note"] = (others.astype(str) + " with other codes").where(others > 0, "")
    labels["note"] = labels["note"].mask(is_outside, "not in the key")
    chosen = labels.sort_values("doubt", ascending=False, kind="stable").iloc[: config.budget]
    extra: dict[str, Any] = {}
    for i in range(len(chosen["alt"].iloc[0])):
        number = i + 1 + len(config.target_cols)
        extra |= {
            f"alt_code_{number}": chosen["alt"].str[i],
            f"alt_prob_{number}": chosen["alt_probs"].str[i],
        }
    near = [
        labels.iloc[some].itertuples()
        for some in nearest_with_other_codes(labels, chosen.index.to_numpy())
    ]
    extra["note"] = chosen["note"]
    extra["near"] = ["; ".join(f"{n.text} ({' '.join(n.codes)})" for n in some) for some in near]
    extra["lines"] = [" ".join(map(str, lines[:10])) for lines in chosen["line"]]
    write_frame(output, to_correct(chosen, config, extra), Form(raw=config.raw))
    wrong = 1 - rows.merge(labels[[*_LABEL, "conf"]], how="left", on=_LABEL)["conf"]
    log.info(
        f"Some {wrong.sum():,.0f} of {len(rows):,} rows with codes "
        f"({percent(wrong.mean())}) are as suspect as rows "
        f"with random codes. Of {len(labels):,} different labels, {sum(others > 0):,} have "
        "rows of the same "
        "description with other codes"
        + (f"; {sum(is_outside):,} are not in the key." if config.key else ".")
    )
    for name, path in paths.items():
        of = rows["codes"].explode() if name == "code" else rows["other"].fillna("(blank)")
        shares = (
            wrong.loc[of.index].groupby(of.to_numpy()).agg(rows="size", suspect="sum", share="mean")
        )
        shares = (
            shares.sort_values("suspect", ascending=False, kind="stable")
            .rename_axis(name)
            .reset_index()
        )
        write_frame(path, shares.round(4), Form(raw=config.raw))
        log.info(
            f"Suspect rows by {name}, all in "
            f"{path}:\n{shares.head(10).round(3).to_string(index=False)}"
        )
    log.info(
        f"Wrote the {len(chosen):,} most suspect labels to {output}. Correct the codes, "
        "write x in the column "
        f"{CHECKED_COL!r} of each row that is now right, and train with --corrections {output}."
    )


def run_agreement(config: AgreementFlags) -> None:
    """Print how far two coders agree, and write what they have to settle."""
    output, by = Path(config.output), ["other"] if config.id_col else ["key", "lang"]
    check_output(output, inputs=config.files, overwrite=config.overwrite)
    tables = [
        coded_rows(config, path, config.id_col, "id_col", has_blank=True) for path in config.files
    ]
    first, second = (rows.assign(n=rows.groupby(by).cumcount()) for rows, _ in tables)
    second["codes"] = _as_first(second["codes"], first["codes"])
    both = first.merge(second[[*by, "n", "codes"]], on=[*by, "n"], suffixes=("", "_second"))
    names = " and ".join(config.files)
    if both.empty:
        raise UserError(
            f"{names} have no row in common; check --input-col, --language-col and --id-col."
        )
    both = both.rename(columns={"codes": "first", "codes_second": "second"})
    digits = 0 if tables[0][1].labels is not None else tables[0][1].block_size - 1
    levels = agreement(both["first"], both["second"], both["text"].tolist(), digits=digits)
    unmatched = " and ".join(f"{len(rows) - len(both):,}" for rows in (first, second))
    log.info(
        f"{len(both):,} rows have codes in both files; {unmatched} rows of {names} have no "
        "counterpart."
    )
    log.info(
        table_of_shares([asdict(level) | {"digits": level.digits or "all"} for level in levels])
    )
    differ = to_settle(both, digits=digits)
    others = {
        f"other_{name}": differ["second"].str.get(i) for i, name in enumerate(config.target_cols)
    }
    halves = differ["first"].map(
        lambda codes: (0.5,) * len(codes)
    )  # one of the two coders has decided so
    found = differ.rename(columns={"first": "codes"}).assign(probs=halves, conf=0.5)
    write_frame(
        output,
        to_correct(found, config, others | {"same_digits": differ["digits"]}),
        Form(raw=config.raw),
    )
    log.info(
        f"Wrote {len(differ):,} descriptions on which they differ to {output}, with the "
        f"codes of {config.files[0]}; "
        f"those of {config.files[1]} are behind them. Correct the former, and write x in "
        f"the column {CHECKED_COL!r} of "
        "what is settled."
    )


def _as_first(second: pd.Series, first: pd.Series) -> pd.Series:
    """Return sets of codes as the first coder spells them, who may write words in other case or
    blanks.
    """
    own = dict.fromkeys(code for codes in first for code in codes)
    column = column_of({}, known=own)
    read = {code: "".join(column.read(code).codes) or code for codes in second for code in codes}
    return second.map(lambda codes: tuple(read[code] for code in codes))


def coded_rows(
    config: CodedTableFlags, path: str, other: str | None, setting: str, *, has_blank: bool = False
) -> tuple[pd.DataFrame, CodeSystem]:
    """Return the rows of a table that have codes, and what these are like; with `has_blank` also
    checked ones without.

    They have `key`, `lang`, `codes` (a tuple), `text`, `line` and `other`, cells of a further
    column (no blank ids).
    """
    own = {
        one.name: getattr(config, one.name)
        for one in settings_of(PrepareConfig)
        if hasattr(config, one.name)
    }
    files = table_files(PrepareConfig(**own | {"dataset": path, "drop_bad_labels": True}))
    examples = files.read(say=log.info)
    if not has_blank:
        examples = examples.coded()
    rows = pd.DataFrame({"key": description_keys(examples.texts), "lang": examples.langs})
    written: dict[
        frozenset[str], tuple[str, ...]
    ] = {}  # each set of codes in the order in which it first occurs
    codes = [written.setdefault(frozenset(one), one) for one in code_sets(examples.codes)]
    rows = rows.assign(codes=codes, text=examples.texts, line=examples.table["line"].to_numpy())
    if other is not None:
        form = {"sheet": files.sheet, "encoding": files.encoding}
        rows["other"] = other_cells(examples, path, other, setting=setting, **form).to_pandas()
    if other is not None and setting == "id_col":
        ids = rows["other"].fillna("").map(read_code)
        rows = rows.assign(other=ids)[ids != ""]
        if number := int((ids == "").sum()):
            log.info(
                f"{path}: {counted(number, 'row without an id is', 'rows without an id are')} left out."
            )
    return rows, files.formatter.system


def to_correct(found: pd.DataFrame, config: CodedTableFlags, extra: dict[str, Any]) -> pd.DataFrame:
    """Return labels in the form of `review`, each code with its probability; `extra` are further
    columns.

    `found` has `text`, `lang`, `codes`, `probs`, `conf` and `times`.
    """
    columns = {
        config.input_col: found["text"],
        config.language_col or LANG_COL: found["lang"],
        CHECKED_COL: "",
    }
    for i, name in enumerate(config.target_cols):
        columns |= {
            name: found["codes"].str.get(i),
            f"prob_{i + 1}": found["probs"].str.get(i).astype(float),
        }
    return pd.DataFrame({**columns, **extra, "conf": found["conf"], "times": found["times"]}).round(
        4
    )
