"""A linear classifier over n-grams beside the deep model: what it lacks in depth it makes up for on small tables."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from histocoder.model.ngram import NgramConfig, crossing_ngrams, hashed_ngrams

LINEAR_NGRAMS = NgramConfig(num_buckets=1 << 20, max_n=5)
"""How the n-grams of the linear expert are hashed: in more buckets, since only those that occur are kept."""
SHARPNESS = 8.0
"""By which its decisions, which are margins of about 1, become log-odds."""


class LinearExpert(nn.Module):
    """TF-IDF of n-grams times weights, as a linear support vector machine has them.

    Parameters
    ----------
    num_features, num_classes : int

    Attributes
    ----------
    buckets : Tensor of int64, of shape (num_features,)
        The hashes of the n-grams that it knows, in order.
    idf : Tensor of shape (num_features,)
    weight : Tensor of shape (num_features, num_classes), fp16
    bias : Tensor of shape (num_classes,)
    """

    buckets: Tensor
    idf: Tensor
    weight: Tensor
    bias: Tensor

    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.register_buffer("buckets", torch.zeros(num_features, dtype=torch.int64))
        self.register_buffer("idf", torch.zeros(num_features))
        self.register_buffer("weight", torch.zeros(num_features, num_classes, dtype=torch.float16))
        self.register_buffer("bias", torch.zeros(num_classes))

    @torch.no_grad()
    def forward(self, characters: Tensor) -> Tensor:
        """Return the log-odds of each class, by itself.

        Parameters
        ----------
        characters : Tensor of int, of shape (B, S)
            Language and description in lower case, as `CharacterTokenizer` gives them.

        Returns
        -------
        Tensor of shape (B, num_classes)
        """
        row, bucket = ngram_rows(characters)
        place = torch.searchsorted(self.buckets, bucket).clamp(max=len(self.buckets) - 1)
        known = self.buckets[place] == bucket
        pairs, counts = (row[known] * len(self.buckets) + place[known]).unique(return_counts=True)
        row, place = pairs // len(self.buckets), pairs % len(self.buckets)
        tfidf = (1 + counts.float().log()) * self.idf[place]
        norm = torch.zeros(len(characters), device=tfidf.device).index_add_(0, row, tfidf.square()).sqrt()
        first = torch.searchsorted(row, torch.arange(len(characters), device=row.device))
        used, place = place.unique(return_inverse=True)  # the others stay in fp16; sums are those of fp32
        found = F.embedding_bag(
            place, self.weight[used].float(), first, mode="sum", per_sample_weights=tfidf / norm[row]
        )
        return SHARPNESS * (found + self.bias)


def ngram_rows(characters: Tensor) -> tuple[Tensor, Tensor]:
    """Return the n-grams of texts (B, S): for each, its text and its hash, both of shape (n,), text after text."""
    buckets = linear_ngrams(characters).flatten(1)
    row, at = (buckets >= 0).nonzero(as_tuple=True)
    return row, buckets[row, at]


def linear_ngrams(characters: Tensor) -> Tensor:
    """Return the n-grams that end at each character of texts (B, S), of shape (B, S, K); -1 where there are fewer."""
    ids = characters.long()
    within, crossing = hashed_ngrams(ids, LINEAR_NGRAMS).buckets, crossing_ngrams(ids, LINEAR_NGRAMS)
    return torch.cat([within, crossing], dim=-1)
