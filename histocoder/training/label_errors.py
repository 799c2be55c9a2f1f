"""Find suspect labels: codes that a model that has not seen the description takes to be others.

The model is the linear expert's, fitted to all folds of descriptions but one, in turn. A label is
the more suspect the less probable it is, and the more of the other descriptions resemble its code
more: a code all of whose descriptions are improbable, because it is rare or broad, is so compared
with itself.
"""

from collections.abc import Callable

import numpy as np
import pandas as pd
from scipy.special import log_softmax
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.isotonic import IsotonicRegression

from histocoder.model.ngram import SHARPNESS
from histocoder.ops.linear_svm import fit_machines
from histocoder.training.svm import MAX_WEIGHTS

NUM_FOLDS, NUM_ALTERNATIVES, NUM_NEIGHBOURS = 5, 3, 3
_SHARES = np.linspace(
    0.2, 0.8, 13
)  # of random codes that are more suspect, where the share of wrong labels is bounded


def suspects(
    rows: pd.DataFrame, *, seed: int = 0, tell: Callable[[int], object] = lambda _: None
) -> pd.DataFrame:
    """Return how likely the codes of n descriptions are right, and which others may be, in the
    order of `rows`.

    These are distinct: `key` (see `description_keys`), `lang`, `codes`, a tuple, and `times`, the
    rows that each stands for. There are two descriptions and two codes at least. `tell` receives
    the number of them that a fold has.

    Returns `doubt`, the logarithm of how suspect codes are; `conf`, the probability that they are
    right (see `_wrong`); the `probs` of each; `alt` and `alt_probs`, others, the most probable
    first, and theirs.
    """
    pairs = rows["codes"].reset_index(drop=True).explode()
    of_row, (classes, names) = pairs.index.to_numpy(), pd.factorize(pairs, sort=True)
    texts = rows["lang"] + " " + rows["key"] if rows["lang"].nunique() > 1 else rows["key"]
    most = MAX_WEIGHTS // len(names)
    features = TfidfVectorizer(
        analyzer="char_wb", ngram_range=(1, 5), sublinear_tf=True, max_features=most
    )
    features, random = features.fit_transform(texts), np.random.default_rng(seed)
    groups, keys = pd.factorize(rows["key"])
    fold = random.permutation(len(keys))[groups] % NUM_FOLDS
    doubts, probs, random_classes = (
        np.empty((2, len(pairs))),
        np.empty(len(pairs)),
        random.permutation(classes),
    )
    others = np.empty((2, len(rows), min(NUM_ALTERNATIVES, len(names) - 1)), dtype=object)
    for number in np.unique(fold):
        held, is_held = np.flatnonzero(fold == number), fold[of_row] == number
        train, place = fold != number, np.cumsum(fold != number)[of_row[~is_held]] - 1
        ones = np.ones(train.sum())
        fitted, coefficients, bias = fit_machines(features[train], place, classes[~is_held], ones)
        decisions = np.full((len(held), len(names)), -1.0, dtype=np.float32)
        decisions[:, fitted] = features[held].astype(np.float32) @ coefficients + bias
        own = np.searchsorted(held, of_row[is_held])
        logs = log_softmax(SHARPNESS * decisions, axis=1)
        for doubt, asked in zip(doubts, (classes, random_classes), strict=True):
            doubt[is_held] = _doubts(decisions, logs, own, asked[is_held])
        probs[is_held] = np.exp(logs[own, classes[is_held]])
        logs[own, classes[is_held]] = -np.inf
        best = np.argsort(-logs, axis=1)[:, : others.shape[2]]
        others[:, held] = names.to_numpy()[best], np.exp(np.take_along_axis(logs, best, axis=1))
        tell(len(held))
    # rows of the same description with other codes speak against these, and those with the same for
    # them
    total, times = (
        rows.groupby(["key", "lang"])["times"].transform("sum").to_numpy(),
        rows["times"].to_numpy(),
    )
    doubts += np.log([(1 + total - times) / times, total])[:, of_row]
    doubt, of_random = (pd.Series(one).groupby(of_row).max().to_numpy() for one in doubts)
    found = {"doubt": doubt, "conf": 1 - _wrong(doubt, of_random)}
    found |= {"probs": pd.Series(probs).groupby(of_row).agg(tuple).to_numpy()}
    found |= {
        name: [*map(tuple, values)]
        for name, values in zip(("alt", "alt_probs"), others, strict=True)
    }
    return pd.DataFrame(found, index=rows.index)


def neighbours(rows: pd.DataFrame, of: np.ndarray) -> list[np.ndarray]:
    """Return the indices of the descriptions with other codes that are nearest to some of n rows,
    by cosine.
    """
    features, codes = (
        TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 4)).fit_transform(rows["key"]),
        rows["codes"],
    )
    near = [
        (features @ features[row].T).toarray()[:, 0] * (codes != codes.iloc[row]).to_numpy()
        for row in of
    ]
    best = [np.argsort(-one, kind="stable")[:NUM_NEIGHBOURS] for one in near]
    return [rows[one[rows] > 0] for one, rows in zip(near, best, strict=True)]


def _doubts(
    decisions: np.ndarray, logs: np.ndarray, rows: np.ndarray, classes: np.ndarray
) -> np.ndarray:
    """Return the logarithms of the odds against labels, times the share of rows that resemble the
    code more.
    """
    share = np.empty(len(rows))
    for one, pairs in pd.Series(np.arange(len(rows))).groupby(classes):
        less = np.searchsorted(
            np.sort(decisions[:, one]), decisions[rows[pairs], one], side="right"
        )
        share[pairs] = 1 - (less - 0.5) / len(decisions)
    own = logs[rows, classes].astype(np.float64)
    return np.log1p(1e-9 - np.exp(own)) - own + np.log(share)


def _wrong(doubt: np.ndarray, of_random: np.ndarray) -> np.ndarray:
    """Return how likely labels are wrong, of shape (n,), if wrong ones are as suspect as random
    codes.

    Errors that resemble the right code are less suspect, and right labels that nothing explains are
    as suspect. There are no more wrong labels than labels above a doubt, for each random code above
    it, as in Storey's (2002) estimate of false discoveries; isotonic regression smooths their share
    at each doubt.
    """
    share_wrong = min(
        (doubt > np.quantile(of_random, 1 - share)).mean() / share for share in _SHARES
    )
    is_random, weights = (
        np.repeat(pair, len(doubt)) for pair in ([0.0, 1.0], [1.0, min(1.0, share_wrong)])
    )
    regression = IsotonicRegression(y_min=0, y_max=0.5).fit(
        np.concatenate([doubt, of_random]), is_random, weights
    )
    both = regression.predict(
        doubt
    )  # x / (1 + x), where x is the number of wrong labels for each label
    return both / (1 - both)
