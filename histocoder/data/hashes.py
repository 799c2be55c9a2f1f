"""Hashes of cells, and those by which a model knows the descriptions that it was trained on without
their texts.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import pyarrow as pa

from histocoder.data.examples import Examples
from histocoder.text.normalize import description_keys


def cell_hashes(column: pa.Array) -> np.ndarray:
    """Return a hash of each cell, uint64 of shape (n,); each distinct one is hashed once."""
    coded = column.fill_null("").dictionary_encode()
    distinct = coded.dictionary.to_numpy(zero_copy_only=False)
    return pd.util.hash_array(distinct, categorize=False)[np.asarray(coded.indices)]


def key_hashes(keys: pa.Array) -> np.ndarray:
    """Return a hash of each key of a description, int32 of shape (n,).

    One of 100,000 other descriptions has a given hash with a probability of 1 / 40,000.
    """
    return (cell_hashes(keys) >> 32).astype(np.uint32).view(np.int32)


def hashes_of(examples: Examples) -> np.ndarray:
    """Return the distinct hashes of the descriptions of some rows, in ascending order."""
    keys = (description_keys(batch["text"].unique()) for batch in examples.table.to_batches())
    parts = [np.unique(key_hashes(pa.array(some, pa.string()))) for some in keys]
    return np.unique(np.concatenate([np.zeros(0, np.int32), *parts]))


def are_among(texts: Sequence[str], trained_on: np.ndarray) -> np.ndarray:
    """Return which descriptions have a key with one of some hashes, of shape (n,)."""
    return np.isin(key_hashes(pa.array(description_keys(texts), pa.string())), trained_on)
