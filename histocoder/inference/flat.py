"""What the flat head answers: which classes, by its probabilities and a language's threshold."""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from histocoder.config import ModelConfig
from histocoder.inference.options import threshold_of


def thresholds_of(config: ModelConfig, langs: pd.Series, given: float | None) -> Tensor:
    """Return the threshold of each description, of shape (n,): the given one, or its language's."""
    own = {lang: threshold_of(config, lang) if given is None else given for lang in langs.unique()}
    return torch.tensor(langs.map(own).to_numpy(np.float32))


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
