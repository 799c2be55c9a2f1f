"""Find suspect labels: codes that a model that has not seen the description takes to be others.

The model is the linear expert's, fitted to all folds of descriptions but one, in turn. A label is
the more suspect the less probable it is, and the more of the other descriptions resemble its code
more: a code all of whose descriptions are improbable, because it is rare or broad, is so compared
with itself.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.special import log_softmax
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.isotonic import IsotonicRegression
from sklearn.model_selection import GroupKFold

from histocoder.model.linear_expert import SHARPNESS
from histocoder.ops.linear_svm import MAX_WEIGHTS, fit_machines

NUM_FOLDS = 5
NUM_ALTERNATIVES = 3
NUM_NEIGHBOURS = 3
# Shares of random codes that are more suspect, where the share of wrong labels is bounded
_SHARES = np.linspace(0.2, 0.8, 13)


class Labels(NamedTuple):
    """The codes of descriptions one by one, k in all."""

    row: np.ndarray  # index of the description, of shape (k,)
    class_id: np.ndarray  # index of the code, of shape (k,)
    codes: np.ndarray  # the distinct codes in order, of shape (num_classes,)

    @classmethod
    def of(cls, rows: pd.DataFrame) -> "Labels":
        """Return the codes of rows as in `suspects`."""
        codes = rows["codes"].reset_index(drop=True).explode()
        class_id, classes = pd.factorize(codes, sort=True)
        return cls(codes.index.to_numpy(), class_id, classes.to_numpy())


class Fold(NamedTuple):
    """Descriptions, and what a model that was fitted to those of the other folds says of them."""

    rows: np.ndarray  # their indices in ascending order, of shape (m,)
    decisions: np.ndarray  # of the linear machines, of shape (m, num_classes)
    log_probs: np.ndarray  # of the classes, of shape (m, num_classes)


def suspects(
    rows: pd.DataFrame, *, seed: int = 0, on_progress: Callable[[int], object] = lambda _: None
) -> pd.DataFrame:
    """Return how likely the codes of n descriptions are right, and which others may be, in the
    order of `rows`.

    These are distinct: `key` (see `description_keys`), `lang`, `codes`, a tuple, and `times`, the
    rows that each stands for. There are two descriptions and two codes at least. `on_progress`
    receives the number of them that a fold has.

    Returns `doubt`, the logarithm of how suspect codes are; `conf`, the probability that they are
    right (see `_probability_wrong`); the `probs` of each; `alt` and `alt_probs`, others, the most
    probable first, and theirs.
    """
    labels = Labels.of(rows)
    random_ids = np.random.default_rng(seed).permutation(labels.class_id)

    # each description is judged by a model that has not seen it
    doubt = np.empty(len(labels.row))
    random_doubt = np.empty(len(labels.row))
    probs = np.empty(len(labels.row))
    num_alternatives = min(NUM_ALTERNATIVES, len(labels.codes) - 1)
    alternatives = np.empty((len(rows), num_alternatives), dtype=object)
    alternative_probs = np.empty((len(rows), num_alternatives))
    for fold in held_out_folds(rows, seed=seed):
        is_held_out = np.isin(labels.row, fold.rows)
        position = np.searchsorted(fold.rows, labels.row[is_held_out])
        own_ids = labels.class_id[is_held_out]
        doubt[is_held_out] = _doubts(fold, position, own_ids)
        random_doubt[is_held_out] = _doubts(fold, position, random_ids[is_held_out])
        probs[is_held_out] = np.exp(fold.log_probs[position, own_ids])

        # the most probable of the codes that a description does not have
        log_probs = fold.log_probs.copy()
        log_probs[position, own_ids] = -np.inf
        best = np.argsort(-log_probs, axis=1)[:, :num_alternatives]
        alternatives[fold.rows] = labels.codes[best]
        alternative_probs[fold.rows] = np.exp(np.take_along_axis(log_probs, best, axis=1))
        on_progress(len(fold.rows))

    # rows of the same description with other codes speak against these, those with the same for
    # them; random codes have none with the same
    times = rows["times"].to_numpy()
    total = rows.groupby(["key", "lang"])["times"].transform("sum").to_numpy()
    doubt += np.log((1 + total - times) / times)[labels.row]
    random_doubt += np.log(total)[labels.row]

    # a description is as suspect as the most suspect of its codes
    doubt = pd.Series(doubt).groupby(labels.row).max().to_numpy()
    random_doubt = pd.Series(random_doubt).groupby(labels.row).max().to_numpy()
    columns = {
        "doubt": doubt,
        "conf": 1 - _probability_wrong(doubt, random_doubt),
        "probs": pd.Series(probs).groupby(labels.row).agg(tuple).to_numpy(),
        "alt": list(map(tuple, alternatives)),
        "alt_probs": list(map(tuple, alternative_probs)),
    }
    return pd.DataFrame(columns, index=rows.index)


def held_out_folds(rows: pd.DataFrame, *, seed: int) -> Iterator[Fold]:
    """Fit a model to all folds of descriptions but one, in turn, and yield what it says of that
    one.

    `rows` are as in `suspects`; equal descriptions are in the same fold.
    """
    labels = Labels.of(rows)
    texts = rows["key"]
    if rows["lang"].nunique() > 1:
        texts = rows["lang"] + " " + rows["key"]
    vectorizer = TfidfVectorizer(
        analyzer="char_wb",
        ngram_range=(1, 5),
        sublinear_tf=True,
        max_features=MAX_WEIGHTS // len(labels.codes),
    )
    features = vectorizer.fit_transform(texts)

    num_folds = min(NUM_FOLDS, rows["key"].nunique())
    folds = GroupKFold(num_folds, shuffle=True, random_state=seed)
    for train, held_out in folds.split(features, groups=rows["key"]):
        is_trained = np.isin(labels.row, train)
        fitted_ids, coefficients, bias = fit_machines(
            features[train],
            np.searchsorted(train, labels.row[is_trained]),
            labels.class_id[is_trained],
            np.ones(len(train)),
        )

        # a code that no other fold has is improbable
        decisions = np.full((len(held_out), len(labels.codes)), -1.0, dtype=np.float32)
        decisions[:, fitted_ids] = features[held_out].astype(np.float32) @ coefficients + bias
        yield Fold(held_out, decisions, log_softmax(SHARPNESS * decisions, axis=1))


def nearest_with_other_codes(rows: pd.DataFrame, indices: np.ndarray) -> list[np.ndarray]:
    """Return the indices of the descriptions with other codes that are nearest to some of n rows,
    by cosine.
    """
    vectorizer = TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 4))
    features = vectorizer.fit_transform(rows["key"])
    codes = rows["codes"]
    nearest = []
    for index in indices:
        cosines = (features @ features[index].T).toarray()[:, 0]
        cosines *= (codes != codes.iloc[index]).to_numpy()
        best = np.argsort(-cosines, kind="stable")[:NUM_NEIGHBOURS]
        nearest.append(best[cosines[best] > 0])
    return nearest


def _doubts(fold: Fold, position: np.ndarray, class_ids: np.ndarray) -> np.ndarray:
    """Return the logarithms of the odds against labels, times the share of a fold's rows that
    resemble the code more.

    Labels are of the rows at some positions in the fold, of shape (k,), and of classes (k,).
    """
    share = np.empty(len(position))
    for class_id in np.unique(class_ids):
        is_own = class_ids == class_id
        decisions = fold.decisions[:, class_id]
        rank = np.searchsorted(np.sort(decisions), decisions[position[is_own]], side="right")
        share[is_own] = 1 - (rank - 0.5) / len(decisions)
    log_probs = fold.log_probs[position, class_ids].astype(np.float64)
    return np.log1p(1e-9 - np.exp(log_probs)) - log_probs + np.log(share)


def _probability_wrong(doubt: np.ndarray, random_doubt: np.ndarray) -> np.ndarray:
    """Return how likely labels are wrong, of shape (n,), if wrong ones are as suspect as random
    codes.

    Errors that resemble the right code are less suspect, and right labels that nothing explains are
    as suspect. There are no more wrong labels than labels above a doubt, for each random code above
    it, as in Storey's (2002) estimate of false discoveries; isotonic regression smooths their share
    at each doubt.
    """
    thresholds = np.quantile(random_doubt, 1 - _SHARES)
    share_wrong = min(1.0, ((doubt[:, None] > thresholds).mean(0) / _SHARES).min())

    # with x wrong labels for each label, regression predicts x / (1 + x)
    regression = IsotonicRegression(y_min=0, y_max=0.5).fit(
        np.concatenate([doubt, random_doubt]),
        np.repeat([0.0, 1.0], len(doubt)),
        np.repeat([1.0, share_wrong], len(doubt)),
    )
    share = regression.predict(doubt)
    return share / (1 - share)
