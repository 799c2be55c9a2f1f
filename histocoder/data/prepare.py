"""Turns a user's table into training and validation data and a key, once; later runs find and check them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from histocoder.config import PrepareConfig
from histocoder.data.examples import LANG_COL, TEXT_COL
from histocoder.data.key import Key, read_key, write_key
from histocoder.data.labels import LabelRules, check_labels
from histocoder.data.table import Table, fingerprint, read_table, write_csv
from histocoder.errors import UserError
from histocoder.files import make_folder, replacing
from histocoder.formatters import MISSING, Formatter, build_formatter

TRAIN_FILE, VAL_FILE, KEY_FILE = "data_train.csv", "data_val.csv", "key.csv"
REJECTED_FILE, PREPARED_FILE = "rejected.csv", "prepared.json"
PREPARED_VERSION = 1


def formatter_of(config: PrepareConfig) -> Formatter:
    """The formatter of prepared data: the general one, with a block for each target column."""
    return build_formatter(
        "general",
        num_blocks=len(config.target_cols),
        block_size=config.block_size,
        use_within_block_sep=config.use_within_block_sep,
    )


def prepare(
    config: PrepareConfig, folder: Path, *, overwrite: bool = False, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Prepare data into a folder, or find them prepared there.

    Writes `data_train.csv`, `data_val.csv`, `key.csv`, `rejected.csv` (each row that was dropped, with its line in
    the source and why) and, last, `prepared.json` (the settings and the source's SHA-256).

    Parameters
    ----------
    config : PrepareConfig
    folder : Path
    overwrite : bool
        Whether to prepare anew where other data are prepared already.
    say : callable
        Told what a user should know.

    Returns
    -------
    dict
        What `prepared.json` holds.

    Raises
    ------
    UserError
        For everything that a user can mend; nothing half-prepared is left.
    """
    record = _record(config)
    make_folder(folder)
    existing = _read_record(folder / PREPARED_FILE)
    if existing is not None and not overwrite:
        _refuse_other(existing, record, folder)
        say(f"Using the data prepared in {folder}: {_describe(existing)}")
        return existing

    formatter = formatter_of(config)
    columns = [config.input_col, *config.target_cols, *([config.language_col] if config.language_col else [])]
    table = read_table(config.dataset, columns)
    for notice in table.notices:
        say(notice)
    rules = LabelRules(config.zero_pad_codes, config.allow_short_codes, config.drop_bad_labels)
    key = read_key(config.key) if config.key else None
    labels = check_labels(table, config.target_cols, formatter, rules, key=key)
    for notice in labels.notices:
        say(notice)
    blank = np.flatnonzero(table.columns[config.input_col].is_null())
    rejected = {row: "no description" for row in blank.tolist()}
    rejected = {**labels.bad, **rejected}
    keep = np.ones(len(table), dtype=bool)
    keep[list(rejected)] = False
    if not keep.any():
        raise UserError(f"{config.dataset} has no row with a description and labels that fit.")

    data = _select(table, labels.codes, keep, config)
    codes = data[list(config.target_cols)].to_numpy().ravel()
    present = {code for code in pd.unique(codes) if code is not None and code != MISSING}
    if len(present) < 2:
        raise UserError(
            f"{config.dataset} has only one code ({''.join(present) or 'none'}) in {', '.join(config.target_cols)}; "
            "there is nothing to learn. Check --target-cols."
        )
    key = key or Key.from_codes(present)
    is_val = _split(data[TEXT_COL], config)
    record["rows"] = {"train": int((~is_val).sum()), "val": int(is_val.sum()), "rejected": len(rejected)}
    record["codes"] = len(key.codes)

    (folder / PREPARED_FILE).unlink(missing_ok=True)  # from here until it is written again, nothing is prepared
    _write_csv(folder / TRAIN_FILE, data[~is_val])
    _write_csv(folder / VAL_FILE, data[is_val])
    write_key(folder / KEY_FILE, key)
    _write_rejected(folder / REJECTED_FILE, table, rejected, config)
    with replacing(folder / PREPARED_FILE) as temporary:
        temporary.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    if rejected:
        say(f"{len(rejected):,} rows were dropped; {folder / REJECTED_FILE} lists them.")
    say(f"Prepared {config.dataset} into {folder}: {_describe(record)}")
    return record


def _record(config: PrepareConfig) -> dict[str, Any]:
    settings = {**asdict(config), "target_cols": list(config.target_cols)}
    settings.pop("dataset")
    settings["key"] = fingerprint(config.key)["sha256"] if config.key else None
    return {"format_version": PREPARED_VERSION, "source": fingerprint(config.dataset), "settings": settings}


def _read_record(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        newer = record["format_version"] > PREPARED_VERSION
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged; prepare anew with --overwrite.") from error
    if newer:
        raise UserError(f"{path} was written by a newer histocoder; update, or prepare anew with --overwrite.")
    return record


def _refuse_other(existing: dict[str, Any], wanted: dict[str, Any], folder: Path) -> None:
    old, new = ({**r["settings"], "dataset": r["source"]["sha256"]} for r in (existing, wanted))
    changed = [name for name in new if old.get(name) != new[name]]
    if not changed:
        return
    old["dataset"], new["dataset"] = (
        f"{r['source']['file']} (SHA-256 {r['source']['sha256'][:8]}…)" for r in (existing, wanted)
    )
    differences = "; ".join(f"{name}: {old.get(name)!r} there, {new[name]!r} now" for name in changed)
    raise UserError(
        f"{folder} holds data prepared otherwise ({differences}). Choose another folder, or add --overwrite to throw "
        "away what is there."
    )


def _describe(record: dict[str, Any]) -> str:
    rows = record["rows"]
    return f"{rows['train']:,} rows to train on, {rows['val']:,} to validate on, {record['codes']:,} codes."


def _select(table: Table, codes: pd.DataFrame, keep: np.ndarray, config: PrepareConfig) -> pd.DataFrame:
    columns = {TEXT_COL: table.columns[config.input_col].to_numpy(zero_copy_only=False)}
    if config.language_col is None:
        columns[LANG_COL] = np.full(len(table), config.language, dtype=object)
    else:
        langs = table.columns[config.language_col].fill_null("unk").to_numpy(zero_copy_only=False)
        columns[LANG_COL] = langs
    return pd.concat([pd.DataFrame(columns, dtype=object), codes], axis=1)[keep]


def _split(texts: pd.Series, config: PrepareConfig) -> np.ndarray:
    """Which rows are for validation, of shape (n,)."""
    unit = np.arange(len(texts)) if config.split_by == "row" else pd.factorize(texts)[0]
    num_units = int(unit.max()) + 1
    if num_units < 2:
        raise UserError(f"{config.dataset} has one distinct description; it can't be split for validation.")
    num_val = min(max(round(num_units * config.share_val), 1), num_units - 1)
    chosen = np.zeros(num_units, dtype=bool)
    chosen[np.random.default_rng(config.seed).permutation(num_units)[:num_val]] = True
    return chosen[unit]


def _write_csv(path: Path, data: pd.DataFrame) -> None:
    table = pa.table({name: pa.array(data[name].to_numpy(), type=pa.string(), from_pandas=True) for name in data})
    with replacing(path) as temporary:
        write_csv(table, temporary)


def _write_rejected(path: Path, table: Table, rejected: dict[int, str], config: PrepareConfig) -> None:
    rows = np.array(sorted(rejected), dtype=np.int64)
    columns: Sequence[str] = (config.input_col, *config.target_cols)
    data = {"line": table.lines(rows), "reason": [rejected[row] for row in rows]}
    with replacing(path) as temporary:
        cells = {name: table.columns[name].take(pa.array(rows)) for name in columns}
        write_csv(pa.table({**{k: pa.array(v) for k, v in data.items()}, **cells}), temporary)
