"""What corrections have brought: the model before and after them, on the same descriptions."""

from __future__ import annotations

from typing import Any

import numpy as np

from histocoder.data.examples import Examples
from histocoder.evaluation.baselines import difference_interval, shares
from histocoder.evaluation.evaluate import right_rows
from histocoder.inference.coder import Coder


def gain(
    before: Coder, after: Coder, validation: Examples, held_out: Examples | None, *, right: np.ndarray
) -> dict[str, Any]:
    """Compare a model that was trained on corrections with the one that they correct.

    Parameters
    ----------
    before, after : Coder
    validation : Examples
        None of which was corrected.
    held_out : Examples, optional
        Corrections that `after` has not been trained on.
    right : ndarray of bool, of shape (n,)
        Where `after` gives exactly the true codes of `validation`.

    Returns
    -------
    dict
        Plain values, for JSON: `validation` and, where there is one, `held_out`, each with `num_rows`, `before` and
        `after` (see `shares`), and their `difference` (see `difference_interval`). `before_has_seen` says whether the
        model before was trained on validation data, so that the comparison favours it.
    """
    found: dict[str, Any] = {
        "before_has_seen": before.model.config.fitted_to_validation,
        "validation": _compared(right_rows(before, validation), right, validation.texts),
    }
    if held_out is not None:
        found["held_out"] = _compared(right_rows(before, held_out), right_rows(after, held_out), held_out.texts)
    return found


def _compared(before: np.ndarray, after: np.ndarray, texts: list[str]) -> dict[str, Any]:
    return {
        "num_rows": len(texts),
        "before": shares(before, texts),
        "after": shares(after, texts),
        "difference": difference_interval(after, before, texts),
    }
