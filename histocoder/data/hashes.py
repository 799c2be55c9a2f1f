"""Hashes of cells, and those by which a model knows the descriptions that it was trained on without
their texts.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import pyarrow as pa

from histocoder.data.examples import Examples
from histocoder.text.normalize import description_keys


def cell_hashes(column: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """Return a hash of each cell, uint64 of shape (n,); each distinct one is hashed once."""
    if isinstance(column, pa.Array):
        column = pa.chunked_array([column])
    hashes = [np.zeros(0, np.uint64)]
    for chunk in column.chunks:
        coded = chunk.fill_null("").dictionary_encode()
        distinct = coded.dictionary.to_numpy(zero_copy_only=False)
        hashes.append(pd.util.hash_array(distinct, categorize=False)[np.asarray(coded.indices)])
    return np.concatenate(hashes)


def key_hashes(keys: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """Return a hash of each key of a description, int32 of shape (n,).

    One of 100,000 other descriptions has a given hash with a probability of 1 / 40,000.
    """
    return (cell_hashes(keys) >> 32).astype(np.uint32).view(np.int32)


def text_hashes(texts: Sequence[str]) -> np.ndarray:
    """Return the hash of the key of each description, int32 of shape (n,)."""
    return key_hashes(pa.array(description_keys(texts), pa.string()))


def hashes_of(examples: Examples) -> np.ndarray:
    """Return the distinct hashes of the descriptions of some rows, in ascending order."""
    parts = [text_hashes(batch["text"].unique()) for batch in examples.table.to_batches()]
    return np.unique(np.concatenate([np.zeros(0, np.int32), *parts]))


def are_among(texts: Sequence[str], trained_on: np.ndarray) -> np.ndarray:
    """Return which descriptions have a key with one of some hashes, of shape (n,)."""
    return np.isin(text_hashes(texts), trained_on)
