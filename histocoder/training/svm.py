"""Fit the linear expert: a support vector machine for each class, on TF-IDF of the n-grams of
descriptions.
"""

import numpy as np
import torch
from scipy.sparse import csr_matrix
from sklearn.feature_extraction.text import TfidfTransformer

from histocoder.data.dataset import OccupationDataset
from histocoder.log import log
from histocoder.model.linear_expert import NGRAM_WEIGHTS, LinearExpert, linear_ngrams
from histocoder.ops import kernels
from histocoder.ops.linear_svm import MAX_WEIGHTS, fit_machines
from histocoder.text.tokenizers import lower_characters

# Without the kernels, rows times classes up to which there is an expert: 35 s of one core
_MAX_COST = 12_000_000
MAX_ROWS = 500_000  # up to which a large table has an expert
MAX_ATTRIBUTE_WEIGHTS = (
    1 << 24
)  # those of an expert on attributes, which has fewer outputs, and needs more n-grams
_ROWS_AT_ONCE = 2048


def fit_linear_expert(data: OccupationDataset, *, num_classes: int) -> LinearExpert | None:
    """Fit linear support vector machines, one against the rest, to TF-IDF of the n-grams of
    descriptions.

    Noise is left out of the data. Returns None if fitting would take too long (`MAX_ROWS`; less
    without the kernels), or there are fewer than two codes.
    """
    rows, class_ids = data.labels()
    if len(np.unique(class_ids)) < 2 or _takes_long(data, num_classes):
        return None
    return _expert(data, [(rows, class_ids)], [num_classes], max_weights=MAX_WEIGHTS)


def fit_attribute_expert(data: OccupationDataset) -> LinearExpert | None:
    """Fit such machines to the attributes; None if there are none, or fitting would take too
    long.
    """
    sizes = [1 + len(labels) for labels in data.attributes.values()]
    if not sizes or len(data) > MAX_ROWS or _takes_long(data, sum(sizes)):
        return None
    return _expert(data, data.attribute_labels(), sizes, max_weights=MAX_ATTRIBUTE_WEIGHTS)


def _takes_long(data: OccupationDataset, num_classes: int) -> bool:
    if len(data.rows) * num_classes <= _MAX_COST:
        return False
    if kernels.library() is None:
        log.warning(
            "Without the C kernels (see histocoder doctor), no model of word parts is "
            "fitted to a large table."
        )
        return True
    return len(data) > MAX_ROWS


def _expert(
    data: OccupationDataset,
    labels: list[tuple[np.ndarray, np.ndarray]],
    sizes: list[int],
    *,
    max_weights: int,
) -> LinearExpert:
    """Fit an expert whose outputs are those of several tasks: rows with their classes, of which
    there are `sizes`.
    """
    buckets, weights, counts = _ngram_counts(data, max_features=max_weights // sum(sizes))
    tfidf = TfidfTransformer(sublinear_tf=True).fit(counts)
    tfidf.idf_ = tfidf.idf_ * weights
    features = tfidf.transform(counts)
    matrix = torch.zeros(len(buckets), sum(sizes), dtype=torch.float16)
    bias = torch.full((sum(sizes),), -1.0)  # for codes that only the key has
    for (rows, class_ids), first in zip(labels, np.cumsum([0, *sizes]), strict=False):
        labelled, index = np.unique(rows, return_inverse=True)
        classes, *fitted = fit_machines(
            features[labelled], index, class_ids, data.weights[labelled]
        )
        coefficients, intercepts = map(torch.from_numpy, fitted)
        matrix[:, first + classes] = coefficients.half()
        bias[first + classes] = intercepts.float()
    return LinearExpert.of(torch.from_numpy(buckets), torch.from_numpy(tfidf.idf_), matrix, bias)


def _ngram_counts(
    data: OccupationDataset, *, max_features: int
) -> tuple[np.ndarray, np.ndarray, csr_matrix]:
    """Count the n-grams that most rows have.

    Returns their sorted hashes, their weights, and their counts, of shape (rows, n-grams).
    """
    parts = []
    for start in range(0, len(data), _ROWS_AT_ONCE):
        texts = data.examples.inputs.texts(np.arange(start, min(start + _ROWS_AT_ONCE, len(data))))
        ngrams = linear_ngrams(torch.from_numpy(lower_characters(texts))).numpy()
        rows, at, kinds = (ngrams >= 0).nonzero()
        parts.append((start + rows, ngrams[rows, at, kinds], kinds))
    row, bucket, kind = (np.concatenate(part) for part in zip(*parts, strict=True))
    buckets, column = np.unique(bucket, return_inverse=True)
    weights = np.empty(len(buckets))
    weights[column] = np.array(NGRAM_WEIGHTS)[kind]
    counts = csr_matrix(
        (np.ones(len(row), np.float32), (row, column)), shape=(len(data), len(buckets))
    )
    if len(buckets) <= max_features:
        return buckets, weights, counts
    num_rows = np.bincount(counts.indices, minlength=len(buckets))
    kept = np.sort(np.argsort(-num_rows, kind="stable")[:max_features])
    return buckets[kept], weights[kept], counts[:, kept]
