"""Which rows make a step: global batches of like lengths, dealt to ranks; a function of (seed, epoch) alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from histocoder.model.encoder import trimmed_length


class Share(NamedTuple):
    """One rank's rows of a global batch."""

    rows: np.ndarray
    """Never empty: a rank that gets none stands in with a row of another's, and its `weight` is 0."""
    epoch: int
    num_rows: int
    """Of the global batch."""
    num_target_blocks: int
    """The largest number of codes in a row of the global batch."""
    weight: float
    """1.0, or 0.0 for a stand-in."""


class TokenBudget(NamedTuple):
    """Padded positions that a global batch may have: its rows × `trimmed_length` of the longest."""

    num_positions: int
    """As many as one row takes, or more."""
    max_len: int
    """Tokens of a row at most."""

    def max_rows(self, length: int) -> int:
        """Rows of a batch whose longest has `length` tokens."""
        return self.num_positions // trimmed_length(length, self.max_len)


class BucketSampler:
    """Length-bucketed global batches, the same ones for every number of ranks.

    Rows are ordered by length over the whole epoch, at random among those of one length, cut into batches, and the
    batches are shuffled. All epochs have the same number of batches.

    Parameters
    ----------
    lengths : ndarray of int, of shape (n,)
        Tokens of each row.
    num_target_blocks : ndarray of int, of shape (n,)
        Codes of each row.
    batch_size : int or TokenBudget
        Of a global batch: that of all ranks together. The rows that do not fill a batch of a number of rows make one of
        their own, drawn before ordering, so that no length is favoured.
    seed : int
    num_replicas, rank : int
        Ranks, and which of them this is. Each gets every `num_replicas`-th row of each batch.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        num_target_blocks: np.ndarray,
        *,
        batch_size: int | TokenBudget,
        seed: int,
        num_replicas: int = 1,
        rank: int = 0,
    ) -> None:
        self._num_target_blocks = num_target_blocks
        self._by_length = np.argsort(lengths, kind="stable").astype(np.int32)
        distinct, counts = np.unique(lengths, return_counts=True)
        self._length_ends = np.cumsum(counts)
        if isinstance(batch_size, TokenBudget):
            self._num_drawn = 0
            self._bounds = _bounds_within(batch_size, distinct, self._length_ends)
        else:
            self._num_drawn = len(lengths) % batch_size
            self._bounds = np.minimum(np.arange(0, len(lengths) + batch_size, batch_size), len(lengths))
        self._seed = seed
        self._num_replicas = num_replicas
        self._rank = rank
        self._epoch = 0
        self._first_batch = 0

    def __len__(self) -> int:
        """Global batches of an epoch."""
        return len(self._bounds) - 1

    def set_position(self, epoch: int, first_batch: int) -> None:
        """Choose the epoch, and how many of its batches the next iteration leaves out as done."""
        self._epoch, self._first_batch = epoch, first_batch

    def global_batches(self, epoch: int, *, first: int = 0) -> Iterator[np.ndarray]:
        """The batches of an epoch, in order, from the `first` on."""
        rng = np.random.default_rng([self._seed, epoch])
        rows = self._by_length.copy()
        for start, end in itertools.pairwise([0, *self._length_ends]):
            rng.shuffle(rows[start:end])
        drawn = np.sort(rng.choice(len(rows), self._num_drawn, replace=False))
        rows = np.concatenate([np.delete(rows, drawn), rows[drawn]])
        for i in rng.permutation(len(self))[first:]:
            yield rows[self._bounds[i] : self._bounds[i + 1]]

    def __iter__(self) -> Iterator[Share]:
        for batch in self.global_batches(self._epoch, first=self._first_batch):
            mine = batch[self._rank :: self._num_replicas]
            yield Share(
                rows=mine if len(mine) else batch[:1],
                epoch=self._epoch,
                num_rows=len(batch),
                num_target_blocks=int(self._num_target_blocks[batch].max()),
                weight=1.0 if len(mine) else 0.0,
            )


def _bounds_within(budget: TokenBudget, lengths: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Where to cut ordered rows into batches within a budget.

    Parameters
    ----------
    budget : TokenBudget
    lengths : ndarray of int, of shape (m,)
        The lengths that occur, in ascending order.
    ends : ndarray of int, of shape (m,)
        Where the rows of each of them end.

    Returns
    -------
    ndarray of int, of shape (num_batches + 1,)
    """
    bounds, shorter_end = [0], 0
    for length, end in zip(lengths.tolist(), ends.tolist(), strict=True):
        max_rows = budget.max_rows(length)
        if shorter_end - bounds[-1] >= max_rows:  # no room for one of this length
            bounds.append(shorter_end)
        bounds += range(bounds[-1] + max_rows, end, max_rows)
        shorter_end = end
    return np.array([*bounds, shorter_end])


class SequentialSampler:
    """Each row once, over all ranks, in batches of like lengths; for validation.

    Parameters are those of `BucketSampler`; `batch_size` is one rank's. Ranks may get different numbers of batches,
    or none.
    """

    def __init__(self, lengths: np.ndarray, *, batch_size: int, num_replicas: int = 1, rank: int = 0) -> None:
        self._rows = np.argsort(lengths, kind="stable")[rank::num_replicas]
        self._batch_size = batch_size

    def __len__(self) -> int:
        return math.ceil(len(self._rows) / self._batch_size)

    def __iter__(self) -> Iterator[Share]:
        for start in range(0, len(self._rows), self._batch_size):
            rows = self._rows[start : start + self._batch_size]
            yield Share(rows=rows, epoch=0, num_rows=len(rows), num_target_blocks=0, weight=1.0)
