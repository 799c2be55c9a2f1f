"""The kernels in C against torch's operators."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from scipy import sparse
from sklearn.svm import LinearSVC
from torch import Tensor

from histocoder.model.layers import attend_to_paths, attention, dropout
from histocoder.model.linear_expert import LinearExpert
from histocoder.model.ngram import NgramConfig, hashed_ngrams
from histocoder.ops import kernels, linear_svm
from histocoder.ops.linear_svm import fit_machines
from histocoder.text.tokenizers import lower_characters

CAPABILITIES = ["AVX512", "AVX2", ""]
HERE = CAPABILITIES[CAPABILITIES.index(kernels.kind_of_cpu()) :]
"""What this processor can run."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2}


@pytest.fixture(params=HERE)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use the kernels compiled for this processor, then those for each lesser one."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: request.param)
    kernels.library.cache_clear()
    if kernels.library() is None:
        pytest.skip("the kernels were not compiled")
    yield
    kernels.library.cache_clear()


built = pytest.mark.usefixtures("library")


def dropped_ones(p: float, count: int = 4096) -> Tensor:
    """Return the dropout of so many ones: of queries that attend to a single key."""
    one = torch.ones(1, 1, 1)
    return attention(
        one.expand(1, count, 1), one, one, num_heads=1, mask=None, dropout_p=p
    ).flatten()


@built
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_zeroes_its_share_and_keeps_the_mean(p: float):
    torch.manual_seed(0)
    dropped = dropped_ones(p, 300_000)
    assert dropped.eq(0).float().mean() == pytest.approx(p, abs=0.003)
    assert dropped.mean() == pytest.approx(1.0, abs=0.01)
    assert not torch.equal(dropped_ones(p, 300_000), dropped)
    torch.manual_seed(0)
    assert torch.equal(dropped_ones(p, 300_000), dropped)
    assert torch.all(dropped_ones(1.0) == 0)


@built
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_dropout_is_that_of_torch(dtype: torch.dtype):
    x = torch.randn(3, 100_000, dtype=dtype, requires_grad=True)
    torch.manual_seed(0)
    found = dropout(x, 0.3)
    kept = found != 0
    assert kept.double().mean(1).sub(0.7).abs().max() < 0.01 and not torch.equal(kept[0], kept[1])
    torch.testing.assert_close(found[kept], (x.float() / 0.7).to(dtype)[kept])
    (found * 2).sum().backward()
    torch.testing.assert_close(x.grad, 2 * kept.to(dtype) / 0.7)
    torch.manual_seed(0)
    assert torch.equal(dropout(x, 0.3), found) and not torch.equal(dropout(x, 0.3), found)
    assert torch.all(dropout(x, 1.0) == 0)


def heads_of(joined: list[Tensor], num_heads: int) -> list[Tensor]:
    dim = sum(tensor.shape[-1] for tensor in joined) // 3
    parts = [part for tensor in joined for part in tensor.split(dim, dim=-1)]
    return [part.unflatten(-1, (num_heads, -1)).transpose(1, 2) for part in parts]


@built
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("mask_of", ["keys", "causal", "queries", None])
@pytest.mark.parametrize(
    "sizes", [(9, 9, (3,), 2), (30, 30, (1, 1, 1), 4), (25, 33, (1, 2), 3), (1, 1, (3,), 1)]
)
def test_attention_is_torchs(sizes: tuple, mask_of: str | None, p: float, dtype: torch.dtype):
    torch.manual_seed(0)
    num_queries, num_keys, widths, num_heads = sizes
    head_dim = 40  # more than keys
    dim, lengths = num_heads * head_dim, (num_queries, num_keys, num_keys)
    sources = [
        torch.randn(5, n, dim * width).to(dtype) for n, width in zip(lengths, widths, strict=False)
    ]
    sources = [source.requires_grad_() for source in sources]
    mask = {
        "keys": (torch.arange(num_keys) < torch.randint(1, num_keys + 1, (5, 1)))[:, None, None],
        "queries": torch.ones(5, 1, num_queries, 1, dtype=torch.bool),
        "causal": torch.ones(num_queries, num_keys, dtype=torch.bool).tril(),
    }.get(mask_of)
    grad = torch.randn(5, num_queries, dim).to(dtype)

    rng = torch.get_rng_state()
    out = attention(*sources, num_heads=num_heads, mask=mask, dropout_p=p)
    found = torch.autograd.grad(out, sources, grad)
    torch.set_rng_state(rng)
    queries, keys, values = heads_of([source.float() for source in sources], num_heads)
    scores = queries @ keys.transpose(-1, -2) / head_dim**0.5
    shares = scores.masked_fill(
        ~mask if mask is not None else torch.tensor(False), -torch.inf
    ).softmax(-1)
    kept = torch.ones(())
    if p:  # the shares that are left by the same draws show which are dropped
        each = torch.eye(num_keys, head_dim).repeat(5, 1, num_heads)
        apart = [part.transpose(1, 2).flatten(2).detach().contiguous() for part in (queries, keys)]
        left = attention(*apart, each, num_heads=num_heads, mask=mask, dropout_p=p)
        torch.set_rng_state(rng)
        kept = heads_of([left] * 3, num_heads)[0][..., :num_keys].ne(0) / (1 - p)
    expected_out = (shares * kept @ values).transpose(1, 2).flatten(2)
    expected = torch.autograd.grad(expected_out, sources, grad.float())
    close = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    torch.testing.assert_close(out.float(), expected_out, **close)
    torch.testing.assert_close(found, expected, **close)
    with torch.no_grad():
        torch.set_rng_state(rng)
        assert torch.equal(attention(*sources, num_heads=num_heads, mask=mask, dropout_p=p), out)


@built
def test_queries_without_keys_get_zeros():
    sources = torch.randn(2, 3, 3 * 16, requires_grad=True)
    out = attention(
        sources,
        num_heads=2,
        mask=torch.tensor([[[[True, True, False]]], [[[False, False, False]]]]),
    )
    out.sum().backward()
    assert torch.all(out[1] == 0) and torch.all(sources.grad[1] == 0) and torch.all(out[0] != 0)


@built
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("num_nodes", [(3,), (2, 1, 5), (1, 40, 300)])
def test_attention_to_paths_is_torchs(
    num_nodes: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    torch.manual_seed(0)
    levels = [torch.randn(nodes, 3 * 96).to(dtype) for nodes in num_nodes]
    newest = num_nodes[-1]
    paths = torch.stack(
        [*(torch.randint(nodes, (newest,)) for nodes in num_nodes[:-1]), torch.arange(newest)]
    )
    found = attend_to_paths(levels, paths, num_heads=2)
    monkeypatch.setattr(kernels, "supports", lambda _: False)
    expected = attend_to_paths([level.float() for level in levels], paths, num_heads=2)
    torch.testing.assert_close(
        found.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


@built
@pytest.mark.parametrize(
    "config", [NgramConfig(), NgramConfig(num_buckets=1000, max_n=3, max_words=2)]
)
@pytest.mark.parametrize("across", [False, True])
def test_ngrams_are_those_of_torch(
    config: NgramConfig, across: bool, monkeypatch: pytest.MonkeyPatch
):
    letters = np.array([*"ab [SEP]-.,\té漢\u2009'", "[SEP]", "en[SEP]"])
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(letters, rng.integers(20))) for _ in range(500)]
    ids = torch.from_numpy(
        lower_characters([*texts, "EN[SEP]Wine- and  spirit merchant.", "a b[SEP]c"])
    ).long()
    found = hashed_ngrams(ids, config, across=across)
    monkeypatch.setattr(kernels, "supports", lambda _: False)
    by_torch = hashed_ngrams(ids, config, across=across)
    assert torch.equal(found.buckets, by_torch.buckets) and torch.equal(found.words, by_torch.words)


RANDOM = np.random.default_rng(0)
FEATURES = sparse.random(70, 40, density=0.2, format="csr", dtype=np.float32, random_state=RANDOM)
LABELS = np.arange(3, 70).repeat(2), RANDOM.integers(1, 21, 134)  # a few rows are of no class
WEIGHTS = RANDOM.uniform(0.2, 1, 70)


@built
@built
def test_sums_of_weights_are_those_of_dense_products(monkeypatch: pytest.MonkeyPatch):
    matrix = torch.randn(1 << 12, 30) * (torch.rand(1 << 12, 30) < 0.1)
    expert = LinearExpert.of(
        torch.arange(1 << 12) * 256, torch.rand(1 << 12), matrix, torch.randn(30)
    )
    characters = torch.from_numpy(
        lower_characters(["en[SEP]wine and spirit merchant", "", "smed"] * 9)
    )
    found = expert(characters)
    monkeypatch.setattr(kernels, "supports", lambda _: False)
    expected = expert(characters)
    assert found.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_machines_of_any_threads_are_scikit_learns(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(linear_svm, "MAX_PASSES", 2000)
    found, threads = [], torch.get_num_threads()
    for number in (3, threads):
        torch.set_num_threads(number)
        found.append(fit_machines(FEATURES, *LABELS, WEIGHTS))
    for array, expected in zip(*found, strict=True):
        np.testing.assert_array_equal(array, expected)
    (classes, coefficients, intercepts), (rows, class_ids) = found[0], LABELS
    assert np.array_equal(classes, np.unique(class_ids))
    for i, own in enumerate(classes):
        is_one = np.isin(np.arange(70), rows[class_ids == own])
        machine = LinearSVC(tol=1e-7, max_iter=100_000, dual=True).fit(
            FEATURES, is_one, sample_weight=WEIGHTS
        )
        np.testing.assert_allclose(coefficients[:, i], machine.coef_[0], atol=1e-4)
        assert intercepts[i] == pytest.approx(machine.intercept_[0], abs=1e-4)


@pytest.mark.skipif(kernels.library() is None, reason="the kernels were not compiled")
def test_machines_without_kernels_are_alike(monkeypatch: pytest.MonkeyPatch):
    _, expected, expected_intercepts = fit_machines(FEATURES, *LABELS, WEIGHTS)
    monkeypatch.setattr(kernels, "library", lambda: None)
    _, found, intercepts = fit_machines(FEATURES, *LABELS, WEIGHTS)
    assert np.corrcoef(found.ravel(), expected.ravel())[0, 1] > 0.99
    np.testing.assert_allclose(intercepts, expected_intercepts, atol=0.2)
