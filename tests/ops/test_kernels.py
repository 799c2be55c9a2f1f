import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from histocoder.model.layers import add_norm, attention, branch, dropout
from histocoder.ops import kernels

NAMES = list(kernels._KINDS.values())
HERE = NAMES[list(kernels._KINDS).index(kernels.kind_of_cpu()) :]
"""The libraries that this processor can run."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2}


class Counter(TorchDispatchMode):
    """Counts torch's operators that read or write more than a few numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(isinstance(x, Tensor) and x.numel() > 100 for x in args) and "detach" not in str(func):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture(params=HERE)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, each that was compiled for this processor or a lesser one; None are torch's operators."""
    found = None if request.param is None else kernels._load(request.param)
    if request.param and found is None:
        pytest.skip(f"{request.param} was not compiled")
    monkeypatch.setattr(kernels, "library", lambda: found)


built = pytest.mark.usefixtures("library")


@pytest.mark.parametrize("name", HERE)
def test_kernels_compiled_before_their_source_changed_are_not_used(name: str, monkeypatch: pytest.MonkeyPatch):
    if kernels._load(name) is None:
        pytest.skip(f"{name} was not compiled")
    monkeypatch.setattr(kernels, "_VERSION", kernels._VERSION + 1)
    assert kernels._load(name) is None


@pytest.mark.parametrize(
    ("capability", "compiled", "taken"),
    [
        ("AVX512", NAMES, "_kernels_avx512"),
        ("AVX2", NAMES, "_kernels_avx2"),
        ("DEFAULT", NAMES, "_kernels"),
        ("SVE256", NAMES, "_kernels"),
        ("AVX512", ["_kernels", "_kernels_avx2"], "_kernels_avx2"),
        ("AVX2", ["_kernels_avx512"], None),
    ],
)
def test_the_best_that_was_compiled_is_taken(
    capability: str, compiled: list[str], taken: str | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(kernels, "_load", lambda name: name if name in compiled else None)
    assert kernels.library.__wrapped__() == taken


@built
@pytest.mark.parametrize("library", [*HERE, None], indirect=True)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_zeroes_its_share_keeps_the_mean_and_sends_gradients_where_it_kept(p: float, dtype: torch.dtype):
    torch.manual_seed(0)
    x = torch.ones(301, 1001, dtype=dtype, requires_grad=True)
    dropped = dropout(x, p)
    assert dropped.eq(0).float().mean() == pytest.approx(p, abs=0.003)
    for dim in (0, 1):  # no row or column is special
        assert dropped.eq(0).float().mean(dim).std() == pytest.approx((p * (1 - p) / x.shape[dim]) ** 0.5, rel=0.15)
    assert dropped.float().mean().item() == pytest.approx(1.0, abs=0.01)
    dropped.sum().backward()
    assert torch.equal(x.grad, dropped)
    assert not torch.equal(dropout(x, p), dropped)
    torch.manual_seed(0)
    assert torch.equal(dropout(x, p), dropped)


@built
def test_nothing_is_left_where_all_is_dropped():
    assert torch.all(dropout(torch.randn(50, 60), 1.0) == 0)


@built
def test_two_draws_of_noise_have_nothing_in_common():
    torch.manual_seed(0)
    draws = [dropout(torch.ones(4096), 0.5) - 1 for _ in range(20)]  # -1 and 1
    for one, other in itertools.combinations(draws, 2):
        spectrum = torch.fft.rfft(one) * torch.fft.rfft(other).conj()
        likeness = torch.fft.irfft(spectrum) / len(one)  # at any distance
        assert likeness.abs().max() < 0.09  # six standard deviations


@built
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(2, 3, 5), (7, 40, 72), (1, 8)])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_add_norm_is_the_norm_of_the_sum(p: float, shape: tuple[int, ...], dtype: torch.dtype):
    torch.manual_seed(0)
    norm = nn.LayerNorm(shape[-1])
    nn.init.normal_(norm.weight), nn.init.normal_(norm.bias)
    x, update, grad = (torch.randn(shape).to(dtype) for _ in range(3))
    inputs = [tensor.requires_grad_() for tensor in (x, update, norm.weight, norm.bias)]
    rng = torch.get_rng_state()
    out = add_norm(x, update, norm, p)
    found = torch.autograd.grad(out, inputs, grad)
    torch.set_rng_state(rng)
    kept = dropout(torch.ones(shape), p)
    expected_out = F.layer_norm((x + update * kept).float(), shape[-1:], norm.weight, norm.bias)
    expected = torch.autograd.grad(expected_out, inputs, grad.float())
    close = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), expected_out, **close)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, **close)


@built
def test_number_of_threads_changes_no_sum_of_gradients():
    torch.manual_seed(0)
    gradients = [torch.randn(100_000), torch.randn(50_000).bfloat16()]
    others = [torch.zeros(len(gradient)) for gradient in gradients]
    parts = kernels.Parts(others, others, others, gradients, [None, None])
    num_threads = torch.get_num_threads()
    sums = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            sums.append(parts.sum_of_squares())
    finally:
        torch.set_num_threads(num_threads)
    assert sums[0] == sums[1] == sums[2] == pytest.approx(sum(float(g.double().square().sum()) for g in gradients))


@built
def test_a_sum_with_noise_and_its_norm_are_one_pass():
    x, update = torch.randn(2, 30, 64).bfloat16()
    with torch.no_grad(), Counter() as counter:
        add_norm(x, update, nn.LayerNorm(64), 0.1)
    assert [name for name in counter.names if "empty_like" not in name] == []


@built
@pytest.mark.parametrize("count", [1, 32, 100, 40_000])
@pytest.mark.parametrize("offset", [0, 1, 8])
def test_a_step_copies_weights_to_wherever_they_are_kept(offset: int, count: int):
    weight, gradient = torch.randn(count, generator=torch.Generator().manual_seed(0)), torch.ones(count)
    room = torch.zeros(offset + count + 1).bfloat16()
    states = [torch.zeros(count) for _ in range(2)]
    parts = kernels.Parts([weight], [states[0]], [states[1]], [gradient], [room[offset:-1]])
    before = weight.clone()
    parts.adamw([1.0], lr=0.1, betas=(0.9, 0.99), eps=0.0, weight_decay=0.0, scale=0.5)
    torch.testing.assert_close(weight, before - 0.1)
    assert torch.equal(room[offset:-1], weight.bfloat16())
    assert torch.all(room[:offset] == 0) and room[-1] == 0


@built
@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (64, 32), (100, 33), (33, 96)])
def test_transposing_sums_rows_as_well(shape: tuple[int, int]):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    transposed, total = kernels.transpose(x)
    assert torch.equal(transposed, x.t())
    torch.testing.assert_close(total, x.float().sum(0), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("uses", [(True, True), (True, False), (False, True)])
def test_gradients_of_a_branch_and_of_what_it_leaves_add_up(uses: tuple[bool, bool], dtype: torch.dtype):
    torch.manual_seed(0)
    layers = [nn.Linear(24, 24) for _ in range(2)]
    x = torch.randn(3, 5, 24).to(dtype).requires_grad_()
    *results, rest = branch(x, *layers)
    assert torch.equal(rest, x)
    exact = x.detach().float().requires_grad_()
    of_branch, of_rest = (float(used) for used in uses)
    loss = of_branch * sum(result.float().square().sum() for result in results) if uses[0] else 0.0
    loss = loss + (rest.float().pow(3).sum() if uses[1] else 0.0)
    expected = of_branch * sum(layer(exact).square().sum() for layer in layers) + of_rest * exact.pow(3).sum()
    close = {"atol": 5 * TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    (found,) = torch.autograd.grad(loss, x)
    torch.testing.assert_close(found.float(), *torch.autograd.grad(expected, exact), **close)


def heads_of(joined: list[Tensor], num_heads: int) -> list[Tensor]:
    dim = sum(tensor.shape[-1] for tensor in joined) // 3
    parts = [part for tensor in joined for part in tensor.split(dim, dim=-1)]
    return [part.unflatten(-1, (num_heads, -1)).transpose(1, 2) for part in parts]


@built
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("mask_of", ["keys", "causal", "queries", None])
@pytest.mark.parametrize(
    ("num_queries", "num_keys", "widths", "num_heads"),
    [(9, 9, (3,), 2), (30, 30, (1, 1, 1), 4), (25, 33, (1, 2), 3), (1, 1, (3,), 1)],
)
def test_attention_is_torch_s(
    num_queries: int,
    num_keys: int,
    widths: tuple[int, ...],
    num_heads: int,
    mask_of: str | None,
    p: float,
    dtype: torch.dtype,
):
    torch.manual_seed(0)
    dim, lengths = num_heads * 24, (num_queries, num_keys, num_keys)
    sources = [torch.randn(5, n, dim * width).to(dtype) for n, width in zip(lengths, widths, strict=False)]
    sources = [source.requires_grad_() for source in sources]
    mask = None
    if mask_of == "keys":
        mask = (torch.arange(num_keys) < torch.randint(1, num_keys + 1, (5, 1)))[:, None, None]
    elif mask_of == "queries":
        mask = torch.ones(5, 1, num_queries, 1, dtype=torch.bool)
    elif mask_of == "causal":
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool).tril()
    grad = torch.randn(5, num_queries, dim).to(dtype)

    rng = torch.get_rng_state()
    out = attention(*sources, num_heads=num_heads, mask=mask, dropout_p=p)
    found = torch.autograd.grad(out, sources, grad)
    torch.set_rng_state(rng)
    kept = dropout(torch.ones(5, num_heads, num_queries, -(-num_keys // 16) * 16), p)[..., :num_keys]
    queries, keys, values = heads_of([source.float() for source in sources], num_heads)
    scores = queries @ keys.transpose(-1, -2) / 24**0.5
    shares = scores.masked_fill(~mask if mask is not None else torch.tensor(False), -torch.inf).softmax(-1)
    expected_out = (shares * kept @ values).transpose(1, 2).flatten(2)
    expected = torch.autograd.grad(expected_out, sources, grad.float())
    close = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    torch.testing.assert_close(out.float(), expected_out, **close)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **close)
    with torch.no_grad():
        torch.set_rng_state(rng)
        assert torch.equal(attention(*sources, num_heads=num_heads, mask=mask, dropout_p=p), out)


@built
def test_a_query_that_may_attend_to_nothing_gets_zeros():
    sources = torch.randn(2, 3, 3 * 16, requires_grad=True)
    mask = torch.tensor([[[[True, True, False]]], [[[False, False, False]]]])
    out = attention(sources, num_heads=2, mask=mask)
    out.sum().backward()
    assert torch.all(out[1] == 0) and torch.all(sources.grad[1] == 0) and torch.all(out[0] != 0)


@built
def test_kernels_without_memory_raise():
    length = 1 << 23  # so that a head's scores exceed the addresses that a process has
    heads = kernels.Attention([torch.zeros(1, length, 3)], 1, None, p=0.0, seed=0)
    with pytest.raises(MemoryError, match="working memory"):
        heads.forward(keep=False)
