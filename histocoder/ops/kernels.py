"""Kernels in C for a CPU: attention, dropout, n-grams, nearest rows, linear machines, steps of a
table's rows.

They are compiled when the package is installed if there is a C compiler; without them callers use
slower operators. benchmarks/notes/kernels.md has what a step takes without each of them.
"""

from __future__ import annotations

import ctypes
import importlib.util
import math
from collections.abc import Sequence
from ctypes import c_double, c_float, c_int, c_int64, c_uint64, c_void_p
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

# `version` of the _kernels.c that this module calls; libraries of other versions are not used
_VERSION = 15
_KINDS = {"AVX512": "_kernels_avx512", "AVX2": "_kernels_avx2", "": "_kernels"}
"""Library for each of torch's names of vector extensions, the best first; setup.py has the same."""
LANES = 16  # `LANES` of _kernels.c
_LINES = 16  # `LINES` of _kernels.c
_NO_MEMORY = "The kernels' working memory could not be allocated."
_ARGUMENTS: dict[str, list[Any]] = {
    "attention": [c_void_p, c_int],
    "attend_paths": [c_void_p],
    "dropout": [c_void_p, c_void_p, c_int64, c_uint64, c_double, c_int],
    "hash_ngrams": [c_void_p],
    "fit_machines": [c_void_p, c_int64, c_int64],
    "nearest": [c_void_p] * 7 + [c_int64] * 3,
    "sum_weights": [c_void_p] * 7 + [c_int64] * 2,
    "adamw_rows": [c_void_p] * 5 + [c_int64] * 2 + [c_float] * 5,
}


def _fields(kind: Any, *names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names]


class _NgramArguments(ctypes.Structure):
    _fields_ = (
        _fields(c_void_p, "ids", "kinds", "mark", "buckets", "words")
        + _fields(c_int64, "batch", "width", "num_code_points", "mark_size")
        + _fields(c_int64, "max_n", "num_buckets", "max_words", "across", "num_kinds")
    )


class _PathArguments(ctypes.Structure):
    _fields_ = (
        _fields(c_void_p, "levels", "out", "paths")
        + _fields(c_int64, "num_nodes", "depth", "heads", "dim")
        + _fields(c_int, "wide")
    )


class _MachineArguments(ctypes.Structure):
    _fields_ = _fields(
        c_void_p, "starts", "bounds", "columns", "members", "values", "costs", "weights"
    ) + _fields(c_int64, "num_rows", "num_columns", "num_classes", "passes")


class _AttentionArguments(ctypes.Structure):
    _fields_ = (
        _fields(c_void_p, "queries", "keys", "values", "out", "probabilities")
        + _fields(c_void_p, "of_queries", "of_keys", "of_values", "mask")
        + _fields(c_int64, "mask_batch_stride", "mask_query_stride", "batch", "heads")
        + _fields(c_int64, "num_queries", "num_keys", "dim", "query_stride", "key_stride")
        + _fields(c_uint64, "seed")
        + _fields(c_double, "p")
        + _fields(c_int, "wide")
    )


@cache
def library() -> Any:
    """Return the functions compiled for this processor; None if there are none, or of another
    version alone.
    """
    # a processor has the vector extensions that come after its own, too
    names = list(_KINDS.values())
    for name in names[names.index(_KINDS[kind_of_cpu()]) :]:
        functions = _load(name)
        if functions is not None:
            return functions
    return None


def kind_of_cpu() -> str:
    """Return the processor's vector extension: "AVX512", "AVX2" or ""."""
    return next(kind for kind in _KINDS if torch.backends.cpu.get_cpu_capability().startswith(kind))


def _load(library_name: str) -> ctypes.CDLL | None:
    spec = importlib.util.find_spec(f"histocoder.ops.{library_name}")
    if spec is None or spec.origin is None:
        return None
    try:
        functions = ctypes.CDLL(spec.origin)
        if functions.version() != _VERSION:
            return None
    except (OSError, AttributeError):  # of another system, or of another program
        return None
    for name, arguments in _ARGUMENTS.items():
        getattr(functions, name).argtypes = arguments
    return functions


def supports(x: Tensor) -> bool:
    """Return whether the kernels below can compute with a tensor."""
    if x.dtype not in (torch.bfloat16, torch.float32, torch.int64) or x.device.type != "cpu":
        return False
    return not torch.compiler.is_compiling() and library() is not None


def _pointers(tensors: Sequence[Tensor]) -> list[int]:
    """Return the addresses of tensors, which the caller keeps until the kernel has returned."""
    return [tensor.data_ptr() for tensor in tensors]


def adamw_rows(
    table: Tensor,
    mean: Tensor,
    square: Tensor,
    rows: Tensor,
    gradient: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    step: float,
) -> None:
    """Take AdamW's `step`-th step, without weight decay, for some rows of a table (num_rows, dim)
    in fp32.

    AdamW's moments `mean` and `square` are of the table's shape; `rows` (R,) are distinct, their
    gradient is (R, dim).
    """
    assert all(x.dtype == torch.float32 and x.is_contiguous() for x in (table, mean, square))
    # the kernel reads rows one after the other
    rows = rows.contiguous()
    gradient = gradient.float().contiguous()
    pointers = _pointers([table, mean, square, gradient, rows])
    num_rows, dim = gradient.shape

    # The moments begin at 0: these factors correct the bias of the mean and of the square.
    step_size = lr / (1 - betas[0] ** step)
    correction = math.sqrt(1 - betas[1] ** step)
    library().adamw_rows(*pointers, num_rows, dim, betas[0], betas[1], eps, step_size, correction)


def dropout(x: Tensor, *, p: float, seed: int) -> Tensor:
    """Return `x` with the share `p` of its numbers zeroed, those that the 64 bits of `seed` choose,
    the others scaled.

    Applied to a gradient with the same seed, it is the backward pass.
    """
    x = x.contiguous()
    out = torch.empty_like(x)
    library().dropout(x.data_ptr(), out.data_ptr(), x.numel(), seed, p, x.dtype == torch.float32)
    return out


def hash_ngrams(
    ids: Tensor, kinds: Tensor, mark: Tensor, *, across: bool, **sizes: int
) -> tuple[Tensor, Tensor]:
    """Return what `hashed_ngrams` of model/ngram.py does for texts (B, S); `sizes` are those of its
    config.
    """
    ids = ids.contiguous()
    num_kinds = 2 * sizes["max_n"] + 1
    if across:
        num_kinds += sizes["max_n"] - 1

    # the kernel writes into tensors that are made here
    buckets = ids.new_empty(*ids.shape, num_kinds)
    words = torch.empty_like(ids)
    call = _NgramArguments(
        ids=ids.data_ptr(),
        kinds=kinds.data_ptr(),
        mark=mark.data_ptr(),
        buckets=buckets.data_ptr(),
        words=words.data_ptr(),
        batch=len(ids),
        width=ids.shape[1],
        num_code_points=len(kinds),
        mark_size=len(mark),
        across=across,
        num_kinds=num_kinds,
        **sizes,
    )
    library().hash_ngrams(ctypes.byref(call))
    return buckets, words


def attend_paths(levels: Sequence[Tensor], paths: Tensor, *, num_heads: int) -> Tensor:
    """Return what `attend_to_paths` of model/layers.py does."""
    assert all(level.is_contiguous() for level in levels)
    newest = levels[-1]
    paths = paths.contiguous()

    # addresses of the levels, in an array of their own
    pointers = (c_void_p * len(levels))(*_pointers(levels))
    out = newest.new_empty(len(newest), newest.shape[1] // 3)
    call = _PathArguments(
        levels=ctypes.addressof(pointers),
        out=out.data_ptr(),
        paths=paths.data_ptr(),
        num_nodes=len(newest),
        depth=len(levels),
        heads=num_heads,
        dim=out.shape[1] // num_heads,
        wide=newest.dtype == torch.float32,
    )
    library().attend_paths(ctypes.byref(call))
    return out


def blocks_of(rows: Tensor) -> Tensor:
    """Return rows (n, dim) in bf16 as `nearest` reads them: in blocks, the same number of all rows
    side by side.
    """
    padded = F.pad(rows, (0, 0, 0, -len(rows) % (2 * _LINES)))
    blocks = padded.unflatten(0, (-1, 2, _LINES))
    return blocks.permute(0, 3, 2, 1).contiguous()  # (n / 2 LINES, dim, LINES, 2)


def nearest(
    queries: Tensor, classes: Tensor, blocks: Tensor, first: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the largest product of each query (B, dim) with a row of each of its classes (B, K),
    and these rows.

    Both are -1 for a class without any. The rows, of which `blocks` are `blocks_of`, are in the
    order of their classes; `first` (num_classes + 1,) are the first ones.
    """
    assert blocks.dtype == torch.bfloat16 and queries.dtype == torch.float32
    queries = queries.contiguous()
    classes = classes.contiguous()
    pairs = classes.flatten().argsort()  # so that the rows of a class are read one after the other
    products = torch.empty(classes.shape)
    rows = torch.empty_like(classes)
    pointers = _pointers([queries, classes, pairs, blocks, first, products, rows])
    library().nearest(*pointers, len(pairs), classes.shape[1], queries.shape[1])
    return products, rows


def sum_weights(
    row: Tensor,
    feature: Tensor,
    shares: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    *,
    num_rows: int,
    num_classes: int,
) -> Tensor:
    """Return the product (num_rows, num_classes) of two sparse matrices.

    The first has `shares` (n,) at its `row` (n,), in ascending order, and `feature` (n,). Of the
    second, `weights` are the first weight of each feature (num_features + 1,), the class of each
    weight in int32, and the weights in fp32.
    """
    first = torch.searchsorted(row, torch.arange(num_rows + 1))
    sums = torch.zeros(num_rows, num_classes)
    arrays = [first, feature.contiguous(), shares.contiguous(), *weights, sums]
    library().sum_weights(*_pointers(arrays), num_rows, num_classes)
    return sums


def fit_machines(
    features: csr_matrix, members: csr_matrix, costs: np.ndarray, *, passes: int
) -> np.ndarray:
    """Return the weights of linear support vector machines, of shape (num_features + 1,
    num_classes), intercepts last.

    `features` (n, num_features) has no duplicates; `members` (num_classes, n) says which rows are
    of each class.
    """
    assert features.format == members.format == "csr"
    num_classes = members.shape[0]
    weights = np.empty((features.shape[1] + 1, num_classes), np.float32)

    # in the types that the kernel reads, kept until it has read them
    arrays = {
        "starts": features.indptr.astype(np.int64),
        "bounds": members.indptr.astype(np.int64),
        "columns": features.indices.astype(np.int32),
        "members": members.indices.astype(np.int32),
        "values": features.data.astype(np.float32),
        "costs": costs.astype(np.float32),
        "weights": weights,
    }
    call = _MachineArguments(
        num_rows=features.shape[0],
        num_columns=features.shape[1],
        num_classes=num_classes,
        passes=passes,
    )
    for name, array in arrays.items():
        setattr(call, name, array.ctypes.data)

    # some at a time, so that Ctrl-C need not wait for all of them
    num_at_once = LANES * torch.get_num_threads()
    for first in range(0, num_classes, num_at_once):
        last = min(first + num_at_once, num_classes)
        if library().fit_machines(ctypes.byref(call), first, last):
            raise MemoryError(_NO_MEMORY)
    return weights


class AttentionKernel:
    """Scaled dot-product attention by heads.

    Parameters
    ----------
    sources : sequence of Tensor of shape (B, L or S, …)
        Queries, keys and values in this order, each of width `heads * dim`, in bf16 or fp32;
        neighbours may lie side by side in one tensor.
    num_heads : int
    mask : Tensor of bool, broadcast to (B, 1, L, S), or None
        True for keys to attend to. A query without any gets zeros.
    p : float
        Share of the probabilities that are zeroed, those that the 64 bits of `seed` choose.
    seed : int
    """

    def __init__(
        self, sources: Sequence[Tensor], num_heads: int, mask: Tensor | None, *, p: float, seed: int
    ) -> None:
        sources = [source.contiguous() for source in sources]
        queries = sources[0]
        batch, num_queries = queries.shape[:2]
        num_keys = sources[-1].shape[1]
        assert all(len(x) == batch and x.dtype == queries.dtype for x in sources)
        if mask is None:
            mask = torch.ones(num_keys, dtype=torch.bool)
        mask = mask.expand(batch, 1, num_queries, num_keys)
        if mask.stride(-1) != 1:
            mask = mask.contiguous()

        # the call holds only addresses, so the tensors are kept
        self._sources = sources
        self._mask = mask
        self._width = sum(source.shape[-1] for source in sources) // 3
        self._call = _AttentionArguments(
            mask=mask.data_ptr(),
            mask_batch_stride=mask.stride(0),
            mask_query_stride=mask.stride(2),
            batch=batch,
            heads=num_heads,
            num_queries=num_queries,
            num_keys=num_keys,
            dim=self._width // num_heads,
            query_stride=queries.shape[-1],
            key_stride=sources[-1].shape[-1],
            seed=seed,
            p=p,
            wide=queries.dtype == torch.float32,
        )
        self._point(("queries", "keys", "values"), sources)

    def forward(self, *, keep: bool) -> tuple[Tensor, Tensor | None]:
        """Return the output (B, L, heads * dim); and with `keep` the probabilities, for
        `backward`.
        """
        call = self._call
        queries = self._sources[0]
        out = queries.new_empty(call.batch, call.num_queries, self._width)
        call.out = out.data_ptr()

        # rows of probabilities are padded to whole vectors
        probabilities = None
        call.probabilities = None
        if keep:
            num_columns = -(-call.num_keys // LANES) * LANES
            shape = (call.batch, call.heads, call.num_queries, num_columns)
            probabilities = queries.new_empty(shape)
            call.probabilities = probabilities.data_ptr()
        self._run(backward=False)
        return out, probabilities

    def backward(self, grad: Tensor, probabilities: Tensor) -> list[Tensor]:
        """Return the gradients of the sources from the gradient of the output."""
        # backwards, the kernel reads the output's gradient where it wrote the output
        grad = grad.contiguous()
        results = [torch.empty_like(source) for source in self._sources]
        self._call.out = grad.data_ptr()
        self._call.probabilities = probabilities.data_ptr()
        self._point(("of_queries", "of_keys", "of_values"), results)
        self._run(backward=True)
        return results

    def _run(self, *, backward: bool) -> None:
        if library().attention(ctypes.byref(self._call), backward):
            raise MemoryError(_NO_MEMORY)

    def _point(self, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
        """Set the addresses of queries, keys and values in the tensors that hold them."""
        parts = [part for tensor in tensors for part in tensor.split(self._width, dim=-1)]
        for name, part in zip(names, parts, strict=True):
            setattr(self._call, name, part.data_ptr())
