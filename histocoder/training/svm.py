"""Fit the linear expert: a support vector machine for each class, on TF-IDF of the n-grams of descriptions."""

import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import numpy as np
import torch
from scipy.sparse import csr_matrix
from sklearn.feature_extraction.text import TfidfTransformer
from sklearn.preprocessing import normalize
from sklearn.svm import LinearSVC

from histocoder.data.dataset import OccupationDataset
from histocoder.formatters.tokenizers import lower_characters
from histocoder.model.ngram import NGRAM_WEIGHTS, LinearExpert, linear_ngrams

MAX_COST = 12_000_000  # rows times classes up to which each machine is fitted to all rows: 35 s of one core
MAX_ROWS = 200_000  # up to which a large table has an expert: as many of 500 classes took 184 s on two cores
NUM_RIVALS, NUM_OTHERS = 60, 500  # in a large table: rival classes of a row, and random negatives of a machine
MAX_WEIGHTS = 1 << 26  # weights of an expert at most, 128 MB; the n-grams of fewest descriptions are left out
MAX_ATTRIBUTE_WEIGHTS = 1 << 24  # those of an expert on attributes, which has fewer outputs, and needs more n-grams
_ROWS_AT_ONCE = 2048
_Machines: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray]


def fit_linear_expert(data: OccupationDataset, *, num_classes: int) -> LinearExpert | None:
    """Fit linear support vector machines, one against the rest, to TF-IDF of the n-grams of descriptions.

    With many rows and classes, each machine is fitted to the rows of its class, to those that resemble them most, and
    to a sample of the others, as Slice (Jain et al. 2019) chooses negative examples. Noise is left out of the data.
    Returns None if fitting would take too long (`MAX_COST`, `MAX_ROWS`), or there are fewer than two codes.
    """
    rows, class_ids = data.labels()
    if len(np.unique(class_ids)) < 2 or (len(rows) * num_classes > MAX_COST and len(data) > MAX_ROWS):
        return None
    return _expert(data, [(rows, class_ids)], [num_classes], max_weights=MAX_WEIGHTS)


def fit_attribute_expert(data: OccupationDataset) -> LinearExpert | None:
    """Fit such machines to the attributes; None if there are none, or too many rows."""
    sizes = [1 + len(labels) for labels in data.attributes.values()]
    if not sizes or len(data) > MAX_ROWS:
        return None
    return _expert(data, data.attribute_labels(), sizes, max_weights=MAX_ATTRIBUTE_WEIGHTS)


def _expert(
    data: OccupationDataset, labels: list[tuple[np.ndarray, np.ndarray]], sizes: list[int], *, max_weights: int
) -> LinearExpert:
    """Fit an expert whose outputs are those of several tasks: rows with their classes, of which there are `sizes`."""
    buckets, weights, counts = _ngram_counts(data, max_features=max_weights // sum(sizes))
    tfidf = TfidfTransformer(sublinear_tf=True).fit(counts)
    tfidf.idf_ = tfidf.idf_ * weights
    features = tfidf.transform(counts).astype(np.float64)  # as liblinear computes
    expert = LinearExpert(len(buckets), sum(sizes))
    expert.buckets.copy_(torch.from_numpy(buckets))
    expert.idf.copy_(torch.from_numpy(tfidf.idf_))
    expert.bias.fill_(-1.0)  # for codes that only the key has
    for (rows, class_ids), size, first in zip(labels, sizes, np.cumsum([0, *sizes]), strict=False):
        labelled, index = np.unique(rows, return_inverse=True)
        fit = fit_to_rivals if len(rows) * size > MAX_COST else fit_to_all
        classes, coefficients, intercepts = fit(features[labelled], index, class_ids, data.weights[labelled])
        expert.weight[:, first + classes] = torch.from_numpy(coefficients.T).half()
        expert.bias[first + classes] = torch.from_numpy(intercepts).float()
    return expert


def _ngram_counts(data: OccupationDataset, *, max_features: int) -> tuple[np.ndarray, np.ndarray, csr_matrix]:
    """Count the n-grams that most rows have.

    Returns their sorted hashes, their weights, and their counts, of shape (rows, n-grams).
    """
    parts = []
    for start in range(0, len(data), _ROWS_AT_ONCE):
        texts = data.examples.inputs(np.arange(start, min(start + _ROWS_AT_ONCE, len(data))))
        ngrams = linear_ngrams(torch.from_numpy(lower_characters(texts))).numpy()
        rows, at, kinds = (ngrams >= 0).nonzero()
        parts.append((start + rows, ngrams[rows, at, kinds], kinds))
    row, bucket, kind = (np.concatenate(part) for part in zip(*parts, strict=True))
    buckets, column = np.unique(bucket, return_inverse=True)
    weights = np.empty(len(buckets))
    weights[column] = np.array(NGRAM_WEIGHTS)[kind]
    counts = csr_matrix((np.ones(len(row), np.float32), (row, column)), shape=(len(data), len(buckets)))
    if len(buckets) <= max_features:
        return buckets, weights, counts
    num_rows = np.bincount(counts.indices, minlength=len(buckets))
    kept = np.sort(np.argsort(-num_rows, kind="stable")[:max_features])
    return buckets[kept], weights[kept], counts[:, kept]


def fit_to_all(features: csr_matrix, rows: np.ndarray, class_ids: np.ndarray, weights: np.ndarray) -> _Machines:
    """Fit each class's machine to all rows; a row with several classes is an example of each of them.

    Returns classes, coefficients of shape (num_classes, num_features), and intercepts.
    """
    classes, num_rows = np.unique(class_ids), features.shape[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # on many classes, as if they were numbers to regress on
        if num_rows == len(rows) and len(classes) > 2:
            machine = LinearSVC(tol=0.1, random_state=0).fit(features, class_ids, sample_weight=weights)
            return classes, machine.coef_, machine.intercept_
        own = [np.isin(np.arange(num_rows), rows[class_ids == each]) for each in classes]
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            found = list(pool.map(lambda is_one: _fit_one(features, is_one, weights), own))
    coefficients, intercepts = zip(*found, strict=True)
    return classes, np.stack(coefficients), np.array(intercepts)


def fit_to_rivals(features: csr_matrix, rows: np.ndarray, class_ids: np.ndarray, weights: np.ndarray) -> _Machines:
    """Fit each machine to the rows of its class, to those whose rival it is, and to some others.

    A row's rivals are the `NUM_RIVALS` classes other than its own whose centroids are nearest to it.
    """
    classes, class_index = np.unique(class_ids, return_inverse=True)
    belongs = csr_matrix((np.ones(len(rows), np.float32), (rows, class_index)), shape=(features.shape[0], len(classes)))
    centroids = normalize(belongs.T @ features).T
    num_rivals = min(NUM_RIVALS, len(classes) - 1)
    rivals = []
    for start in range(0, features.shape[0], _ROWS_AT_ONCE):
        some = slice(start, start + _ROWS_AT_ONCE)
        nearness = (features[some] @ centroids).toarray()
        nearness[belongs[some].nonzero()] = -1.0
        rivals.append(np.argpartition(-nearness, num_rivals - 1, axis=1)[:, :num_rivals].astype(np.int32))
    rival = np.concatenate(rivals).ravel()
    order = np.argsort(rival, kind="stable")
    bounds = np.searchsorted(rival[order], np.arange(len(classes) + 1))
    examples = belongs.tocsc()
    coefficients = np.empty((len(classes), features.shape[1]), np.float16)
    intercepts = np.empty(len(classes))

    def fit(number: int) -> None:
        own = examples.indices[examples.indptr[number] : examples.indptr[number + 1]]
        others = np.random.default_rng(number).integers(0, features.shape[0], NUM_OTHERS)
        alike = order[bounds[number] : bounds[number + 1]] // num_rivals
        against = np.setdiff1d(np.concatenate([alike, others]), own)
        is_own = np.arange(len(own) + len(against)) < len(own)
        chosen = np.concatenate([own, against])
        coefficients[number], intercepts[number] = _fit_one(features[chosen], is_own, weights[chosen])

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(fit, range(len(classes))))  # raises the errors of the threads
    return classes, coefficients, intercepts


def _fit_one(features: csr_matrix, is_one: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, float]:
    """Fit the machine of one class; return its coefficients and its intercept."""
    if is_one.all():
        return np.zeros(features.shape[1]), 1.0
    machine = LinearSVC(tol=0.1, random_state=0).fit(features, is_one, sample_weight=weights)
    return machine.coef_[0], machine.intercept_[0]
