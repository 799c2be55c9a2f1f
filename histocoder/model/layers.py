"""What encoder and decoder are made of: products, attention and dropout, each as fast as the device at hand allows."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def linear(x: Tensor, module: nn.Linear) -> Tensor:
    """A linear layer in the precision of `x` (…, in)."""
    return product(x, module.weight, module.bias)


def product(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`x @ weight.T + bias` in the precision of `x` (…, in)."""
    return F.linear(x, in_precision(weight, x.dtype), in_precision(bias, x.dtype))


def in_precision(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight in the precision of a computation: its kept copy where it has one, else one made now."""
    copy = kept_copy(weight)
    if copy is None or dtype == weight.dtype or torch.compiler.is_compiling():
        return weight.to(dtype)
    return copy.of(weight, dtype)


class KeptCopy:
    """A weight in another precision, made when it is first asked for, and again when the weight has changed.

    Gradients collect in the copy: the weight gets none.
    """

    def __init__(self) -> None:
        self.tensor: Tensor | None = None
        self.version = -1
        """Of the weight, when the copy was made."""

    def of(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The copy, up to date."""
        with torch.inference_mode(mode=False), torch.no_grad():  # whoever asks first, the copy is one to train with
            if self.tensor is None or (self.tensor.dtype, self.tensor.requires_grad) != (dtype, weight.requires_grad):
                self.tensor = weight.detach().to(dtype).requires_grad_(weight.requires_grad)
            elif self.version != weight._version:
                self.tensor.copy_(weight)
        self.is_fresh(weight)
        return self.tensor

    def is_fresh(self, weight: Tensor) -> None:
        """Note that the copy is as the weight now is."""
        self.version = weight._version

    def forget_gradient(self) -> None:
        """As `zero_grad` does for the weight."""
        if self.tensor is not None:
            self.tensor.grad = None


def keep_copies(module: nn.Module) -> None:
    """From now on, keep a module's weights in the precision of its computations as well.

    Worth it where one process trains on a CPU: a step is shorter by the time it takes to read all weights. An optimizer
    must know of it; `histocoder.optimizer.AdamW` does. Changes of a weight's `data` go unnoticed.
    """
    for parameter in module.parameters():
        parameter.kept_copy = KeptCopy()  # type: ignore[attr-defined]


def kept_copy(weight: Tensor) -> KeptCopy | None:
    """Where a weight's copy is kept, if it is."""
    return getattr(weight, "kept_copy", None)


def layer_norm(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    """A layer norm with fp32 weights over `x` of any precision."""
    if x.dtype == norm.weight.dtype or x.device.type == "cpu":  # CPUs mix precisions in one pass
        return norm(x)
    return F.layer_norm(x.float(), norm.normalized_shape, norm.weight, norm.bias, norm.eps).to(x.dtype)


def attention(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, *, dropout_p: float = 0.0) -> Tensor:
    """Scaled dot-product attention.

    On a CPU torch's fused kernel is several times slower backwards than the products it is made of.

    Parameters
    ----------
    queries, keys, values : Tensor of shape (B, heads, L, dim), (B, heads, S, dim), (B, heads, S, dim)
    mask : Tensor, broadcast to (B, heads, L, S), or None
        Of bool: true where a key may be attended to. Of another dtype: added to the scores.
    dropout_p : float
        Share of the probabilities that are zeroed.

    Returns
    -------
    Tensor of shape (B, L, heads * dim)
    """
    if queries.device.type != "cpu":
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, dropout_p=dropout_p)
    else:
        scores = torch.matmul(queries * queries.shape[-1] ** -0.5, keys.transpose(-1, -2))
        if mask is not None:
            scores = scores + (additive(mask, scores.dtype) if mask.dtype == torch.bool else mask)
        mixed = torch.matmul(dropout(scores.softmax(-1), dropout_p), values)
    return mixed.transpose(1, 2).flatten(2)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as what is added to scores: 0 where it is true, else the least finite number."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)


def dropout(x: Tensor, p: float) -> Tensor:
    """Zero a share `p` of `x`, and scale the rest to keep the mean.

    On a CPU torch draws a random number of 53 bits for each element; 16 bits are enough, with `p` exact to 1/65536.
    """
    if p == 0.0:
        return x
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.dropout(x, p)
    return _Dropout.apply(None, x, p)


def add_dropout(x: Tensor, update: Tensor, p: float) -> Tensor:
    """`x + dropout(update, p)`."""
    if p == 0.0 or x.device.type != "cpu" or torch.compiler.is_compiling():
        return x + dropout(update, p)
    return _Dropout.apply(x, update, p)


class _Dropout(torch.autograd.Function):
    """`dropout` and `add_dropout` on a CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor | None, update: Tensor, p: float) -> Tensor:
        """`x + dropout(update, p)`; without `x`, the latter alone."""
        share = round(p * 65536)
        draws = torch.empty(-(-update.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
        draws = draws.view(torch.int16)[: update.numel()].view(update.shape)
        kept = torch.ge(draws, share - 32768, out=torch.empty_like(update))  # in one pass, unlike a cast of bools
        ctx.save_for_backward(kept)
        ctx.scale = 65536 / (65536 - share)
        if x is None:
            return (update * kept).mul_(ctx.scale)
        return torch.addcmul(x, update, kept, value=ctx.scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, None]:
        (kept,) = ctx.saved_tensors
        return grad if ctx.needs_input_grad[0] else None, (grad * kept).mul_(ctx.scale), None
