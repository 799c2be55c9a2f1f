"""How far the codes of a file can be trusted, and what more checking brings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pydantic import BaseModel

_PRIOR_SD = np.array([1.0, 0.5])
"""Of shift and slope: before anything is checked, confidence means what it says, give or take this much."""
_DRAWS = 1000
_BINS = 500
_PAUSE = 120.0
"""Seconds between two decisions, beyond which the reviewer was away."""
_FEWEST = 5
"""Decisions from which a pace is told."""


class Estimate(BaseModel):
    """A share, with its 95 % interval."""

    mean: float
    low: float
    high: float


class Trust(BaseModel):
    """The state of a file."""

    rows: int
    rows_settled: int
    cards: int
    cards_settled: int
    cards_unsure: int
    right: int
    """Checked descriptions whose codes were right as predicted."""
    rest: Estimate | None
    """Accuracy of the rows that are not settled; None where there are none."""
    whole: Estimate | None
    """Accuracy of all rows, where settled ones are right."""
    seconds_per_card: float | None
    """Median of the reviewers' own; None before there are some decisions."""
    hour_cards: int | None
    hour_rows: int | None
    """What an hour more settles at this pace."""
    hour_whole: float | None
    """Accuracy of all rows after it."""


def estimate(
    conf: np.ndarray, times: np.ndarray, settled: np.ndarray, right: np.ndarray, *, gaps: Sequence[float], unsure: int
) -> Trust:
    """Estimate accuracy from the model's confidence, corrected by what reviewers found.

    The probability that a description's codes are right is sigmoid(a + b · logit(conf)). Without any check a = 0 and
    b = 1 (the model is calibrated); checked descriptions move both, as in Bayesian logistic regression (Laplace's
    approximation; Bishop, Pattern Recognition and Machine Learning, 4.5). Which descriptions are checked depends on
    confidence and frequency alone, so that the least certain being checked first does not bias it. The interval holds
    the uncertainty of a and b, and that of the descriptions themselves.

    Parameters
    ----------
    conf, times : ndarray of shape (n,)
        Confidence of each distinct description, in the order of the queue, and the number of its rows.
    settled : ndarray of bool, of shape (n,)
    right : ndarray of bool, of shape (n,)
        Of settled ones, whether the predicted codes stayed.
    gaps : sequence of float
        Seconds between decisions of one reviewer.
    unsure : int
        Descriptions that reviewers left open.
    """
    features = np.stack([np.ones_like(conf), _logit(conf)], axis=1)
    mean, covariance = _fit(features[settled], right[settled].astype(float))
    draws = np.random.default_rng(0).multivariate_normal(mean, covariance, _DRAWS)
    total, num_settled = int(times.sum()), int(times[settled].sum())
    rest = whole = None
    if num_settled < total:
        rest = _share(features[~settled], times[~settled], mean, draws)
        whole = Estimate(
            **{name: (num_settled + share * (total - num_settled)) / total for name, share in rest.model_dump().items()}
        )
    elif total:
        whole = Estimate(mean=1, low=1, high=1)
    pace = [gap for gap in gaps if 0 < gap < _PAUSE]
    seconds = float(np.median(pace)) if len(pace) >= _FEWEST else None
    more = np.flatnonzero(~settled)[: int(3600 / max(seconds, 1.0))] if seconds else None
    hour_whole = None
    if more is not None and whole is not None:
        wrong = times[more] * (1 - _sigmoid(features[more] @ mean))
        hour_whole = min(whole.mean + float(wrong.sum()) / total, 1.0)
    return Trust(
        rows=total,
        rows_settled=num_settled,
        cards=len(conf),
        cards_settled=int(settled.sum()),
        cards_unsure=unsure,
        right=int((right & settled).sum()),
        rest=rest,
        whole=whole,
        seconds_per_card=seconds,
        hour_cards=None if more is None else len(more),
        hour_rows=None if more is None else int(times[more].sum()),
        hour_whole=hour_whole,
    )


def _share(features: np.ndarray, times: np.ndarray, mean: np.ndarray, draws: np.ndarray) -> Estimate:
    """Return the share of rows that is right; descriptions of like confidence are taken together."""
    edges = np.linspace(features[:, 1].min(), features[:, 1].max(), _BINS)
    width = max(edges[1] - edges[0], 1e-9)
    bins = np.rint((features[:, 1] - edges[0]) / width).astype(int)
    weights = np.bincount(bins, times, _BINS)
    squares = np.bincount(bins, times.astype(float) ** 2, _BINS)
    used = weights > 0
    centres = np.stack([np.ones(int(used.sum())), edges[used]], axis=1)
    weights, squares = weights[used], squares[used]
    total = weights.sum()
    probable = _sigmoid(draws @ centres.T)  # (draws, bins)
    spread = np.sqrt((squares * probable * (1 - probable)).sum(1)) / total
    noise = np.random.default_rng(1).standard_normal(len(draws))
    shares = np.clip(probable @ weights / total + spread * noise, 0, 1)
    low, high = np.quantile(shares, (0.025, 0.975))
    best = float(_sigmoid(centres @ mean) @ weights / total)
    return Estimate(mean=best, low=min(float(low), best), high=max(float(high), best))


def _fit(features: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and covariance of shift and slope, by Newton's method."""
    prior = np.array([0.0, 1.0])
    precision = np.diag(_PRIOR_SD**-2)
    found = prior.copy()
    for _ in range(25):
        probable = _sigmoid(features @ found)
        gradient = features.T @ (right - probable) - precision @ (found - prior)
        hessian = (features * (probable * (1 - probable))[:, None]).T @ features + precision
        step = np.linalg.solve(hessian, gradient)
        found = found + np.clip(step, -2, 2)
        if np.abs(step).max() < 1e-8:
            break
    return found, np.linalg.inv(hessian)


def _logit(conf: np.ndarray) -> np.ndarray:
    conf = np.clip(conf, 1e-4, 1 - 1e-4)
    return np.log(conf / (1 - conf))


def _sigmoid(values: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-values))
