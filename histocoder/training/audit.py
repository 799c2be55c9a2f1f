"""Find suspect labels of a table: codes that a model that has not seen the description takes to be others.

The model is the linear expert's (see `svm`), fitted to all folds of descriptions but one, in turn. A label is the more
suspect the less probable it is, and the more of the other descriptions resemble its code more: a code all of whose
descriptions are improbable, because it is rare or broad, is so compared with itself. How suspect random codes would be
tells how likely it is that a label is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from histocoder.training.svm import MAX_COST, MAX_WEIGHTS, fit_machines

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

NUM_FOLDS, NUM_ALTERNATIVES, NUM_NEIGHBOURS = 5, 3, 3
_TEMPERATURE_ROWS = 5_000  # rows of a fold to which the temperature of its probabilities is fitted, at most
_SHARES = np.linspace(0.2, 0.8, 13)  # of random codes, that are as suspect, to estimate the share of wrong labels at
_ROWS_AT_ONCE = 1024


def suspects(rows: pd.DataFrame, *, seed: int = 0, tell: Callable[[int], object] = lambda _: None) -> pd.DataFrame:
    """Return how likely the codes of n descriptions are right, and which others may be, in their order.

    Parameters
    ----------
    rows : DataFrame
        Distinct combinations of `key` (see `description_keys`), `lang` and `codes`, a tuple, and `times`, the rows that
        each stands for. There are two descriptions and two codes at least.
    seed : int
        Seed of the folds, and of the random codes.
    tell : callable, optional
        Receives the number of descriptions that each fold has.

    Returns
    -------
    DataFrame
        `doubt`, the logarithm of how suspect the codes are; `conf`, the estimated probability that they are right;
        `probs`, the probability of each; `alt` and `alt_probs`, other codes, the most probable first, and theirs.
    """
    pairs = rows["codes"].reset_index(drop=True).explode()
    of_row, (classes, names) = pairs.index.to_numpy(), pd.factorize(pairs, sort=True)
    features, random = ngram_features(rows, max_features=MAX_WEIGHTS // len(names)), np.random.default_rng(seed)
    groups, keys = pd.factorize(rows["key"])
    fold = random.permutation(len(keys))[groups] % NUM_FOLDS
    asked = np.stack([classes, classes[random.integers(len(pairs), size=len(pairs))]])  # labels, and random codes
    doubts, probs = np.empty(asked.shape), np.empty(len(pairs))
    alternatives = np.empty((2, len(rows), min(NUM_ALTERNATIVES, len(names) - 1)), dtype=object)
    for number in range(NUM_FOLDS):
        held, is_held = np.flatnonzero(fold == number), fold[of_row] == number
        if not len(held):
            continue
        place = np.cumsum(fold != number) - 1
        machines = fit_machines(
            features[fold != number],
            place[of_row[~is_held]],
            classes[~is_held],
            np.ones(int((fold != number).sum())),
            is_costly=len(pairs) * len(names) > MAX_COST,
        )
        decisions = _decisions(features[held], *machines, num_classes=len(names))
        own = np.searchsorted(held, of_row[is_held])
        logs = _log_probabilities(decisions, own, classes[is_held])
        for which in (0, 1):
            doubts[which, is_held] = _doubts(decisions, logs, own, asked[which, is_held])
        probs[is_held] = np.exp(logs[own, classes[is_held]])
        logs[own, classes[is_held]] = -np.inf
        best = np.argsort(-logs, axis=1)[:, : alternatives.shape[2]]
        alternatives[:, held] = names.to_numpy()[best], np.exp(np.take_along_axis(logs, best, axis=1))
        tell(len(held))
    # rows of the same description with other codes speak against these, and those with the same for them
    total, times = rows.groupby(["key", "lang"])["times"].transform("sum").to_numpy(), rows["times"].to_numpy()
    doubts += np.log([(1 + total - times) / times, total])[:, of_row]
    doubt = pd.Series(doubts[0]).groupby(of_row).max().to_numpy()
    found = {"doubt": doubt, "conf": 1 - _wrong(doubt, pd.Series(doubts[1]).groupby(of_row).max().to_numpy())}
    found["probs"] = pd.Series(probs).groupby(of_row).agg(tuple).to_numpy()
    found |= {name: [*map(tuple, values)] for name, values in zip(("alt", "alt_probs"), alternatives, strict=True)}
    return pd.DataFrame(found, index=rows.index)


def ngram_features(rows: pd.DataFrame, *, max_features: int | None = None) -> csr_matrix:
    """Return TF-IDF of the character n-grams of `key`, and of `lang` if there are several, of shape (n, features)."""
    from sklearn.feature_extraction.text import TfidfVectorizer  # here, since it takes a second to import

    texts = rows["lang"] + " " + rows["key"] if rows["lang"].nunique() > 1 else rows["key"]
    how = {"analyzer": "char_wb", "ngram_range": (1, 5), "sublinear_tf": True}
    return TfidfVectorizer(**how, max_features=max_features).fit_transform(texts)


def neighbours(rows: pd.DataFrame, of: np.ndarray) -> list[np.ndarray]:
    """Return the indices of the descriptions with other codes that are nearest to some of n rows, by cosine."""
    features, codes, found = ngram_features(rows), rows["codes"].map(frozenset).to_numpy(), []
    for row in of.tolist():
        near = (features @ features[row].T).toarray()[:, 0] * (codes != codes[row])
        best = np.argsort(-near, kind="stable")[:NUM_NEIGHBOURS]
        found.append(best[near[best] > 0])
    return found


def _decisions(
    features: csr_matrix, classes: np.ndarray, coefficients: np.ndarray, bias: np.ndarray, *, num_classes: int
) -> np.ndarray:
    """Return the machines' decisions, of shape (n, num_classes); -1 for codes that have none."""
    found = np.full((features.shape[0], num_classes), -1.0, dtype=np.float32)
    weights = np.ascontiguousarray(coefficients.T, dtype=np.float32)
    for start in range(0, len(found), _ROWS_AT_ONCE):
        some = slice(start, start + _ROWS_AT_ONCE)
        found[some, classes] = features[some].astype(np.float32) @ weights + bias
    return found


def _log_probabilities(decisions: np.ndarray, rows: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Return the logarithms of probabilities, of shape (n, num_classes), at the temperature that suits labels best.

    `rows` and `classes` are pairs of a row and a label.
    """
    from scipy.optimize import minimize_scalar
    from scipy.special import log_softmax

    some = slice(_TEMPERATURE_ROWS)

    def loss(scale: float) -> float:
        chosen = log_softmax(scale * decisions[rows[some]], axis=1)
        return -float(chosen[np.arange(len(chosen)), classes[some]].mean())

    scale = minimize_scalar(loss, bounds=(0.5, 20), method="bounded").x
    return log_softmax(scale * decisions, axis=1)


def _doubts(decisions: np.ndarray, logs: np.ndarray, rows: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Return the logarithms of the odds against labels, times the share of other rows that resemble the code more."""
    share = np.empty(len(rows))
    for one, pairs in pd.Series(np.arange(len(rows))).groupby(classes):
        ordered = np.sort(decisions[:, one])
        less = np.searchsorted(ordered, decisions[rows[pairs], one], side="right")
        share[pairs] = 1 - (less - 0.5) / len(ordered)
    own = logs[rows, classes].astype(np.float64)
    return np.log1p(-np.exp(own) + 1e-9) - own + np.log(share)


def _wrong(doubt: np.ndarray, of_random: np.ndarray) -> np.ndarray:
    """Return how likely labels are wrong, of shape (n,), by comparing their doubts with those of random codes.

    Above the doubt that a share of random codes exceeds, there can be no more wrong labels than there are labels: the
    smallest ratio of both bounds the share of wrong labels, as in Storey's (2002) estimate of false discoveries. Of
    equally suspect labels, those are wrong that so many random codes make up; isotonic regression smooths their share.
    """
    from sklearn.isotonic import IsotonicRegression

    limits = np.quantile(of_random, 1 - _SHARES)
    share_wrong = min(1.0, float(np.min([(doubt > limit).mean() for limit in limits] / _SHARES)))
    values, is_random = np.concatenate([doubt, of_random]), np.repeat([0.0, 1.0], len(doubt))
    # of both together: x / (1 + x), with x the expected number of wrong labels for each label
    weights = np.repeat([1.0, share_wrong], len(doubt))
    both = IsotonicRegression(y_min=0, y_max=0.5).fit(values, is_random, weights).predict(doubt)
    return both / (1 - both)
