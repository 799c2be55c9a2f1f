"""Preparation of a user's table, once, as training and validation data and a key, which later runs use again."""

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
from histocoder.data.examples import CODES, LANG_COL, TEXT_COL, ExampleFiles, is_codes
from histocoder.data.key import Key, read_key, write_key
from histocoder.data.labels import LabelChecker, LabelRules, count_codes, fit_codes, rules_of
from histocoder.data.languages import chosen_language
from histocoder.data.output import CsvWriter, write_table
from histocoder.data.record import describe, read_record, record_of, refuse_other
from histocoder.data.screen import columns_of, conflicts, rejected, screen
from histocoder.data.store import (
    EXAMPLES_FILE,
    HELD_OUT,
    NO_SPLIT,
    PREPARED_FILE,
    PREPARED_VERSION,
    SPLITS,
    TRAIN,
    VAL,
    ExampleWriter,
    made_from,
    write_record,
)
from histocoder.data.table import TableFile, open_table
from histocoder.errors import UserError, counted
from histocoder.files import is_same_file, make_folder, remove_leftovers, temporary_folder
from histocoder.formatters import MISSING, Formatter, Labels, build_formatter
from histocoder.log import log, quiet

TRAIN_FILE, VAL_FILE, KEY_FILE = "data_train.csv", "data_val.csv", "key.csv"
REJECTED_FILE, CONFLICTS_FILE = "rejected.csv", "conflicts.csv"
HELD_OUT_FILE = "data_held_out.csv"  # corrections to compare the model with the one before
_SPLIT_FILES = {TRAIN: TRAIN_FILE, VAL: VAL_FILE, HELD_OUT: HELD_OUT_FILE}
PREPARED_TABLES = (EXAMPLES_FILE, TRAIN_FILE, VAL_FILE, KEY_FILE, REJECTED_FILE, CONFLICTS_FILE, HELD_OUT_FILE)
_ROWS_FILE = "rows.arrow"
_TRAIN, _VAL = SPLITS.index(TRAIN), SPLITS.index(VAL)
PREPARED_RULES = LabelRules(allow_short=True, blank_means_no_occupation=True)
"""Rules by which prepared data, which were checked before, are read."""


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


def prepared_files(folder: Path, record: dict[str, Any], key: Key) -> dict[str, ExampleFiles]:
    """Return the tables of prepared data by the names of their splits."""
    paths = {name: folder / file for name, file in _SPLIT_FILES.items()}
    columns, formatter = tuple(record["settings"]["target_cols"]), formatter_of(record, key)
    return {
        name: ExampleFiles((path,), columns, formatter, key=key, rules=PREPARED_RULES)
        for name, path in paths.items()
        if path.is_file()
    }


def prepare(
    config: PrepareConfig,
    folder: Path,
    *,
    known: Key | None = None,
    overwrite: bool = False,
    text_normalization: str = "none",
) -> dict[str, Any]:
    """Prepare data in a folder, or use those prepared there before; return the content of `prepared.json`.

    Writes `examples.arrow` (all rows, see `ExampleWriter`), `key.csv`, and what people read of both: `data_train.csv`,
    `data_val.csv`, `rejected.csv` (each row that was dropped, with its line in the source and why), `conflicts.csv`
    (descriptions with different codes) and `data_held_out.csv` (corrections to compare models on). Last comes
    `prepared.json` (the settings and the source's SHA-256).

    Parameters
    ----------
    config : PrepareConfig
    folder : Path
    known : Key, optional
        Codes of the model that is trained further, which come first in the key, whether or not they occur.
    overwrite : bool
        Whether to replace other data that were prepared in the folder before.
    text_normalization : str
        How the model reads descriptions; see `normalize`.

    Raises UserError if the table or the settings can't be used; no half-prepared files are left.
    """
    record = record_of(config)
    make_folder(folder)
    remove_leftovers(folder)  # of a run that was killed while it prepared
    existing = None if overwrite else read_record(folder / PREPARED_FILE)
    if existing is not None:
        refuse_other(existing, record, config, folder)
        log.info(f"Using the data prepared in {folder}: {describe(existing)}")
        if existing["format_version"] < PREPARED_VERSION:
            log.info(
                "Notice: an earlier histocoder prepared them; spellings such as væver and vaever may be in both the "
                "training and the validation data. --overwrite prepares them again."
            )
        return existing
    try:
        _prepare(config, folder, record, known, text_normalization)
    except UserError as error:
        raise _all_problems(error, config, folder, known) from error
    write_record(folder, record)
    if len({name[:1].lower() for name in config.target_cols}) > 1:
        log.info(
            f"The columns {', '.join(config.target_cols)} are read as several codes in one classification. If they are "
            "of different classifications, train a model for each."
        )
    if num_rejected := record["rows"]["rejected"]:
        rows = counted(num_rejected, "row was", "rows were")
        why = ", ".join(f"{count:,} {reason}" for reason, count in record["dropped"].items())
        log.info(f"{rows} dropped ({why}); see {folder / REJECTED_FILE}.")
    log.info(f"Prepared {config.dataset} into {folder}: {describe(record)}")
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
                _prepare(fixed, scratch, record_of(fixed), known, "none")
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


def _prepare(
    config: PrepareConfig, folder: Path, record: dict[str, Any], known: Key | None, text_normalization: str
) -> None:
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
        rows = screen(file, config, checker, scratch / _ROWS_FILE)
        kept = rows["reason"].is_null()
        columns = (rows[name].filter(kept).unique().to_pylist() for name in filter(is_codes, rows.column_names))
        codes = {code for column in columns for code in column} - {None, MISSING}
        if len(codes) < 2:
            raise UserError(
                f"{config.dataset} has only one code ({''.join(codes) or 'none'}) in "
                f"{', '.join(config.target_cols)}; there is nothing to learn. Check --target-cols."
            )
        key = _whole_key(key or Key.from_codes(codes), known, codes, corrections)
        write_key(scratch / KEY_FILE, key)
        writer = ExampleWriter(scratch / EXAMPLES_FILE, config.target_cols, text_normalization=text_normalization)
        num_rows = _write_split(scratch, rows, config, corrections, writer)
        dropped = Counter(map(_kind_of, rows["reason"].drop_null().to_pylist()))
        record |= {"rows": {**num_rows, "rejected": dropped.total()}, "dropped": dropped, "codes": len(key.codes)}
        source = made_from(prepared_files(scratch, record, key), text_normalization)
        record["examples"] = {"made_from": source, **writer.record(), "notices": []}
        write_table(scratch / REJECTED_FILE, rejected(rows, config))
        table, number = conflicts(rows, config)
        if number:
            write_table(scratch / CONFLICTS_FILE, [table])
            descriptions = counted(number, "description has", "descriptions have")
            log.info(f"{descriptions} different codes in different rows; {folder / CONFLICTS_FILE} lists them.")
        del rows, table  # which keep their file open
        write_record(folder, {"format_version": PREPARED_VERSION})  # so that half a folder is not taken as prepared
        for name in PREPARED_TABLES:
            if (scratch / name).exists():
                os.replace(scratch / name, folder / name)
            else:
                (folder / name).unlink(missing_ok=True)  # of data that are replaced


def _kind_of(reason: str) -> str:
    """Return the kind of a reason, as a notice counts them."""
    kinds = {"no description": "without a description", "no code": "without a code"}
    return kinds.get(reason, "with codes that do not fit")


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


def _refuse_to_replace(config: PrepareConfig, folder: Path) -> None:
    """Raise a UserError if a file that is read would be replaced."""
    corrections = (("--corrections", path) for path in config.corrections or ())
    for flag, path in (("--dataset", config.dataset), ("--key", config.key), *corrections):
        if path is not None and any(is_same_file(path, folder / name) for name in PREPARED_TABLES):
            raise UserError(f"{flag} {path}: preparing would replace this file. Copy it, or choose another folder.")


def _write_split(
    folder: Path, rows: pa.Table, config: PrepareConfig, corrections: Corrections | None, writer: ExampleWriter
) -> dict[str, int]:
    """Write all rows with their splits, and a table of each split; return their numbers of rows.

    All corrections are to train on, except for held-out ones, which have a split of their own.
    """
    last = _last_of_validation(rows, config)
    num_held_out = corrections.hold_out(config.seed) if corrections else 0
    num_rows, changed = Counter[str](), Counter[str]()
    schema = pa.schema([(name, pa.string()) for name in (TEXT_COL, LANG_COL, *config.target_cols)])
    names = ["text", "lang", *(f"{CODES}{name}" for name in config.target_cols)]
    files = {name: file for name, file in _SPLIT_FILES.items() if name != HELD_OUT or num_held_out}
    with writer, ExitStack() as stack:
        tables = {name: stack.enter_context(CsvWriter(folder / file, schema)) for name, file in files.items()}

        def write(batch: pa.RecordBatch, split: np.ndarray) -> None:
            writer.write(batch, split)
            for name, table in tables.items():
                kept = batch.select(names).filter(pa.array(split == SPLITS.index(name)))
                table.write(pa.RecordBatch.from_arrays(kept.columns, schema=schema))
                num_rows[name] += len(kept)

        for checked in rows.to_batches():
            batch, split = checked, np.where(checked["unit"].to_numpy() <= last, _VAL, _TRAIN)
            if corrections is not None:
                batch, is_corrected, is_known, is_held_out = corrections.apply(checked)
                split[is_known], split[is_held_out] = _TRAIN, NO_SPLIT
                changed.update(corrected=int(is_corrected.sum()), passed=int(is_held_out.sum()))
            split[checked["reason"].is_valid()] = NO_SPLIT
            write(batch, split)
        if corrections is not None:
            others, held_out = corrections.others(), corrections.held_out()
            write(others, np.full(len(others), _TRAIN))
            write(held_out, np.full(len(held_out), SPLITS.index(HELD_OUT)))
            corrected = counted(changed["corrected"], "row has", "rows have")
            added = counted(len(others), "description is", "descriptions are")
            log.info(f"{corrected} corrected codes, and {added} added; all are training data.")
    if num_rows[VAL] == 0:
        raise UserError(
            "All validation data are corrected, which makes them training data. Set aside more with --share-val."
        )
    numbers = {"train": num_rows[TRAIN], "val": num_rows[VAL]}
    if corrections is None or not num_held_out:
        return numbers
    passed = counted(changed["passed"], "row", "rows")
    log.info(
        f"{num_held_out:,} of {len(corrections):,} corrections, chosen at random, are held out ({HELD_OUT_FILE}) to "
        f"compare the new model with the old one; training leaves out {passed} of these."
    )
    return {**numbers, "held_out": num_held_out}


def _last_of_validation(rows: pa.Table, config: PrepareConfig) -> np.uint64:
    """Return the largest hash that is for validation: a share of the distinct ones, the smallest, is."""
    distinct = np.unique(rows["unit"].filter(rows["reason"].is_null()).to_numpy())
    if len(distinct) < 2:
        raise UserError(f"{config.dataset} has one distinct description; it can't be split for validation.")
    return distinct[min(max(round(len(distinct) * config.share_val), 1), len(distinct) - 1) - 1]
