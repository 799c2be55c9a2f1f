"""Layers of encoder and decoder: products, attention, dropout and norms, by the fastest operators
of the device.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from histocoder.ops import kernels

Config = TypeVar("Config", bound="EncoderConfig")
MAX_SEQUENCES = 65_535
"""Largest batch of CUDA's attention kernels: the batch is a dimension of their grid that ends
there.
"""


class WithoutInit(TorchFunctionMode):
    """Skips initial values, which on the meta device would import torch's compiler: a mode of
    `torch.overrides`.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", "") == nn.init.__name__:
            return kwargs["tensor"]
        return func(*args, **kwargs)


@dataclass
class EncoderConfig:
    """Base of the sizes of an encoder, which are the fields of its config file."""

    model_type: ClassVar[str]

    @classmethod
    def from_dict(cls: type[Config], config: dict[str, Any]) -> Config:
        """Return the sizes among the fields of a config file, and ignore the other fields."""
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in config.items() if name in names})

    def to_diff_dict(self) -> dict[str, Any]:
        """Return the fields of a config file; the name is that of `PretrainedConfig`'s method."""
        return {"model_type": self.model_type} | asdict(self)


class TransformerLayer(nn.Module):
    """Base of layers, which with `is_checkpointed` keep only their inputs and compute the rest
    again backwards.
    """

    is_checkpointed = False

    def __call__(self, *args: Any) -> Any:
        if self.is_checkpointed and torch.is_grad_enabled():
            return checkpoint(super().__call__, *args, use_reentrant=False)
        return super().__call__(*args)


class Weights:
    """Weights of modules in the precision of their products.

    On a GPU all of them are cast by one kernel, and their gradients by another: what a step takes
    there is the launches of its kernels, of which casts of single weights would be a quarter. Those
    of linear layers that are `joined`, which have one input, lie one below the other then.
    """

    def __init__(
        self, dtype: torch.dtype, *modules: nn.Module, joined: Sequence[nn.Linear] = ()
    ) -> None:
        self._dtype = dtype
        self._joined = joined
        self._casts: dict[Tensor, Tensor] = {}
        self._joined_casts: tuple[Tensor, ...] = ()
        if torch.compiler.is_compiling():  # which fuses casts itself
            return

        # Tensors can't be compared by ==, which would compare their numbers.
        joined_parameters = [layer.weight for layer in joined] + [layer.bias for layer in joined]
        joined_ids = set(map(id, joined_parameters))
        apart = [
            parameter
            for module in modules
            for parameter in module.parameters()
            if id(parameter) not in joined_ids
        ]
        parameters = joined_parameters + apart
        if parameters and parameters[0].device.type != "cpu" and parameters[0].dtype != dtype:
            casts = _CastFunction.apply(dtype, len(joined), *parameters)
            if joined:
                self._joined_casts = casts[:2]
                casts = casts[2:]
            self._casts = dict(zip(apart, casts, strict=True))

    def of_joined(self) -> tuple[Tensor, ...]:
        """Return weight and bias of the joined layers, as of one layer that has the outputs of
        all.
        """
        if self._joined_casts:
            return self._joined_casts
        weight = torch.cat([self[layer.weight] for layer in self._joined])
        return weight, torch.cat([self[layer.bias] for layer in self._joined])

    def __getitem__(self, parameter: Tensor) -> Tensor:
        cast = self._casts.get(parameter)
        return parameter.to(self._dtype) if cast is None else cast


class _CastFunction(torch.autograd.Function):
    """Casts of several tensors at once, of which the first are the weights and then the biases of
    joined layers.
    """

    @staticmethod
    def forward(
        ctx: Any, dtype: torch.dtype, num_joined: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        # A layer has as many outputs as its weight has rows, and its bias numbers.
        ctx.dtype = tensors[0].dtype
        ctx.sizes = [len(tensor) for tensor in tensors[:num_joined]]
        if not num_joined:
            return _cast(tensors, dtype)

        # What is joined is cast into parts of one tensor.
        num_outputs = sum(ctx.sizes)
        weight = tensors[0].new_empty((num_outputs, *tensors[0].shape[1:]), dtype=dtype)
        bias = tensors[num_joined].new_empty(num_outputs, dtype=dtype)
        apart = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors[2 * num_joined :]]
        torch._foreach_copy_(_split([weight, bias], ctx.sizes) + apart, list(tensors))
        return weight, bias, *apart

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.sizes:
            grads = (*_split(grads[:2], ctx.sizes), *grads[2:])
        return None, None, *_cast(grads, ctx.dtype)


def _split(tensors: Sequence[Tensor], sizes: list[int]) -> list[Tensor]:
    """Return the parts of some sizes of each tensor."""
    return [part for tensor in tensors for part in tensor.split(sizes)]


def _cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    casts = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    torch._foreach_copy_(casts, list(tensors))
    return tuple(casts)


def linear(x: Tensor, module: nn.Linear, weights: Weights | None = None) -> Tensor:
    """Apply a linear layer to `x` (…, in) in the precision of `x`, that of the `weights` if they
    are given.
    """
    weights = weights or Weights(x.dtype)
    return F.linear(x, weights[module.weight], weights[module.bias])


def residual_and_linear(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return `x` (…, in), for a residual connection, and its product by a linear layer, of shape
    (…, out).

    On a GPU the gradients that reach `x` on both ways are joined by the product that computes one
    of them.
    """
    if x.device.type == "cpu" or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return x, F.linear(x, weight, bias)
    return _ResidualAndLinearFunction.apply(x, weight, bias)


class _ResidualAndLinearFunction(torch.autograd.Function):
    """A linear layer beside a residual connection."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        return x.view_as(x), F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_residual: Tensor, grad_product: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        rows = x.flatten(0, -2)
        grad_rows = grad_product.flatten(0, -2)
        grad = torch.addmm(grad_residual.flatten(0, -2), grad_rows, weight)
        return grad.view_as(x), grad_rows.t() @ rows, grad_rows.sum(0)


def layer_norm(x: Tensor, norm: nn.LayerNorm, weights: Weights | None = None) -> Tensor:
    """Apply a layer norm with fp32 weights to `x` of any precision, that of the `weights` if they
    are given.
    """
    if x.dtype == norm.weight.dtype or x.device.type == "cpu":  # CPUs mix precisions in one pass
        return norm(x)
    if weights is not None:
        return F.layer_norm(
            x, norm.normalized_shape, weights[norm.weight], weights[norm.bias], norm.eps
        )
    normalized = F.layer_norm(x.float(), norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    return normalized.to(x.dtype)


def attention(
    *sources: Tensor, num_heads: int, mask: Tensor | None, dropout_p: float = 0.0
) -> Tensor:
    """Return scaled dot-product attention, of shape (B, L, dim).

    `sources` are queries, keys and values in this order, of shape (B, L or S, dim); neighbours may
    lie side by side in one tensor. `mask`, broadcast to (B, 1, L, S), is True for keys to attend
    to; if not of bool, it is added to the scores. On a CPU torch's fused kernel is several times
    slower backwards than the products it is made of.
    """
    if kernels.supports(sources[0]) and (mask is None or mask.dtype == torch.bool):
        return _AttentionFunction.apply(num_heads, mask, dropout_p, *sources)
    dim = sum(source.shape[-1] for source in sources) // 3
    queries, keys, values = (
        part.unflatten(-1, (num_heads, -1)).transpose(1, 2)  # (B, heads, L, dim / heads)
        for source in sources
        for part in source.split(dim, dim=-1)
    )
    if mask is not None:
        mask = additive(mask, queries.dtype)
    if queries.device.type != "cpu":
        mixed = scaled_dot_product(queries, keys, values, mask, dropout_p=dropout_p)
    else:
        scores = torch.matmul(queries * queries.shape[-1] ** -0.5, keys.transpose(-1, -2))
        if mask is not None:
            scores = scores + mask
        mixed = torch.matmul(F.dropout(scores.softmax(-1), dropout_p), values)
    return mixed.transpose(1, 2).flatten(2)


def scaled_dot_product(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, *, dropout_p: float = 0.0
) -> Tensor:
    """Return `F.scaled_dot_product_attention` of a batch of any size, in parts that CUDA's kernels
    take.
    """
    if len(queries) <= MAX_SEQUENCES:
        return F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, dropout_p=dropout_p
        )

    # A mask may be one for all rows of the batch.
    has_rows = mask is not None and mask.dim() == queries.dim() and len(mask) > 1
    parts = []
    for start in range(0, len(queries), MAX_SEQUENCES):
        rows = slice(start, start + MAX_SEQUENCES)
        part = F.scaled_dot_product_attention(
            queries[rows],
            keys[rows],
            values[rows],
            attn_mask=mask[rows] if mask is not None and has_rows else mask,
            dropout_p=dropout_p,
        )
        parts.append(part)
    return torch.cat(parts)


def attend_to_paths(levels: Sequence[Tensor], paths: Tensor, *, num_heads: int) -> Tensor:
    """Return the attention (N, dim) of the newest nodes of trees to their ancestors and themselves,
    without gradients.

    `levels` are the trees' levels, the newest last, each with the queries, keys and values of its
    nodes side by side, of shape (nodes, 3 * dim); `paths` (depth, N) has the node of each level on
    the way to each of the newest ones, the ones themselves last.
    """
    dim = levels[0].shape[1] // 3
    if kernels.supports(levels[0]) and dim % (kernels.LANES * num_heads) == 0:
        return kernels.attend_paths(levels, paths, num_heads=num_heads)
    sources = [level[:, dim:][path] for level, path in zip(levels, paths, strict=True)]
    queries = levels[-1][:, None, :dim]
    return attention(queries, torch.stack(sources, dim=1), num_heads=num_heads, mask=None)[:, 0]


class _AttentionFunction(torch.autograd.Function):
    """`attention` by the kernels of a CPU."""

    @staticmethod
    def forward(
        ctx: Any, num_heads: int, mask: Tensor | None, p: float, *sources: Tensor
    ) -> Tensor:
        """Return the attention; see `attention`."""
        ctx.num_heads = num_heads
        ctx.mask = mask
        ctx.p = p
        ctx.seed = _seed() if p else 0  # backwards the same probabilities are zeroed
        kernel = kernels.AttentionKernel(sources, num_heads, mask, p=p, seed=ctx.seed)
        out, probabilities = kernel.forward(keep=any(ctx.needs_input_grad))
        if probabilities is not None:
            ctx.save_for_backward(probabilities, *sources)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, *sources = ctx.saved_tensors
        kernel = kernels.AttentionKernel(sources, ctx.num_heads, ctx.mask, p=ctx.p, seed=ctx.seed)
        return None, None, None, *kernel.backward(grad, probabilities)


def dropout(x: Tensor, p: float) -> Tensor:
    """Return `x` with the share `p` of its numbers zeroed, and the others scaled; torch's CPU draws
    are slow.
    """
    if p and kernels.supports(x):
        return _DropoutFunction.apply(x, p)
    return F.dropout(x, p)


class Dropout(nn.Dropout):
    """`dropout` in training."""

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.p) if self.training else x


class _DropoutFunction(torch.autograd.Function):
    """`dropout` by the kernels of a CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        ctx.p = p
        ctx.seed = _seed()
        return kernels.dropout(x, p=p, seed=ctx.seed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return kernels.dropout(grad, p=ctx.p, seed=ctx.seed), None


def _seed() -> int:
    """Return 64 bits of torch's generator."""
    return int(torch.empty((), dtype=torch.int64).random_(-(2**63), None).numpy())


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a bool mask to one that is added to scores: 0 if True, else the least finite
    number.
    """
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)


def reusable(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask for several calls of `attention` in a precision: converted once on a GPU,
    unlike on a CPU.
    """
    return mask if mask.device.type == "cpu" else additive(mask, dtype)


def add_norm(
    x: Tensor, update: Tensor, norm: nn.LayerNorm, p: float, weights: Weights | None = None
) -> Tensor:
    """Return the layer norm of `x + dropout(update, p)`."""
    return layer_norm(x + dropout(update, p), norm, weights)


def padded(x: Tensor, real: Tensor, shape: tuple[int, int]) -> Tensor:
    """Put `x` (n, dim) at some positions of a `shape` (B, L), given by their indices (n,), and
    zeros elsewhere.
    """
    return x.new_zeros(shape[0] * shape[1], x.shape[1]).index_copy(0, real, x).unflatten(0, shape)


def mean_pooled(x: Tensor, mask: Tensor) -> Tensor:
    """Return the mean in fp32 of `x` (B, L, dim) over the positions where `mask` (B, L) is True."""
    real = mask[..., None]
    return x.float().masked_fill(~real, 0.0).sum(1) / real.sum(1)
