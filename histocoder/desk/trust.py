"""Estimates of how far the codes of a file can be trusted, and of what more checking brings."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import BaseModel

_PRIOR_MEAN, _PRIOR_SD = np.array([0.0, 1.0, 0.0]), np.array([1.0, 0.5, 0.5])
"""Prior of shift, slope and frequency: before anything is checked, the model is about calibrated."""
_VALIDATION_WEIGHT = 100  # checked descriptions that validation data count as at most: they may differ from these
_DRAWS = 1000
_WIDTH = 0.1  # width of the cells in which descriptions of similar features are taken together
_PAUSE = 120.0  # maximum time in seconds between two decisions of a reviewer who was not away
_FEWEST = 5  # minimum number of decisions for a pace


class Estimate(BaseModel):
    """A share, with its 95 % interval."""

    mean: float
    low: float
    high: float


class Trust(BaseModel):
    """State of the review of a file."""

    rows: int
    rows_settled: int
    cards: int
    cards_settled: int
    cards_unsure: int
    right: int  # number of checked descriptions whose codes were right as predicted
    rest: Estimate | None = None  # accuracy of the rows that are not settled; None if there are none
    whole: Estimate | None = None  # accuracy of all rows, of which the settled ones are right
    seconds_per_card: float | None = None  # median time of a decision; None before there are five
    hour_cards: int | None = None
    hour_rows: int | None = None  # rows of the cards that another hour settles at this pace
    hour_whole: float | None = None  # accuracy of all rows after another hour


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
    observation a = c = 0 and b = 1 (the model is calibrated). Checked descriptions and the validation data move all
    three, as in Bayesian logistic regression (Laplace's approximation; Bishop, Pattern Recognition and Machine
    Learning, 4.5). Which descriptions are checked depends on confidence and frequency alone, so that checking the least
    certain first does not bias the estimate. The interval covers the uncertainty of a, b and c, and that of the
    descriptions.

    Arrays have shape (n,), in the order of the queue: confidence and number of rows of each distinct description,
    whether it is settled, and whether its predicted codes stayed. `gaps` are seconds between decisions of one reviewer,
    `unsure` is the number of descriptions that reviewers left open, and `calibration` has the bins of
    `scores.calibration` on the run's validation data.
    """
    total, num_settled = int(times.sum()), int(times[settled].sum())
    log_times = np.log(times)
    log_times -= times @ log_times / max(total, 1)  # validation data counts rows, so that its mean is near this one
    features = _features(conf, log_times)
    mean, covariance = _fit_to_found(features[settled], right[settled], calibration)
    rest = whole = None
    if num_settled < total:
        draws = np.random.default_rng(0).multivariate_normal(mean, covariance, _DRAWS)
        rest = _share(features[~settled], times[~settled], mean, draws)
        whole = Estimate(
            **{name: (num_settled + share * (total - num_settled)) / total for name, share in rest.model_dump().items()}
        )
    elif total:
        whole = Estimate(mean=1, low=1, high=1)
    counts = {"rows": total, "rows_settled": num_settled, "cards": len(conf), "cards_settled": int(settled.sum())}
    trust = Trust(**counts, cards_unsure=unsure, right=int((right & settled).sum()), rest=rest, whole=whole)
    pace = [gap for gap in gaps if 0 < gap < _PAUSE]
    if len(pace) >= _FEWEST:
        wrong = times[~settled] * (1 - _sigmoid(features[~settled] @ mean))
        trust.seconds_per_card = float(np.median(pace))
        more = slice(int(3600 / max(trust.seconds_per_card, 1.0)))  # the cards of another hour
        trust.hour_cards, trust.hour_rows = len(wrong[more]), int(times[~settled][more].sum())
        if whole is not None:
            trust.hour_whole = min(whole.mean + float(wrong[more].sum()) / total, 1.0)
    return trust


def _fit_to_found(
    features: np.ndarray, right: np.ndarray, calibration: Sequence[Mapping[str, Any]]
) -> tuple[np.ndarray, np.ndarray]:
    """Fit the coefficients to settled descriptions and to the bins of validation; see `_fit`."""
    bins = [one for one in calibration if one["count"]]
    counts, confs, accuracies = (np.array([one[name] for one in bins]) for name in ("count", "conf", "accuracy"))
    weights = counts * min(1.0, _VALIDATION_WEIGHT / max(counts.sum(), 1))
    return _fit(
        np.concatenate([_features(confs, np.zeros(len(bins))), features]),
        np.concatenate([accuracies, right]),
        np.concatenate([weights, np.ones(len(right))]),
    )


def _share(features: np.ndarray, times: np.ndarray, mean: np.ndarray, draws: np.ndarray) -> Estimate:
    """Estimate the share of rows that is right, with descriptions of similar features taken together."""
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
    """Return mean and covariance of the coefficients, of shapes (3,) and (3, 3), by Newton's method."""
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
    """Return features of shape (n, 3): one, the logit of confidence, and frequency."""
    conf = np.clip(conf, 1e-4, 1 - 1e-4)
    return np.stack([np.ones(len(conf)), np.log(conf / (1 - conf)), log_times], axis=1)


def _sigmoid(values: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-values))
