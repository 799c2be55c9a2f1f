"""Preparation of a user's table, once, as training and validation data and a key, which later runs
use again.
"""

import os
from collections.abc import Collection, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import pyarrow as pa

from histocoder.config import FinetuneConfig, PrepareConfig, settings_of
from histocoder.data import prepared_folder
from histocoder.data.corrections import Corrections, read_corrections
from histocoder.data.example_writer import (
    EXAMPLES_FILE,
    NO_SPLIT,
    ExampleWriter,
    examples_record,
    made_from,
)
from histocoder.data.examples import (
    CODES,
    HELD_OUT,
    LANG_COL,
    SEEN,
    SPLITS,
    TITLES,
    TRAIN,
    VAL,
    Examples,
    is_codes,
)
from histocoder.data.hashes import cell_hashes, key_hashes
from histocoder.data.key import Key, read_key, write_key
from histocoder.data.labelled_files import LabelledFiles
from histocoder.data.labels import LabelRules, rules_of
from histocoder.data.problems import conflicts, joined_spellings, rejected_rows
from histocoder.data.titles import titles_to_learn
from histocoder.errors import UserError, counted
from histocoder.files import is_same_file, make_folder, remove_leftovers, temporary_folder
from histocoder.formatters import MISSING, Formatter, build_formatter
from histocoder.log import log, sending_lines
from histocoder.tables.output import write_table
from histocoder.tables.table import open_table
from histocoder.text.languages import Language, chosen_language, own_languages
from histocoder.text.normalize import description_keys, spellings

SPLIT_FILES = {
    TRAIN: "data_train.csv",
    VAL: "data_val.csv",
    HELD_OUT: "data_held_out.csv",
    TITLES: "data_titles.csv",
}
"""Split -> the table that people read; corrections are held out to compare the model with the one
before.
"""
TRAIN_FILE, VAL_FILE, KEY_FILE = SPLIT_FILES[TRAIN], SPLIT_FILES[VAL], "key.csv"
REJECTED_FILE, CONFLICTS_FILE = "rejected.csv", "conflicts.csv"
PREPARED_TABLES = (
    EXAMPLES_FILE,
    *SPLIT_FILES.values(),
    KEY_FILE,
    REJECTED_FILE,
    CONFLICTS_FILE,
)
_ROWS_FILE = "rows.arrow"
LANGUAGE_COLS = ("lang", "language")
"""Names of columns of languages that need no flag."""
_MOSTLY = 0.9  # share of distinct cells that are languages in a column of them
_Config = TypeVar("_Config", bound=FinetuneConfig)
_ENOUGH_TO_VALIDATE = 1_000  # descriptions, by default
_FEWEST_NEW = (
    100  # descriptions unknown to the initial model from which on these alone are validated on
)
_MIN_IDENTIFIERS, _IDENTIFIERS_SHARE = 50, 0.9
"""Number of codes, and its share of a column's rows, from which on the column seems to number its
rows.
"""
PREPARED_RULES = LabelRules(allow_short=True, blank_means_no_occupation=True)
"""Rules by which prepared data, which were checked before, are read."""


def formatter_of(record: dict[str, Any], key: Key) -> Formatter:
    """Return the formatter of prepared data, from their record: the general one with a block for
    each target column.
    """
    settings = record["settings"]
    return build_formatter(
        "general",
        num_blocks=len(settings["target_cols"]),
        block_size=settings["block_size"],
        use_within_block_sep=settings["use_within_block_sep"],
        labels=None if settings["block_size"] else sorted(key.codes),
    )


def prepared_files(folder: Path, record: dict[str, Any], key: Key) -> dict[str, LabelledFiles]:
    """Return the tables of prepared data by the names of their splits."""
    paths = {name: folder / file for name, file in SPLIT_FILES.items()}
    columns, formatter = tuple(record["settings"]["target_cols"]), formatter_of(record, key)
    attributes = tuple(record["settings"].get("attribute_cols") or ())
    how: dict[str, Any] = {"key": key, "rules": PREPARED_RULES, "attribute_cols": attributes}
    return {
        name: LabelledFiles((path,), columns, formatter, **how)
        for name, path in paths.items()
        if path.is_file()
    }


def with_language_column(config: _Config) -> _Config:
    """Return settings with the table's column `lang` or `language`, if it has languages and the
    settings name none.

    Data that were prepared before keep what they were prepared with. A table that can't be read is
    left to `prepare`.
    """
    if config.language_col is not None or config.language != "unk":
        return config
    settings = (
        {} if config.overwrite else prepared_folder.read_prepared(config.folder).get("settings", {})
    )
    if "language_col" in settings:
        return replace(config, language_col=settings["language_col"])
    try:
        file = open_table(
            Path(config.dataset), [config.input_col], optional=LANGUAGE_COLS, sheet=config.sheet
        )
        name = next(file.column(name) for name in LANGUAGE_COLS if file.has(name))
        cells = next(file.tables([name])).columns[name].drop_null().unique().to_pylist()
    except (UserError, StopIteration):
        return config
    languages = [*map(Language, cells)]
    num_known = sum(language.is_known for language in languages)
    is_used = name in (config.input_col, *config.target_cols, *(config.attribute_cols or ()))
    if is_used or {*languages} <= {Language()} or num_known < _MOSTLY * len(cells):
        return config
    log.info(
        f"{config.dataset}: the column {name!r} has each row's language; --language-col "
        "none ignores it."
    )
    return replace(config, language_col=name)


def prepare(
    config: PrepareConfig,
    folder: Path,
    *,
    known: Key | None = None,
    overwrite: bool = False,
    text_normalization: str = "none",
    trained_on: np.ndarray | None = None,
) -> dict[str, Any]:
    """Prepare data in a folder, or use those prepared there before; return the content of
    `prepared.json`.

    Writes `examples.arrow` (all rows, see `ExampleWriter`), `key.csv`, and what people read of
    both: `data_train.csv`, `data_val.csv`, `rejected.csv` (each row that was dropped, with its line
    in the source and why), `conflicts.csv` (descriptions with different codes), `data_held_out.csv`
    (corrections to compare models on) and `data_titles.csv` (see `titles_to_learn`). Last comes
    `prepared.json` (the settings and the source's SHA-256).

    `known` are the codes of the model that is trained further, which come first in the key, whether
    or not they occur. With `overwrite`, other data that were prepared in the folder before are set
    aside, from where `prepared_folder.put_back_earlier` can put them back. `text_normalization` is how the
    model reads descriptions; see `normalize`. Descriptions that the model was `trained_on` (see
    `key_hashes`) are not validated on while there are enough others.

    Raises UserError if the table or the settings can't be used; no half-prepared files are left.
    """
    record = prepared_folder.record_of(config)
    make_folder(folder)
    remove_leftovers(folder)  # of a run that was killed while it prepared
    existing = None if overwrite else prepared_folder.prepared_before(folder, record)
    if existing is not None:
        log.info(f"Using the data prepared in {folder}: {_describe(existing)}")
        return existing
    try:
        _prepare(config, folder, record, known, text_normalization, trained_on)
    except UserError as error:
        raise _all_problems(error, config, folder, known) from error
    prepared_folder.write_record(folder, record)
    if num_rejected := record["rows"]["rejected"]:
        log.info(
            f"{folder / REJECTED_FILE} lists "
            f"{counted(num_rejected, 'row that is', 'rows that are')} left out."
        )
    log.info(f"Prepared {config.dataset} into {folder}: {_describe(record)}")
    return record


def _describe(record: dict[str, Any]) -> str:
    rows = record["rows"]
    val = counted(rows["val"], "validation row", "validation rows")
    return (
        f"{counted(rows['train'], 'training row', 'training rows')}, {val}, "
        f"{record['codes']:,} codes."
    )


def _all_problems(
    error: UserError, config: PrepareConfig, folder: Path, known: Key | None
) -> UserError:
    """Return an error with all problems of a table, and the settings by which it can be prepared,
    if there are any.
    """
    problems, fixed, num_guesses = [str(error)], config, 0
    while error.settings:
        is_guess = any(isinstance(value, Mapping) for value in error.settings.values())
        num_guesses += is_guess and num_guesses == len(problems) - 1
        try:
            fixed = fixed.corrected(error)
            # what is tried is not told
            with sending_lines(lambda _: None), temporary_folder(folder / "tried") as scratch:
                _prepare(fixed, scratch, prepared_folder.record_of(fixed), known, "none", None)
            break
        except UserError as other:
            error = other if str(other) not in problems else UserError("")
            problems += [str(other)] * (str(other) not in problems)
    names = [one.name for one in settings_of(type(config))]
    changed = {
        name: new for name in names if (new := getattr(fixed, name)) != getattr(config, name)
    }
    if num_guesses and not error.settings:
        problems = problems[:num_guesses]  # what follows wrong guesses at columns says nothing
    message = problems[0]
    if len(problems) > 1:
        message = "\n- ".join([f"{config.dataset} has {len(problems)} problems:", *problems])
    return UserError(message, **(changed if error.settings else {}))


def _prepare(
    config: PrepareConfig,
    folder: Path,
    record: dict[str, Any],
    known: Key | None,
    text_normalization: str,
    trained_on: np.ndarray | None,
) -> None:
    """Write the tables, all or none of them, and add their numbers of rows and codes to the
    record.
    """
    _refuse_to_replace(config, folder)

    # the form of the codes: by the key, a model that is trained further, or the table itself
    num_digits = config.block_size if config.zero_pad_codes else 0
    key = read_key(config.key, num_digits=num_digits) if config.key else None
    own = [code for one in (key, known) if one is not None for code in one.codes]
    files = table_files(config, key, known, own)
    record["settings"]["block_size"] = files.formatter.block_size
    if files.formatter.system.labels is not None:
        record["settings"]["block_size"] = None
        log.info(
            f"{config.dataset}: {', '.join(config.target_cols)} holds labels, each of "
            "which is a class as written."
        )
    corrections = read_corrections(config, files, own) if config.corrections else None
    with temporary_folder(folder / "prepared") as scratch:
        # each row is checked once, and what is noticed is said once
        rows = _screen(files, config, scratch / _ROWS_FILE)
        num_spelt, num_joined = joined_spellings(rows)
        if num_spelt:
            log.info(
                f"{num_joined:,} rows have "
                f"{counted(num_spelt, 'description', 'descriptions')} in several spellings "
                "that differ in case, accents or punctuation only; these are one description each."
            )
        codes = _codes_of(rows)
        if len(codes) < 2:
            raise UserError(
                f"{config.dataset} has only one code ({''.join(codes) or 'none'}) in "
                f"{', '.join(config.target_cols)}; there is nothing to learn. Check --target-cols."
            )

        # the key has all codes that occur, titles' among them
        beside = corrections.keys if corrections else ()
        titles = titles_to_learn(config, rows, files, key=key, beside=beside)
        if titles is not None:
            codes |= set(titles[f"{CODES}{config.target_cols[0]}"].to_pylist())
        key = _whole_key(key or Key.from_codes(codes), known, codes, corrections)
        write_key(scratch / KEY_FILE, key)

        # the rows as the model reads them, and the tables that people read
        form: dict[str, Any] = {"text_normalization": text_normalization, "trained_on": trained_on}
        writer = ExampleWriter(scratch / EXAMPLES_FILE, files, **form)
        is_val = _to_validate_on(rows, config, trained_on)
        num_rows = _write_split(
            scratch, rows, is_val, config, writer, corrections=corrections, titles=titles
        )
        left_out = [rows] if corrections is None else [rows, corrections.rejected]
        num_rows["rejected"] = sum(len(part) - part["reason"].null_count for part in left_out)
        record |= {"rows": num_rows, "codes": len(key.codes)}
        source = made_from(prepared_files(scratch, record, key), **form)
        record["examples"] = examples_record(writer.path, source)
        write_table(scratch / REJECTED_FILE, rejected_rows(left_out, config))
        table, number = conflicts(rows, config)
        if number:
            write_table(scratch / CONFLICTS_FILE, [table])
            descriptions = counted(number, "description has", "descriptions have")
            log.info(
                f"{descriptions} different codes in different rows; "
                f"{folder / CONFLICTS_FILE} lists them."
            )

        # only now is anything in the folder replaced
        del rows, left_out, table  # which keep their file open
        prepared_folder.set_aside(folder, (*PREPARED_TABLES, prepared_folder.PREPARED_FILE))
        # so that half a folder is not taken as prepared
        prepared_folder.write_record(folder, {"format_version": prepared_folder.PREPARED_VERSION})
        for name in PREPARED_TABLES:
            if (scratch / name).exists():
                os.replace(scratch / name, folder / name)
            else:
                (folder / name).unlink(missing_ok=True)  # of data that are replaced


def _codes_of(rows: pa.Table) -> set[str]:
    """Return the codes of checked rows, and say which columns of them seem to number the rows."""
    kept = rows["reason"].is_null()
    codes = set[str]()
    for name in filter(is_codes, rows.column_names):
        cells = rows[name].filter(kept)
        codes_of_column = {*cells.unique().to_pylist()} - {None, MISSING}
        codes |= codes_of_column
        num_rows = len(cells) - cells.null_count
        if notice := identifiers_notice(len(codes_of_column), num_rows, name.removeprefix(CODES)):
            log.info(notice)
    return codes


def identifiers_notice(num_codes: int, num_rows: int, column: str) -> str | None:
    """Return a notice if nearly each row of a column of codes has a code of its own."""
    if num_codes < _MIN_IDENTIFIERS or num_codes < _IDENTIFIERS_SHARE * num_rows:
        return None
    return (
        f"Notice: the {num_rows:,} codes in {column} are {num_codes:,} different ones. A "
        "model can't learn what occurs "
        "once. If the column numbers the rows, name that of the codes with --target-cols."
    )


def _screen(files: LabelledFiles, config: PrepareConfig, path: Path) -> pa.Table:
    """Check all rows of a table, write them to `path`, a chunk at a time, and return that file,
    mapped into memory.

    Its columns are those of `checked_rows`, `key` (see `description_keys`) and `unit`, a hash of
    the seed and of the spelling, or of the row.

    Raises UserError if the table can't be read, its labels do not fit, or no row can be used.
    """
    schema = pa.schema([*files.schema, ("key", pa.string()), ("unit", pa.uint64())])
    with pa.ipc.new_file(str(path), schema) as writer:
        for rows in files.rows(say=log.info):
            texts = rows["text"].fill_null("")
            keys = description_keys(texts)
            if config.split_by == "text":
                split_by = spellings(texts)
            else:
                split_by = rows["row"].to_numpy().astype(str).astype(object)
            units = pd.util.hash_array(
                split_by, hash_key=f"{config.seed:016x}"[-16:], categorize=False
            )
            columns = [*rows.columns, pa.array(keys, pa.string()), pa.array(units)]
            writer.write(pa.RecordBatch.from_arrays(columns, schema=schema))
    found = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    if strange := own_languages(
        found["lang"].filter(found["reason"].is_null()).unique().to_pylist()
    ):
        log.info(strange)
    return found


def _to_validate_on(
    rows: pa.Table, config: PrepareConfig, trained_on: np.ndarray | None
) -> np.ndarray:
    """Return which rows are to validate on, of shape (n,): those of the descriptions, or rows, with
    the lowest hashes.

    All spellings of a description have the lowest hash of any of them: they stay together, and a
    table with one spelling of each is split as earlier versions did. Descriptions that the model
    was `trained_on` are not among them if there are enough others.
    """
    units, may_be = rows["unit"].to_numpy(), rows["reason"].is_null().to_numpy()
    if config.split_by == "text":
        groups, distinct = pd.factorize(
            np.concatenate([cell_hashes(batch["key"]) for batch in rows.to_batches()])
        )
        lowest = np.full(len(distinct), np.iinfo(np.uint64).max)
        np.minimum.at(lowest, groups[may_be], units[may_be])
        units = lowest[groups]
    distinct = np.sort(pd.unique(units[may_be]))  # several times as fast as `np.unique`
    if len(distinct) < 2:
        raise UserError(
            f"{config.dataset} has one distinct description; it can't be split for validation."
        )
    share = (
        np.clip(_ENOUGH_TO_VALIDATE / len(distinct), 0.1, 0.2)
        if config.share_val is None
        else config.share_val
    )
    num_val = min(max(round(len(distinct) * share), 1), len(distinct) - 1)

    # a model that is trained further is right on what it was trained on
    if trained_on is not None:
        is_new = ~np.concatenate(
            [np.isin(key_hashes(batch["key"]), trained_on) for batch in rows.to_batches()]
        )
        new = np.sort(pd.unique(units[may_be & is_new]))
        if len(new) >= min(num_val, _FEWEST_NEW):
            distinct, may_be = new, may_be & is_new
            num_val = min(num_val, len(new))
            log.info(
                f"Validation data are {num_val:,} descriptions that the initial model was "
                "not trained on."
            )
    return may_be & (units <= distinct[num_val - 1])


def _write_split(
    folder: Path,
    rows: pa.Table,
    is_val: np.ndarray,
    config: PrepareConfig,
    writer: ExampleWriter,
    *,
    corrections: Corrections | None,
    titles: pa.RecordBatch | None,
) -> dict[str, int]:
    """Write all rows with their splits, and a table of each split; return their numbers of rows.

    `is_val`, of shape (n,), says which rows are to validate on. All corrections are to train on,
    except for held-out ones, which have a split of their own, as titles have.
    """
    num_held_out = corrections.hold_out(config.seed) if corrections else 0
    train, val, held_out = map(SPLITS.index, (TRAIN, VAL, HELD_OUT))
    with closing(writer):
        num_corrected = 0
        end = 0
        for checked in rows.to_batches():
            start, end = end, end + len(checked)
            batch, split = checked, np.where(is_val[start:end], val, train)
            if corrections is not None:
                batch, is_corrected, is_known, is_held_out = corrections.apply(checked)
                split[is_known], split[is_held_out] = train, NO_SPLIT
                num_corrected += int(is_corrected.sum())
            split[checked["reason"].is_valid()] = NO_SPLIT
            writer.write(batch, split)
        if titles is not None:
            writer.write(titles, np.full(len(titles), SPLITS.index(TITLES)))
        if corrections is not None:
            others, others_held_out = corrections.rest()
            writer.write(others, np.full(len(others), train))
            writer.write(others_held_out, np.full(num_held_out, held_out))
            corrected = counted(num_corrected, "row has", "rows have")
            added = counted(len(others), "description is", "descriptions are")
            log.info(f"{corrected} corrected codes, and {added} added; all are training data.")
    parts = {name: (VAL, SEEN) if name == VAL else (name,) for name in SPLIT_FILES}
    examples = {name: Examples.open(writer.path, *splits) for name, splits in parts.items()}
    if not len(examples[VAL]):
        raise UserError(
            "All validation data are corrected, which makes them training data. Raise --share-val."
        )
    for name, split_examples in examples.items():
        if len(split_examples):
            write_table(folder / SPLIT_FILES[name], split_examples.as_people_read())
    if num_held_out:
        log.info(
            f"{num_held_out:,} of {len(corrections or ()):,} corrections, chosen at "
            "random, are held out "
            f"({SPLIT_FILES[HELD_OUT]}) to compare the new model with the old one; "
            "training leaves out their rows."
        )
    numbers = {"train": len(examples[TRAIN]), "val": len(examples[VAL])}
    return {**numbers, "held_out": num_held_out} if num_held_out else numbers


def table_files(
    config: PrepareConfig,
    key: Key | None = None,
    known: Key | None = None,
    codes: Collection[str] = (),
) -> LabelledFiles:
    """Return the table with the formatter that its codes, and those of a key and of a model, need;
    see `fit_codes`.
    """
    num_blocks, sep, attributes = (
        len(config.target_cols),
        config.use_within_block_sep,
        config.attribute_cols or (),
    )
    language_col = config.column_of_languages
    needed = {language_col: "language_col"} if language_col else {}
    # those that --code-sep fills need not be there
    needed |= dict.fromkeys(
        config.target_cols[:1] if config.code_sep else config.target_cols, "target_cols"
    )
    files = LabelledFiles(
        (Path(config.dataset),),
        config.target_cols,
        build_formatter(
            "general",
            num_blocks=num_blocks,
            block_size=config.block_size or 1,
            use_within_block_sep=sep,
        ),
        needed=needed | dict.fromkeys(attributes, "attribute_cols"),
        input_col=config.input_col,
        language_col=language_col or LANG_COL,
        language=None if language_col else chosen_language(config.language),
        key=key,
        known=known.codes if known else (),
        rules=rules_of(config),
        attribute_cols=attributes,
        sheet=config.sheet,
        encoding=config.file_encoding,
    )
    return files if config.block_size is not None else files.fitted(codes)


def _whole_key(
    given: Key, known: Key | None, codes: set[str], corrections: Corrections | None
) -> Key:
    """Return a key of the known codes, those of the user's key, and those that occur."""
    first = known or given
    corrected = corrections.codes if corrections else set()
    key = first.extended([*given.codes, *(codes | corrected)], given.descriptions)
    if corrections and (new := key.codes[len(first.codes) :]):
        log.info(
            f"New codes: {', '.join(new[:10])}{', …' if len(new) > 10 else ''} ({len(new):,})."
        )
    return key


def _refuse_to_replace(config: PrepareConfig, folder: Path) -> None:
    """Raise a UserError if a file that is read would be replaced."""
    corrections = (("--corrections", path) for path in config.corrections or ())
    for flag, path in (("--dataset", config.dataset), ("--key", config.key), *corrections):
        if path is not None and any(is_same_file(path, folder / name) for name in PREPARED_TABLES):
            raise UserError(
                f"{flag} {path}: preparing would replace this file. Copy it, or choose "
                "another folder."
            )
