"""Samplers: global batches of like lengths, dealt to ranks; a function of (seed, epoch) alone."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np


class BatchIndices(NamedTuple):
    """One rank's rows of a global batch, or a part of them."""

    rows: np.ndarray
    """Indices of the rows; a rank without any repeats another's row with a `weight` of 0."""
    epoch: int
    num_rows: int
    """Number of rows of the global batch."""
    num_target_blocks: int
    """Largest number of codes in a row of the global batch."""
    weight: float
    """1.0, or 0.0 for a repeated row."""


@dataclass(eq=False)
class BucketSampler:
    """Length-bucketed global batches, the same ones for every number of ranks.

    Rows are ordered by length over the whole epoch, at random among those of one length, cut into
    batches, and the batches are shuffled. The rows that do not fill a batch make one of their own;
    they are drawn before ordering, so that no length is favoured.
    """

    lengths: Callable[[int], np.ndarray]
    """Epoch -> number of tokens of each row, of shape (n,)."""
    num_target_blocks: np.ndarray
    """Number of codes of each row, of shape (n,)."""
    batch_size: int
    """Number of rows of a batch of all ranks together."""
    seed: int
    rows: np.ndarray
    """Rows to draw from, of shape (m,)."""
    num_replicas: int = 1
    """Number of ranks; each gets every `num_replicas`-th row of each batch."""
    rank: int = 0
    num_parts: int = 1
    """Number of shares that a rank's rows of a batch are given in, each of like lengths."""
    _epoch: int = field(default=0, init=False)
    _consumed: int = field(default=0, init=False)

    def __len__(self) -> int:
        """Return the number of shares of an epoch."""
        return self.num_batches * self.num_parts

    @property
    def num_batches(self) -> int:
        """Number of batches of an epoch."""
        return math.ceil(len(self.rows) / self.batch_size)

    def set_position(self, epoch: int, consumed: int) -> None:
        """Set the epoch, and the number of its rows that all ranks have consumed, which the next
        iteration skips.
        """
        self._epoch = epoch
        self._consumed = consumed

    def global_batches(self, epoch: int, *, consumed: int = 0) -> Iterator[np.ndarray]:
        """Yield the batches of an epoch, in order, without the first ones, which have `consumed`
        rows in total.
        """
        # rows are shuffled before they are sorted, so that those of one length are mixed; the last
        # batch, which is not full, has rows of all lengths
        rng = np.random.default_rng([self.seed, epoch])
        lengths = self.lengths(epoch)
        rows = self.rows.copy()
        rng.shuffle(rows)
        num_full = len(rows) - len(rows) % self.batch_size
        full = rows[:num_full]
        rows[:num_full] = full[np.argsort(lengths[full], kind="stable")]

        # batches come in random order, so that lengths do not rise in an epoch
        num_batches = -(-len(rows) // self.batch_size)
        num_seen = 0
        for i in rng.permutation(num_batches):
            batch = rows[i * self.batch_size : (i + 1) * self.batch_size]
            num_seen += len(batch)
            if num_seen > consumed:
                yield batch

    def __iter__(self) -> Iterator[BatchIndices]:
        for batch in self.global_batches(self._epoch, consumed=self._consumed):
            num_target_blocks = int(self.num_target_blocks[batch].max())
            for mine in np.array_split(batch[self.rank :: self.num_replicas], self.num_parts):
                yield BatchIndices(
                    rows=mine if len(mine) else batch[:1],
                    epoch=self._epoch,
                    num_rows=len(batch),
                    num_target_blocks=num_target_blocks,
                    weight=1.0 if len(mine) else 0.0,
                )


class SequentialSampler:
    """Each row once, over all ranks, in batches of like lengths; for validation.

    `lengths` is an array of shape (n,), and `batch_size` that of one rank. Ranks may get different
    numbers of batches.
    """

    def __init__(
        self, lengths: np.ndarray, *, batch_size: int, num_replicas: int = 1, rank: int = 0
    ) -> None:
        self._rows = np.argsort(lengths, kind="stable")[rank::num_replicas]
        self._batch_size = batch_size

    def __iter__(self) -> Iterator[BatchIndices]:
        for start in range(0, len(self._rows), self._batch_size):
            rows = self._rows[start : start + self._batch_size]
            yield BatchIndices(
                rows=rows, epoch=0, num_rows=len(rows), num_target_blocks=0, weight=1.0
            )
