"""Layers of encoder and decoder: products, attention, dropout and norms, by the fastest operators of the device."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from histocoder.model.copies import in_precision, stacked
from histocoder.ops import kernels


@contextmanager
def without_weights() -> Iterator[None]:
    """Build modules on the meta device, without initial values, which would import torch's compiler there."""
    with torch.device("meta"), _WithoutInit():
        yield


class _WithoutInit(TorchFunctionMode):
    """Skips the functions of `torch.nn.init`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return kwargs["tensor"] if getattr(func, "__module__", "") == nn.init.__name__ else func(*args, **kwargs)


class TransformerLayer(nn.Module):
    """Base of layers, which with `is_checkpointed` keep only their inputs and compute the rest again backwards."""

    is_checkpointed = False

    def __call__(self, *args: Any) -> Any:
        if self.is_checkpointed and torch.is_grad_enabled():
            return checkpoint(super().__call__, *args, use_reentrant=False)
        return super().__call__(*args)


def linear(x: Tensor, module: nn.Linear) -> Tensor:
    """Apply a linear layer to `x` (…, in) in the precision of `x`."""
    return affine(x, in_precision(module.weight, x.dtype), in_precision(module.bias, x.dtype))


def branch(x: Tensor, *modules: nn.Linear) -> tuple[Tensor, ...]:
    """Apply linear layers to `x` (…, in), where a residual branch begins; return their outputs, and `x` last.

    Layers whose weights `keep_copies` stacked become one product, whose outputs lie side by side. In the backward pass
    the product adds up the gradients that meet in `x`.
    """
    weight, bias = (stacked([getattr(m, name) for m in modules], x.dtype) for name in ("weight", "bias"))
    if weight is not None and bias is not None:
        return branch_of(x, weight, bias)
    results = []
    for module in modules:
        result, x = branch_of(x, in_precision(module.weight, x.dtype), in_precision(module.bias, x.dtype))
        results.append(result)
    return *results, x


def branch_of(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return `affine(x, weight, bias)`, and `x` to add the branch to; see `branch`."""
    if x.dtype == torch.bfloat16 and x.device.type == "cpu" and not torch.compiler.is_compiling():
        return _Affine.apply(x, weight, bias)
    return F.linear(x, weight, bias), x


def affine(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `x @ weight.T + bias` for `x` (…, in), all of one precision."""
    return branch_of(x, weight, bias)[0]


class _Affine(torch.autograd.Function):
    """`branch_of` in bf16 on a CPU, without copies of the bias for each row.

    The gradient of the weight is a product of columns, for which a CPU's matrix unit takes 1.5 times as long as for
    rows: the kernel transposes one side first, and sums the bias's gradient in the same pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        ctx.set_materialize_grads(False)
        if has_mkldnn_linear():
            return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], ""), x
        return F.linear(x, weight, bias), x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, of_rest: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of `x`, `weight` and `bias`; None for those that are not needed."""
        if grad is None:
            return of_rest, None, None
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad = grad.flatten(0, -2)  # (tokens, out)
        of_x = of_bias = of_weight = None
        if needs_x:
            of_x = torch.mm(grad, weight) if of_rest is None else torch.addmm(of_rest.flatten(0, -2), grad, weight)
            of_x = of_x.view(x.shape)
        if needs_weight and kernels.supports(grad):
            transposed, total = kernels.transpose(grad)
            of_weight, of_bias = torch.mm(transposed, x.flatten(0, -2)), total.to(grad.dtype)
        elif needs_weight:
            of_weight = torch.mm(grad.t(), x.flatten(0, -2))
        if needs_bias and of_bias is None:
            of_bias = grad.sum(0)
        return of_x, of_weight, of_bias if needs_bias else None


@cache
def has_mkldnn_linear() -> bool:
    """Return whether torch and the CPU have the operators for linear layers in bf16 that `torch.compile` uses."""
    operators = ("_linear_pointwise", "_reorder_linear_weight", "_is_mkldnn_bf16_supported")
    known = torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.mkldnn, name) for name in operators)
    return known and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def layer_norm(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    """Apply a layer norm with fp32 weights to `x` of any precision."""
    if x.dtype == norm.weight.dtype or x.device.type == "cpu":  # CPUs mix precisions in one pass
        return norm(x)
    return F.layer_norm(x.float(), norm.normalized_shape, norm.weight, norm.bias, norm.eps).to(x.dtype)


def attention(*sources: Tensor, num_heads: int, mask: Tensor | None, dropout_p: float = 0.0) -> Tensor:
    """Return scaled dot-product attention, of shape (B, L, dim).

    On a CPU torch's fused kernel is several times slower backwards than the products it is made of.

    Parameters
    ----------
    *sources : Tensor of shape (B, L or S, …)
        Queries, keys and values in this order, each of width `dim`; neighbours may lie side by side in one tensor.
    num_heads : int
    mask : Tensor, broadcast to (B, 1, L, S), or None
        If of bool, True for keys to attend to; else added to the scores.
    dropout_p : float
        Share of the probabilities that are zeroed.
    """
    if kernels.supports(sources[0]) and (mask is None or mask.dtype == torch.bool):
        return _Attention.apply(num_heads, mask, dropout_p, *sources)
    dim = sum(source.shape[-1] for source in sources) // 3
    queries, keys, values = (
        part.unflatten(-1, (num_heads, -1)).transpose(1, 2)  # (B, heads, L, dim / heads)
        for source in sources
        for part in source.split(dim, dim=-1)
    )
    if queries.device.type != "cpu":
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, dropout_p=dropout_p)
    else:
        scores = torch.matmul(queries * queries.shape[-1] ** -0.5, keys.transpose(-1, -2))
        if mask is not None:
            scores = scores + additive(mask, scores.dtype)
        mixed = torch.matmul(dropout(scores.softmax(-1), dropout_p), values)
    return mixed.transpose(1, 2).flatten(2)


class _Attention(torch.autograd.Function):
    """`attention` by the kernels of a CPU."""

    @staticmethod
    def forward(ctx: Any, num_heads: int, mask: Tensor | None, p: float, *sources: Tensor) -> Tensor:
        ctx.how = {"p": p, "seed": _seed() if p else 0}
        ctx.num_heads, ctx.mask = num_heads, mask
        is_trained = any(ctx.needs_input_grad)
        out, probabilities = kernels.Attention(sources, num_heads, mask, **ctx.how).forward(keep=is_trained)
        if probabilities is not None:
            ctx.save_for_backward(probabilities, *sources)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, *sources = ctx.saved_tensors
        found = kernels.Attention(sources, ctx.num_heads, ctx.mask, **ctx.how)
        return None, None, None, *found.backward(grad, probabilities)


def attention_mask(mask: Tensor, x: Tensor) -> Tensor:
    """Convert a mask of bool to the one that the attention of `x` computes with, once for all layers."""
    return mask if kernels.supports(x) else additive(mask, x.dtype)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a bool mask to one that is added to scores: 0 if True, else the least finite number."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)


def dropout(x: Tensor, p: float) -> Tensor:
    """Zero a share `p` of `x`, and scale the rest to keep the mean."""
    if p == 0.0:
        return x
    return _Dropout.apply(x, p) if kernels.supports(x) else F.dropout(x, p)


def add_norm(x: Tensor, update: Tensor, norm: nn.LayerNorm, p: float) -> Tensor:
    """Return the layer norm of `x + dropout(update, p)`."""
    in_bf16 = x.dtype == update.dtype == torch.bfloat16  # in fp32 torch's operators take as long
    if in_bf16 and kernels.supports(x) and norm.weight.dtype == torch.float32:
        return _AddNorm.apply(x, update, norm.weight, norm.bias, norm.eps, p)
    return layer_norm(x + dropout(update, p), norm)


class _Dropout(torch.autograd.Function):
    """`dropout` by the kernels of a CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        ctx.how = p, _seed()
        return kernels.dropout(x, *ctx.how)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return kernels.dropout(grad, *ctx.how), None


class _AddNorm(torch.autograd.Function):
    """`add_norm` by the kernels of a CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, update: Tensor, weight: Tensor, bias: Tensor, eps: float, p: float) -> Tensor:
        ctx.noise = {"p": p, "seed": _seed() if p else 0}
        out, total, moments = kernels.add_norm(x, update, weight, bias, eps=eps, **ctx.noise)
        ctx.save_for_backward(total, moments, weight)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *kernels.add_norm_backward(grad, *ctx.saved_tensors, **ctx.noise), None, None


def _seed() -> int:
    """Draw 64 bits from torch's generator."""
    return int(torch.empty((), dtype=torch.int64).random_(-(2**63), None).numpy())
