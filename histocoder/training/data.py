"""The data of a run, which rank 0 reads and checks once, into a file that all ranks map into
memory.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

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
from histocoder.data.cells import CodeColumn
from histocoder.data.dataset import OccupationDataset
from histocoder.data.example_writer import EXAMPLES_FILE, store_examples
from histocoder.data.examples import SEEN, TRAIN, VAL, Examples
from histocoder.data.key import read_key
from histocoder.data.labelled_files import LabelledFiles
from histocoder.data.labels import LabelRules, rules_of
from histocoder.data.prepare import KEY_FILE, prepare, prepared_files
from histocoder.data.prepared_folder import PREPARED_FILE
from histocoder.errors import UserError, counted, shown
from histocoder.formatters import Formatter, build_formatter
from histocoder.log import log
from histocoder.model import PRESETS
from histocoder.tables.table import open_table
from histocoder.text.normalize import normalize
from histocoder.training.building import initial_key, trained_before

FEWEST_NEW = (
    20  # descriptions of validation data that are not trained on from which on these alone are used
)
_WORD_ROWS = 250_000  # descriptions whose words are counted at most
_ROWS_AT_ONCE = 1 << 14


@dataclass(frozen=True)
class RunData:
    """Data of a run: `examples.arrow`, and the files that its rows come from."""

    path: Path
    files: LabelledFiles  # those to train on
    record: dict[str, Any]  # see `store_examples`

    def open(self, *splits: str) -> Examples:
        return Examples.open(self.path, *splits)

    def fingerprint(self, split: str) -> str:
        """Return a hash of the files that a split comes from."""
        return hashlib.sha256(
            "".join(self.record["made_from"]["sources"][split]).encode()
        ).hexdigest()[:8]

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that there are: held-out corrections may be lacking."""
        return (*self.record["made_from"]["sources"], SEEN)

    @property
    def has_new(self) -> bool:
        """Whether enough validation data are of descriptions that are not trained on."""
        return (
            self.record["num_distinct"].get(VAL, 0) >= FEWEST_NEW
            or SEEN not in self.record["num_distinct"]
        )

    def to_validate_on(self) -> Examples:
        """Return the rows by which models are chosen and judged: without `SEEN`, if there are
        enough others.
        """
        return self.open(VAL) if self.has_new else self.open(VAL, SEEN)


def example_files(config: FinetuneConfig | MixerConfig) -> dict[str, LabelledFiles]:
    """Return the files of each split; those of a `FinetuneConfig` are prepared first if needed, on
    rank 0.

    Raises a UserError on every rank if the data or the settings can't be used.
    """
    if isinstance(config, MixerConfig):
        return _given_files(config)

    def prepared() -> dict[str, LabelledFiles]:
        known = initial_key(config) if config.corrections else None
        record = prepare(
            config,
            config.folder,
            known=known,
            overwrite=config.overwrite,
            text_normalization=config.text_normalization,
            trained_on=trained_before(config),
        )
        return prepared_files(config.folder, record, read_key(config.folder / KEY_FILE))

    return distributed.broadcast_from_primary(prepared, doing="preparing the data")


def _given_files(config: MixerConfig) -> dict[str, LabelledFiles]:
    columns, rules = config.columns, rules_of(config)
    num_blocks, sep = NUM_CODES.get(config.formatter, len(columns)), config.use_within_block_sep
    formatter = build_formatter(
        config.formatter,
        num_blocks=num_blocks,
        block_size=config.block_size or 1,
        use_within_block_sep=sep,
    )
    check_target_len(formatter.num_blocks, formatter.block_size)
    if len(columns) > formatter.num_blocks:
        raise UserError(
            f"--formatter {config.formatter} takes {formatter.num_blocks} columns of codes at most."
        )
    if config.blank_means_no_occupation and formatter.system.missing_block is None:
        raise UserError(
            f"--formatter {config.formatter} has no mark for a row without any code; give "
            "such rows a code of their "
            "own (in HISCO -1) instead of --blank-means-no-occupation."
        )
    is_fitted = config.block_size is None and config.formatter not in NUM_CODES
    num_digits = 0 if not config.zero_pad_codes else None if is_fitted else formatter.block_size
    key = read_key(config.key, num_digits=num_digits) if config.key else None
    rules = replace(rules, needs_code=formatter.system.missing_block is None)
    given = LabelledFiles(
        tuple(map(Path, config.train_data + config.val_data)),
        columns,
        formatter,
        needed=dict.fromkeys(config.attribute_cols or (), "attribute_cols"),
        input_col=config.input_col,
        language_col=config.language_col,
        key=key,
        rules=rules,
        attribute_cols=config.attribute_cols or (),
    )

    def fitted() -> tuple[Formatter, LabelRules, CodeColumn | None]:
        files = given.fitted([] if key is None else [code for code in key.codes if code])
        return files.formatter, files.rules, files.column

    if is_fitted:
        formatter, rules, column = distributed.broadcast_from_primary(
            fitted, doing="reading the codes"
        )
        given = replace(given, formatter=formatter, rules=rules, column=column)
    paths = {TRAIN: config.train_data, VAL: config.val_data}
    return {name: replace(given, paths=tuple(map(Path, some))) for name, some in paths.items()}


def open_data(config: RunConfig, files: dict[str, LabelledFiles], run: RunFolder) -> RunData:
    """Open `examples.arrow` in the run's folder, which rank 0 writes if it is missing.

    Raises a UserError on every rank if the data or the settings can't be used.
    """
    store = partial(
        store_examples,
        run.path,
        files,
        text_normalization=config.text_normalization,
        sets_aside=True,
        trained_on=trained_before(config),
        compares_splits=isinstance(config, MixerConfig),
    )
    record = distributed.broadcast_from_primary(store, doing="reading the data")
    check_shared(run.path / PREPARED_FILE)
    return RunData(run.path / EXAMPLES_FILE, files[TRAIN], record)


def log_cut_descriptions(config: FinetuneConfig | MixerConfig) -> None:
    """Say how many descriptions of prepared data are too long; of encoders that read tokens, only
    training knows.
    """
    if not distributed.is_primary() or config.encoder not in (PRETRAINED_ENCODER, *PRESETS):
        return
    examples = Examples.open(config.folder / EXAMPLES_FILE, TRAIN, VAL)
    num_cut = int((examples.num_characters.astype(np.int64) + 2 > config.max_len).sum())
    if (notice := cut_notice(num_cut, config.max_len, "characters")) is not None:
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
    alters = config.augmentation_prob > 0 and config.num_transformations > 0
    if not alters and config.unk_lang_prob == 0:
        return None
    if config.fn_word_freq is not None:
        words = read_word_list(config.fn_word_freq, config.text_normalization)
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
    rows = np.arange(0, len(data), -(-len(data) // _WORD_ROWS))
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        yield from data.descriptions(rows[start : start + _ROWS_AT_ONCE])


def read_word_list(path: str, text_normalization: str) -> WordList:
    """Read normalised words and their frequencies from a CSV file with the columns `word` and
    `freq`.
    """
    table = open_table(path, ("word", "freq")).read(("word", "freq"))
    words = normalize(
        [word or "" for word in table.columns["word"].to_pylist()], text_normalization
    )
    counts = pd.to_numeric(table.columns["freq"].to_pandas().fillna(""), errors="coerce").to_numpy(
        float
    )
    if len(bad := np.flatnonzero(~np.isfinite(counts))):
        cell = shown(table.columns["freq"][bad[0]].as_py() or "")
        line = table.lines(bad[:1])[0]
        raise UserError(f"--fn-word-freq {path}, line {line}, freq: {cell} is not a number.")
    return WordList(dict(zip(words, counts.tolist(), strict=True)))
