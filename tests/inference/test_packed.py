"""Packed weights against the layers they are made from, and that decoding uses them, counted."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from histocoder.formatters import build_formatter
from histocoder.inference.greedy import greedy
from histocoder.inference.packed import PackedLinear
from histocoder.inference.search import TrieSearch
from histocoder.inference.trie import CodeTrie
from histocoder.model import Decoder
from histocoder.model.layers import has_mkldnn_linear

HISCO = build_formatter("hisco", num_blocks=2)
needs_packing = pytest.mark.skipif(not has_mkldnn_linear(), reason="this CPU or this torch packs no weights")


class Operators(TorchDispatchMode):
    """Counts what is called, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        is_plain = name == "_linear_pointwise" and not any(getattr(arg, "is_mkldnn", False) for arg in args)
        self.calls["plain" if is_plain else name] += 1
        return func(*args, **(kwargs or {}))

    @property
    def products(self) -> dict[str, int]:
        """Linear layers: with packed weights, packing them, and others."""
        names = {"packed": ("_linear_pointwise",), "packing": ("_reorder_linear_weight",)}
        names["plain"] = ("plain", "addmm", "addmm_")
        return {key: sum(self.calls[name] for name in known) for key, known in names.items()}


@pytest.fixture
def decoder() -> Decoder:
    torch.manual_seed(3)
    return Decoder(HISCO.vocab_size + 1, 32, num_layers=2, num_heads=4).eval().to(torch.bfloat16)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("shape", [(1, 32), (70, 32), (2, 5, 32)])
@torch.no_grad()
def test_a_packed_layer_is_the_layer(shape: tuple[int, ...], dtype: torch.dtype, tolerance: float):
    torch.manual_seed(0)
    layer = torch.nn.Linear(32, 48)
    x, y = torch.randn(shape), torch.randn(*shape[:-1], 48)
    packed = PackedLinear(layer.weight.to(dtype), layer.bias.to(dtype))
    assert packed.is_packed == (dtype == torch.bfloat16 and has_mkldnn_linear())
    for found, expected in (
        (packed(x.to(dtype)), layer(x)),
        (packed.relu(x.to(dtype)), layer(x).relu()),
        (packed.add_to(y.to(dtype, copy=True), x.to(dtype)), y + layer(x)),
    ):
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)


def counted(work: Callable[[], object]) -> dict[str, int]:
    with Operators() as operators:
        work()
    return operators.products


@needs_packing
@torch.no_grad()
def test_greedy_packs_the_decoder_once_for_all_steps(decoder: Decoder):
    memory = torch.randn(6, 8, 32, dtype=torch.bfloat16)
    found = counted(lambda: greedy(decoder, memory, None, num_tokens=10, block_size=10))
    layers, steps = len(decoder.decoder.layers), 10
    assert found["packing"] == 6 * layers and found["packed"] == 6 * layers * steps
    assert found["plain"] == layers + steps  # memory's keys and values; logits


@needs_packing
@pytest.mark.parametrize("num_positions", [8, 16])  # folded into the weights, and too long for it
@torch.no_grad()
def test_full_search_packs_the_decoder_once_for_all_batches(decoder: Decoder, num_positions: int):
    memory = torch.randn(6, num_positions, 32, dtype=torch.bfloat16)
    mask = torch.ones(6, num_positions, dtype=torch.bool)
    search = TrieSearch(decoder, CodeTrie([f"{i:05}" for i in range(0, 100_000, 991)], HISCO))
    found = counted(lambda: [search.full(memory, mask) for _ in range(3)])
    layers, batches = len(decoder.decoder.layers), 3
    of_memory = 0 if num_positions == 8 else 2 * layers
    assert found["packing"] == 6 * layers
    # what all rows share once; of each batch, self-attention's two but in the first layer, and the feed-forward's two
    assert found["packed"] == 2 + batches * (2 * (layers - 1) + 2 * layers + of_memory)
    assert found["plain"] == batches * (layers + 1)
