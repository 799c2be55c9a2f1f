"""Which rows make a step: global batches of like lengths, dealt to ranks; a function of (seed, epoch) alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np


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


class BucketSampler:
    """Length-bucketed global batches, the same ones for every number of ranks.

    Rows are shuffled, ordered by length over the whole epoch, cut into batches, and the batches are shuffled. The rows
    that do not fill a batch make one of their own, drawn before ordering, so that no length is favoured.

    Parameters
    ----------
    lengths : ndarray of int, of shape (n,)
        Tokens of each row.
    num_target_blocks : ndarray of int, of shape (n,)
        Codes of each row.
    batch_size : int
        Rows of a global batch: those of all ranks together.
    seed : int
    num_replicas, rank : int
        Ranks, and which of them this is. Each gets every `num_replicas`-th row of each batch.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        num_target_blocks: np.ndarray,
        *,
        batch_size: int,
        seed: int,
        num_replicas: int = 1,
        rank: int = 0,
    ) -> None:
        self._lengths = lengths
        self._num_target_blocks = num_target_blocks
        self._batch_size = batch_size
        self._seed = seed
        self._num_replicas = num_replicas
        self._rank = rank
        self._epoch = 0
        self._first_batch = 0

    def __len__(self) -> int:
        """Global batches of an epoch."""
        return math.ceil(len(self._lengths) / self._batch_size)

    def set_position(self, epoch: int, first_batch: int) -> None:
        """Choose the epoch, and how many of its batches the next iteration leaves out as done."""
        self._epoch, self._first_batch = epoch, first_batch

    def global_batches(self, epoch: int) -> list[np.ndarray]:
        """All batches of an epoch, in order."""
        rng = np.random.default_rng([self._seed, epoch])
        rows = rng.permutation(len(self._lengths))
        rest = len(rows) % self._batch_size
        remainder, rows = rows[:rest], rows[rest:]
        rows = rows[np.argsort(self._lengths[rows], kind="stable")]
        batches = [rows[i : i + self._batch_size] for i in range(0, len(rows), self._batch_size)]
        if rest:
            batches.append(remainder[np.argsort(self._lengths[remainder], kind="stable")])
        return [batches[i] for i in rng.permutation(len(batches))]

    def __iter__(self) -> Iterator[Share]:
        for batch in self.global_batches(self._epoch)[self._first_batch :]:
            mine = batch[self._rank :: self._num_replicas]
            yield Share(
                rows=mine if len(mine) else batch[:1],
                epoch=self._epoch,
                num_rows=len(batch),
                num_target_blocks=int(self._num_target_blocks[batch].max()),
                weight=1.0 if len(mine) else 0.0,
            )


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
