"""The data of a run: read and tokenised once, by rank 0, into a cache that all processes map into memory."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd

from histocoder import distributed
from histocoder.checkpoints.run_folder import CACHE_FOLDER
from histocoder.config import AugmentConfig, config_of
from histocoder.data.augment import Augmenter, WordList
from histocoder.data.cache import CACHE_FILE, ExampleArrays, build_cache, is_whole, open_cache, prune_cache
from histocoder.data.examples import ExampleFiles
from histocoder.data.normalize import normalize
from histocoder.data.table import read_table
from histocoder.data.tokens import LANG_SEP
from histocoder.distributed.nodes import on_each_node
from histocoder.errors import UserError, shown
from histocoder.model import Tokenizer

_WORD_ROWS = 250_000
"""Descriptions whose words are counted, at most."""
_ROWS_AT_ONCE = 1 << 14


def open_data(
    args: argparse.Namespace, files: list[ExampleFiles], folder: Path, tokenizer: Tokenizer
) -> list[ExampleArrays]:
    """The examples of some files, from the cache in `--cache-dir` or the run's folder; built where they are not there.

    Raises
    ------
    UserError
        On every process, for what a user can mend.
    """
    cache_dir = Path(args.cache_dir) if args.cache_dir else folder / CACHE_FOLDER

    def build() -> list[str]:
        options = {"max_len": args.max_len, "text_normalization": args.text_normalization}
        return [build_cache(part, cache_dir, tokenizer=tokenizer, **options).name for part in files]

    names = distributed.from_primary(distributed.run_on_primary(build, doing="tokenising the data"))
    built = [on_each_node(cache_dir / name, marker=CACHE_FILE, is_whole=is_whole) for name in names]
    if args.cache_dir is None and distributed.is_first_here():
        prune_cache(cache_dir, built)
    return [open_cache(path, tokenizer) for path in built]


def augmenter_of(args: argparse.Namespace, arrays: ExampleArrays) -> Augmenter | None:
    """The noise that the arguments ask for; None where they ask for none."""
    config = config_of(AugmentConfig, args)
    alters = config.augmentation_prob > 0 and config.num_transformations > 0
    if not alters and config.unk_lang_prob == 0:
        return None
    if args.fn_word_freq is not None:
        words = read_word_list(args.fn_word_freq, args.text_normalization)
    else:
        words = WordList.from_texts(some_descriptions(arrays))
    return Augmenter(words, **asdict(config), seed=args.seed)


def some_descriptions(arrays: ExampleArrays) -> Iterator[str]:
    """Descriptions from all over the data, in their order; all where there are few."""
    rows = np.arange(0, len(arrays), -(-len(arrays) // _WORD_ROWS))
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        for text in arrays.characters.decode(rows[start : start + _ROWS_AT_ONCE]):
            yield text.partition(LANG_SEP)[2]


def read_word_list(path: str, text_normalization: str) -> WordList:
    """Read words, as they are to be read, and their frequencies from a CSV file with the columns `word` and `freq`."""
    table = read_table(path, ("word", "freq"))
    words = normalize([word or "" for word in table.columns["word"].to_pylist()], text_normalization)
    counts = pd.to_numeric(table.columns["freq"].to_pandas().fillna(""), errors="coerce").to_numpy(float)
    if len(bad := np.flatnonzero(~np.isfinite(counts))):
        cell = shown(table.columns["freq"][bad[0]].as_py() or "")
        line = table.lines(bad[:1])[0]
        raise UserError(f"--fn-word-freq {path}, line {line}, freq: {cell} is no number.")
    return WordList(dict(zip(words, counts.tolist(), strict=True)))
