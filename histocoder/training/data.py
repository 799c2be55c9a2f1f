"""The data of a run, which rank 0 reads and tokenises once, into a cache that all ranks map into memory."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from histocoder import distributed
from histocoder.checkpoints.nodes import on_each_node
from histocoder.checkpoints.run_folder import RunFolder
from histocoder.config import NUM_CODES, FinetuneConfig, MixerConfig, RunConfig, check_target_len
from histocoder.data.augment import Augmenter, WordList
from histocoder.data.cache import CACHE_FILE, ExampleArrays, build_cache, is_whole, open_cache, prune_cache
from histocoder.data.examples import ExampleFiles
from histocoder.data.key import Key, read_key
from histocoder.data.labels import LabelRules, fit_codes, rules_of
from histocoder.data.normalize import normalize
from histocoder.data.prepare import KEY_FILE, PREPARED_RULES, TRAIN_FILE, VAL_FILE, formatter_of, prepare
from histocoder.data.table import open_table
from histocoder.errors import UserError, shown
from histocoder.formatters import Formatter, build_formatter
from histocoder.model import Tokenizer
from histocoder.training.building import initial_key

_WORD_ROWS = 250_000  # descriptions whose words are counted at most
_ROWS_AT_ONCE = 1 << 14


def example_files(config: FinetuneConfig | MixerConfig) -> tuple[ExampleFiles, ExampleFiles]:
    """Return the files to train on and to validate on; those of a `FinetuneConfig` are prepared first if needed.

    Raises a UserError on every rank if the data or the settings can't be used.
    """
    return _prepared_files(config) if isinstance(config, FinetuneConfig) else _given_files(config)


def _prepared_files(config: FinetuneConfig) -> tuple[ExampleFiles, ExampleFiles]:
    def prepared() -> tuple[Key, Formatter]:
        known = initial_key(config) if config.corrections else None
        record = prepare(config, config.folder, known=known, overwrite=config.overwrite)
        key = read_key(config.folder / KEY_FILE)
        return key, formatter_of(record, key)

    key, formatter = distributed.broadcast_from_primary(prepared, doing="preparing the data")
    columns = config.target_cols
    train, val = (
        ExampleFiles((config.folder / name,), columns, formatter, key=key, rules=PREPARED_RULES)
        for name in (TRAIN_FILE, VAL_FILE)
    )
    return train, val


def _given_files(config: MixerConfig) -> tuple[ExampleFiles, ExampleFiles]:
    columns, rules = config.columns, rules_of(config)
    num_blocks, sep = NUM_CODES.get(config.formatter, len(columns)), config.use_within_block_sep
    formatter = build_formatter(
        config.formatter, num_blocks=num_blocks, block_size=config.block_size or 1, use_within_block_sep=sep
    )
    check_target_len(formatter.num_blocks, formatter.block_size)
    if len(columns) > formatter.num_blocks:
        raise UserError(f"--formatter {config.formatter} takes {formatter.num_blocks} columns of codes at most.")
    if config.blank_means_no_occupation and formatter.system.missing_block is None:
        raise UserError(
            f"--formatter {config.formatter} has no mark for a row without any code; give such rows a code of their "
            "own (in HISCO -1) instead of --blank-means-no-occupation."
        )
    is_fitted = config.block_size is None and config.formatter not in NUM_CODES
    num_digits = 0 if not config.zero_pad_codes else None if is_fitted else formatter.block_size
    key = read_key(config.key, num_digits=num_digits) if config.key else None
    given = ExampleFiles(
        tuple(map(Path, config.train_data + config.val_data)),
        columns,
        formatter,
        input_col=config.input_col,
        language_col=config.language_col,
        key=key,
        rules=rules,
    )

    def fitted() -> tuple[Formatter, LabelRules]:
        counts = given.count_codes() if key is None else Counter(filter(None, key.codes))
        return fit_codes(counts, rules, num_blocks=num_blocks, use_within_block_sep=sep, are_right=key is not None)

    if is_fitted:
        formatter, rules = distributed.broadcast_from_primary(fitted, doing="reading the codes")
        given = replace(given, formatter=formatter, rules=rules)
    train, val = (replace(given, paths=tuple(map(Path, paths))) for paths in (config.train_data, config.val_data))
    return train, val


def open_data(
    config: RunConfig, files: list[ExampleFiles], run: RunFolder, tokenizer: Tokenizer
) -> list[ExampleArrays]:
    """Open the examples of files from the cache in `--cache-dir` or the run's folder; rank 0 builds it if missing.

    Raises a UserError on every rank if the data or the settings can't be used.
    """
    cache_dir = Path(config.cache_dir) if config.cache_dir else run.cache

    def build() -> list[str]:
        form: dict[str, Any] = {"max_len": config.max_len, "text_normalization": config.text_normalization}
        return [build_cache(part, cache_dir, tokenizer=tokenizer, **form).name for part in files]

    names = distributed.broadcast_from_primary(build, doing="tokenising the data")
    built = [on_each_node(cache_dir / name, marker=CACHE_FILE, is_whole=is_whole) for name in names]
    if config.cache_dir is None and distributed.is_local_primary():
        prune_cache(cache_dir, built)
    return [open_cache(path, tokenizer) for path in built]


def augmenter_of(config: RunConfig, arrays: ExampleArrays) -> Augmenter | None:
    """Return the augmenter that the settings ask for, or None."""
    alters = config.augmentation_prob > 0 and config.num_transformations > 0
    if not alters and config.unk_lang_prob == 0:
        return None
    if config.fn_word_freq is not None:
        words = read_word_list(config.fn_word_freq, config.text_normalization)
    else:
        words = WordList.from_texts(some_descriptions(arrays))
    return Augmenter(
        words,
        augmentation_prob=config.augmentation_prob,
        num_transformations=config.num_transformations,
        unk_lang_prob=config.unk_lang_prob,
        seed=config.seed,
    )


def some_descriptions(arrays: ExampleArrays) -> Iterator[str]:
    """Yield descriptions evenly spaced over the data, or all of a small one."""
    rows = np.arange(0, len(arrays), -(-len(arrays) // _WORD_ROWS))
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        yield from arrays.descriptions(rows[start : start + _ROWS_AT_ONCE])


def read_word_list(path: str, text_normalization: str) -> WordList:
    """Read normalised words and their frequencies from a CSV file with the columns `word` and `freq`."""
    table = open_table(path, ("word", "freq")).read(("word", "freq"))
    words = normalize([word or "" for word in table.columns["word"].to_pylist()], text_normalization)
    counts = pd.to_numeric(table.columns["freq"].to_pandas().fillna(""), errors="coerce").to_numpy(float)
    if len(bad := np.flatnonzero(~np.isfinite(counts))):
        cell = shown(table.columns["freq"][bad[0]].as_py() or "")
        line = table.lines(bad[:1])[0]
        raise UserError(f"--fn-word-freq {path}, line {line}, freq: {cell} is not a number.")
    return WordList(dict(zip(words, counts.tolist(), strict=True)))
