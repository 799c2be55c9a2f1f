"""Preparation of a user's table, once, as training and validation data and a key, which later runs use again."""

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from histocoder.config import PrepareConfig, settings_of
from histocoder.data.corrections import Corrections, read_corrections
from histocoder.data.key import Key, read_key, write_key
from histocoder.data.labels import LabelChecker, LabelRules, count_codes, fit_codes, rules_of
from histocoder.data.languages import chosen_language
from histocoder.data.output import CsvWriter, write_table
from histocoder.data.screen import Screened, columns_of, screen
from histocoder.data.table import TableFile, fingerprint, open_table
from histocoder.errors import UserError, counted
from histocoder.files import is_same_file, make_folder, temporary_folder, write_text
from histocoder.formatters import Formatter, Labels, build_formatter
from histocoder.log import log, quiet

TRAIN_FILE, VAL_FILE, KEY_FILE = "data_train.csv", "data_val.csv", "key.csv"
REJECTED_FILE, CONFLICTS_FILE, PREPARED_FILE = "rejected.csv", "conflicts.csv", "prepared.json"
HELD_OUT_FILE = "data_held_out.csv"  # corrections to compare the model with the one before
PREPARED_TABLES = (TRAIN_FILE, VAL_FILE, KEY_FILE, REJECTED_FILE, CONFLICTS_FILE, HELD_OUT_FILE)
_ROWS_FILE = "rows.arrow"
PREPARED_VERSION, _OLDEST_VERSION = 3, 2
"""Version of the rules; since 2, rows without any code are dropped; since 3, the split is by `description_keys`."""
PREPARED_RULES = LabelRules(allow_short=True, blank_means_no_occupation=True)
"""Rules by which prepared data, which were checked before, are read."""
_NOT_OF_THE_DATA = {"dataset", "corrections", "save_path", "prepare_only", "cache_dir"}
_NAMES = {"allow_codes_shorter_than_block_size": "allow_short_codes"}
"""Setting -> its name in `prepared.json`, if it differs."""


def formatter_of(record: dict[str, Any], key: Key) -> Formatter:
    """Return the formatter of prepared data, from their record: the general one with a block for each target column."""
    settings = record["settings"]
    return build_formatter(
        "general",
        num_blocks=len(settings["target_cols"]),
        block_size=settings["block_size"],
        use_within_block_sep=settings["use_within_block_sep"],
        labels=None if settings["block_size"] else sorted(key.codes),
    )


def prepare(
    config: PrepareConfig, folder: Path, *, known: Key | None = None, overwrite: bool = False
) -> dict[str, Any]:
    """Prepare data in a folder, or use those prepared there before; return the content of `prepared.json`.

    Writes `data_train.csv`, `data_val.csv`, `key.csv`, `rejected.csv` (each row that was dropped, with its line in
    the source and why), `conflicts.csv` (descriptions with different codes), `data_held_out.csv` (corrections to
    compare models on) and, last, `prepared.json` (the settings and the source's SHA-256).

    Parameters
    ----------
    config : PrepareConfig
    folder : Path
    known : Key, optional
        Codes of the model that is trained further, which come first in the key, whether or not they occur.
    overwrite : bool
        Whether to replace other data that were prepared in the folder before.

    Raises UserError if the table or the settings can't be used; no half-prepared files are left.
    """
    record = _record(config)
    make_folder(folder)
    existing = None if overwrite else _read_record(folder / PREPARED_FILE)
    if existing is not None:
        _refuse_other(existing, record, config, folder)
        log.info(f"Using the data prepared in {folder}: {_describe(existing)}")
        if existing["format_version"] < PREPARED_VERSION:
            log.info(
                "Notice: an earlier histocoder prepared them; spellings such as væver and vaever may be in both the "
                "training and the validation data. --overwrite prepares them again."
            )
        return existing
    try:
        _prepare(config, folder, record, known)
    except UserError as error:
        raise _all_problems(error, config, folder, known) from error
    _write_record(folder, record)
    if len({name[:1].lower() for name in config.target_cols}) > 1:
        log.info(
            f"The columns {', '.join(config.target_cols)} are read as several codes in one classification. If they are "
            "of different classifications, train a model for each."
        )
    if rejected := record["rows"]["rejected"]:
        rows = counted(rejected, "row was", "rows were")
        why = ", ".join(f"{count:,} {reason}" for reason, count in record["dropped"].items())
        log.info(f"{rows} dropped ({why}); see {folder / REJECTED_FILE}.")
    log.info(f"Prepared {config.dataset} into {folder}: {_describe(record)}")
    return record


def _all_problems(error: UserError, config: PrepareConfig, folder: Path, known: Key | None) -> UserError:
    """Return an error that tells all problems of a table, with the settings by which it can be prepared, if any."""
    problems, fixed, failed, num_guesses = [str(error)], config, True, 0
    while error.settings and failed:
        is_guess = any(isinstance(value, Mapping) for value in error.settings.values())
        num_guesses += is_guess and num_guesses == len(problems) - 1
        try:
            fixed = fixed.corrected(error)
            with temporary_folder(folder / "tried") as scratch, quiet():
                _prepare(fixed, scratch, _record(fixed), known)
            failed = False
        except UserError as other:
            error = UserError(str(other)) if str(other) in problems else other
            problems += [] if str(other) in problems else [str(other)]
    names = [one.name for one in settings_of(type(config))]
    settings = {name: new for name in names if (new := getattr(fixed, name)) != getattr(config, name) and not failed}
    if failed and num_guesses:
        problems = problems[:num_guesses]  # what follows wrong guesses at columns says nothing
    message = problems[0]
    if len(problems) > 1:
        message = "\n- ".join([f"{config.dataset} has {len(problems)} problems:", *problems])
    return UserError(message, **settings)


def _prepare(config: PrepareConfig, folder: Path, record: dict[str, Any], known: Key | None) -> None:
    """Write the tables, all or none of them, and add their numbers of rows and codes to the record."""
    _refuse_to_replace(config, folder)
    chosen_language(config.language)  # raises an error if it is not one
    num_digits = config.block_size if config.zero_pad_codes else 0
    key = read_key(config.key, num_digits=num_digits) if config.key else None
    own = [code for one in (key, known) if one is not None for code in one.codes]
    file = open_table(config.dataset, columns_of(config), sheet=config.sheet, codes=config.target_cols)
    for notice in file.notices:
        log.info(notice)
    formatter, rules = _fitting(config, file, own, are_right=key is not None)
    record["settings"]["block_size"] = formatter.block_size
    if isinstance(formatter.system, Labels):
        record["settings"]["block_size"] = None
        log.info(
            f"{config.dataset}: {', '.join(config.target_cols)} holds labels, each of which is a class as written."
        )
    corrections = read_corrections(config, formatter, rules, own) if config.corrections else None
    checker = LabelChecker(file, config.target_cols, formatter, rules, key=key, known=known.codes if known else ())
    with temporary_folder(folder / "prepared") as scratch:
        found = screen(file, config, checker, scratch / _ROWS_FILE)
        if len(found.codes) < 2:
            raise UserError(
                f"{config.dataset} has only one code ({''.join(found.codes) or 'none'}) in "
                f"{', '.join(config.target_cols)}; there is nothing to learn. Check --target-cols."
            )
        key = _whole_key(key or Key.from_codes(found.codes), known, found.codes, corrections)
        record["rows"] = {**_write_split(scratch, found, config, corrections), "rejected": found.reasons.total()}
        record["dropped"] = found.reasons
        record["codes"] = len(key.codes)
        write_key(scratch / KEY_FILE, key)
        found.write_rejected(scratch / REJECTED_FILE)
        if number := found.write_conflicts(scratch / CONFLICTS_FILE):
            descriptions = counted(number, "description has", "descriptions have")
            log.info(f"{descriptions} different codes in different rows; {folder / CONFLICTS_FILE} lists them.")
        _write_record(folder, {"format_version": PREPARED_VERSION})  # so that half a folder is not taken as prepared
        for name in PREPARED_TABLES:
            if (scratch / name).exists():
                os.replace(scratch / name, folder / name)
            else:
                (folder / name).unlink(missing_ok=True)  # of data that are replaced


def _fitting(
    config: PrepareConfig, file: TableFile, known: Sequence[str], *, are_right: bool
) -> tuple[Formatter, LabelRules]:
    """Return the formatter of a table's codes and the rules that they are checked by; see `fit_codes`.

    `known` are codes of a key and of a model; with `are_right` there are no others.
    """
    num_blocks, sep, rules = len(config.target_cols), config.use_within_block_sep, rules_of(config)
    if (size := config.block_size) is not None:
        return build_formatter("general", num_blocks=num_blocks, block_size=size, use_within_block_sep=sep), rules
    counts = Counter(known) if are_right else count_codes(file, config.target_cols) + Counter(known)
    return fit_codes(counts, rules, num_blocks=num_blocks, use_within_block_sep=sep, are_right=are_right)


def held_out(folder: Path) -> tuple[Path, ...]:
    """Return the file of held-out corrections in a folder, if there is one."""
    path = folder / HELD_OUT_FILE
    return (path,) if path.is_file() else ()


def _whole_key(given: Key, known: Key | None, codes: set[str], corrections: Corrections | None) -> Key:
    """Return a key of the known codes, those of the user's key, and those that occur."""
    first = known or given
    corrected = corrections.codes if corrections else set()
    key = first.extended([*given.codes, *(codes | corrected)], given.descriptions)
    if corrections and (new := key.codes[len(first.codes) :]):
        log.info(f"New codes: {', '.join(new[:10])}{', …' if len(new) > 10 else ''} ({len(new):,}).")
    return key


def _record(config: PrepareConfig) -> dict[str, Any]:
    names = [one.name for one in settings_of(PrepareConfig) if one.name not in _NOT_OF_THE_DATA]
    settings = {_NAMES.get(name, name): getattr(config, name) for name in names}
    settings |= {"target_cols": list(config.target_cols), "key": fingerprint(config.key) if config.key else None}
    if config.corrections:
        settings["corrections"] = [fingerprint(path) for path in config.corrections]
    dataset = Path(config.dataset)
    source = {"file": dataset.name, "sha256": fingerprint(dataset), "bytes": dataset.stat().st_size}
    return {"format_version": PREPARED_VERSION, "source": source, "settings": settings}


def _write_record(folder: Path, record: dict[str, Any]) -> None:
    write_text(folder / PREPARED_FILE, json.dumps(record, indent=2) + "\n")


def _read_record(path: Path) -> dict[str, Any] | None:
    """Return the content of `prepared.json`; None if it is missing, or the data are not all there yet."""
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        version = record["format_version"]
        newer, older = version > PREPARED_VERSION, version < _OLDEST_VERSION and "settings" in record
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged; prepare the data again with --overwrite.") from error
    if newer:
        raise UserError(f"{path} was written by a newer histocoder; update, or prepare again with --overwrite.")
    if older:
        raise UserError(
            f"{path.parent} holds data that an earlier histocoder prepared, by other rules (rows without any "
            "code are kept, and variants of a description may be in both files). Choose another folder, or add "
            "--overwrite to prepare them again."
        )
    return record if "settings" in record else None


def _refuse_other(existing: dict[str, Any], wanted: dict[str, Any], config: PrepareConfig, folder: Path) -> None:
    old, new = ({**r["settings"], "dataset": r["source"]["sha256"]} for r in (existing, wanted))
    if new["block_size"] is None:  # which fits any data
        new["block_size"] = old["block_size"]
    changed = [name for name in {**new, **old} if old.get(name) != new.get(name)]
    if not changed:
        return
    old["dataset"], new["dataset"] = (
        f"{r['source']['file']} (SHA-256 {r['source']['sha256'][:8]}…)" for r in (existing, wanted)
    )
    files = {"key": [config.key] if config.key else [], "corrections": [*(config.corrections or ())]}

    def difference(name: str) -> str:
        if name not in files:
            return f"{name}: {old.get(name)!r} there, {new.get(name)!r} now"
        then, now = ([one] if isinstance(one, str) else one or [] for one in (old.get(name), new.get(name)))  # SHA-256
        others = [path for path, digest in zip(files[name], now, strict=True) if digest not in then]
        if others and len(then) == len(now):
            return "; ".join(f"{path} has changed" for path in others)
        return f"{name}: {len(then) or 'no'} files there, {', '.join(files[name]) or 'none'} now"

    differences = "; ".join(map(difference, changed))
    raise UserError(
        f"{folder} holds data prepared with other settings ({differences}). Choose another folder, or add "
        "--overwrite to replace them."
    )


def _refuse_to_replace(config: PrepareConfig, folder: Path) -> None:
    """Raise a UserError if a file that is read would be replaced."""
    corrections = (("--corrections", path) for path in config.corrections or ())
    for flag, path in (("--dataset", config.dataset), ("--key", config.key), *corrections):
        if path is not None and any(is_same_file(path, folder / name) for name in PREPARED_TABLES):
            raise UserError(f"{flag} {path}: preparing would replace this file. Copy it, or choose another folder.")


def _describe(record: dict[str, Any]) -> str:
    rows = record["rows"]
    val = counted(rows["val"], "validation row", "validation rows")
    return f"{counted(rows['train'], 'training row', 'training rows')}, {val}, {record['codes']:,} codes."


def _write_split(
    folder: Path, found: Screened, config: PrepareConfig, corrections: Corrections | None
) -> dict[str, int]:
    """Write the data to train on, which include all corrections, and to validate on; return their numbers of rows.

    Held-out corrections are in neither, but in a file of their own.
    """
    last = _last_of_validation(found.units(), config)
    num_held_out = corrections.hold_out(config.seed) if corrections else 0
    num_train = num_val = num_corrected = num_passed = 0
    with ExitStack() as stack:
        train, val = (stack.enter_context(CsvWriter(folder / name, found.schema)) for name in (TRAIN_FILE, VAL_FILE))
        for kept, units in found.kept():
            batch, is_val = kept, units <= last
            is_train = ~is_val
            if corrections is not None:
                batch, is_corrected, is_known, is_held_out = corrections.apply(kept)
                is_val &= ~(is_known | is_held_out)
                is_train = ~(is_val | is_held_out)
                num_corrected += int(is_corrected.sum())
                num_passed += int(is_held_out.sum())
            train.write(batch.filter(pa.array(is_train)))
            val.write(batch.filter(pa.array(is_val)))
            num_train += int(is_train.sum())
            num_val += int(is_val.sum())
        if corrections is not None:
            others = corrections.others(found.schema)
            train.write(others)
            num_train += len(others)
            added = f"{counted(len(others), 'description is', 'descriptions are')} added"
            log.info(
                f"{counted(num_corrected, 'row has', 'rows have')} corrected codes, and {added}; all are training data."
            )
    if num_val == 0:
        raise UserError(
            "All validation data are corrected, which makes them training data. Set aside more with --share-val."
        )
    if not (corrections and num_held_out):
        return {"train": num_train, "val": num_val}
    write_table(folder / HELD_OUT_FILE, [pa.Table.from_batches([corrections.held_out(found.schema)])])
    log.info(
        f"{num_held_out:,} of {len(corrections):,} corrections, chosen at random, are held out ({HELD_OUT_FILE}) to "
        f"compare the new model with the old one; training leaves out {counted(num_passed, 'row', 'rows')} of these."
    )
    return {"train": num_train, "val": num_val, "held_out": num_held_out}


def _last_of_validation(units: np.ndarray, config: PrepareConfig) -> np.uint64:
    """Return the largest hash that is for validation: a share of the distinct ones, the smallest, is."""
    units.sort()
    distinct = units[np.concatenate([[True], units[1:] != units[:-1]])]
    if len(distinct) < 2:
        raise UserError(f"{config.dataset} has one distinct description; it can't be split for validation.")
    return distinct[min(max(round(len(distinct) * config.share_val), 1), len(distinct) - 1) - 1]
