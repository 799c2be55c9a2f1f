"""Compare a model with two simple methods fitted on the same training rows, and with the model that
it corrects.

Exact match answers a description with the codes that it has in the training data. The linear model
is one linear support vector machine for each code over TF-IDF of character 1-5-grams; a description
gets the code with the highest decision value, and others whose value is positive where training
rows have several codes. (A class for each set of codes, instead, never gives a set that training
rows do not have: it was right on 73.5 % of the sample data's rows, this on 78.2 %.)
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from histocoder.data.example_writer import EXAMPLES_FILE, EXAMPLES_VERSION
from histocoder.data.examples import SEEN, VAL, Examples
from histocoder.data.labels import LabelRules
from histocoder.data.prepare import SPLIT_FILES
from histocoder.data.prepared_folder import read_prepared
from histocoder.evaluation.scores import code_sets, score_sets
from histocoder.files import sha256
from histocoder.inference.coder import Coder
from histocoder.inference.known import Known, files_of
from histocoder.text.normalize import description_keys

MAX_ROWS = 200_000  # maximum number of training rows that the linear model is fitted on
AFTER_TRAINING = 6_000_000  # training rows × codes up to which it is fitted unasked, within seconds
FEWEST_TEXTS = 30  # distinct descriptions without which no interval is given
Differences: TypeAlias = dict[str, dict[str, float | None]]  # see `difference_interval`
_RESAMPLES = 1000


def run_rows(run: Path, coder: Coder, *splits: str) -> Examples | None:
    """Return the rows of some splits of a run's data: its `examples.arrow`, or the tables of an
    earlier version's run.

    None where the folder has none of them.
    """
    record, path = read_prepared(run).get("examples") or {}, run / EXAMPLES_FILE
    is_current = record and record["made_from"]["version"] == EXAMPLES_VERSION
    if is_current and path.is_file() and sha256(path) == record["sha256"]:
        sources = {*record["made_from"]["sources"], *((SEEN,) if VAL in splits else ())}
        return Examples.open(path, *(name for name in (*splits, SEEN) if name in sources))
    paths = tuple(path for name in splits if (path := run / SPLIT_FILES[name]).is_file())
    rules = LabelRules(allow_short=True, drop_bad=True)
    return files_of(coder, *paths, rules=rules).read() if paths else None


class Baselines:
    """Exact match and a linear model, to be compared with a model on the n `examples` that it is
    evaluated on.

    `known` is an empty dictionary, whose settings say what exact match is; `max_size` are the
    training rows × codes up to which the linear model is fitted, 0: it is not. `texts_seen` and
    `codes_seen` are the numbers of training rows with each description of `examples`, by its key,
    and with each code.
    """

    def __init__(self, examples: Examples, known: Known, *, max_size: float) -> None:
        self._examples, self._known, self._max_size = examples, known, max_size
        self._asked = set(known.keys(examples.texts))
        self._keys = set(description_keys(examples.texts))
        self._parts: list[Examples] = []
        self._num_rows = 0
        self.texts_seen: Counter[str] = Counter()
        self.codes_seen: Counter[str] = Counter()

    def add(self, chunk: Examples) -> None:
        """Count training rows, and fit exact match to them."""
        self.texts_seen.update(key for key in description_keys(chunk.texts) if key in self._keys)
        self.codes_seen.update(itertools.chain.from_iterable(code_sets(chunk.codes)))
        self._known.add(chunk, only=self._asked)
        self._num_rows += len(chunk)
        if self._num_rows > MAX_ROWS:
            self._parts.clear()
        elif self._max_size > 0:
            self._parts.append(chunk)

    def compare(self, right: np.ndarray) -> dict[str, Any]:
        """Compare both methods with a model, which is exactly right where `right`, of shape (n,),
        is True.

        Return plain values, for JSON: `model`, `exact_match` and `svc`, each with its share of
        `rows` and of distinct `texts` that are exactly right. The methods have their `difference`
        (model - method) in both (see `difference_interval`). `exact_match` has the shares of rows
        that are `answered`, and of these that are right. Where there is no `svc`, `notice` says
        why.
        """
        texts, truth = self._examples.texts, code_sets(self._examples.codes)

        def is_right(codes: Iterable[Sequence[str]]) -> np.ndarray:
            return score_sets(truth, code_sets(codes))["accuracy"].to_numpy()

        def compared(method: np.ndarray) -> dict[str, Any]:
            return {
                **shares(method, texts),
                "difference": difference_interval(right, method, texts),
            }

        answers = self._known.find(texts, self._examples.langs)
        answered = np.array([answer is not None for answer in answers])
        exact = answered & is_right(answer.codes if answer else () for answer in answers)
        answered_right = float(exact[answered].mean()) if answered.any() else None
        found = compared(exact) | {
            "answered": float(answered.mean()),
            "answered_right": answered_right,
        }
        result: dict[str, Any] = {"model": shares(right, texts), "exact_match": found}
        if notice := self._notice():
            return {**result, "notice": notice}
        return {
            **result,
            "svc": compared(is_right(linear_codes(Examples.join(self._parts), self._examples))),
        }

    def attribute(self, name: str) -> np.ndarray | None:
        """Return the categories of an attribute that a linear model gives each of the n rows; None
        without one.
        """
        train = Examples.join(self._parts) if self._notice() is None else None
        if train is None or name not in train.attributes:
            return None
        labels = pd.DataFrame({name: train.attributes[name].to_pylist()}, dtype=object)
        known = Examples.of(train.texts, train.langs, labels).take(
            np.flatnonzero(labels[name].notna())
        )
        return np.array(
            [category for (category,) in linear_codes(known, self._examples)], dtype=object
        )

    def _notice(self) -> str | None:
        """Return why there is no linear model."""
        if self._max_size == 0:
            return "histocoder evaluate --baselines also compares with a linear model."
        if self._num_rows > MAX_ROWS or self._num_rows * len(self.codes_seen) > self._max_size:
            return (
                f"No linear model is fitted, because {self._num_rows:,} rows with "
                f"{len(self.codes_seen):,} codes take "
                f"long; histocoder evaluate --baselines fits one to up to {MAX_ROWS:,} rows."
            )
        return None


def linear_codes(train: Examples, asked: Examples) -> list[tuple[str, ...]]:
    """Fit a linear model on training rows, and return the codes that it gives each of other rows.

    The language precedes a description where training rows have several.
    """
    from sklearn.feature_extraction.text import (
        TfidfVectorizer,
    )  # here, since it takes a second to import

    from histocoder.ops.linear_svm import MAX_PASSES, fit_machines

    texts, others = train.texts, asked.texts
    if len(set(train.langs)) > 1:
        texts, others = (
            list(map(" ".join, zip(one.langs, one.texts, strict=True))) for one in (train, asked)
        )
    distinct, indices = np.unique(np.array(others, dtype=object), return_inverse=True)
    # a missing code, as formatters mark it, is one of them
    codes = [
        {code for code in row if code is not None} for row in train.codes.to_numpy(dtype=object)
    ]
    pairs = pd.Series(codes).explode().dropna()
    class_ids, names = pd.factorize(pairs, sort=True)
    vectorizer = TfidfVectorizer(analyzer="char_wb", ngram_range=(1, 5), sublinear_tf=True)
    features = vectorizer.fit_transform(texts)
    rows, weights = pairs.index.to_numpy(), np.ones(len(codes))
    _, coefficients, intercepts = fit_machines(
        features, rows, class_ids, weights, min_passes=MAX_PASSES
    )
    values = vectorizer.transform(distinct).astype(np.float32) @ coefficients + intercepts
    order = np.argsort(-values, axis=1, kind="stable")[:, : max(map(len, codes))]
    given = np.take_along_axis(values, order, axis=1) > 0
    given[:, 0] = True
    sets = [tuple(names[order[row, given[row]]]) for row in range(len(distinct))]
    return [sets[row] for row in indices]


def shares(right: np.ndarray, texts: list[str]) -> dict[str, float]:
    """Return the shares of `rows` and of distinct `texts` that are right."""
    by_text = pd.Series(right.astype(float)).groupby(description_keys(texts)).mean()
    return {"rows": float(right.mean()), "texts": float(by_text.mean())}


def difference_interval(right: np.ndarray, other: np.ndarray, texts: list[str]) -> Differences:
    """Return the difference of two methods' shares of right rows and of right distinct texts, with
    95 % intervals.

    `right`, `other` and `texts`, the descriptions, are of shape (n,). Rows of one text are drawn
    together: the intervals are the percentiles of a bootstrap over distinct texts (Efron and
    Tibshirani 1993, An Introduction to the Bootstrap), which fewer than `FEWEST_TEXTS` distinct
    texts can't give. Return `rows` and `texts`, each with `mean`, `low` and `high`, both None where
    there are too few.
    """
    gain = right.astype(float) - other.astype(float)
    by_text = (
        pd.Series(gain).groupby(description_keys(texts)).agg(["sum", "size", "mean"]).to_numpy()
    )
    total, size, mean = by_text.T
    random, num_texts = np.random.default_rng(0), len(by_text)
    if num_texts < FEWEST_TEXTS:
        means = {"rows": float(gain.mean()), "texts": float(mean.mean())}
        return {name: {"mean": value, "low": None, "high": None} for name, value in means.items()}
    draws = np.empty((_RESAMPLES, 2))
    for i in range(_RESAMPLES):
        times = np.bincount(random.integers(num_texts, size=num_texts), minlength=num_texts)
        draws[i] = times @ total / (times @ size), times @ mean / num_texts
    low, high = np.percentile(draws, [2.5, 97.5], axis=0)
    return {
        name: {"mean": float(value), "low": float(low[i]), "high": float(high[i])}
        for i, (name, value) in enumerate({"rows": gain.mean(), "texts": mean.mean()}.items())
    }
