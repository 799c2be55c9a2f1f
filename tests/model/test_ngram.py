"""The encoder of hashed n-grams: its hashes, its batches, and what it refuses."""

import numpy as np
import pytest
import torch
from conftest import spied

from histocoder.model import canine
from histocoder.model.ngram import Lookup, NgramConfig, NgramEncoder, hashed_ngrams
from histocoder.text.tokenizers import join_language, tokenize

CONFIG = NgramConfig(num_buckets=4096, hidden_size=16, num_attention_heads=2, intermediate_size=16)
TEXTS = [
    "wine and spirit merchant",
    "dräng",
    "",
    "a",
    "靴屋 😀",
    "سائق",
    "word " * 40,
    "x" * 300,
    "(retired), farmer",
]


def ids_of(texts: list[str], lang: str = "en") -> torch.Tensor:
    tokens = tokenize(join_language(texts, [lang] * len(texts)), max_len=128)
    return torch.from_numpy(tokens.pad(np.arange(len(texts)), max_len=128))


def encode(model: NgramEncoder, texts: list[str], lang: str = "en") -> tuple[torch.Tensor, ...]:
    return model(ids_of(texts, lang), dtype=torch.float32)


@pytest.fixture
def model() -> NgramEncoder:
    torch.manual_seed(0)
    return NgramEncoder(CONFIG).eval()


def mixed(number: int, kind: int, num_buckets: int) -> int:
    number = (number ^ (kind * 0x27D4EB2F & 0xFFFFFFFF)) & 0xFFFFFFFF
    number = (number ^ number >> 13) * 0x5BD1E995 & 0xFFFFFFFF
    number = (number ^ number >> 15) * 0x2C1B3C6D & 0xFFFFFFFF
    return (number ^ number >> 12) % num_buckets


def buckets_of_word(word: str, max_n: int, num_buckets: int) -> set[int]:
    """The definition, one n-gram at a time, in Python's own integers."""
    found, total = set(), 0
    for end, character in enumerate(word):
        number = 0x811C9DC5
        for n in range(1, min(max_n, end + 1) + 1):
            number = (number ^ ord(word[end - n + 1])) * 16777619 & 0xFFFFFFFF
            edges = (n == end + 1) + 2 * (end == len(word) - 1)
            found.add(mixed(number, 4 * n, num_buckets))
            if edges:
                found.add(mixed(number, 4 * n + edges, num_buckets))
        letter = (
            (ord(character) + 0x9E3779B1 * (end + 1)) & 0xFFFFFFFF ^ 0x811C9DC5
        ) * 16777619 & 0xFFFFFFFF
        total += (letter ^ letter >> 15) * 0x5BD1E995 & 0xFFFFFFFF
    return found | {mixed(total & 0xFFFFFFFF, 0, num_buckets)}


@pytest.mark.parametrize("times", [1, 40])
def test_encodings_without_padding_are_the_same(
    times: int, model: NgramEncoder, monkeypatch: pytest.MonkeyPatch
):
    computed = spied(monkeypatch, canine, "linear", lambda x, *_: [x.shape[:-1].numel()])
    padded = encode(model, TEXTS * times)
    num_padded, num_words = computed[0], int(padded[2].sum())
    computed.clear()
    with torch.no_grad():
        found = encode(model, TEXTS * times)
    assert computed[0] == min(num_padded, -(-num_words // 256) * 256)
    assert torch.equal(found[2], padded[2])
    real = padded[2][..., None]
    torch.testing.assert_close(found[0] * real, padded[0].detach() * real)
    torch.testing.assert_close(found[1], padded[1].detach())


@pytest.mark.parametrize("word", ["a", "dräng", "apothecary", "😀"])
def test_hashes_are_those_of_the_definition(word: str):
    ngrams = hashed_ngrams(ids_of([word]).long(), NgramConfig(num_buckets=1 << 17, max_n=4))
    found = ngrams.buckets[ngrams.words == 1]
    assert {int(bucket) for bucket in found.flatten() if bucket >= 0} == buckets_of_word(
        word, 4, 1 << 17
    )


def test_encoding_does_not_depend_on_the_batch(model: NgramEncoder):
    together = encode(model, TEXTS)
    for i, text in enumerate(TEXTS):
        alone = encode(model, [text])
        torch.testing.assert_close(alone[1][0], together[1][i], atol=1e-5, rtol=0)
        assert int(alone[2].sum()) == int(together[2][i].sum())
    assert torch.isfinite(together[1]).all()


def test_prepared_ngrams_encode_as_hashed_ones_do(model: NgramEncoder):
    ids = ids_of(TEXTS)
    results = []
    for lookup in (None, Lookup.of(ids, CONFIG)):
        torch.manual_seed(1)  # of the n-grams that are left out
        memory, pooled, mask = model.train()(ids, lookup, dtype=torch.float32)
        (memory.square().sum() + pooled.sum()).backward()
        results.append((memory, pooled, mask, model.table.grad.to_dense()))
        model.zero_grad()
    torch.testing.assert_close(*results)
