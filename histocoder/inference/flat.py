"""What the flat head answers: which classes, by its probabilities and a language's threshold."""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from histocoder.config import ALL_LANGUAGES, ModelConfig
from histocoder.data.languages import same_language


def threshold_of(config: ModelConfig, lang: str) -> float:
    """Return the flat head's threshold for a language; languages that the model does not know are "unk"."""
    known = lang if not config.languages or same_language(lang, config.languages) else "unk"
    own = config.thresholds.get(same_language(known, config.thresholds) or ALL_LANGUAGES)
    return config.default_threshold if own is None else own


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
