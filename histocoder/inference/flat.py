"""What the flat head answers: which classes, by its probabilities and a language's threshold."""

from __future__ import annotations

import torch
from torch import Tensor


def chosen_classes(probabilities: Tensor, thresholds: Tensor | float, *, most: int) -> Tensor:
    """Return the flat head's answer: the most probable class, and others above a threshold.

    Parameters
    ----------
    probabilities : Tensor of shape (B, num_classes)
    thresholds : Tensor of shape (B, 1), or float
    most : int
        Classes of a row at most.

    Returns
    -------
    Tensor of bool, of shape (B, num_classes)

    Examples
    --------
    >>> chosen_classes(torch.tensor([[0.2, 0.1], [0.4, 0.6]]), 0.3, most=2)
    tensor([[ True, False],
            [ True,  True]])
    """
    best = probabilities.topk(min(most, probabilities.shape[1]))
    counts = best.values > thresholds
    counts[:, 0] = True
    return torch.zeros_like(probabilities, dtype=torch.bool).scatter(1, best.indices, counts)
