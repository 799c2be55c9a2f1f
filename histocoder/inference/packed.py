"""Linear layers for inference, with weights packed once for a CPU's matrix units."""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from histocoder.model.decoder import DecoderLayer


@cache
def has_mkldnn_linear() -> bool:
    """Return whether torch and the CPU have the operators for linear layers in bf16 that `torch.compile` uses."""
    operators = ("_linear_pointwise", "_reorder_linear_weight", "_is_mkldnn_bf16_supported")
    known = torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.mkldnn, name) for name in operators)
    return known and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class PackedLinear:
    """A linear layer with its present weights, fused with the operation that follows it where possible.

    PyTorch packs a weight again for each bf16 product on a CPU, and copies the bias to each row of the result first:
    with few rows that takes as long as the product. The operators of `torch.compile`'s graphs do neither; where there
    are none, and in other precisions, the layer is computed as usual. Together with bins of 64 nodes this made full
    search on AMX 1.6 times as fast.

    Examples
    --------
    >>> layer = PackedLinear(torch.tensor([[1.0, 0.0], [-1.0, 1.0]]), torch.tensor([0.0, -9.0]))
    >>> layer(torch.tensor([[2.0, 3.0]])), layer.relu(torch.tensor([[2.0, 3.0]]))
    (tensor([[ 2., -8.]]), tensor([[2., 0.]]))
    >>> layer.add_to(torch.tensor([[1.0, 1.0]]), torch.tensor([[2.0, 3.0]]))
    tensor([[ 3., -7.]])
    """

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        self.is_packed = weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and has_mkldnn_linear()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self.is_packed else weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return self._packed(x, "none") if self.is_packed else F.linear(x, self._weight, self._bias)

    def relu(self, x: Tensor) -> Tensor:
        return self._packed(x, "relu") if self.is_packed else F.linear(x, self._weight, self._bias).relu_()

    def add_to(self, x: Tensor, inner: Tensor) -> Tensor:
        """Add the layer of `inner` (…, in) to `x` (…, out), which may be overwritten."""
        if self.is_packed:
            return torch.ops.mkldnn._linear_pointwise.binary(inner, x, self._weight, self._bias, "add")
        x.add_(self._bias).view(-1, x.shape[-1]).addmm_(inner.reshape(-1, inner.shape[-1]), self._weight.t())
        return x

    def _packed(self, x: Tensor, function: str) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, function, [], "")


class PackedLayer:
    """The linear layers of a decoder layer: those of self-attention, of attention to memory, and the feed-forward."""

    def __init__(self, layer: DecoderLayer) -> None:
        own, to_memory = layer.self_attn, layer.multihead_attn
        self.own = PackedLinear(own.in_proj_weight, own.in_proj_bias)  # queries, keys and values together
        self.own_out = PackedLinear(own.out_proj.weight, own.out_proj.bias)
        self.queries = PackedLinear(*to_memory.query_projection)
        self.out = PackedLinear(to_memory.out_proj.weight, to_memory.out_proj.bias)
        self.inner = PackedLinear(layer.linear1.weight, layer.linear1.bias)
        self.outer = PackedLinear(layer.linear2.weight, layer.linear2.bias)
