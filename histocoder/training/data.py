"""The data of a run, which rank 0 reads and checks once, into a file that all ranks map into
memory.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from histocoder import distributed
from histocoder.checkpoints.run_folder import RunFolder, check_shared
from histocoder.config import (
    NUM_CODES,
    PRETRAINED_ENCODER,
    FinetuneConfig,
    MixerConfig,
    RunConfig,
    check_target_len,
)
from histocoder.data.augment import Augmenter, WordList
from histocoder.data.dataset import OccupationDataset, character_lengths
from histocoder.data.example_writer import EXAMPLES_FILE, store_examples
from histocoder.data.examples import SEEN, TITLES, TRAIN, VAL, Examples
from histocoder.data.key import Key, read_key
from histocoder.data.labelled_files import LabelledFiles
from histocoder.data.labels import rules_of
from histocoder.data.prepare import KEY_FILE, prepare, prepared_files
from histocoder.data.prepared_folder import PREPARED_FILE
from histocoder.errors import UserError, counted
from histocoder.formatters import MISSING, Formatter, build_formatter
from histocoder.log import log
from histocoder.model import PRESETS, MixerModel
from histocoder.training.building import Task
from histocoder.training.start import Start

MIN_NEW_TEXTS = 20
"""Descriptions of validation data that are not trained on from which on these alone are used."""
MAX_CATEGORIES = 1_000
"""Categories of a column of attributes at most."""
MIN_CATEGORY_ROWS = 5
"""Rows of a category below which it is hardly learned."""
_MAX_WORD_TEXTS = 250_000  # descriptions whose words are counted at most
_ROWS_AT_ONCE = 1 << 14


@dataclass(frozen=True)
class RunData:
    """Data of a run: `examples.arrow`, and the files that its rows come from."""

    path: Path
    files: LabelledFiles  # those to train on
    record: dict[str, Any]  # see `store_examples`

    def open(self, *splits: str) -> Examples:
        return Examples.open(self.path, *splits)

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that there are: held-out corrections may be lacking."""
        return (*self.record["made_from"]["sources"], SEEN)

    @property
    def has_new(self) -> bool:
        """Whether enough validation data are of descriptions that are not trained on."""
        num_distinct = self.record["num_distinct"]
        return SEEN not in num_distinct or num_distinct.get(VAL, 0) >= MIN_NEW_TEXTS

    def to_train_on(self) -> Examples:
        """Return the rows to train on, and the titles of codes if there are any."""
        if TITLES in self.splits:
            return self.open(TRAIN, TITLES)
        return self.open(TRAIN)

    def to_validate_on(self) -> Examples:
        """Return the rows by which models are chosen and judged: without `SEEN`, if there are
        enough others.
        """
        if self.has_new:
            return self.open(VAL)
        return self.open(VAL, SEEN)

    def num_examples(self, repeats: str) -> int:
        """Return the number of examples of an epoch, by `--repeats`."""
        if repeats == "once":
            return int(self.record["num_distinct"][TRAIN])
        return len(self.to_train_on())

    def description(self) -> dict[str, str]:
        """Return what a resumed run must agree on of the rows: their number, and a hash of the files
        that they come from.
        """
        sources = self.record["made_from"]["sources"]
        description = {}
        for use, split, rows in (
            ("train on", TRAIN, self.to_train_on()),
            ("validate on", VAL, self.to_validate_on()),
        ):
            files_hash = hashlib.sha256("".join(sources[split]).encode()).hexdigest()[:8]
            description[f"data to {use}"] = f"{len(rows):,} rows ({files_hash})"
        return description


def example_files(config: FinetuneConfig | MixerConfig, start: Start) -> dict[str, LabelledFiles]:
    """Return the files of each split; those of a `FinetuneConfig` are prepared first if needed, on
    rank 0.

    Raises a UserError on every rank if the data or the settings can't be used.
    """
    if isinstance(config, MixerConfig):
        return _mixer_files(config)

    def prepare_and_open() -> dict[str, LabelledFiles]:
        """Prepare the data, unless the run's folder has them, and return their files."""
        # a key says what the codes are, unless corrections are of the initial model's
        known = None
        if config.corrections or not config.key:
            known = start.key()
        record = prepare(
            config,
            config.folder,
            known=known,
            overwrite=config.overwrite,
            text_normalization=config.text_normalization,
            trained_on=start.trained_on,
        )
        return prepared_files(config.folder, record, read_key(config.folder / KEY_FILE))

    return distributed.broadcast_from_primary(prepare_and_open, doing="preparing the data")


def _mixer_files(config: MixerConfig) -> dict[str, LabelledFiles]:
    """Return the prepared files that the settings name, with the form of their codes."""
    formatter = _mixer_formatter(config)
    is_fitted = config.block_size is None and config.formatter not in NUM_CODES

    # the key, if there is one, has all codes; they may have lost zeros, up to the length of codes,
    # which may not be known yet
    key = None
    if config.key is not None:
        num_digits: int | None = 0
        if config.zero_pad_codes:
            num_digits = None if is_fitted else formatter.block_size
        key = read_key(config.key, num_digits=num_digits)

    # all files together, since the form of the codes is that of all of them
    train_paths = tuple(map(Path, config.train_data))
    val_paths = tuple(map(Path, config.val_data))
    attribute_cols = config.attribute_cols or ()
    needs_code = formatter.system.missing_block is None
    files = LabelledFiles(
        train_paths + val_paths,
        config.columns,
        formatter,
        needed=dict.fromkeys(attribute_cols, "attribute_cols"),
        input_col=config.input_col,
        language_col=config.language_col,
        key=key,
        rules=replace(rules_of(config), needs_code=needs_code),
        attribute_cols=attribute_cols,
    )
    if is_fitted:
        files = _with_fitted_codes(files)
    return {TRAIN: replace(files, paths=train_paths), VAL: replace(files, paths=val_paths)}


def _mixer_formatter(config: MixerConfig) -> Formatter:
    """Return the formatter that the settings name; raise a UserError if it can't write the
    columns.
    """
    # these formatters fix the number of codes; the general one has a block for each column
    num_columns = len(config.columns)
    formatter = build_formatter(
        config.formatter,
        num_blocks=NUM_CODES.get(config.formatter, num_columns),
        block_size=config.block_size or 1,
        use_within_block_sep=config.use_within_block_sep,
    )
    check_target_len(formatter.num_blocks, formatter.block_size)
    if num_columns > formatter.num_blocks:
        raise UserError(
            f"--formatter {config.formatter} takes {formatter.num_blocks} columns of codes at most."
        )
    if config.blank_means_no_occupation and formatter.system.missing_block is None:
        raise UserError(
            f"--formatter {config.formatter} has no mark for a row without any code; give "
            "such rows a code of their "
            "own (in HISCO -1) instead of --blank-means-no-occupation."
        )
    return formatter


def _with_fitted_codes(files: LabelledFiles) -> LabelledFiles:
    """Return files with the form of the codes that they and their key hold, which rank 0 reads."""

    def fit() -> LabelledFiles:
        # open files can't be sent to other ranks
        return replace(files.fitted(), opened={})

    fitted = distributed.broadcast_from_primary(fit, doing="reading the codes")
    return replace(fitted, opened=files.opened)


def open_data(
    config: RunConfig, files: dict[str, LabelledFiles], run: RunFolder, start: Start
) -> RunData:
    """Open `examples.arrow` in the run's folder, which rank 0 writes if it is missing.

    Raises a UserError on every rank if the data or the settings can't be used.
    """
    store = partial(
        store_examples,
        run.path,
        files,
        text_normalization=config.text_normalization,
        trained_on=start.trained_on,
        compares_splits=isinstance(config, MixerConfig),
    )
    record = distributed.broadcast_from_primary(store, doing="reading the data")
    check_shared(run.path / PREPARED_FILE)
    return RunData(run.path / EXAMPLES_FILE, files[TRAIN], record)


def task_of(data: RunData) -> Task:
    """Return what a model is to learn from the data of a run; say which attributes are rare."""
    train_rows = data.to_train_on()
    val_rows = data.open(VAL, SEEN)

    # without a key, the codes that occur, in validation rows alone, too
    key = data.files.key
    if key is None:
        codes = set(train_rows.code_table).union(val_rows.code_table)
        key = Key.from_codes(codes - {MISSING})
    return Task(
        files=data.files,
        key=key,
        languages=tuple(sorted({"unk"}.union(train_rows.languages))),
        attributes=attribute_categories((train_rows, val_rows)),
    )


def attribute_categories(parts: Sequence[Examples]) -> dict[str, tuple[str, ...]]:
    """Return the categories of each column of attributes, however rare, and say which hardly any
    row has.
    """
    categories: dict[str, tuple[str, ...]] = {}
    for name in parts[0].attributes:
        counts = Counter[str]()
        for part in parts:
            counts.update(part.attributes[name].to_pylist())

        # a blank cell is none; that of a title is null
        categories[name] = tuple(sorted(label for label in counts if label))
        num_categories = counted(len(categories[name]), "category", "categories")
        if not 0 < len(categories[name]) <= MAX_CATEGORIES:
            raise UserError(
                f"The column {name!r} has {num_categories}; a column of "
                f"--attribute-cols has 1 to {MAX_CATEGORIES:,}."
            )
        message = f"{name}: {num_categories}, and none in {counts['']:,} rows"
        rare = [label for label in categories[name] if counts[label] < MIN_CATEGORY_ROWS]
        if rare:
            labels = ", ".join(rare[:10])
            message += f"; rarely predicted, with fewer than {MIN_CATEGORY_ROWS} rows: {labels}"
        log.info(message)
    return categories


def training_data(config: RunConfig, model: MixerModel, rows: Examples) -> OccupationDataset:
    """Return rows to train on as a model reads them, altered as the settings say."""
    data = OccupationDataset(
        rows,
        formatter=build_formatter(**model.config.formatter),
        classes=model.config.codes,
        max_len=config.max_len,
        attributes=model.config.attributes,
        tokenizer=model.tokenizer,
        pad_to=model.config.pad_to,
        once=config.repeats == "once",
    )
    # noise inserts words that the data have
    data.augmenter = augmenter_of(config, data)
    return data


def log_cut_descriptions(config: FinetuneConfig | MixerConfig) -> None:
    """Say how many descriptions of prepared data are too long; of encoders that read tokens, only
    training knows.
    """
    reads_characters = config.encoder == PRETRAINED_ENCODER or config.encoder in PRESETS
    if not distributed.is_primary() or not reads_characters:
        return
    examples = Examples.open(config.folder / EXAMPLES_FILE, TRAIN, VAL)
    num_cut = character_lengths(examples, max_len=config.max_len).num_cut
    notice = cut_notice(num_cut, config.max_len, "characters")
    if notice is not None:
        log.warning(notice)


def cut_notice(num_cut: int, max_len: int, unit: str) -> str | None:
    """Return a notice of descriptions that are longer than the model reads, if there are any."""
    if not num_cut:
        return None
    rows = counted(num_cut, "row has a description", "rows have descriptions")
    return (
        f"Notice: {rows} of more than {max_len} {unit}, with the language and the marks of "
        "both ends; the model does "
        "not read the rest. Set a larger --max-len, or shorten them."
    )


def augmenter_of(config: RunConfig, data: OccupationDataset) -> Augmenter | None:
    """Return the augmenter that the settings ask for, or None."""
    alters_words = config.augmentation_prob > 0 and config.num_transformations > 0
    if not alters_words and config.unk_lang_prob == 0:
        return None

    # the words to insert: a file's, or the data's own
    if config.fn_word_freq is not None:
        words = WordList.read(config.fn_word_freq, config.text_normalization)
    else:
        words = WordList.from_texts(some_descriptions(data))
    return Augmenter(
        words,
        augmentation_prob=config.augmentation_prob,
        num_transformations=config.num_transformations,
        unk_lang_prob=config.unk_lang_prob,
        seed=config.seed,
    )


def some_descriptions(data: OccupationDataset) -> Iterator[str]:
    """Yield descriptions evenly spaced over the data, or all of a small one."""
    rows = np.arange(0, len(data), -(-len(data) // _MAX_WORD_TEXTS))
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        yield from data.descriptions(rows[start : start + _ROWS_AT_ONCE])
