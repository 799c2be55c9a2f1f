"""Preparation of a user's table, once, as training and validation data and a key, which later runs
use again.
"""

import itertools
import os
from collections.abc import Collection, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

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
    CODES_PREFIX,
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
TRAIN_FILE = SPLIT_FILES[TRAIN]
VAL_FILE = SPLIT_FILES[VAL]
KEY_FILE = "key.csv"
REJECTED_FILE = "rejected.csv"
CONFLICTS_FILE = "conflicts.csv"
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
MIN_SHARE_OF_LANGUAGES = 0.9
"""Share of distinct cells that are languages in a column of them."""
MIN_VAL_DESCRIPTIONS = 1_000
"""Number of descriptions to validate on, by default."""
MIN_NEW_VAL_DESCRIPTIONS = 100
"""Number of descriptions unknown to the initial model from which on these alone are validated on."""
MIN_IDENTIFIERS = 50
MIN_SHARE_OF_IDENTIFIERS = 0.9
"""Number of codes, and its share of a column's rows, from which on the column seems to number its
rows.
"""
_Config = TypeVar("_Config", bound=FinetuneConfig)
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
    settings = record["settings"]
    files = LabelledFiles(
        (),
        tuple(settings["target_cols"]),
        formatter_of(record, key),
        key=key,
        rules=PREPARED_RULES,
        attribute_cols=tuple(settings.get("attribute_cols") or ()),
    )
    return {
        split: replace(files, paths=(folder / name,))
        for split, name in SPLIT_FILES.items()
        if (folder / name).is_file()
    }


def with_language_column(config: _Config) -> _Config:
    """Return settings with the table's column `lang` or `language`, if it has languages and the
    settings name none.

    Data that were prepared before keep what they were prepared with. A table that can't be read is
    left to `prepare`.
    """
    if config.language_col is not None or config.language != "unk":
        return config
    record = {}
    if not config.overwrite:
        record = prepared_folder.read_prepared(config.folder)

    # a folder that is used again decides; else the first rows of the table
    settings = record.get("settings", {})
    if "language_col" in settings:
        return replace(config, language_col=settings["language_col"])
    try:
        file = open_table(
            Path(config.dataset),
            [config.input_col],
            optional=LANGUAGE_COLS,
            sheet=config.sheet,
            encoding=config.file_encoding,
        )
        names = [file.column(name) for name in LANGUAGE_COLS if file.has(name)]
        used = (config.input_col, *config.target_cols, *(config.attribute_cols or ()))
        if not names or names[0] in used:
            return config
        first_rows = next(file.tables(names[:1])).columns[names[0]]
    except UserError:
        return config

    # a column of that name may hold something else, or nothing
    languages = [Language(cell) for cell in first_rows.drop_null().unique().to_pylist()]
    num_known = sum(language.is_known for language in languages)
    has_languages = num_known >= MIN_SHARE_OF_LANGUAGES * len(languages)
    if not has_languages or set(languages) <= {Language()}:
        return config
    log.info(
        f"{config.dataset}: the column {names[0]!r} has each row's language; --language-col "
        "none ignores it."
    )
    return replace(config, language_col=names[0])


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
    # data that were prepared with the same settings are used again
    record = prepared_folder.record_of(config)
    make_folder(folder)
    remove_leftovers(folder)  # of a run that was killed while it prepared
    existing = None if overwrite else prepared_folder.prepared_before(folder, record)
    if existing is not None:
        log.info(f"Using the data prepared in {folder}: {_describe(existing)}")
        return existing

    # after a mistake the table is tried with it corrected, so that all of them are said at once
    try:
        record = _prepare(config, folder, record, known, text_normalization, trained_on)
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


class _Problem(NamedTuple):
    """Problem of a table."""

    message: str
    is_guess: bool
    """Whether its settings guess at a misspelt column."""

    @classmethod
    def of(cls, error: UserError) -> "_Problem":
        is_guess = any(isinstance(value, Mapping) for value in error.settings.values())
        return cls(str(error), is_guess)


def _all_problems(
    error: UserError, config: PrepareConfig, folder: Path, known: Key | None
) -> UserError:
    """Return an error with all problems of a table, and the settings by which it can be prepared,
    if there are any.
    """
    problems = [_Problem.of(error)]
    fixed = config
    is_solved = False
    while error.settings and not is_solved:
        try:
            fixed = fixed.corrected(error)
            # lines of the attempt are not shown
            with sending_lines(lambda _: None), temporary_folder(folder / "tried") as scratch:
                _prepare(fixed, scratch, prepared_folder.record_of(fixed), known)
            is_solved = True
        except UserError as next_error:
            problem = _Problem.of(next_error)
            if problem in problems:
                break
            problems.append(problem)
            error = next_error

    # what follows wrong guesses at columns says nothing, and only settings that helped are suggested
    if not is_solved:
        fixed = config
        first_guesses = list(itertools.takewhile(lambda problem: problem.is_guess, problems))
        problems = first_guesses or problems

    messages = [problem.message for problem in problems]
    message = messages[0]
    if len(messages) > 1:
        message = "\n- ".join([f"{config.dataset} has {len(messages)} problems:", *messages])
    fixes = {}
    for setting in settings_of(type(config)):
        value = getattr(fixed, setting.name)
        if value != getattr(config, setting.name):
            fixes[setting.name] = value
    return UserError(message, **fixes)


def _prepare(
    config: PrepareConfig,
    folder: Path,
    record: dict[str, Any],
    known: Key | None,
    text_normalization: str = "none",
    trained_on: np.ndarray | None = None,
) -> dict[str, Any]:
    """Write the tables, all or none of them; return the record with their numbers of rows and
    codes.
    """
    _refuse_to_replace(config, folder)
    files = _read_table(config, known)
    corrections = read_corrections(config, files)
    has_labels = files.formatter.system.labels is not None
    block_size = None if has_labels else files.formatter.block_size
    record = record | {"settings": record["settings"] | {"block_size": block_size}}

    with temporary_folder(folder / "prepared") as scratch:
        # each row is checked once, so that what is noticed is said once
        rows = _check_rows(files, config, scratch / _ROWS_FILE)
        _log_spellings(rows)
        codes = _codes_of(rows, config)

        # the model learns from titles as well, so that the key needs their codes
        titles = titles_to_learn(config, rows, files, beside=corrections.keys)
        if titles is not None:
            codes |= set(titles[f"{CODES_PREFIX}{config.target_cols[0]}"].to_pylist())
        key = _complete_key(files.key or Key.from_codes(codes), known, codes, corrections)
        write_key(scratch / KEY_FILE, key)

        # the examples come first: the tables that people read are made from them
        is_val = _to_validate_on(rows, config, trained_on, corrected=corrections.keys)
        num_held_out = corrections.hold_out(config.seed)
        examples_path = scratch / EXAMPLES_FILE
        writer = ExampleWriter(
            examples_path, files, text_normalization=text_normalization, trained_on=trained_on
        )
        with closing(writer):
            _write_rows(writer, rows, is_val, corrections)
            if titles is not None:
                writer.write(titles, np.full(len(titles), SPLITS.index(TITLES)))
            if len(corrections):
                _write_other_corrections(writer, corrections)
        num_rows = _write_split_tables(scratch, examples_path)
        if num_held_out:
            num_rows["held_out"] = num_held_out
            _log_held_out(num_held_out, corrections)
        num_rows["rejected"] = _write_rejected(scratch / REJECTED_FILE, rows, config, corrections)
        _write_conflicts(scratch / CONFLICTS_FILE, rows, config, folder)

        # by the record later runs know what was prepared
        source = made_from(prepared_files(scratch, record, key), text_normalization, trained_on)
        examples = examples_record(examples_path, source)

        # only now is anything in the folder replaced
        del rows  # which keep their file open
        _replace_tables(scratch, folder)
    return record | {"rows": num_rows, "codes": len(key.codes), "examples": examples}


def _read_table(config: PrepareConfig, known: Key | None) -> LabelledFiles:
    """Return the table with the user's key and the form of its codes."""
    key = None
    if config.key:
        num_digits = config.block_size if config.zero_pad_codes else 0
        key = read_key(config.key, num_digits=num_digits)
    files = table_files(config, key, known)
    if files.formatter.system.labels is not None:
        log.info(
            f"{config.dataset}: {', '.join(config.target_cols)} holds labels, each of "
            "which is a class as written."
        )
    return files


def _log_held_out(num_held_out: int, corrections: Corrections) -> None:
    log.info(
        f"{num_held_out:,} of {len(corrections):,} corrections, chosen at random, are held "
        f"out ({SPLIT_FILES[HELD_OUT]}) to compare the new model with the old one; "
        "training leaves out their rows."
    )


def _write_rejected(
    path: Path, rows: pa.Table, config: PrepareConfig, corrections: Corrections
) -> int:
    """Write the rows and corrections that are left out; return their number."""
    tables = [rows, corrections.rejected]
    write_table(path, rejected_rows(tables, config))
    return sum(len(table) - table["reason"].null_count for table in tables)


def _replace_tables(scratch: Path, folder: Path) -> None:
    """Move new tables into a folder, from which those of before are set aside."""
    prepared_folder.set_aside(folder, (*PREPARED_TABLES, prepared_folder.PREPARED_FILE))
    # so that half a folder is not taken as prepared
    version = {"format_version": prepared_folder.PREPARED_VERSION}
    prepared_folder.write_record(folder, version)
    for name in PREPARED_TABLES:
        if (scratch / name).exists():
            os.replace(scratch / name, folder / name)
        else:
            (folder / name).unlink(missing_ok=True)  # of data that are replaced


def _log_spellings(rows: pa.Table) -> None:
    """Say how many descriptions of checked rows are spelt in several ways."""
    num_spelt, num_joined = joined_spellings(rows)
    if num_spelt:
        descriptions = counted(num_spelt, "description", "descriptions")
        log.info(
            f"{num_joined:,} rows have {descriptions} in several spellings that differ in case, "
            "accents or punctuation only; these are one description each."
        )


def _write_conflicts(path: Path, rows: pa.Table, config: PrepareConfig, folder: Path) -> None:
    """Write the descriptions whose rows have different codes, if there are any."""
    table, number = conflicts(rows, config)
    if number:
        write_table(path, [table])
        descriptions = counted(number, "description has", "descriptions have")
        log.info(
            f"{descriptions} different codes in different rows; {folder / path.name} lists them."
        )


def _codes_of(rows: pa.Table, config: PrepareConfig) -> set[str]:
    """Return the codes of checked rows, and say which columns of them seem to number the rows.

    Raises UserError if there are fewer than two codes.
    """
    is_kept = rows["reason"].is_null()
    codes = set[str]()
    for name in filter(is_codes, rows.column_names):
        cells = rows[name].filter(is_kept)
        codes_of_column = set(cells.unique().to_pylist()) - {None, MISSING}
        codes |= codes_of_column
        num_rows = len(cells) - cells.null_count
        column = name.removeprefix(CODES_PREFIX)
        notice = identifiers_notice(len(codes_of_column), num_rows, column)
        if notice is not None:
            log.info(notice)
    if len(codes) < 2:
        raise UserError(
            f"{config.dataset} has only one code ({''.join(codes) or 'none'}) in "
            f"{', '.join(config.target_cols)}; there is nothing to learn. Check --target-cols."
        )
    return codes


def identifiers_notice(num_codes: int, num_rows: int, column: str) -> str | None:
    """Return a notice if nearly each row of a column of codes has a code of its own."""
    if num_codes < MIN_IDENTIFIERS or num_codes < MIN_SHARE_OF_IDENTIFIERS * num_rows:
        return None
    return (
        f"Notice: the {num_rows:,} codes in {column} are {num_codes:,} different ones. A model "
        "can't learn what occurs once. If the column numbers the rows, name that of the codes with "
        "--target-cols."
    )


def _check_rows(files: LabelledFiles, config: PrepareConfig, path: Path) -> pa.Table:
    """Check all rows of a table, write them to `path`, a chunk at a time, and return that file,
    mapped into memory.

    Its columns are those of `row_schema`, `key` (see `description_keys`) and `unit`, a hash of the
    seed and of the spelling, or of the row.

    Raises UserError if the table can't be read, its labels do not fit, or no row can be used.
    """
    hash_key = f"{config.seed:016x}"[-16:]
    schema = pa.schema([*files.schema, ("key", pa.string()), ("unit", pa.uint64())])
    with pa.ipc.new_file(str(path), schema) as writer:
        for rows in files.rows(say=log.info):
            texts = rows["text"].fill_null("")
            if config.split_by == "text":
                hashed = spellings(texts)
            else:
                hashed = rows["row"].to_numpy().astype(str).astype(object)
            units = pd.util.hash_array(hashed, hash_key=hash_key, categorize=False)
            keys = pa.array(description_keys(texts), pa.string())
            columns = [*rows.columns, keys, pa.array(units)]
            writer.write(pa.RecordBatch.from_arrays(columns, schema=schema))

    # mapped, since the rows may be larger than memory
    checked_rows = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    langs = checked_rows["lang"].filter(checked_rows["reason"].is_null())
    if notice := own_languages(langs.unique().to_pylist()):
        log.info(notice)
    return checked_rows


def _to_validate_on(
    rows: pa.Table,
    config: PrepareConfig,
    trained_on: np.ndarray | None,
    *,
    corrected: Collection[str],
) -> np.ndarray:
    """Return which rows are to validate on, of shape (n,): those of the descriptions, or rows, with
    the lowest hashes.

    All spellings of a description have the lowest hash of any of them: they stay together, and a
    table with one spelling of each is split as earlier versions did. Descriptions that the model
    was `trained_on` are not among them if there are enough others beside the `corrected` ones,
    which become training data.
    """
    units = rows["unit"].to_numpy()
    may_be_val = rows["reason"].is_null().to_numpy()
    if config.split_by == "text":
        groups, keys = pd.factorize(cell_hashes(rows["key"]))
        lowest = np.full(len(keys), np.iinfo(np.uint64).max)
        np.minimum.at(lowest, groups[may_be_val], units[may_be_val])
        units = lowest[groups]

    # the share is that of descriptions, so that the split does not depend on how often each occurs
    distinct = np.sort(pd.unique(units[may_be_val]))  # several times as fast as `np.unique`
    if len(distinct) < 2:
        raise UserError(
            f"{config.dataset} has one distinct description; it can't be split for validation."
        )
    share = config.share_val
    if share is None:
        share = np.clip(MIN_VAL_DESCRIPTIONS / len(distinct), 0.1, 0.2)
    num_val = min(max(round(len(distinct) * share), 1), len(distinct) - 1)

    # a model that is trained further is right on what it was trained on
    if trained_on is not None:
        is_new = may_be_val & ~np.isin(key_hashes(rows["key"]), trained_on)
        if corrected:
            is_new &= ~pc.is_in(rows["key"], pa.array(list(corrected), pa.string())).to_numpy()
        new = np.sort(pd.unique(units[is_new]))
        if len(new) >= min(num_val, MIN_NEW_VAL_DESCRIPTIONS):
            distinct = new
            may_be_val = is_new
            num_val = min(num_val, len(new))
            log.info(
                f"Validation data are {num_val:,} descriptions that the initial model was not "
                "trained on."
            )
    is_val = may_be_val & (units <= distinct[num_val - 1])
    if config.split_by == "row":
        keys = pd.Series(rows["key"].to_pylist())
        num_seen = int(keys[is_val].isin(set(keys[may_be_val & ~is_val])).sum())
        log.info(
            f"Notice: {num_seen:,} of {int(is_val.sum()):,} validation rows have a description of the "
            "training data (--split-by row): the accuracy says little of new descriptions."
        )
    return is_val


def _write_rows(
    writer: ExampleWriter, rows: pa.Table, is_val: np.ndarray, corrections: Corrections
) -> None:
    """Write all rows with their splits, and with corrected codes.

    `is_val`, of shape (n,), says which rows are to validate on.
    """
    split_of_row = np.where(is_val, SPLITS.index(VAL), SPLITS.index(TRAIN))
    split_of_row[rows["reason"].is_valid().to_numpy()] = NO_SPLIT

    batches = rows.to_batches()
    ends = np.cumsum([len(batch) for batch in batches])
    for batch, split in zip(batches, np.split(split_of_row, ends[:-1]), strict=True):
        writer.write(*corrections.apply(batch, split))


def _write_other_corrections(writer: ExampleWriter, corrections: Corrections) -> None:
    """Write the corrections that are in no row to train on, and held-out ones to compare models."""
    added = corrections.added()
    held_out = corrections.held_out()
    writer.write(added, np.full(len(added), SPLITS.index(TRAIN)))
    writer.write(held_out, np.full(len(held_out), SPLITS.index(HELD_OUT)))
    corrected = counted(corrections.num_corrected, "row has", "rows have")
    descriptions = counted(len(added), "description is", "descriptions are")
    log.info(f"{corrected} corrected codes, and {descriptions} added; all are training data.")


def _write_split_tables(folder: Path, examples_path: Path) -> dict[str, int]:
    """Write a table of each split for people to read; return the numbers of rows."""
    examples = {split: Examples.open(examples_path, split) for split in SPLIT_FILES}

    # to people, validation rows are one table, whether or not the model has seen them
    examples[VAL] = Examples.open(examples_path, VAL, SEEN)
    if not len(examples[VAL]):
        raise UserError(
            "All validation data are corrected, which makes them training data. Raise --share-val."
        )
    for split, name in SPLIT_FILES.items():
        if len(examples[split]):
            write_table(folder / name, examples[split].to_tables())
    return {"train": len(examples[TRAIN]), "val": len(examples[VAL])}


def table_files(
    config: PrepareConfig, key: Key | None = None, known: Key | None = None
) -> LabelledFiles:
    """Return the table with the formatter that its codes, and those of a key and of a model, need;
    see `fit_codes`.
    """
    language_col = config.column_of_languages
    attribute_cols = config.attribute_cols or ()
    formatter = build_formatter(
        "general",
        num_blocks=len(config.target_cols),
        block_size=config.block_size or 1,
        use_within_block_sep=config.use_within_block_sep,
    )

    needed = {}
    if language_col is not None:
        needed[language_col] = "language_col"
    needed |= dict.fromkeys(_needed_targets(config), "target_cols")
    needed |= dict.fromkeys(attribute_cols, "attribute_cols")

    files = LabelledFiles(
        (Path(config.dataset),),
        config.target_cols,
        formatter,
        needed=needed,
        input_col=config.input_col,
        language_col=language_col or LANG_COL,
        language=None if language_col else chosen_language(config.language),
        key=key,
        known=known.codes if known else (),
        rules=rules_of(config),
        attribute_cols=attribute_cols,
        sheet=config.sheet,
        encoding=config.file_encoding,
    )
    if config.block_size is None:
        return files.fitted()
    return files


def _needed_targets(config: PrepareConfig) -> list[str]:
    """Return the target columns that a table must have: the first, and those that neither
    --code-sep nor corrections fill.
    """
    first, *further = config.target_cols
    if config.code_sep or not further:
        return [first]
    corrections = [open_table(path, [first]) for path in config.corrections or ()]
    needed = [name for name in further if not any(file.has(name) for file in corrections)]
    return [first, *needed]


def _complete_key(key: Key, known: Key | None, codes: set[str], corrections: Corrections) -> Key:
    """Return a key of the known codes, those of the user's key, and those that occur."""
    first = known or key
    codes = codes.union(key.codes, corrections.codes)
    complete = first.extended(codes, key.descriptions)

    # corrections may bring codes that the model does not know yet
    new = complete.codes[len(first.codes) :]
    if len(corrections) and new:
        examples = list(new[:10])
        if len(new) > 10:
            examples.append("…")
        log.info(f"New codes: {', '.join(examples)} ({len(new):,}).")
    return complete


def _refuse_to_replace(config: PrepareConfig, folder: Path) -> None:
    """Raise a UserError if a file that is read would be replaced."""
    corrections = (("--corrections", path) for path in config.corrections or ())
    titles = None if config.titles in ("auto", "none") else config.titles
    read = (("--dataset", config.dataset), ("--key", config.key), ("--titles", titles))
    for flag, path in (*read, *corrections):
        if path is not None and any(is_same_file(path, folder / name) for name in PREPARED_TABLES):
            raise UserError(
                f"{flag} {path}: preparing would replace this file. Copy it, or choose "
                "another folder."
            )
