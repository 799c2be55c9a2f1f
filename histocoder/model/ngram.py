"""An encoder of words, the mean of hashed embeddings of a word's n-grams, and a linear classifier
over n-grams.

Subword hashing is fastText's (Bojanowski et al. 2017, https://arxiv.org/abs/1607.04606), hashing
within the model the Byte Latent Transformer's (Pagnoni et al. 2024,
https://arxiv.org/abs/2412.09871).
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_exporting

from histocoder.config import LANG_SEP
from histocoder.model.canine import CanineConfig, CanineLayer
from histocoder.model.devices import moved
from histocoder.model.layers import EncoderConfig, layer_norm, mean_pooled, padded
from histocoder.ops import kernels

_FNV_OFFSET, _FNV_PRIME, _MASK = 0x811C9DC5, 16777619, 0xFFFFFFFF
"""Constants of FNV-1a in 32 bits; products fit into int64, so that every device computes the same
hashes.
"""
_MIX = (
    0x5BD1E995  # multiplier of MurmurHash2's last steps, since FNV-1a mixes its lowest bits poorly
)
_ENDS = (0, 0xE000, 0xE001)  # padding, CLS, SEP
_BREAKS = (
    *map(ord, "\t\n\v\f\r \u0085\u00a0\u2028\u2029\u202f\u205f\u3000"),
    *range(0x2000, 0x200B),
)
"""White space between words."""
_PUNCTUATION = tuple(ord(c) for c in "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~¡«·»¿‘’“”„–—…")
"""Characters that are words by themselves."""
_LETTER, _MARK, _BREAK, _END = range(4)  # kinds of characters
_MULTIPLE = 256  # number to a multiple of which words are computed


@dataclass
class NgramConfig(EncoderConfig):
    """Sizes of an n-gram encoder."""

    model_type: ClassVar[str] = "ngram"

    num_buckets: int = 1 << 17  # rows of the embedding table; n-grams with the same hash share one
    max_n: int = 6  # characters of the longest n-gram; each whole word is one more n-gram
    max_words: int = 32  # words of a description; further ones are read as part of the last
    hidden_size: int = 192
    num_hidden_layers: int = 1
    num_attention_heads: int = 4
    intermediate_size: int = 384
    hidden_dropout_prob: float = 0.0
    attention_probs_dropout_prob: float = 0.0
    ngram_dropout_prob: float = 0.3  # share of n-grams that are left out in training
    embedding_std: float = 0.1  # standard deviation of the table's initial values
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12


class Ngrams(NamedTuple):
    """The n-grams of a batch of descriptions."""

    # table's rows of the n-grams that end at each character, int64 (B, S, K); -1 for padding
    buckets: Tensor
    words: Tensor  # the word of each character, int64 of shape (B, S); 0 is the language


class Lookup(NamedTuple):
    """The n-grams of a batch, prepared on the CPU, so that the host need not wait until a GPU has
    counted them.
    """

    distinct: (
        Tensor  # the table's rows of the distinct n-grams in ascending order, int64 of shape (D,)
    )
    inverse: Tensor  # the row of each n-gram among these, int64 of shape (n,)
    places: (
        Tensor  # the n-grams' places among the B * S * K of `Ngrams.buckets`, int64 of shape (n,)
    )
    words: Tensor  # `Ngrams.words`, of shape (B, S)
    num_words: int  # largest number of words of a row, with its language

    @classmethod
    def of(cls, input_ids: Tensor, config: NgramConfig) -> "Lookup":
        """Return the n-grams of token ids (B, S) on the CPU."""
        ngrams = hashed_ngrams(input_ids.long(), config)
        buckets = ngrams.buckets.flatten()
        places = (buckets >= 0).nonzero()[:, 0]
        distinct, inverse = buckets[places].unique(return_inverse=True)
        return cls(distinct, inverse, places, ngrams.words, int(ngrams.words.max()) + 1)

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "Lookup":
        """Return the lookup with a function of each tensor in place of it."""
        distinct, inverse, places, words = map(function, self[:-1])
        return Lookup(distinct, inverse, places, words, self.num_words)


class NgramEncoder(nn.Module):
    """Encodes descriptions word by word.

    The gradients of `table` (num_buckets, dim) are sparse: a step changes only rows of n-grams in
    its batch.
    """

    is_trained: Tensor | None
    """Whether each row of the table was trained before a run that trains it further, bool
    (num_buckets,); None if none was. Others have random values in training, and zeros once saved.
    """

    def __init__(self, config: NgramConfig) -> None:
        super().__init__()
        self.config = config
        layer = CanineConfig.from_dict(asdict(config))
        self.table = nn.Parameter(torch.empty(config.num_buckets, config.hidden_size))
        self.table.is_sparse_table = True  # type: ignore[attr-defined]
        self.is_trained = None
        self.word_norm = nn.LayerNorm(config.hidden_size)
        self.position_embeddings = nn.Embedding(config.max_words + 1, config.hidden_size)
        self.layer = nn.ModuleList(CanineLayer(layer) for _ in range(config.num_hidden_layers))
        nn.init.normal_(self.table, std=config.embedding_std)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=config.initializer_range)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(
        self, input_ids: Tensor, lookup: Lookup | None = None, *, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Encode `CharacterTokenizer`'s ids (B, S), with matrix products in the precision `dtype`.

        `lookup` has the n-grams of the ids, if they were prepared.

        Returns the encodings (B, W, dim) of the language and of the words, their means (B, dim)
        over the words, and a mask (B, W) that is False for padding.
        """
        num_words: Any
        if lookup is None:
            ngrams = hashed_ngrams(input_ids.long(), self.config)
            num_words = ngrams.words.max().item() + 1  # not int(…), which torch.export can't trace
            x, mask = self._words(ngrams, num_words)
        else:
            num_words = lookup.num_words
            x, mask = self._prepared_words(lookup)
        positions, real = self.position_embeddings.weight[:num_words], None
        # backwards it gains nothing, on a GPU the host would wait for the number of words; when
        # exporting, sizes have to follow from those of the inputs
        if not torch.is_grad_enabled() and not is_exporting() and lookup is None:
            real, others = (found.flatten().nonzero()[:, 0] for found in (mask, ~mask))
            # half of the positions or fewer, and some others, since processors compile code for
            # each shape
            real = torch.cat([real, others[: -len(real) % _MULTIPLE]])
            x, positions = (
                x.flatten(0, 1).index_select(0, real),
                positions.index_select(0, real % num_words),
            )
        x = (layer_norm(x, self.word_norm) + positions).to(dtype)
        for layer in self.layer:
            x = layer(x, mask[:, None, None], real)
        x = x if real is None else padded(x, real, (len(mask), num_words))
        described = mask.clone()
        described[:, 0] = ~mask[:, 1:].any(1)  # the language is pooled only if there are no words
        return x, mean_pooled(x, described).to(dtype), mask

    @torch.no_grad()
    def fill_empty_rows(self, values: Tensor) -> None:
        """Give rows of a saved model's table that were never trained other values (num_buckets,
        dim), to train from.
        """
        self.is_trained = self.table.any(1)
        self.table.copy_(torch.where(self.is_trained[:, None], self.table, values))

    def _words(self, ngrams: Ngrams, num_words: int) -> tuple[Tensor, Tensor]:
        """Return the means of embeddings (B, W, dim), and a mask (B, W) that is False for
        padding.
        """
        batch, _, width = ngrams.buckets.shape
        real = ngrams.buckets >= 0
        word = ngrams.words + num_words * torch.arange(batch, device=real.device)[:, None]
        is_word = torch.zeros(batch * num_words, dtype=torch.bool, device=real.device)
        is_word[word[real.any(-1)]] = True
        is_word[::num_words] = True  # the language, so that each row has something to attend to
        used = real
        if self.training and self.config.ngram_dropout_prob:
            used = used & (
                torch.rand(real.shape, device=real.device) >= self.config.ngram_dropout_prob
            )
        flat = used.flatten().nonzero()[:, 0]
        index, word = ngrams.buckets.flatten()[flat], word.flatten()[flat // width]
        rows: Tensor = self.table
        if (
            torch.is_grad_enabled() and rows.requires_grad
        ):  # what is learned is a row of each distinct n-gram
            distinct, index = index.unique(return_inverse=True)
            rows = F.embedding(distinct, rows, sparse=True)
        counts = torch.bincount(word, minlength=batch * num_words)
        # rows and words are in order, so that the n-grams of a word follow each other
        total = F.embedding_bag(index, rows, counts.cumsum(0) - counts, mode="sum")
        x = total / counts.clamp(min=1)[:, None]
        return x.unflatten(0, (batch, num_words)), is_word.unflatten(0, (batch, num_words))

    def _prepared_words(self, lookup: Lookup) -> tuple[Tensor, Tensor]:
        """Return what `_words` does, in shapes that the host knows: n-grams that are left out weigh
        nothing.
        """
        batch, num_characters = lookup.words.shape
        num_kinds, num_words = 2 * self.config.max_n + 1, lookup.num_words
        device = lookup.words.device

        # The words that there are, and the word of each n-gram, in ascending order.
        starts = num_words * torch.arange(batch, device=device)[:, None]
        word = (lookup.words + starts).flatten()[lookup.places // num_kinds]
        is_word = torch.zeros(batch * num_words, dtype=torch.bool, device=device).index_fill_(
            0, word, True
        )
        is_word[::num_words] = True  # the language, so that each row has something to attend to

        # The same random numbers as in `_words`.
        shares = torch.ones(len(word), device=device)
        if self.training and self.config.ngram_dropout_prob:
            noise = torch.rand(batch, num_characters, num_kinds, device=device).flatten()[
                lookup.places
            ]
            shares = (noise >= self.config.ngram_dropout_prob).float()

        rows = F.embedding(lookup.distinct, self.table, sparse=True)
        first = torch.searchsorted(word, torch.arange(len(is_word), device=device))
        counts = torch.zeros(len(is_word), device=device).index_add_(0, word, shares)
        total = F.embedding_bag(
            lookup.inverse, rows, first, mode="sum", per_sample_weights=shares.to(rows.dtype)
        )
        x = total / counts.clamp(min=1)[:, None].to(rows.dtype)
        return x.unflatten(0, (batch, num_words)), is_word.unflatten(0, (batch, num_words))


_NGRAMS = NgramConfig(num_buckets=1 << 20, max_n=5)
"""Hashing of the expert's n-grams, in more buckets than an encoder's, since only those that occur
are kept.
"""
NGRAM_WEIGHTS = (
    *(
        0.5 ** (max(n + is_edge - 4, 0) / 2)
        for n in range(1, _NGRAMS.max_n + 1)
        for is_edge in (0, 1)
    ),
    1.0,  # whole words
    *(0.5 ** ((n - 2) / 2) for n in range(2, _NGRAMS.max_n + 1)),  # across blanks
)
"""Weight of each kind of n-gram: long ones, and those across blanks, repeat what others say."""
SHARPNESS = (
    8.0  # factor that turns the expert's decisions, which are margins of about 1, into log-odds
)


class LinearExpert(nn.Module):
    """TF-IDF of n-grams times the weights of a linear support vector machine, which helps on small
    tables.

    Most weights are zero, or so small that they decide nothing; the others are stored by their
    n-grams, as in a sparse matrix of rows.
    """

    constants: ClassVar[dict[str, float]] = {"sharpness": SHARPNESS}
    buckets: (
        Tensor  # hashes of the known n-grams in ascending order, int64 of shape (num_features,)
    )
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
        for name, values in {"buckets": buckets, "idf": idf, "bias": bias, **parts}.items():
            getattr(expert, name).copy_(values)
        return expert

    def pruned(self, threshold: float) -> "LinearExpert":
        """Return an expert without the weights whose size is below a threshold."""
        is_large = self.values.abs() >= threshold
        num_features = len(self.buckets)
        feature = torch.arange(num_features, device=is_large.device)
        feature = feature.repeat_interleave(self.counts)[is_large]

        expert = LinearExpert(
            num_features, len(self.bias), int(is_large.sum()), threshold=threshold
        ).to(is_large.device)
        expert.buckets, expert.idf, expert.bias = self.buckets, self.idf, self.bias
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
        index = self._feature_index(characters.device)
        row, bucket = ngram_rows(characters)
        feature = index.of_bucket[bucket]
        known = feature >= 0
        pairs, counts = (row[known] * len(self.buckets) + feature[known]).unique(return_counts=True)
        row, feature = pairs // len(self.buckets), pairs % len(self.buckets)

        # TF-IDF of each text, with a norm of 1.
        device = self.values.device
        tfidf = (1 + moved(counts, device).float().log()) * self.idf[moved(feature, device)]
        row_there = moved(row, device)
        squares = torch.zeros(len(characters), device=device)
        norm = squares.index_add_(0, row_there, tfidf.square()).sqrt()
        shares = tfidf / norm[row_there]

        sizes = {"num_rows": len(characters), "num_classes": len(self.bias)}
        if kernels.supports(self.bias) and characters.device == device:
            weights = (index.starts, self.classes, index.values)
            sums = kernels.sum_weights(row, feature, shares, weights, **sizes)
        else:
            sums = self._sums(index, row, feature, shares, **sizes)
        return SHARPNESS * (sums + self.bias)

    def _sums(
        self,
        index: "_FeatureIndex",
        row: Tensor,
        feature: Tensor,
        shares: Tensor,
        *,
        num_rows: int,
        num_classes: int,
    ) -> Tensor:
        """Return what `kernels.sum_weights` returns, by torch's operators."""
        num_weights = index.starts[feature + 1] - index.starts[feature]
        pair = torch.arange(len(feature), device=row.device).repeat_interleave(num_weights)
        skipped = index.starts[feature] - (num_weights.cumsum(0) - num_weights)
        weight = skipped[pair] + torch.arange(len(pair), device=row.device)
        row, pair, weight = (moved(x, shares.device) for x in (row[pair], pair, weight))

        # Each weight is added to the cell of its text and its class.
        cell = row * num_classes + self.classes[weight]
        sums = torch.zeros(num_rows * num_classes, device=shares.device)
        sums.index_add_(0, cell, shares[pair] * self.values[weight].float())
        return sums.view(-1, num_classes)

    def _feature_index(self, device: torch.device) -> "_FeatureIndex":
        """Return where n-grams and their weights are, on a device."""
        if self._index is None or self._index.starts.device != device:
            of_bucket = torch.full((_NGRAMS.num_buckets,), -1, device=device)
            of_bucket[self.buckets.to(device)] = torch.arange(len(self.buckets), device=device)
            starts = F.pad(self.counts.to(device).long().cumsum(0), (1, 0))
            # whole, since other threads may be waiting for it
            self._index = _FeatureIndex(of_bucket, starts, self.values.float())
        return self._index


class _FeatureIndex(NamedTuple):
    """Places of the n-grams that a linear expert knows, and of their weights."""

    of_bucket: Tensor  # index of each hash among the known n-grams, (num_buckets,); -1 for others
    starts: Tensor  # the first weight of each n-gram, and their number, (num_features + 1,)
    values: Tensor  # the weights in fp32, of shape (num_weights,)


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
    row, at = (buckets >= 0).nonzero(as_tuple=True)
    return row, buckets[row, at]


def linear_ngrams(characters: Tensor) -> Tensor:
    """Return the hashes (B, S, K) of the n-grams that end at each character of texts (B, S); -1 for
    padding.

    The K are those of `NGRAM_WEIGHTS`: within words, then across blanks.
    """
    return hashed_ngrams(characters.long(), _NGRAMS, across=True).buckets


@torch.no_grad()
def hashed_ngrams(ids: Tensor, config: NgramConfig, *, across: bool = False) -> Ngrams:
    """Hash the n-grams of 1 to `max_n` characters in each word of texts (B, S), and the word as a
    whole.

    N-grams at the ends of a word are hashed once more as such; the language is one n-gram of its
    own kind. Then come, if wanted, those of 2 to `max_n` characters `across` blanks. Hashes are
    FNV-1a over Unicode code points, mixed by MurmurHash2's last steps, and the same on each device
    and platform.
    """
    if kernels.supports(ids):
        sizes = {name: getattr(config, name) for name in ("max_n", "num_buckets", "max_words")}
        mark = torch.tensor([*map(ord, LANG_SEP)])
        return Ngrams(
            *kernels.hash_ngrams(ids, character_kinds(ids.device), mark, across=across, **sizes)
        )
    column = torch.arange(ids.shape[1], device=ids.device)
    starts_sep = torch.stack([_shifted(ids, -i) == ord(c) for i, c in enumerate(LANG_SEP)]).all(0)
    # of each description, (B, 1)
    start = torch.where(starts_sep.any(1), starts_sep.int().argmax(1) + len(LANG_SEP), 0)[:, None]
    is_lang = (column < start - len(LANG_SEP)) & (column > 0)
    kinds = character_kinds(ids.device)
    kinds = kinds[ids.clamp(max=len(kinds) - 1)]
    is_char = (kinds != _BREAK) & (kinds != _END) & ((column >= start) | is_lang)
    punctuation = (kinds == _MARK) & is_char & ~is_lang
    begins = is_char & (~_shifted(is_char, 1) | punctuation | _shifted(punctuation, 1))
    ends = is_char & (~_shifted(is_char, -1) | punctuation | _shifted(punctuation, -1))
    number = begins.cumsum(1)  # of each character's word, from 1; 0 in front of the first
    words = (number - is_lang.any(1, keepdim=True).long()).clamp(0, config.max_words)
    # the character at which each character's word begins
    first = torch.zeros_like(ids).scatter(1, number * begins, column * begins).gather(1, number)
    position = column - first

    is_break, is_text = (kinds == _BREAK) | (kinds == _END), (column >= start) & (kinds != _END)
    hashes, is_whole, crosses = (
        torch.full_like(ids, _FNV_OFFSET),
        is_text,
        torch.zeros_like(is_text),
    )
    found, found_across = [], []
    for n in range(1, config.max_n + 1):
        hashes = ((hashes ^ _shifted(ids, n - 1)) * _FNV_PRIME) & _MASK
        inside = is_char & (position >= n - 1) & ~is_lang
        is_whole, crosses = is_whole & _shifted(is_text, n - 1), crosses | _shifted(is_break, n - 1)
        found_across += (
            [_bucket(hashes, 4 * (n + config.max_n), is_whole & crosses, config)]
            if across and n > 1
            else []
        )
        edges = (position == n - 1).long() + 2 * ends.long()
        found += [_bucket(hashes, 4 * n, inside, config)]
        found += [_bucket(hashes, edges + 4 * n, inside & (edges > 0), config)]
    # a word's hash is the sum of its characters' hashes, each with its position: no loop over the
    # longest word
    letters = ((ids + 0x9E3779B1 * (position + 1)) & _MASK ^ _FNV_OFFSET) * _FNV_PRIME & _MASK
    letters = torch.where(is_char, (letters ^ (letters >> 15)) * _MIX & _MASK, 0)
    total = letters.cumsum(1)
    before = (total - letters).gather(1, first)
    found += [_bucket((total - before) & _MASK, is_lang.long(), ends, config)]
    return Ngrams(torch.stack(found + found_across, dim=-1), words)


def _bucket(hashes: Tensor, kind: Tensor | int, where: Tensor, config: NgramConfig) -> Tensor:
    """Return the table's rows of n-grams of a kind, such as those at a word's end; -1 where `where`
    is False.
    """
    mixed = (hashes ^ (kind * 0x27D4EB2F & _MASK)) & _MASK
    mixed = (mixed ^ (mixed >> 13)) * _MIX & _MASK
    mixed = (mixed ^ (mixed >> 15)) * 0x2C1B3C6D & _MASK
    return torch.where(where, (mixed ^ (mixed >> 12)) % config.num_buckets, -1)


def _shifted(x: Tensor, by: int) -> Tensor:
    """Shift texts (B, S) `by` places to the right, or to the left if negative; fill up with 0."""
    if by >= 0:
        return F.pad(x, (by, 0))[:, : x.shape[1]]
    return F.pad(x, (0, -by))[:, -by:]


@cache
def character_kinds(device: torch.device) -> Tensor:
    """Return the kind of each code point, such as `_LETTER`, copied to a GPU once; the last is that
    of further ones.
    """
    with torch.inference_mode(mode=False):
        kinds = torch.full((max(*_BREAKS, *_ENDS) + 2,), _LETTER, dtype=torch.uint8)
        for kind, code_points in ((_MARK, _PUNCTUATION), (_BREAK, _BREAKS), (_END, _ENDS)):
            kinds[list(code_points)] = kind
        return kinds.to(device)
