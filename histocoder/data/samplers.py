"""Which rows make a step: global batches of like lengths, dealt to ranks; a function of (seed, epoch) alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from histocoder.tokenizers import CHARACTERS, Tokenizer


class Share(NamedTuple):
    """One rank's rows of a global batch, or a part of them."""

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
    """Padded positions that a global batch may have: its rows × what the longest needs, as far as known."""

    num_positions: int
    """As many as one row takes, or more."""
    max_len: int
    """Tokens of a row at most."""
    tokenizer: Tokenizer = CHARACTERS
    """By whose rule batches are padded."""

    def max_rows(self, length: int) -> int:
        """Rows of a batch whose longest has `length` tokens."""
        return self.num_positions // self.tokenizer.num_positions(length, self.max_len)


class BucketSampler:
    """Length-bucketed global batches, the same ones for every number of ranks.

    Rows are ordered by length over the whole epoch, at random among those of one length, cut into batches, and the
    batches are shuffled.

    Parameters
    ----------
    lengths : callable
        Takes an epoch; gives the tokens that each row has in it, an array of int of shape (n,).
    num_target_blocks : ndarray of int, of shape (n,)
        Codes of each row.
    batch_size : int or TokenBudget
        Of a global batch: that of all ranks together. The rows that do not fill a batch of a number of rows make one of
        their own, drawn before ordering, so that no length is favoured. Within a token budget, epochs may differ in
        their number of batches.
    seed : int
    num_replicas, rank : int
        Ranks, and which of them this is. Each gets every `num_replicas`-th row of each batch.
    num_parts : int
        Shares that a rank's rows of a batch are given in, each of like lengths.
    """

    def __init__(
        self,
        lengths: Callable[[int], np.ndarray],
        num_target_blocks: np.ndarray,
        *,
        batch_size: int | TokenBudget,
        seed: int,
        num_replicas: int = 1,
        rank: int = 0,
        num_parts: int = 1,
    ) -> None:
        self._lengths = lengths
        self._num_target_blocks = num_target_blocks
        self._batch_size = batch_size
        self._seed = seed
        self._num_replicas = num_replicas
        self._rank = rank
        self._num_parts = num_parts
        self.set_position(0, 0)

    def __len__(self) -> int:
        """Yield the shares of the current epoch."""
        return self.num_batches(self._epoch) * self._num_parts

    def num_batches(self, epoch: int) -> int:
        """Global batches of an epoch."""
        if isinstance(self._batch_size, int):
            return math.ceil(len(self._num_target_blocks) / self._batch_size)
        return len(_bounds_within(self._batch_size, self._lengths(epoch))) - 1

    def set_position(self, epoch: int, consumed: int) -> None:
        """Choose the epoch, and how many of its rows the next iteration leaves out, as consumed by all ranks."""
        self._epoch, self._consumed = epoch, consumed

    def global_batches(self, epoch: int, *, consumed: int = 0) -> Iterator[np.ndarray]:
        """Yield the batches of an epoch, in order, but the first ones that have `consumed` rows together."""
        rng = np.random.default_rng([self._seed, epoch])
        lengths = self._lengths(epoch)
        rows = np.arange(len(lengths), dtype=np.int32)
        rng.shuffle(rows)
        if isinstance(self._batch_size, int):
            whole = len(rows) - len(rows) % self._batch_size
            bounds = np.array([*range(0, len(rows), self._batch_size), len(rows)])
        else:
            whole, bounds = len(rows), _bounds_within(self._batch_size, lengths)
        rows[:whole] = rows[:whole][np.argsort(lengths[rows[:whole]], kind="stable")]
        order = rng.permutation(len(bounds) - 1)
        for i in order[np.cumsum(np.diff(bounds)[order]) > consumed]:
            yield rows[bounds[i] : bounds[i + 1]]

    def __iter__(self) -> Iterator[Share]:
        for batch in self.global_batches(self._epoch, consumed=self._consumed):
            num_target_blocks = int(self._num_target_blocks[batch].max())
            for mine in np.array_split(batch[self._rank :: self._num_replicas], self._num_parts):
                yield Share(
                    rows=mine if len(mine) else batch[:1],
                    epoch=self._epoch,
                    num_rows=len(batch),
                    num_target_blocks=num_target_blocks,
                    weight=1.0 if len(mine) else 0.0,
                )


def _bounds_within(budget: TokenBudget, lengths: np.ndarray) -> np.ndarray:
    """Return where to cut rows, ordered by length, into batches within a budget; of shape (num_batches + 1,)."""
    counts = np.bincount(lengths)
    bounds, shorter_end = [0], 0
    for length in counts.nonzero()[0].tolist():
        end = shorter_end + int(counts[length])
        max_rows = budget.max_rows(length)
        if shorter_end - bounds[-1] >= max_rows:  # no room for one of this length
            bounds.append(shorter_end)
        bounds += range(bounds[-1] + max_rows, end, max_rows)
        shorter_end = end
    return np.array([*bounds, shorter_end])


class SequentialSampler:
    """Each row once, over all ranks, in batches of like lengths; for validation.

    Parameters are those of `BucketSampler`, but `lengths` are an array of shape (n,), and `batch_size` is one rank's.
    Ranks may get different numbers of batches, or none.
    """

    def __init__(self, lengths: np.ndarray, *, batch_size: int, num_replicas: int = 1, rank: int = 0) -> None:
        self._rows = np.argsort(lengths, kind="stable")[rank::num_replicas]
        self._batch_size = batch_size

    def __iter__(self) -> Iterator[Share]:
        for start in range(0, len(self._rows), self._batch_size):
            rows = self._rows[start : start + self._batch_size]
            yield Share(rows=rows, epoch=0, num_rows=len(rows), num_target_blocks=0, weight=1.0)
