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

import numpy as np
import pandas as pd

from histocoder.data.example_writer import EXAMPLES_FILE, EXAMPLES_VERSION
from histocoder.data.examples import SEEN, VAL, Examples
from histocoder.data.labels import LabelRules
from histocoder.data.prepare import SPLIT_FILES
from histocoder.data.prepared_folder import read_prepared
from histocoder.evaluation.metrics import (
    BaselineMetrics,
    Difference,
    Differences,
    ExactMatchScores,
    MethodScores,
    Shares,
)
from histocoder.evaluation.scores import code_sets, score_sets
from histocoder.files import sha256
from histocoder.inference.coder import Coder
from histocoder.inference.known import Known, files_of
from histocoder.text.normalize import description_keys

MAX_ROWS = 200_000  # of training data that the linear model is fitted on
AFTER_TRAINING = 6_000_000  # training rows × codes up to which it is fitted unasked, within seconds
MIN_TEXTS_FOR_INTERVAL = 30  # distinct descriptions
_NUM_RESAMPLES = 1000


def run_rows(run: Path, coder: Coder, *splits: str) -> Examples | None:
    """Return the rows of some splits of a run's data: its `examples.arrow`, or the tables of an
    earlier version's run.

    None where the folder has none of them.
    """
    examples_file = run / EXAMPLES_FILE
    record = read_prepared(run).get("examples") or {}
    is_current = record and record["made_from"]["version"] == EXAMPLES_VERSION
    if is_current and examples_file.is_file() and sha256(examples_file) == record["sha256"]:
        sources = record["made_from"]["sources"]
        names = [name for name in splits if name in sources]
        if VAL in splits or SEEN in sources:
            names.append(SEEN)
        return Examples.open(examples_file, *names)

    # a run of an earlier version
    paths = []
    for name in splits:
        if (run / SPLIT_FILES[name]).is_file():
            paths.append(run / SPLIT_FILES[name])
    if not paths:
        return None
    return files_of(coder, *paths, rules=LabelRules(allow_short=True, drop_bad=True)).read()


class Baselines:
    """Exact match and a linear model, to be compared with a model on the n `examples` that it is
    evaluated on.

    `known` is an empty dictionary, whose settings say what exact match is; `max_size` are the
    training rows × codes up to which the linear model is fitted, 0: it is not. `texts_seen` and
    `codes_seen` are the numbers of training rows with each description of `examples`, by its key,
    and with each code.
    """

    def __init__(self, examples: Examples, known: Known, *, max_size: float) -> None:
        self._examples = examples
        self._known = known
        self._max_size = max_size
        self._known_keys = set(known.keys(examples.texts))
        self._text_keys = set(description_keys(examples.texts))

        # what `add` has read of the training data
        self._chunks: list[Examples] = []
        self._num_rows = 0
        self.texts_seen: Counter[str] = Counter()
        self.codes_seen: Counter[str] = Counter()

    def add(self, chunk: Examples) -> None:
        """Count training rows, and fit exact match to them."""
        keys = description_keys(chunk.texts)
        self.texts_seen.update(key for key in keys if key in self._text_keys)
        self.codes_seen.update(itertools.chain.from_iterable(code_sets(chunk.codes)))
        self._known.add(chunk, only=self._known_keys)

        # more rows than it is fitted on need not be kept in memory
        self._num_rows += len(chunk)
        if self._num_rows > MAX_ROWS:
            self._chunks.clear()
        elif self._max_size > 0:
            self._chunks.append(chunk)

    def compare(self, right: np.ndarray) -> BaselineMetrics:
        """Compare both methods with a model, which is exactly right where `right`, of shape (n,),
        is True.
        """
        texts = self._examples.texts
        is_answered = np.zeros(len(texts), dtype=bool)
        codes: list[Sequence[str]] = [()] * len(texts)
        for row, answer in enumerate(self._known.find(texts, self._examples.langs)):
            if answer is not None:
                is_answered[row] = True
                codes[row] = answer.codes
        exact_right = is_answered & self._is_right(codes)
        exact_match = ExactMatchScores(
            **vars(_method_scores(right, exact_right, texts)),
            answered=float(is_answered.mean()),
            answered_right=None,
        )
        if is_answered.any():
            exact_match.answered_right = float(exact_right[is_answered].mean())

        # beside a linear model, where the training data are few enough
        metrics = BaselineMetrics(shares(right, texts), exact_match, notice=self._notice())
        if metrics.notice is None:
            linear = linear_codes(Examples.join(self._chunks), self._examples)
            metrics.svc = _method_scores(right, self._is_right(linear), texts)
        return metrics

    def _is_right(self, codes: Iterable[Sequence[str]]) -> np.ndarray:
        truth = code_sets(self._examples.codes)
        return score_sets(truth, code_sets(codes))["accuracy"].to_numpy()

    def attribute(self, name: str) -> np.ndarray | None:
        """Return the categories of an attribute that a linear model gives each of the n rows; None
        without one.
        """
        if self._notice() is not None:
            return None
        train = Examples.join(self._chunks)
        if name not in train.attributes:
            return None
        labels = pd.DataFrame({name: train.attributes[name].to_pylist()}, dtype=object)
        is_known = labels[name].notna()
        known = Examples.of(train.texts, train.langs, labels).take(np.flatnonzero(is_known))
        categories = [category for (category,) in linear_codes(known, self._examples)]
        return np.array(categories, dtype=object)

    def _notice(self) -> str | None:
        """Return why there is no linear model."""
        if self._max_size == 0:
            return "histocoder evaluate --baselines also compares with a linear model."
        if self._num_rows > MAX_ROWS or self._num_rows * len(self.codes_seen) > self._max_size:
            return (
                f"No linear model is fitted, because {self._num_rows:,} rows with "
                f"{len(self.codes_seen):,} codes take long; histocoder evaluate --baselines fits "
                f"one to up to {MAX_ROWS:,} rows."
            )
        return None


def _method_scores(right: np.ndarray, method_right: np.ndarray, texts: list[str]) -> MethodScores:
    difference = difference_interval(right, method_right, texts)
    return MethodScores(**vars(shares(method_right, texts)), difference=difference)


def linear_codes(train: Examples, asked: Examples) -> list[tuple[str, ...]]:
    """Fit a linear model on training rows, and return the codes that it gives each of other rows.

    The language precedes a description where training rows have several.
    """
    # here, since it takes a second to import
    from sklearn.feature_extraction.text import TfidfVectorizer

    from histocoder.ops.linear_svm import MAX_PASSES, fit_machines

    texts = train.texts
    asked_texts = asked.texts
    if len(set(train.langs)) > 1:
        texts = _with_languages(train)
        asked_texts = _with_languages(asked)

    # a machine for each code; a missing code, as formatters mark it, is one of them
    codes = []
    for row in train.codes.to_numpy(dtype=object):
        codes.append(set(row) - {None})
    pairs = pd.Series(codes).explode().dropna()
    class_ids, names = pd.factorize(pairs, sort=True)
    vectorizer = TfidfVectorizer(analyzer="char_wb", ngram_range=(1, 5), sublinear_tf=True)
    features = vectorizer.fit_transform(texts)
    _, coefficients, intercepts = fit_machines(
        features,
        pairs.index.to_numpy(),
        class_ids,
        np.ones(len(codes)),
        min_passes=MAX_PASSES,
    )

    # the best code of each distinct description, and further ones whose machines are positive
    distinct, indices = np.unique(np.array(asked_texts, dtype=object), return_inverse=True)
    values = vectorizer.transform(distinct).astype(np.float32) @ coefficients + intercepts
    max_codes = max(map(len, codes))
    order = np.argsort(-values, axis=1, kind="stable")[:, :max_codes]
    is_given = np.take_along_axis(values, order, axis=1) > 0
    is_given[:, 0] = True
    answers = []
    for classes, is_answer in zip(order, is_given, strict=True):
        answers.append(tuple(names[classes[is_answer]]))
    return [answers[index] for index in indices]


def _with_languages(examples: Examples) -> list[str]:
    pairs = zip(examples.langs, examples.texts, strict=True)
    return [f"{lang} {text}" for lang, text in pairs]


def shares(right: np.ndarray, texts: list[str]) -> Shares:
    """Return the shares of rows and of distinct texts that are right."""
    by_text = pd.Series(right.astype(float)).groupby(description_keys(texts)).mean()
    return Shares(rows=float(right.mean()), texts=float(by_text.mean()))


def difference_interval(right: np.ndarray, reference: np.ndarray, texts: list[str]) -> Differences:
    """Return the difference of two methods' shares of right rows and of right distinct texts, with
    95 % intervals.

    `right`, `reference` and `texts`, the descriptions, are of shape (n,). Rows of one text are drawn
    together: the intervals are the percentiles of a bootstrap over distinct texts (Efron and
    Tibshirani 1993, An Introduction to the Bootstrap), which fewer than `MIN_TEXTS_FOR_INTERVAL`
    distinct texts can't give.
    """
    gain = pd.Series(right.astype(float) - reference.astype(float))
    by_text = gain.groupby(description_keys(texts)).agg(["sum", "size", "mean"])
    total, size, mean = by_text.to_numpy().T
    num_texts = len(by_text)
    rows = Difference(float(gain.mean()), low=None, high=None)
    distinct = Difference(float(mean.mean()), low=None, high=None)
    if num_texts < MIN_TEXTS_FOR_INTERVAL:
        return Differences(rows, distinct)

    # a text of many rows weighs as much as these in the rows, and as one in the texts
    random = np.random.default_rng(0)
    row_draws = np.empty(_NUM_RESAMPLES)
    text_draws = np.empty(_NUM_RESAMPLES)
    for i in range(_NUM_RESAMPLES):
        times = np.bincount(random.integers(num_texts, size=num_texts), minlength=num_texts)
        row_draws[i] = times @ total / (times @ size)
        text_draws[i] = times @ mean / num_texts
    rows.low, rows.high = np.percentile(row_draws, [2.5, 97.5]).tolist()
    distinct.low, distinct.high = np.percentile(text_draws, [2.5, 97.5]).tolist()
    return Differences(rows, distinct)
