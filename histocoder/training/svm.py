"""Fit the linear expert: a support vector machine for each class, on TF-IDF of the n-grams of
descriptions, of which the largest weights are kept.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from scipy.sparse import csr_matrix
from sklearn.feature_extraction.text import TfidfTransformer
from torch import Tensor

from histocoder.data.dataset import OccupationDataset, category_ids
from histocoder.data.examples import Examples
from histocoder.log import log
from histocoder.model.linear_expert import NGRAM_WEIGHTS, LinearExpert, linear_ngrams
from histocoder.ops import kernels
from histocoder.ops.linear_svm import MAX_WEIGHTS, fit_machines
from histocoder.text.tokenizers import lower_characters

# Without the kernels, rows times classes up to which there is an expert: 35 s of one core
_MAX_COST = 12_000_000
MAX_ROWS = 500_000  # up to which a large table has an expert
# those of an expert on attributes, which has fewer outputs, and needs more n-grams
MAX_ATTRIBUTE_WEIGHTS = 1 << 24
_ROWS_AT_ONCE = 2048
_KEPT_SHARES = (0.02, 0.05, 0.1)
"""Shares of a linear expert's weights, zeros included, that are tried, the smallest first."""
_MIN_WEIGHTS = 100_000  # of a linear expert, which has all of its weights if they are fewer
_TEXTS_AT_ONCE = 128  # descriptions that an expert reads, since many weights are looked up


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
    num_classes = sum(sizes)
    ngrams = _count_ngrams(data, max_features=max_weights // num_classes)
    tfidf = TfidfTransformer(sublinear_tf=True).fit(ngrams.counts)
    tfidf.idf_ = tfidf.idf_ * ngrams.weights
    features = tfidf.transform(ngrams.counts)

    # codes that only the key has keep a bias by which they are improbable
    matrix = torch.zeros(len(ngrams.buckets), num_classes, dtype=torch.float16)
    bias = torch.full((num_classes,), -1.0)
    first = 0
    for (rows, class_ids), size in zip(labels, sizes, strict=True):
        labelled, index = np.unique(rows, return_inverse=True)
        weights = data.weights[labelled]
        classes, coefficients, intercepts = fit_machines(
            features[labelled], index, class_ids, weights
        )
        matrix[:, first + classes] = torch.from_numpy(coefficients).half()
        bias[first + classes] = torch.from_numpy(intercepts).float()
        first += size
    buckets = torch.from_numpy(ngrams.buckets)
    return LinearExpert.of(buckets, torch.from_numpy(tfidf.idf_), matrix, bias)


class _NgramCounts(NamedTuple):
    """Numbers of times that n-grams occur in each of some texts."""

    buckets: np.ndarray  # their hashes in ascending order, of shape (num_features,)
    weights: np.ndarray  # those of their kinds, of shape (num_features,)
    counts: csr_matrix  # of shape (n, num_features)


def _count_ngrams(data: OccupationDataset, *, max_features: int) -> _NgramCounts:
    """Count the n-grams that most rows have."""
    row_parts = []
    bucket_parts = []
    kind_parts = []
    for start in range(0, len(data), _ROWS_AT_ONCE):
        end = min(start + _ROWS_AT_ONCE, len(data))
        texts = data.examples.inputs.texts(np.arange(start, end))
        ngrams = linear_ngrams(torch.from_numpy(lower_characters(texts))).numpy()
        is_ngram = ngrams >= 0
        row, _, kind = is_ngram.nonzero()
        row_parts.append(start + row)
        bucket_parts.append(ngrams[is_ngram])
        kind_parts.append(kind)
    rows = np.concatenate(row_parts)

    # n-grams of one hash are of one kind, but for collisions
    buckets, column = np.unique(np.concatenate(bucket_parts), return_inverse=True)
    weights = np.empty(len(buckets))
    weights[column] = np.array(NGRAM_WEIGHTS)[np.concatenate(kind_parts)]
    shape = (len(data), len(buckets))
    counts = csr_matrix((np.ones(len(rows), np.float32), (rows, column)), shape=shape)
    if len(buckets) <= max_features:
        return _NgramCounts(buckets, weights, counts)

    # a table of many n-grams has those that most rows have
    num_rows = np.bincount(counts.indices, minlength=len(buckets))
    commonest = np.sort(np.argsort(-num_rows, kind="stable")[:max_features])
    return _NgramCounts(buckets[commonest], weights[commonest], counts[:, commonest])


def code_truth(examples: Examples, codes: Sequence[str]) -> list[Tensor]:
    """Return which codes are true of each row, bool (n, num_codes), as the one part of a linear
    expert's outputs.
    """
    class_of = {code: i for i, code in enumerate(codes)}
    is_true = np.zeros((len(examples), len(codes)), dtype=bool)
    for row, row_codes in enumerate(examples.codes.to_numpy(dtype=object)):
        for code in row_codes:
            if code in class_of:
                is_true[row, class_of[code]] = True
    return [torch.from_numpy(is_true)]


def attribute_truth(examples: Examples, attributes: Mapping[str, tuple[str, ...]]) -> list[Tensor]:
    """Return which categories of each attribute are true of each row, bool (n, 1 + num_categories)
    each.
    """
    parts = []
    for name, categories in attributes.items():
        ids = torch.from_numpy(category_ids(examples.attributes[name], categories))
        parts.append(ids[:, None] == torch.arange(1 + len(categories)))
    return parts


def without_small_weights(
    expert: LinearExpert, examples: Examples, truth: Sequence[Tensor]
) -> LinearExpert:
    """Return an expert with as few of its weights, the largest, as validation allows.

    The share of right first choices may not fall by more than a standard error of the difference.
    `truth` says what is true of each row, bool (n, k), by parts of the expert's outputs.
    """
    inputs = examples.table["input"].to_pylist()
    batches = torch.from_numpy(lower_characters(inputs)).split(_TEXTS_AT_ONCE)
    sizes_of_parts = [part.shape[1] for part in truth]

    def shares_right(candidate: LinearExpert) -> Tensor:
        """Return the share of each row's first choices that are right, of shape (n,)."""
        log_odds = torch.cat([candidate(batch) for batch in batches])
        right = []
        for part, is_true in zip(log_odds.split(sizes_of_parts, dim=1), truth, strict=True):
            choices = part.argmax(1, keepdim=True)
            right.append(is_true.gather(1, choices))
        return torch.cat(right, dim=1).double().mean(1)

    right_of_all = shares_right(expert)
    num_cells = len(expert.buckets) * len(expert.bias)
    sizes = expert.values.abs().float().sort(descending=True).values
    for share in _KEPT_SHARES:
        num_weights = max(round(share * num_cells), _MIN_WEIGHTS)
        if num_weights >= len(sizes):
            break
        candidate = expert.pruned(float(sizes[num_weights]))
        change = shares_right(candidate) - right_of_all
        standard_error = float(change.square().mean().sqrt()) / math.sqrt(len(change))
        if float(change.mean()) >= -standard_error:
            return candidate
    return expert
