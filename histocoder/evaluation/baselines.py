"""Accuracy of two simple methods, fitted on the same training rows, beside that of a model.

Exact match answers a description with the codes that it has in the training data. The linear model is one linear
support vector machine for each code over TF-IDF of character 1-5-grams; a description gets the code with the highest
decision value, and others whose value is positive where training rows have several codes. (A class for each set of
codes, instead, never gives a set that training rows do not have: it was right on 73.5 % of the sample data's rows,
this on 78.2 %, in a quarter of the time.)
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pandas as pd
from sklearn.exceptions import ConvergenceWarning
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.svm import LinearSVC
from tqdm import tqdm

from histocoder.data.examples import Examples
from histocoder.evaluation.scores import code_sets, score_sets
from histocoder.inference.known import Known

RIGHT_COL = "right"
"""The column of `Evaluation.rows` that says where a model is right."""
MAX_ROWS = 200_000
"""Training rows that the linear model is fitted on at most."""
AFTER_TRAINING = 6_000_000
"""Training rows × codes at most where nobody asked for the linear model: 20 to 30 seconds on one core."""
_RESAMPLES = 1000
_COMMAND = "histocoder evaluate --baselines"


class Baselines:
    """Exact match and a linear model, to be compared with a model on the rows that it is evaluated on.

    Parameters
    ----------
    examples : Examples
        Of n rows, with their true codes.
    known : Known
        An empty dictionary, which says what exact match is.
    max_size : float
        Training rows × codes up to which the linear model is fitted; 0: it is not.

    Examples
    --------
    baselines = Baselines(examples, Known(), max_size=AFTER_TRAINING)
    for chunk in baselines.watch(train_files.chunks()): ...
    found = baselines.compare(right)
    """

    def __init__(self, examples: Examples, known: Known, *, max_size: float) -> None:
        self._examples, self._known, self._max_size = examples, known, max_size
        self._asked = {known.key(text, lang) for text, lang in zip(examples.texts, examples.langs, strict=True)}
        self._parts: list[Examples] = []
        self._num_rows = 0

    def watch(self, chunks: Iterable[Examples]) -> Iterator[Examples]:
        """Pass on chunks of training rows, and take them in."""
        for chunk in chunks:
            self._known.add(chunk, only=self._asked)
            self._num_rows += len(chunk)
            if self._num_rows > MAX_ROWS:
                self._parts.clear()
            elif self._max_size > 0:
                self._parts.append(chunk)
            yield chunk

    def compare(self, right: np.ndarray) -> dict[str, Any]:
        """Compare both methods with a model.

        Parameters
        ----------
        right : ndarray of bool, of shape (n,)
            Where the model gives exactly the true set of codes.

        Returns
        -------
        dict
            Plain values, for JSON: `model`, `exact_match` and `svc`, each with its share of `rows` and of
            distinct `texts` that are exactly right. The methods have their `difference` (model - method) in both, with
            a 95 % interval, `low` to `high`: the bootstrap's percentiles over distinct descriptions. `exact_match` has
            the shares of rows that are `answered`, and of these that are right. Where there is no `svc`, `notice` says
            why.
        """
        examples, truth = self._examples, code_sets(self._examples.codes)
        answers = [self._known.find(text, lang) for text, lang in zip(examples.texts, examples.langs, strict=True)]
        answered = np.array([answer is not None for answer in answers])
        exact = answered & self._is_right(truth, [answer.codes if answer else () for answer in answers])
        found: dict[str, Any] = {"model": shares(right, self._examples.texts)}
        found["exact_match"] = {
            **self._compared(right, exact),
            "answered": float(answered.mean()),
            "answered_right": float(exact[answered].mean()) if answered.any() else None,
        }
        if notice := self._notice():
            return {**found, "notice": notice}
        predicted = linear_codes(Examples.join(self._parts), examples)
        return {**found, "svc": self._compared(right, self._is_right(truth, predicted))}

    def _notice(self) -> str | None:
        """Return why there is no linear model."""
        if self._num_rows > MAX_ROWS:
            return f"The linear model is left out: there are more than {MAX_ROWS:,} training rows."
        if self._max_size == 0:
            return f"{_COMMAND} compares with a linear model as well."
        num_codes = len(set().union(*(_codes_of_rows(part)[1] for part in self._parts)))
        if self._num_rows * num_codes > self._max_size:
            return (
                f"The linear model is left out, since with {self._num_rows:,} rows and {num_codes:,} codes it takes "
                f"more than half a minute; {_COMMAND} compares with it."
            )
        return None

    def _is_right(self, truth: pd.DataFrame, predicted: list[tuple[str, ...]]) -> np.ndarray:
        width = max(map(len, predicted), default=0)
        codes = np.full((len(predicted), width), None, dtype=object)
        for row, given in enumerate(predicted):
            codes[row, : len(given)] = given
        return score_sets(truth, code_sets(codes), len(predicted))["accuracy"].to_numpy()

    def _compared(self, right: np.ndarray, method: np.ndarray) -> dict[str, Any]:
        difference = difference_interval(right, method, self._examples.texts)
        return {**shares(method, self._examples.texts), "difference": difference}


def linear_codes(train: Examples, asked: Examples, *, progress: bool = True) -> list[tuple[str, ...]]:
    """Fit a linear model on training rows, and code other rows with it.

    The language stands in front of a description where training rows have several.

    Parameters
    ----------
    train, asked : Examples
        The codes of `asked` are not looked at.
    progress : bool
        Whether to show a bar, on a terminal.

    Returns
    -------
    list of tuple of str, of shape (n,)
    """
    vectorizer = TfidfVectorizer(analyzer="char_wb", ngram_range=(1, 5), sublinear_tf=True)
    with_language = len(set(train.langs)) > 1
    features = vectorizer.fit_transform(_inputs(train, with_language))
    distinct, place = np.unique(np.array(_inputs(asked, with_language), dtype=object), return_inverse=True)
    asked_features = vectorizer.transform(distinct)
    rows, codes = _codes_of_rows(train)
    index, names = pd.factorize(codes, sort=True)
    values = np.empty((len(distinct), len(names)), dtype=np.float32)
    bar = tqdm(range(len(names)), desc="linear model", unit="code", disable=None if progress else True, leave=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        for i in bar:
            has_code = np.zeros(len(train), dtype=bool)
            has_code[rows[index == i]] = True
            if has_code.all():
                values[:, i] = 1.0
            else:
                values[:, i] = LinearSVC(random_state=0).fit(features, has_code).decision_function(asked_features)
    most = int(np.bincount(rows).max())
    order = np.argsort(-values, axis=1, kind="stable")[:, :most]
    given = np.take_along_axis(values, order, axis=1) > 0
    given[:, 0] = True
    sets = [tuple(names[order[row, given[row]]]) for row in range(len(distinct))]
    return [sets[row] for row in place]


def _codes_of_rows(examples: Examples) -> tuple[np.ndarray, np.ndarray]:
    """Return each row and code that belong together; a missing code, as formatters mark it, is one of them."""
    values = examples.codes.to_numpy(dtype=object)
    present = pd.notna(values)
    return np.nonzero(present)[0], values[present]


def _inputs(examples: Examples, with_language: bool) -> list[str]:
    if not with_language:
        return examples.texts
    return [f"{lang} {text}" for text, lang in zip(examples.texts, examples.langs, strict=True)]


def shares(right: np.ndarray, texts: list[str]) -> dict[str, float]:
    """Return the shares of `rows` and of distinct `texts` that are right."""
    by_text = pd.Series(right.astype(float)).groupby(np.array(texts, dtype=object)).mean()
    return {"rows": float(right.mean()), "texts": float(by_text.mean())}


def difference_interval(right: np.ndarray, other: np.ndarray, texts: list[str]) -> dict[str, dict[str, float]]:
    """Return the difference of two methods' shares of right rows and of right distinct texts, with 95 % intervals.

    Parameters
    ----------
    right, other : ndarray of bool, of shape (n,)
    texts : list of str, of shape (n,)
        Rows of one text are drawn together: Efron and Tibshirani (1993), An Introduction to the Bootstrap.

    Returns
    -------
    dict
        `rows` and `texts`: `mean`, `low` and `high`.
    """
    gain = right.astype(float) - other.astype(float)
    by_text = pd.Series(gain).groupby(np.array(texts, dtype=object)).agg(["sum", "size", "mean"]).to_numpy()
    total, size, mean = by_text.T
    random, num_texts = np.random.default_rng(0), len(by_text)
    draws = np.empty((_RESAMPLES, 2))
    for i in range(_RESAMPLES):
        times = np.bincount(random.integers(num_texts, size=num_texts), minlength=num_texts)
        draws[i] = times @ total / (times @ size), times @ mean / num_texts
    low, high = np.percentile(draws, [2.5, 97.5], axis=0)
    return {
        name: {"mean": float(value), "low": float(low[i]), "high": float(high[i])}
        for i, (name, value) in enumerate({"rows": gain.mean(), "texts": mean.mean()}.items())
    }
