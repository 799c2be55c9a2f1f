"""Estimate how far the codes of a file can be trusted, and what more checking brings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import BaseModel

_PRIOR_MEAN, _PRIOR_SD = np.array([0.0, 1.0, 0.0]), np.array([1.0, 0.5, 0.5])
"""Prior of shift, slope and weight of frequency: before anything is checked, confidence is taken as calibrated, with
these standard deviations."""
_VALIDATION_WEIGHT = 100
"""Maximum number of checked descriptions that the validation data counts as: it may differ from the reviewed file."""
_DRAWS = 1000
_WIDTH = 0.1
"""Width of the cells in which logarithms of confidence and frequency are summed."""
_PAUSE = 120.0
"""Seconds between two decisions, beyond which the reviewer was away."""
_FEWEST = 5
"""Minimum number of decisions to state a pace."""


class Estimate(BaseModel):
    """A share, with its 95 % interval."""

    mean: float
    low: float
    high: float


class Trust(BaseModel):
    """State of a file under review."""

    rows: int
    rows_settled: int
    cards: int
    cards_settled: int
    cards_unsure: int
    right: int
    """Checked descriptions whose codes were right as predicted."""
    rest: Estimate | None = None
    """Accuracy of the rows that are not settled; None without such rows."""
    whole: Estimate | None = None
    """Accuracy of all rows; settled ones count as right."""
    seconds_per_card: float | None = None
    """Median of the seconds between decisions; None before there are some decisions."""
    hour_cards: int | None = None
    hour_rows: int | None = None
    """Cards and rows that another hour settles at this pace."""
    hour_whole: float | None = None
    """Accuracy of all rows after it."""


def estimate(
    conf: np.ndarray,
    times: np.ndarray,
    settled: np.ndarray,
    right: np.ndarray,
    *,
    gaps: Sequence[float],
    unsure: int,
    calibration: Sequence[Mapping[str, Any]] = (),
) -> Trust:
    """Estimate accuracy from the model's confidence, corrected by what validation and reviewers found.

    The probability that a description's codes are right is sigmoid(a + b · logit(conf) + c · log(times)). Without any
    observation a = c = 0 and b = 1 (the model is calibrated). Checked descriptions move all three, and so does the
    validation data, as in Bayesian logistic regression (Laplace's approximation; Bishop, Pattern Recognition and
    Machine Learning, 4.5). Which descriptions are checked depends on confidence and frequency alone, so that the least
    certain being checked first does not bias it. The interval holds the uncertainty of a, b and c, and that of the
    descriptions themselves.

    Parameters
    ----------
    conf, times : ndarray of shape (n,)
        Confidence of each distinct description, in the order of the queue, and the number of its rows.
    settled, right : ndarray of bool, of shape (n,)
        Descriptions that are settled, and settled ones whose predicted codes stayed.
    gaps : sequence of float
        Seconds between decisions of one reviewer.
    unsure : int
        Number of descriptions that reviewers left open.
    calibration : sequence of mapping
        Bins of `scores.calibration` on the run's validation data.
    """
    total, num_settled = int(times.sum()), int(times[settled].sum())
    log_times = np.log(times)
    log_times -= times @ log_times / max(total, 1)  # validation data counts rows, so that its mean is near this one
    features = _features(conf, log_times)
    mean, covariance = _fit_to_found(features[settled], right[settled], calibration)
    trust = Trust(
        rows=total,
        rows_settled=num_settled,
        cards=len(conf),
        cards_settled=int(settled.sum()),
        cards_unsure=unsure,
        right=int((right & settled).sum()),
    )
    if num_settled < total:
        draws = np.random.default_rng(0).multivariate_normal(mean, covariance, _DRAWS)
        trust.rest = _share(features[~settled], times[~settled], mean, draws)
        whole = {name: (num_settled + share * (total - num_settled)) / total for name, share in trust.rest}
        trust.whole = Estimate(**whole)
    elif total:
        trust.whole = Estimate(mean=1, low=1, high=1)
    pace = [gap for gap in gaps if 0 < gap < _PAUSE]
    if len(pace) >= _FEWEST:
        wrong = times[~settled] * (1 - _sigmoid(features[~settled] @ mean))
        _tell_hour(trust, float(np.median(pace)), times[~settled], wrong)
    return trust


def _tell_hour(trust: Trust, seconds_per_card: float, times: np.ndarray, wrong: np.ndarray) -> None:
    """Add what another hour brings; `times` and rows likely `wrong` are those of descriptions in the queue's order."""
    more = slice(int(3600 / max(seconds_per_card, 1.0)))
    trust.seconds_per_card = seconds_per_card
    trust.hour_cards, trust.hour_rows = len(times[more]), int(times[more].sum())
    if trust.whole is not None:
        trust.hour_whole = min(trust.whole.mean + float(wrong[more].sum()) / trust.rows, 1.0)


def _fit_to_found(
    features: np.ndarray, right: np.ndarray, calibration: Sequence[Mapping[str, Any]]
) -> tuple[np.ndarray, np.ndarray]:
    """Fit the model of `estimate` to settled descriptions and to the bins of validation; see `_fit`."""
    bins = [one for one in calibration if one["count"]]
    counts, confs, accuracies = (np.array([one[name] for one in bins]) for name in ("count", "conf", "accuracy"))
    weights = counts * min(1.0, _VALIDATION_WEIGHT / max(counts.sum(), 1))
    return _fit(
        np.concatenate([_features(confs, np.zeros(len(bins))), features]),
        np.concatenate([accuracies, right]),
        np.concatenate([weights, np.ones(len(right))]),
    )


def _share(features: np.ndarray, times: np.ndarray, mean: np.ndarray, draws: np.ndarray) -> Estimate:
    """Estimate the share of rows that is right; descriptions of similar confidence and frequency are summed."""
    lowest = features.min(0)
    cells = np.rint((features - lowest) / _WIDTH).astype(int)
    shape = tuple(cells.max(0) + 1)
    cell = np.ravel_multi_index(tuple(cells.T), shape)
    weights, squares = np.bincount(cell, times), np.bincount(cell, times.astype(float) ** 2)
    used = np.flatnonzero(weights)
    like = lowest + _WIDTH * np.stack(np.unravel_index(used, shape), axis=1)
    weights, squares, total = weights[used], squares[used], times.sum()
    probable = _sigmoid(draws @ like.T)  # (draws, kinds)
    spread = np.sqrt((probable * (1 - probable)) @ squares) / total
    noise = np.random.default_rng(1).standard_normal(len(draws))
    shares = np.clip(probable @ weights / total + spread * noise, 0, 1)
    low, high = np.quantile(shares, (0.025, 0.975))
    best = float(_sigmoid(like @ mean) @ weights / total)
    return Estimate(mean=best, low=min(float(low), best), high=max(float(high), best))


def _fit(features: np.ndarray, right: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and covariance of the weights of features, by Newton's method."""
    precision = np.diag(_PRIOR_SD**-2)
    found = _PRIOR_MEAN
    for _ in range(25):
        probable = _sigmoid(features @ found)
        gradient = features.T @ (weights * (right - probable)) - precision @ (found - _PRIOR_MEAN)
        hessian = (features * (weights * probable * (1 - probable))[:, None]).T @ features + precision
        step = np.linalg.solve(hessian, gradient)
        found = found + np.clip(step, -2, 2)
        if np.abs(step).max() < 1e-8:
            break
    return found, np.linalg.inv(hessian)


def _features(conf: np.ndarray, log_times: np.ndarray) -> np.ndarray:
    return np.stack([np.ones(len(conf)), _logit(conf), log_times], axis=1)


def _logit(conf: np.ndarray) -> np.ndarray:
    conf = np.clip(conf, 1e-4, 1 - 1e-4)
    return np.log(conf / (1 - conf))


def _sigmoid(values: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-values))
