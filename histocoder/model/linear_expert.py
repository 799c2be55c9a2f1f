"""A linear classifier over n-grams beside the deep model, which helps on small tables."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from histocoder.model.ngram import NgramConfig, crossing_ngrams, hashed_ngrams

_NGRAMS = NgramConfig(num_buckets=1 << 20, max_n=5)
"""Hashing of the expert's n-grams, in more buckets than an encoder's, since only those that occur are kept."""
NGRAM_WEIGHTS = (
    *(0.5 ** (max(n + is_edge - 4, 0) / 2) for n in range(1, _NGRAMS.max_n + 1) for is_edge in (0, 1)),
    1.0,  # whole words
    *(0.5 ** ((n - 2) / 2) for n in range(2, _NGRAMS.max_n + 1)),  # across blanks
)
"""Weight of each kind of n-gram: long ones, and those across blanks, repeat what others say."""
SHARPNESS = 8.0  # factor that turns the expert's decisions, which are margins of about 1, into log-odds


class LinearExpert(nn.Module):
    """TF-IDF of n-grams times the weights of a linear support vector machine."""

    buckets: Tensor  # hashes of the known n-grams in ascending order, int64 of shape (num_features,)
    idf: Tensor  # inverse document frequencies, of shape (num_features,)
    weight: Tensor  # weights, fp16 of shape (num_features, num_classes)
    bias: Tensor  # biases, of shape (num_classes,)

    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.register_buffer("buckets", torch.zeros(num_features, dtype=torch.int64))
        self.register_buffer("idf", torch.zeros(num_features))
        self.register_buffer("weight", torch.zeros(num_features, num_classes, dtype=torch.float16))
        self.register_buffer("bias", torch.zeros(num_classes))

    @torch.no_grad()
    def forward(self, characters: Tensor) -> Tensor:
        """Return the log-odds (B, num_classes) of texts (B, S), as `tokenizers.lower_characters` gives them."""
        row, bucket = ngram_rows(characters)
        feature = torch.searchsorted(self.buckets, bucket).clamp(max=len(self.buckets) - 1)
        known = self.buckets[feature] == bucket
        pairs, counts = (row[known] * len(self.buckets) + feature[known]).unique(return_counts=True)
        row, feature = pairs // len(self.buckets), pairs % len(self.buckets)
        tfidf = (1 + counts.float().log()) * self.idf[feature]
        norm = torch.zeros(len(characters), device=tfidf.device).index_add_(0, row, tfidf.square()).sqrt()
        first = torch.searchsorted(row, torch.arange(len(characters), device=row.device))
        used, feature = feature.unique(return_inverse=True)  # only these are converted to fp32
        found = F.embedding_bag(
            feature, self.weight[used].float(), first, mode="sum", per_sample_weights=tfidf / norm[row]
        )
        return SHARPNESS * (found + self.bias)


def ngram_rows(characters: Tensor) -> tuple[Tensor, Tensor]:
    """Return the text and the hash of each n-gram of texts (B, S), both of shape (n,), text after text."""
    buckets = linear_ngrams(characters).flatten(1)
    row, at = (buckets >= 0).nonzero(as_tuple=True)
    return row, buckets[row, at]


def linear_ngrams(characters: Tensor) -> Tensor:
    """Return the hashes (B, S, K) of the n-grams that end at each character of texts (B, S); -1 for padding.

    The K are those of `NGRAM_WEIGHTS`.
    """
    ids = characters.long()
    within, crossing = hashed_ngrams(ids, _NGRAMS).buckets, crossing_ngrams(ids, _NGRAMS)
    return torch.cat([within, crossing], dim=-1)
