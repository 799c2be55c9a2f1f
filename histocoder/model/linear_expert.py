"""A linear classifier over the hashed n-grams of descriptions."""

from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from histocoder.model.devices import moved
from histocoder.model.ngram import NgramConfig, hashed_ngrams
from histocoder.ops import kernels

_NGRAMS = NgramConfig(num_buckets=1 << 20, max_n=5)
"""Hashing of the expert's n-grams, in more buckets than an encoder's, since only those that occur
are kept.
"""
_SIZES = range(1, _NGRAMS.max_n + 1)
_WITHIN_WORDS = [0.5 ** (max(n + is_edge - 4, 0) / 2) for n in _SIZES for is_edge in (0, 1)]
_WHOLE_WORDS = [1.0]
_ACROSS_BLANKS = [0.5 ** ((n - 2) / 2) for n in _SIZES[1:]]
NGRAM_WEIGHTS = tuple(_WITHIN_WORDS + _WHOLE_WORDS + _ACROSS_BLANKS)
"""Weight of each kind of n-gram: long ones, and those across blanks, repeat what others say."""
SHARPNESS = 8.0
"""Factor that turns the expert's decisions, which are margins of about 1, into log-odds."""


class LinearExpert(nn.Module):
    """TF-IDF of n-grams times the weights of a linear support vector machine, which helps on small
    tables.

    Most weights are zero, or so small that they decide nothing; the others are stored by their
    n-grams, as in a sparse matrix of rows.
    """

    constants: ClassVar[dict[str, float]] = {"sharpness": SHARPNESS}
    # hashes of the known n-grams in ascending order, int64 of shape (num_features,)
    buckets: Tensor
    idf: Tensor  # inverse document frequencies, of shape (num_features,)
    counts: Tensor  # number of weights of each n-gram, int32 of shape (num_features,)
    classes: Tensor  # class of each weight, n-gram after n-gram, int32 of shape (num_weights,)
    values: Tensor  # the weights, fp16 of shape (num_weights,)
    bias: Tensor  # biases, of shape (num_classes,)

    def __init__(
        self, num_features: int, num_classes: int, num_weights: int, *, threshold: float = 0.0
    ) -> None:
        super().__init__()
        self.threshold = threshold  # smaller weights were left out
        self.register_buffer("buckets", torch.zeros(num_features, dtype=torch.int64))
        self.register_buffer("idf", torch.zeros(num_features))
        self.register_buffer("counts", torch.zeros(num_features, dtype=torch.int32))
        self.register_buffer("classes", torch.zeros(num_weights, dtype=torch.int32))
        self.register_buffer("values", torch.zeros(num_weights, dtype=torch.float16))
        self.register_buffer("bias", torch.zeros(num_classes))
        self._index: _FeatureIndex | None = None  # made when it is first used

    @classmethod
    def of(cls, buckets: Tensor, idf: Tensor, matrix: Tensor, bias: Tensor) -> "LinearExpert":
        """Return an expert with the weights of a matrix (num_features, num_classes)."""
        parts = sparse_parts(matrix)
        num_features, num_classes = matrix.shape
        expert = cls(num_features, num_classes, len(parts["values"]))
        parts |= {"buckets": buckets, "idf": idf, "bias": bias}
        for name, values in parts.items():
            getattr(expert, name).copy_(values)
        return expert

    def pruned(self, threshold: float) -> "LinearExpert":
        """Return an expert without the weights whose size is below a threshold."""
        is_large = self.values.abs() >= threshold
        device = is_large.device
        num_features = len(self.buckets)
        feature = torch.arange(num_features, device=device)
        feature = feature.repeat_interleave(self.counts)[is_large]

        num_weights = int(is_large.sum())
        expert = LinearExpert(num_features, len(self.bias), num_weights, threshold=threshold)
        expert.to(device)
        expert.buckets = self.buckets
        expert.idf = self.idf
        expert.bias = self.bias
        expert.counts.copy_(feature.bincount(minlength=num_features))
        expert.classes.copy_(self.classes[is_large])
        expert.values.copy_(self.values[is_large])
        return expert

    @torch.no_grad()
    def forward(self, characters: Tensor) -> Tensor:
        """Return the log-odds (B, num_classes) of texts (B, S), as `tokenizers.lower_characters`
        gives them.

        N-grams are counted where the texts are; if that is the CPU, the host does not wait for a
        GPU to count them.
        """
        return SHARPNESS * self.margins(characters)

    @torch.no_grad()
    def margins(self, characters: Tensor) -> Tensor:
        """Return the decisions (B, num_classes) of the machines on texts (B, S)."""
        index = self._feature_index(characters.device)
        device = self.values.device
        row, feature, shares = self.tfidf(characters)

        sum_weights = _sum_weights
        if kernels.supports(self.bias) and characters.device == device:
            sum_weights = kernels.sum_weights
        weights = (index.starts, self.classes, index.values)
        sums = sum_weights(
            row, feature, shares, weights, num_rows=len(characters), num_classes=len(self.bias)
        )
        return sums + self.bias

    def tfidf(self, characters: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the text, the index and the TF-IDF of the known n-grams in texts (B, S), all (n,)."""
        index = self._feature_index(characters.device)
        num_features = len(self.buckets)
        row, bucket = ngram_rows(characters)

        # How often each text has each known n-gram; text and n-gram are one number, to be counted.
        feature = index.of_bucket[bucket]
        is_known = feature >= 0
        pairs = row[is_known] * num_features + feature[is_known]
        pairs, counts = pairs.unique(return_counts=True)
        row = pairs // num_features
        feature = pairs % num_features

        # TF-IDF of each text, with a norm of 1.
        device = self.values.device
        tfidf = (1 + moved(counts, device).float().log()) * self.idf[moved(feature, device)]
        device_row = moved(row, device)
        squares = torch.zeros(len(characters), device=device)
        norm = squares.index_add_(0, device_row, tfidf.square()).sqrt()
        shares = tfidf / norm[device_row]
        return row, feature, shares

    def _feature_index(self, device: torch.device) -> "_FeatureIndex":
        """Return where n-grams and their weights are, on a device."""
        index = self._index
        devices = (device, self.values.device)  # the model may have been moved, too
        if index is None or (index.starts.device, index.values.device) != devices:
            of_bucket = torch.full((_NGRAMS.num_buckets,), -1, device=device)
            of_bucket[self.buckets.to(device)] = torch.arange(len(self.buckets), device=device)
            starts = F.pad(self.counts.to(device).long().cumsum(0), (1, 0))
            # whole, since other threads may be waiting for it
            index = _FeatureIndex(of_bucket, starts, self.values.float())
            self._index = index
        return index


class _FeatureIndex(NamedTuple):
    """Places of the n-grams that a linear expert knows, and of their weights."""

    of_bucket: Tensor  # index of each hash among the known n-grams, (num_buckets,); -1 for others
    starts: Tensor  # the first weight of each n-gram, and their number, (num_features + 1,)
    values: Tensor  # the weights in fp32, of shape (num_weights,)


def _sum_weights(
    row: Tensor,
    feature: Tensor,
    shares: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    *,
    num_rows: int,
    num_classes: int,
) -> Tensor:
    """Return what `kernels.sum_weights` returns, by torch's operators."""
    starts, classes, values = weights

    # Each n-gram of a text has several weights, which lie side by side: a product of TF-IDF and
    # weight has the index of the n-gram, and that of the weight.
    num_weights = starts[feature + 1] - starts[feature]
    pair = torch.arange(len(feature), device=row.device).repeat_interleave(num_weights)
    first_product = num_weights.cumsum(0) - num_weights
    skipped = starts[feature] - first_product
    weight = skipped[pair] + torch.arange(len(pair), device=row.device)

    # Each weight is added to the cell of its text and its class.
    device = shares.device
    row = moved(row[pair], device)
    pair = moved(pair, device)
    weight = moved(weight, device)
    cell = row * num_classes + classes[weight]
    sums = torch.zeros(num_rows * num_classes, device=device)
    sums.index_add_(0, cell, shares[pair] * values[weight])
    return sums.view(-1, num_classes)


def sparse_parts(matrix: Tensor) -> dict[str, Tensor]:
    """Return the weights of a matrix (num_features, num_classes) that are not zero, by the names of
    `LinearExpert`'s parts.
    """
    is_weight = matrix != 0
    return {
        "counts": is_weight.sum(1, dtype=torch.int32),
        "classes": is_weight.nonzero()[:, 1].int(),
        "values": matrix[is_weight].half(),
    }


def ngram_rows(characters: Tensor) -> tuple[Tensor, Tensor]:
    """Return the text and the hash of each n-gram of texts (B, S), both of shape (n,), text after
    text.
    """
    buckets = linear_ngrams(characters).flatten(1)
    row, position = (buckets >= 0).nonzero(as_tuple=True)
    return row, buckets[row, position]


def linear_ngrams(characters: Tensor) -> Tensor:
    """Return the hashes (B, S, K) of the n-grams that end at each character of texts (B, S); -1 for
    padding.

    The K are those of `NGRAM_WEIGHTS`: within words, then across blanks.
    """
    return hashed_ngrams(characters.long(), _NGRAMS, across=True).buckets
