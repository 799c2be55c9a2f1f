"""An encoder of words: the mean of hashed embeddings of a word's n-grams.

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
from histocoder.model.layers import EncoderConfig, layer_norm, mean_pooled, padded
from histocoder.ops import kernels

_FNV_OFFSET = 0x811C9DC5
_FNV_PRIME = 16777619
_MASK = 0xFFFFFFFF
"""Constants of FNV-1a in 32 bits; products fit into int64, so that every device computes the same
hashes.
"""
_MIX = 0x5BD1E995
"""Multiplier of MurmurHash2's last steps, since FNV-1a mixes its lowest bits poorly."""
_SECOND_MIX = 0x2C1B3C6D
_KIND_MULTIPLIER = 0x27D4EB2F
"""Multiplier of the kind of an n-gram, so that kinds of the same characters differ in all bits."""
_POSITION_MULTIPLIER = 0x9E3779B1
"""Multiplier of the position of a character in its word: 2 ** 32 divided by the golden ratio."""
_ENDS = (0, 0xE000, 0xE001)  # padding, CLS, SEP
_BREAKS = (
    *map(ord, "\t\n\v\f\r \u0085\u00a0\u2028\u2029\u202f\u205f\u3000"),
    *range(0x2000, 0x200B),
)
"""White space between words."""
_PUNCTUATION = tuple(ord(c) for c in "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~¡«·»¿‘’“”„–—…")
"""Characters that are words by themselves."""
# Kinds of characters
_LETTER = 0
_MARK = 1
_BREAK = 2
_END = 3
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

    # the table's rows of the distinct n-grams in ascending order, int64 of shape (D,)
    distinct: Tensor
    inverse: Tensor  # the row of each n-gram among these, int64 of shape (n,)
    # the n-grams' places among the B * S * K of `Ngrams.buckets`, int64 of shape (n,)
    places: Tensor
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
        return self._replace(
            distinct=function(self.distinct),
            inverse=function(self.inverse),
            places=function(self.places),
            words=function(self.words),
        )


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
        positions = self.position_embeddings.weight[:num_words]

        # Half of the positions or more are padding, which is left out. Backwards that gains
        # nothing, on a GPU the host would wait for the number of words, and when exporting, sizes
        # have to follow from those of the inputs.
        real = None
        if not torch.is_grad_enabled() and not is_exporting() and lookup is None:
            real = mask.flatten().nonzero()[:, 0]
            # some padding as well, since processors compile code for each shape
            padding = (~mask).flatten().nonzero()[:, 0]
            real = torch.cat([real, padding[: -len(real) % _MULTIPLE]])
            x = x.flatten(0, 1).index_select(0, real)
            positions = positions.index_select(0, real % num_words)

        x = (layer_norm(x, self.word_norm) + positions).to(dtype)
        for layer in self.layer:
            x = layer(x, mask[:, None, None], real)
        if real is not None:
            x = padded(x, real, (len(mask), num_words))

        # The language is pooled only if there are no words.
        described = mask.clone()
        described[:, 0] = ~mask[:, 1:].any(1)
        return x, mean_pooled(x, described).to(dtype), mask

    @torch.no_grad()
    def fill_empty_rows(self, values: Tensor) -> None:
        """Fill rows of a saved model's table that were never trained with initial values
        (num_buckets, dim).
        """
        self.is_trained = self.table.any(1)
        self.table.copy_(torch.where(self.is_trained[:, None], self.table, values))

    def _words(self, ngrams: Ngrams, num_words: int) -> tuple[Tensor, Tensor]:
        """Return the means of embeddings (B, W, dim), and a mask (B, W) that is False for
        padding.
        """
        batch, _, num_kinds = ngrams.buckets.shape
        device = ngrams.buckets.device
        real = ngrams.buckets >= 0

        # The words that there are, numbered over the whole batch.
        word = ngrams.words + num_words * torch.arange(batch, device=device)[:, None]
        is_word = torch.zeros(batch * num_words, dtype=torch.bool, device=device)
        is_word[word[real.any(-1)]] = True
        is_word[::num_words] = True  # the language, so that each row has something to attend to

        used = real
        if self.training and self.config.ngram_dropout_prob:
            used = used & (torch.rand(real.shape, device=device) >= self.config.ngram_dropout_prob)
        flat = used.flatten().nonzero()[:, 0]
        index = ngrams.buckets.flatten()[flat]
        word = word.flatten()[flat // num_kinds]

        # What is learned is a row of each distinct n-gram.
        rows: Tensor = self.table
        if torch.is_grad_enabled() and rows.requires_grad:
            distinct, index = index.unique(return_inverse=True)
            rows = F.embedding(distinct, rows, sparse=True)

        # The n-grams of a word follow each other, since both are in order.
        counts = torch.bincount(word, minlength=batch * num_words)
        total = F.embedding_bag(index, rows, counts.cumsum(0) - counts, mode="sum")
        x = total / counts.clamp(min=1)[:, None]
        return x.unflatten(0, (batch, num_words)), is_word.unflatten(0, (batch, num_words))

    def _prepared_words(self, lookup: Lookup) -> tuple[Tensor, Tensor]:
        """Return what `_words` does, in shapes that the host knows: n-grams that are left out weigh
        nothing.
        """
        batch, num_characters = lookup.words.shape
        num_kinds = 2 * self.config.max_n + 1
        num_words = lookup.num_words
        device = lookup.words.device

        # The words that there are, and the word of each n-gram, in ascending order.
        starts = num_words * torch.arange(batch, device=device)[:, None]
        word = (lookup.words + starts).flatten()[lookup.places // num_kinds]
        is_word = torch.zeros(batch * num_words, dtype=torch.bool, device=device)
        is_word.index_fill_(0, word, True)
        is_word[::num_words] = True  # the language, so that each row has something to attend to

        # The same random numbers as in `_words`.
        shares = torch.ones(len(word), device=device)
        if self.training and self.config.ngram_dropout_prob:
            noise = torch.rand(batch, num_characters, num_kinds, device=device)
            noise = noise.flatten()[lookup.places]
            shares = (noise >= self.config.ngram_dropout_prob).float()

        rows = F.embedding(lookup.distinct, self.table, sparse=True)
        first = torch.searchsorted(word, torch.arange(len(is_word), device=device))
        counts = torch.zeros(len(is_word), device=device).index_add_(0, word, shares)
        total = F.embedding_bag(
            lookup.inverse, rows, first, mode="sum", per_sample_weights=shares.to(rows.dtype)
        )
        x = total / counts.clamp(min=1)[:, None].to(rows.dtype)
        return x.unflatten(0, (batch, num_words)), is_word.unflatten(0, (batch, num_words))


class _Words(NamedTuple):
    """The words of texts, by their characters; each tensor is of shape (B, S)."""

    is_char: Tensor  # whether a character is of a word, or of the language
    is_lang: Tensor
    is_text: Tensor  # of the description, blanks included
    is_break: Tensor  # a blank, or outside of the text
    ends: Tensor  # whether it is the last one of its word
    position: Tensor  # in its word, from 0
    word: Tensor  # `Ngrams.words`


@torch.no_grad()
def hashed_ngrams(ids: Tensor, config: NgramConfig, *, across: bool = False) -> Ngrams:
    """Hash the n-grams of 1 to `max_n` characters in each word of texts (B, S), and the word as a
    whole.

    N-grams at the ends of a word are hashed once more as such; the language is one n-gram of its
    own kind. Then come, if wanted, those of 2 to `max_n` characters `across` blanks. Hashes are
    FNV-1a over Unicode code points, mixed by MurmurHash2's last steps, and the same on each device
    and platform. `hash_ngrams` of `_kernels.c` does the same as this specification, faster.
    """
    if kernels.supports(ids):
        buckets, word = kernels.hash_ngrams(
            ids,
            character_kinds(ids.device),
            torch.tensor([ord(character) for character in LANG_SEP]),
            across=across,
            max_n=config.max_n,
            num_buckets=config.num_buckets,
            max_words=config.max_words,
        )
        return Ngrams(buckets, word)

    # The n-grams that end at each character, from those of a single character on: the next longer
    # ones hash the character before as well.
    words = _find_words(ids, config.max_words)
    hashes = torch.full_like(ids, _FNV_OFFSET)
    is_whole = words.is_text
    crosses = torch.zeros_like(words.is_text)
    within_words = []
    across_blanks = []
    for n in range(1, config.max_n + 1):
        hashes = _fnv(hashes, _shifted(ids, n - 1))
        is_within = words.is_char & (words.position >= n - 1) & ~words.is_lang
        edges = (words.position == n - 1).long() + 2 * words.ends.long()
        within_words.append(_bucket(hashes, 4 * n, is_within, config))
        within_words.append(_bucket(hashes, edges + 4 * n, is_within & (edges > 0), config))

        is_whole = is_whole & _shifted(words.is_text, n - 1)
        crosses = crosses | _shifted(words.is_break, n - 1)
        if across and n > 1:
            kind = 4 * (n + config.max_n)
            across_blanks.append(_bucket(hashes, kind, is_whole & crosses, config))

    # The hash of a word is the sum of the hashes of its characters, each with its position, so that
    # there is no loop over the longest word.
    letters = _fnv((ids + _POSITION_MULTIPLIER * (words.position + 1)) & _MASK, _FNV_OFFSET)
    letters = torch.where(words.is_char, (letters ^ (letters >> 15)) * _MIX & _MASK, 0)
    total = letters.cumsum(1)
    first = torch.arange(ids.shape[1], device=ids.device) - words.position
    before_word = (total - letters).gather(1, first)
    whole_words = _bucket((total - before_word) & _MASK, words.is_lang.long(), words.ends, config)
    buckets = torch.stack([*within_words, whole_words, *across_blanks], dim=-1)
    return Ngrams(buckets, words.word)


def _find_words(ids: Tensor, max_words: int) -> _Words:
    """Return the words of texts (B, S), of which those beyond `max_words` are parts of the last."""
    # The language comes first, up to a mark; `start` is where each description begins, (B, 1).
    column = torch.arange(ids.shape[1], device=ids.device)
    matches = [_shifted(ids, -i) == ord(character) for i, character in enumerate(LANG_SEP)]
    is_mark = torch.stack(matches).all(0)
    start = torch.where(is_mark.any(1), is_mark.int().argmax(1) + len(LANG_SEP), 0)[:, None]
    is_lang = (column < start - len(LANG_SEP)) & (column > 0)

    # A word ends before a blank, and on both sides of punctuation.
    kinds = character_kinds(ids.device)
    kinds = kinds[ids.clamp(max=len(kinds) - 1)]
    is_break = (kinds == _BREAK) | (kinds == _END)
    is_char = ~is_break & ((column >= start) | is_lang)
    is_punctuation = (kinds == _MARK) & is_char & ~is_lang
    begins = is_char & (~_shifted(is_char, 1) | is_punctuation | _shifted(is_punctuation, 1))
    ends = is_char & (~_shifted(is_char, -1) | is_punctuation | _shifted(is_punctuation, -1))

    # Words are numbered from 1, and 0 is what is in front of the first.
    number = begins.cumsum(1)
    first = torch.zeros_like(ids).scatter(1, number * begins, column * begins).gather(1, number)
    has_lang = is_lang.any(1, keepdim=True)
    return _Words(
        is_char=is_char,
        is_lang=is_lang,
        is_text=(column >= start) & (kinds != _END),
        is_break=is_break,
        ends=ends,
        position=column - first,
        word=(number - has_lang.long()).clamp(0, max_words),
    )


def _fnv(hashes: Tensor, values: Tensor | int) -> Tensor:
    """Return the hashes with one more value, by a step of FNV-1a."""
    return ((hashes ^ values) * _FNV_PRIME) & _MASK


def _bucket(hashes: Tensor, kind: Tensor | int, where: Tensor, config: NgramConfig) -> Tensor:
    """Return the table's rows of n-grams of a kind, such as those at a word's end; -1 where `where`
    is False.
    """
    mixed = (hashes ^ (kind * _KIND_MULTIPLIER & _MASK)) & _MASK
    mixed = (mixed ^ (mixed >> 13)) * _MIX & _MASK
    mixed = (mixed ^ (mixed >> 15)) * _SECOND_MIX & _MASK
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
        num_kinds = max(_BREAKS + _ENDS) + 2
        kinds = torch.full((num_kinds,), _LETTER, dtype=torch.uint8)
        for kind, code_points in ((_MARK, _PUNCTUATION), (_BREAK, _BREAKS), (_END, _ENDS)):
            kinds[list(code_points)] = kind
        return kinds.to(device)
