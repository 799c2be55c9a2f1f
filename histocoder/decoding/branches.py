"""Which branches of a search go on."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Branches(NamedTuple):
    """For each row of a batch, some of its candidates, the best first."""

    places: Tensor
    """Among the candidates, of shape (B, W)."""
    scores: Tensor
    """Of shape (B, W); -inf where a row has fewer than W."""

    @property
    def real(self) -> Tensor:
        """Where there is one at all, of shape (B, W)."""
        return self.scores > -torch.inf


def branches_above(scores: Tensor, floor: Tensor | float, *, width: int | None = None) -> Branches:
    """Of candidates' scores (B, C), those that reach their row's floor (B, 1); with a width, the best so many of them.

    Examples
    --------
    >>> branches_above(torch.tensor([[-3.0, -1.0, -2.0], [-9.0, -1.0, -9.0]]), -4.0)
    Branches(places=tensor([[1, 2, 0],
            [1, 0, 2]]), scores=tensor([[-1., -2., -3.],
            [-1., -inf, -inf]]))
    """
    above = scores >= floor
    count = max(int((above & (scores > -torch.inf)).sum(1).max()), 1)
    best = scores.masked_fill(~above, -torch.inf).topk(count if width is None else min(width, count))
    return Branches(best.indices, best.values)
