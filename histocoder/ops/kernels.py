"""Kernels in C for training on a CPU, which take one pass over memory where torch's operators take several.

They are compiled when the package is installed if there is a C compiler; without them callers use torch's operators.
Benchmarks of a training step without them:

- all of them, CANINE-s's sizes in bf16 on AMX, 64 rows: 53 % longer; in fp32 on AVX2, 32 rows, CPU time: 10 % longer;
- attention, encoder "small" in fp32 on AVX2, 64 rows, CPU time: 9 % longer;
- the optimizer's step, and sums with their norms, in fp32 on AVX2: 2 % longer at most (n-grams: 9 % shorter), so that
  these are used in bf16 alone;
- the optimizer's step for 20,000 rows of an n-gram encoder's table, in fp32 on AVX2: 58 instead of 17 ms, in a step of
  about 120 ms on one thread.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Sequence
from ctypes import c_double, c_float, c_int, c_int64, c_uint64, c_void_p
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

_VERSION = 7  # `version` of the _kernels.c that this module calls; libraries of other versions are not used
_KINDS = {"AVX512": "_kernels_avx512", "AVX2": "_kernels_avx2", "": "_kernels"}
"""Library for each of torch's names of vector extensions, the best first; setup.py has the same."""
_PART = np.dtype(
    [(name, "u8") for name in ("weight", "mean", "square", "gradient", "copy")]
    + [("count", "i8"), ("wide", "i4"), ("step_size", "f4"), ("correction", "f4")],
    align=True,
)
"""`struct part` of _kernels.c."""
_LANES = 16  # `LANES` of _kernels.c
_ARGUMENTS: dict[str, list[Any]] = {
    "sum_of_squares": [c_void_p, c_int64],
    "attention": [c_void_p, c_int],
    "adamw": [c_void_p, c_int64, *[c_float] * 5],
    "adamw_rows": [c_void_p, c_void_p, c_int64, *[c_float] * 4],
    "dropout": [c_void_p, c_void_p, c_int64, c_uint64, c_double, c_int],
    "transpose": [c_void_p, c_void_p, c_void_p, c_int64, c_int64],
    "add_norm": [*[c_void_p] * 7, c_int64, c_int64, c_float, c_uint64, c_double],
    "add_norm_backward": [*[c_void_p] * 8, c_int64, c_int64, c_uint64, c_double],
}
_RESULTS: dict[str, Any] = {"sum_of_squares": c_double, "attention": c_int, "add_norm_backward": c_int}
"""Result of the functions that need working memory: a sum, or 0; -1 or 1 if there is none."""


class _Attention(ctypes.Structure):
    """`struct attention` of _kernels.c."""

    _fields_ = [
        *((name, c_void_p) for name in ("queries", "keys", "values", "out", "probabilities")),
        *((name, c_void_p) for name in ("of_queries", "of_keys", "of_values", "mask")),
        *((name, c_int64) for name in ("mask_batch_stride", "mask_query_stride", "batch", "heads")),
        *((name, c_int64) for name in ("num_queries", "num_keys", "dim", "query_stride", "key_stride")),
        ("seed", c_uint64),
        ("p", c_double),
        ("wide", c_int),
    ]


@cache
def library() -> ctypes.CDLL | None:
    """Return the functions compiled for this processor; None if there are none, or of another version alone."""
    kinds = list(_KINDS)
    found = (_load(_KINDS[kind]) for kind in kinds[kinds.index(kind_of_cpu()) :])
    return next((one for one in found if one is not None), None)


def kind_of_cpu() -> str:
    """Return the processor's vector extension: "AVX512", "AVX2" or ""."""
    return next(kind for kind in _KINDS if torch.backends.cpu.get_cpu_capability().startswith(kind))


def _load(name: str) -> ctypes.CDLL | None:
    spec = importlib.util.find_spec(f"histocoder.ops.{name}")
    if spec is None or spec.origin is None:
        return None
    try:
        found = ctypes.CDLL(spec.origin)
        if found.version() != _VERSION:
            return None
    except (OSError, AttributeError):  # of another system, or of another program
        return None
    for function_name, arguments in _ARGUMENTS.items():
        function = getattr(found, function_name)
        function.argtypes, function.restype = arguments, _RESULTS.get(function_name)
        if function.restype:
            function.errcheck = _check_memory
    return found


def _check_memory(result: float, function: Any, _arguments: Any) -> float:
    """Raise a MemoryError if a function got no memory; see `_RESULTS`."""
    if result == -1 or (result and function.restype is c_int):
        raise MemoryError("The kernels' working memory could not be allocated.")
    return result


class Parts:
    """Parameters in an optimizer step.

    Weights and AdamW's moments, `means` and `squares`, are contiguous in fp32; gradients have any precision. A step
    writes the weights to `copies`, which are contiguous in bf16, or None.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        means: Sequence[Tensor],
        squares: Sequence[Tensor],
        gradients: Sequence[Tensor],
        copies: Sequence[Tensor | None],
    ) -> None:
        written = [*weights, *means, *squares]
        assert all(tensor.dtype == torch.float32 for tensor in written)
        assert all(tensor.is_contiguous() for tensor in (*written, *copies) if tensor is not None)
        self._held = gradients = [
            (gradient if gradient.dtype == torch.bfloat16 else gradient.float()).contiguous() for gradient in gradients
        ]
        columns = {"weight": weights, "mean": means, "square": squares, "gradient": gradients, "copy": copies}
        self._parts = np.zeros(len(weights), _PART)
        for name, tensors in columns.items():
            self._parts[name] = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        self._parts["count"] = [weight.numel() for weight in weights]
        self._parts["wide"] = [_is_wide(gradient) for gradient in gradients]

    def sum_of_squares(self) -> float:
        return _library().sum_of_squares(self._parts.ctypes.data, len(self._parts))

    def adamw(
        self,
        steps: Sequence[float],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        scale: float,
    ) -> None:
        """Take the `steps`-th step of each parameter, with gradients times `scale`."""
        self._set_step(steps, lr, betas)
        _library().adamw(self._parts.ctypes.data, len(self._parts), *betas, eps, 1 - lr * weight_decay, scale)

    def adamw_rows(
        self, rows: Tensor, step: float, *, lr: float, betas: tuple[float, float], eps: float, scale: float
    ) -> None:
        """Take a step of distinct `rows` (R,) of the only parameter, with their gradient (R, dim), without decay."""
        self._set_step([step], lr, betas)
        self._parts["count"] = self._held[0].shape[1]
        rows = rows.contiguous()
        _library().adamw_rows(self._parts.ctypes.data, rows.data_ptr(), len(rows), *betas, eps, scale)

    def _set_step(self, steps: Sequence[float], lr: float, betas: tuple[float, float]) -> None:
        counts = np.asarray(steps, np.float64)
        self._parts["step_size"] = lr / (1 - betas[0] ** counts)
        self._parts["correction"] = np.sqrt(1 - betas[1] ** counts)


def supports(x: Tensor) -> bool:
    """Return whether the kernels below can compute with a tensor."""
    known = x.dtype in (torch.bfloat16, torch.float32)
    return known and x.device.type == "cpu" and not torch.compiler.is_compiling() and library() is not None


def dropout(x: Tensor, p: float, seed: int) -> Tensor:
    """Return the dropout of `x` in bf16 or fp32, or by the same seed that of its gradient."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _library().dropout(out.data_ptr(), x.data_ptr(), x.numel(), seed, p, _is_wide(x))
    return out


def add_norm(
    x: Tensor, update: Tensor, weight: Tensor, bias: Tensor, *, eps: float, p: float, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the layer norm of `x + dropout(update)`, both (…, dim) in bf16, with weight and bias (dim,) in fp32.

    Also return the sum (…, dim) and its moments (rows, 2), for `add_norm_backward`.
    """
    x, update = x.contiguous(), update.contiguous()
    dim = x.shape[-1]
    out, total, moments = torch.empty_like(x), torch.empty_like(x), torch.empty(x.numel() // dim, 2)
    pointers = [tensor.data_ptr() for tensor in (out, total, moments, x, update, weight, bias)]
    _library().add_norm(*pointers, len(moments), dim, eps, seed, p)
    return out, total, moments


def add_norm_backward(
    grad: Tensor, total: Tensor, moments: Tensor, weight: Tensor, *, p: float, seed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of `x`, `update`, `weight` and `bias` of `add_norm` from the gradient of its output."""
    grad = grad.contiguous()
    of_x, of_update, of_weight, of_bias = map(torch.empty_like, (grad, grad, weight, weight))
    tensors = (of_x, of_update, of_weight, of_bias, grad, total, moments, weight)
    pointers = [tensor.data_ptr() for tensor in tensors]
    _library().add_norm_backward(*pointers, len(moments), grad.shape[-1], seed, p)
    return of_x, of_update, of_weight, of_bias


class Attention:
    """Scaled dot-product attention by heads.

    Parameters
    ----------
    sources : sequence of Tensor of shape (B, L or S, …)
        Queries, keys and values in this order, each of width `heads * dim`, in bf16 or fp32; neighbours may lie side by
        side in one tensor.
    num_heads : int
    mask : Tensor of bool, broadcast to (B, 1, L, S), or None
        True for keys to attend to. A query without any gets zeros.
    p : float
        Share of the probabilities that are zeroed, those that the 64 bits of `seed` choose.
    seed : int
    """

    def __init__(self, sources: Sequence[Tensor], num_heads: int, mask: Tensor | None, *, p: float, seed: int) -> None:
        assert all((len(source), source.dtype) == (len(sources[0]), sources[0].dtype) for source in sources)
        self._sources = sources = [source.contiguous() for source in sources]
        self._width = sum(source.shape[-1] for source in sources) // 3
        batch, num_queries, num_keys = len(sources[0]), sources[0].shape[1], sources[-1].shape[1]
        if mask is None:
            mask = torch.ones(num_keys, dtype=torch.bool)
        mask = mask.expand(batch, 1, num_queries, num_keys)
        self._mask = mask = mask if mask.stride(-1) == 1 else mask.contiguous()
        self._call = _Attention(
            mask=mask.data_ptr(),
            mask_batch_stride=mask.stride(0),
            mask_query_stride=mask.stride(2),
            batch=batch,
            heads=num_heads,
            num_queries=num_queries,
            num_keys=num_keys,
            dim=self._width // num_heads,
            query_stride=sources[0].shape[-1],
            key_stride=sources[-1].shape[-1],
            seed=seed,
            p=p,
            wide=_is_wide(sources[0]),
        )
        self._point(("queries", "keys", "values"), sources)

    def forward(self, *, keep: bool) -> tuple[Tensor, Tensor | None]:
        """Return the output (B, L, heads * dim); and with `keep` the probabilities, for `backward`."""
        call, like = self._call, self._sources[0]
        out = like.new_empty(call.batch, call.num_queries, self._width)
        columns = -(-call.num_keys // _LANES) * _LANES
        shares = like.new_empty(call.batch, call.heads, call.num_queries, columns) if keep else None
        call.out, call.probabilities = out.data_ptr(), None if shares is None else shares.data_ptr()
        _library().attention(ctypes.byref(call), False)
        return out, shares

    def backward(self, grad: Tensor, probabilities: Tensor) -> list[Tensor]:
        """Return the gradients of the sources from the gradient of the output."""
        grad = grad.contiguous()
        results = [torch.empty_like(source) for source in self._sources]
        self._call.out, self._call.probabilities = grad.data_ptr(), probabilities.data_ptr()
        self._point(("of_queries", "of_keys", "of_values"), results)
        _library().attention(ctypes.byref(self._call), True)
        return results

    def _point(self, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
        parts = [part for tensor in tensors for part in tensor.split(self._width, dim=-1)]
        for name, part in zip(names, parts, strict=True):
            setattr(self._call, name, part.data_ptr())


def transpose(x: Tensor) -> tuple[Tensor, Tensor]:
    """Transpose a matrix (rows, dim) in bf16; return also the sum of its rows (dim,) in fp32."""
    x = x.contiguous()
    rows, dim = x.shape
    transposed, total = x.new_empty(dim, rows), torch.empty(dim)
    _library().transpose(transposed.data_ptr(), total.data_ptr(), x.data_ptr(), rows, dim)
    return transposed, total


def _is_wide(x: Tensor) -> bool:
    return x.dtype == torch.float32


def _library() -> ctypes.CDLL:
    found = library()
    assert found is not None
    return found
