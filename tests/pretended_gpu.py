"""A pretended CUDA GPU for a PyTorch without CUDA, on which whole runs show what would fail or wait
on a real one.

Within `pretended_gpu()`, tensors that are moved to "cuda" are `CudaTensor`s: they say that they are
on a GPU, and hold a tensor on the CPU that has the values. Each operator on them

1. is refused where CUDA refuses it: tensors on several devices, NumPy, pointers, dtypes,
  deterministic mode, forks;
2. is counted in a `Log`: where the host waits for the GPU, and how many operators the host
  launches;
3. is computed on the CPU, with random numbers of the device's own generator.

FakeTensorMode can't do this: without CUDA, autograd of a fake tensor on "cuda" aborts, and it has
no values to branch on.

It can be wrong in both directions. It does not see faults of real kernels and of NCCL; memory;
streams, such as a copy that is read before it has arrived; `torch.inference_mode`, which is
`no_grad` here; the operators that autocast chooses on CUDA alone; storages and `.data =`. It is too
strict where CUDA mixes devices in an operator that neither has the tag `pointwise` nor is in
`_TAKES_CPU_SCALARS`. An operator is counted as one launch, though on a GPU some, such as a sort,
are several kernels; of copies from pageable memory each is counted as a wait, as CUDA's
documentation describes them.

`python tests/pretended_gpu.py [--capability 7.0] [--gpus 2] -- SCRIPT ARG …` runs a program so.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import histocoder

_PACKAGE = str(Path(histocoder.__file__).parent) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep

_TAKES_CPU_SCALARS = {
    "copy_",
    "fill_",
    "masked_fill",
    "masked_fill_",
    "where",
    "index_fill",
    "index_fill_",
}
"""Operators that take a tensor of no dimensions from the CPU, beside those with the tag
`pointwise`.
"""
_INDEXES = {
    "index",
    "index_put",
    "index_put_",
    "_index_put_impl_",
    "_unsafe_index",
    "_unsafe_index_put",
}
"""Operators that copy indices from the CPU to the GPU."""
_WAITS = {
    "_coalesce",
    "_linalg_eigh",
    "_local_scalar_dense",
    "_unique2",
    "bincount",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "unique_consecutive",
    "unique_dim",
}
"""Operators whose result's size, or whose result, the host has to know."""
_LAUNCHES_NOTHING = {
    *(
        "view",
        "_unsafe_view",
        "_reshape_alias",
        "expand",
        "t",
        "transpose",
        "permute",
        "slice",
        "select",
        "unsqueeze",
    ),
    *(
        "squeeze",
        "detach",
        "alias",
        "as_strided",
        "split",
        "split_with_sizes",
        "unbind",
        "diagonal",
        "unfold",
        "set_",
    ),
    *(
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "resize_",
        "lift_fresh",
    ),
    *(
        "_indices",
        "indices",
        "_values",
        "values",
        "_nnz",
        "is_coalesced",
        "_coalesced_",
        "sym_size",
    ),
    *(
        "_sparse_coo_tensor_unsafe",
        "_sparse_coo_tensor_with_dims_and_tensors",
        "_local_scalar_dense",
    ),
}
"""Views, allocations, and copies to the host."""
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "dot"}
_DRAWS = {
    "rand",
    "randn",
    "randint",
    "randperm",
    "normal",
    "rand_like",
    "randn_like",
    "randint_like",
    "bernoulli",
}
"""Functions that draw random numbers for a new tensor."""
_COPIES_DATA = {"tensor", "as_tensor", "asarray"}
"""Functions that copy numbers of Python's or the CPU's to a new tensor."""
_MOST_SEQUENCES = 65_535
"""Largest size of CUDA's grids in their second and third dimension, which attention has for the
batch.
"""
_NOT_DETERMINISTIC = {"put_", "kthvalue", "histc", "_ctc_loss", "nll_loss2d_forward", "median"}
"""Operators of CUDA without a deterministic form, beside those of `_check_deterministic`."""


@dataclass
class Log:
    """What has been done on the pretended GPU since it was last cleared."""

    waits: Counter[str] = field(default_factory=Counter)
    """How often the host has waited for the GPU, by line of the package and what it waited for."""
    launches: Counter[str] = field(default_factory=Counter)
    """How many operators were launched, by name."""
    lines: Counter[str] = field(default_factory=Counter)
    """How many operators were launched, by line of the package; those of a backward pass by the
    line that starts it.
    """
    doubles: Counter[str] = field(default_factory=Counter)
    """How many tensors in fp64, which GPUs of Macs lack, by line of the package and operator."""

    def clear(self) -> None:
        for counter in vars(self).values():
            counter.clear()

    def launched(self, name: str) -> None:
        self.launches[name] += 1
        self.lines[_line()] += 1


def _line() -> str:
    """Return the line of the package that is running; outside it, the line of a test."""
    frame: Any = sys._getframe(1)
    outside = ""
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_PACKAGE):
            return f"{path.removeprefix(_PACKAGE)}:{frame.f_lineno} {frame.f_code.co_name}"
        if not outside and path != __file__ and not path.startswith(_TORCH):
            outside = f"{Path(path).name}:{frame.f_lineno}"
        frame = frame.f_back
    return outside


class CudaTensor(Tensor):
    """A tensor that says it is on a GPU, and whose values are those of `inner`, on the CPU."""

    inner: Tensor
    index: int  # of its GPU
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor, index: int) -> CudaTensor:
        assert type(inner) is not CudaTensor
        options: dict[str, Any] = {"dtype": inner.dtype, "layout": inner.layout, "device": "cpu"}
        if inner.layout == torch.strided:
            options |= {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        self: CudaTensor = Tensor._make_wrapper_subclass(cls, inner.size(), **options)  # type: ignore[attr-defined]
        self.inner = inner
        self.index = index
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _machine().run(func, args, kwargs or {})

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", self.index)

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    def get_device(self) -> int:
        return self.index

    def numpy(self, **_: Any) -> Any:
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to "
            "copy the tensor to host "
            "memory first."
        )

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self.numpy()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def data_ptr(self) -> int:
        """Return an address, which the package's kernels for CPUs would read: they must not be
        given a GPU's.
        """
        if sys._getframe(1).f_code.co_filename.startswith(_PACKAGE):
            raise RuntimeError("the address of a GPU's memory is used on the CPU")
        return self.inner.data_ptr()

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()

    def new_tensor(
        self, data: Any, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any
    ) -> Tensor:
        return torch.tensor(
            data, dtype=dtype or self.dtype, device=device or self.device, **options
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            copy: Any = CudaTensor(self.inner.detach().clone(), self.index)
            if isinstance(self, nn.Parameter):
                copy = nn.Parameter(copy, self.requires_grad)
            elif self.requires_grad:
                copy.requires_grad_()
            copy.__dict__.update(_attributes(self))
            memo[id(self)] = copy
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError("a tensor on a GPU is sent to another process")

    def __repr__(self, **_: Any) -> str:
        return f"CudaTensor({self.inner}, index={self.index})"


def _attributes(tensor: Tensor) -> dict[str, Any]:
    """Return what a program has set on a tensor."""
    return {
        name: value
        for name, value in vars(tensor).items()
        if name not in ("inner", "index", "_is_param")
    }


def mapped(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Return a tree with a function of each tensor in place of it; PyTorch's `tree_map` takes
    several times as long.
    """
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, list | tuple):
        return type(tree)([mapped(function, value) for value in tree])
    if isinstance(tree, dict):
        return {name: mapped(function, value) for name, value in tree.items()}
    return tree


def tensors_of(tree: Any) -> list[Tensor]:
    tensors: list[Tensor] = []
    mapped(tensors.append, tree)
    return tensors


def plain(tree: Any) -> Any:
    """Return a tree with the values of tensors on a GPU in place of them."""
    return mapped(lambda x: x.inner if isinstance(x, CudaTensor) else x, tree)


class _Machine:
    """A machine with GPUs: checks operators, counts them and computes them."""

    def __init__(self, *, capability: tuple[int, int], num_gpus: int, free_bytes: int) -> None:
        self.log = Log()
        self.capability, self.num_gpus, self.free_bytes = capability, num_gpus, free_bytes
        self.current = 0
        self.pinned: dict[
            int, Tensor
        ] = {}  # by the address of their storage, and kept, so that none is used again
        self.sync_debug_mode = "default"
        self._process = os.getpid()
        self._random_states = [
            torch.Generator().manual_seed(0).get_state() for _ in range(num_gpus)
        ]

    def index_of(self, device: Any) -> int | None:
        """Return the number of a GPU; None for another device."""
        if device is None or isinstance(device, Tensor):
            return None
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if device.type != "cuda":
            return None
        index = self.current if device.index is None else device.index
        if index >= self.num_gpus:
            raise RuntimeError("CUDA error: invalid device ordinal")
        return index

    # Random numbers

    def random_state(self, index: int) -> Tensor:
        return self._random_states[index].clone()

    def set_random_state(self, index: int, state: Tensor) -> None:
        self._random_states[index] = state.clone()

    def seed(self, seed: int) -> None:
        self._random_states = [
            torch.Generator().manual_seed(seed).get_state() for _ in range(self.num_gpus)
        ]

    @contextlib.contextmanager
    def drawing(self, index: int) -> Iterator[None]:
        """Draw the random numbers of a GPU instead of those of the CPU."""
        of_cpu = torch.get_rng_state()
        torch.set_rng_state(self._random_states[index])
        try:
            yield
        finally:
            self._random_states[index] = torch.get_rng_state()
            torch.set_rng_state(of_cpu)

    # Waits

    def wait(self, reason: str) -> None:
        """Have the host wait for the GPU."""
        self.log.waits[f"{_line()} {reason}"] += 1
        if self.sync_debug_mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.layout == torch.strided and tensor.untyped_storage().data_ptr() in self.pinned

    def pin(self, tensor: Tensor) -> Tensor:
        copy = tensor.detach().clone()
        self.pinned[copy.untyped_storage().data_ptr()] = copy
        return copy

    def copies(self, source: Tensor, *, to_gpu: bool, non_blocking: bool) -> None:
        """Copy between the host and a GPU, for which the host waits unless the memory is pinned."""
        self.log.launched("copy between devices")
        if to_gpu and not (non_blocking and self.is_pinned(source)):
            self.wait("copies to the GPU")
        if not to_gpu and not non_blocking:
            self.wait("copies to the CPU")

    # Operators

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator of which a tensor is on a GPU, as `__torch_dispatch__` is asked to."""
        name = func._schema.name.removeprefix("aten::")
        tensors = tensors_of((args, kwargs))
        on_gpu = [x for x in tensors if isinstance(x, CudaTensor)]
        on_cpu = [x for x in tensors if not isinstance(x, CudaTensor)]
        self.check_process()
        _check_devices(name, func, args, on_gpu, on_cpu)
        _check_dtypes(name, args, tensors)
        if torch.are_deterministic_algorithms_enabled():
            _check_deterministic(name, args, kwargs)

        if name == "copy_" and on_cpu:
            self.copies(
                args[1],
                to_gpu=isinstance(args[0], CudaTensor),
                non_blocking=len(args) > 2 and args[2],
            )
        else:
            self._count(name, args, kwargs)

        index = on_gpu[0].index
        draws = torch.Tag.nondeterministic_seeded in func.tags
        with self.drawing(index) if draws else contextlib.nullcontext():
            result = func(*plain(args), **plain(kwargs))
        outputs = {id(x.inner): x for x in on_gpu}  # those that an operator changes in place
        outputs.update({id(x): x for x in on_cpu})
        return mapped(lambda x: self._output(name, x, index, outputs), result)

    def _output(self, name: str, value: Tensor, index: int, outputs: dict[int, Any]) -> Tensor:
        if value.dtype == torch.float64:
            self.log.doubles[f"{_line()} {name}"] += 1
        return outputs[id(value)] if id(value) in outputs else CudaTensor(value, index)

    def _count(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name in _WAITS:
            self.wait(name)
        if name == "repeat_interleave" and kwargs.get("output_size") is None:
            self.wait(name)
        if name in _INDEXES:
            indices = [x for x in args[1] if isinstance(x, Tensor)]
            is_mask = all(x.dtype == torch.bool for x in indices)
            is_fill = (
                name.endswith("_") and is_mask and args[2].numel() == 1
            )  # done by `masked_fill_`
            if any(x.dtype == torch.bool for x in indices) and not is_fill:
                self.wait(f"{name} by a mask")
            if any(not isinstance(x, CudaTensor) for x in indices):
                self.wait(f"{name} by indices on the CPU")
        if name not in _LAUNCHES_NOTHING:
            self.log.launched(name)

    def check_process(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                "Cannot re-initialize CUDA in forked subprocess. To use CUDA with "
                "multiprocessing, you must use the "
                "'spawn' start method"
            )


_running: _Machine | None = None


def _machine() -> _Machine:
    if _running is None:
        raise RuntimeError("a tensor of a pretended GPU is used after its end")
    return _running


def _check_devices(
    name: str, func: Any, args: tuple[Any, ...], on_gpu: list[CudaTensor], on_cpu: list[Tensor]
) -> None:
    """Refuse tensors on several devices, except copies, numbers in elementwise operators, and
    indices.
    """
    if name == "copy_":
        return
    strangers = on_cpu
    if name in _INDEXES:
        indices = {id(x) for x in args[1] if x is not None}
        strangers = [x for x in strangers if id(x) not in indices]
    if torch.Tag.pointwise in func.tags or name in _TAKES_CPU_SCALARS | _INDEXES:
        strangers = [x for x in strangers if x.dim()]
    devices = {str(x.device) for x in (*on_gpu, *strangers)}
    if len(devices) > 1:
        shapes = [(str(x.device), tuple(x.shape)) for x in (*on_gpu, *on_cpu)]
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, "
            f"{' and '.join(sorted(devices))}! ({name} of {shapes})"
        )


def _check_dtypes(name: str, args: tuple[Any, ...], tensors: list[Tensor]) -> None:
    """Refuse dtypes that operators of the CPU take, and those of CUDA do not."""
    if name == "native_layer_norm":
        dtypes = {x.dtype for x in tensors}
        if len(dtypes) > 1:
            raise RuntimeError(
                f"expected scalar type {args[0].dtype}, but found "
                f"{dtypes - {args[0].dtype}} ({name})"
            )
    if name in _PRODUCTS and not tensors[0].dtype.is_floating_point:
        raise NotImplementedError(f'"{name}_cuda" not implemented for {tensors[0].dtype}')


def _check_deterministic(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse operators without a deterministic form: a table in the documentation of
    `use_deterministic_algorithms`.
    """
    is_refused = name in _NOT_DETERMINISTIC
    if name == "cumsum":
        is_refused = args[0].dtype.is_floating_point
    elif name == "bincount":
        is_refused = len(args) > 1 and args[1] is not None
    elif name.startswith("scatter_reduce"):
        is_refused = args[4] == "prod"
    if is_refused:
        raise RuntimeError(f"{name}_cuda does not have a deterministic implementation")
    if name in _PRODUCTS and os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in (":4096:8", ":16:8"):
        raise RuntimeError("Deterministic behavior needs CUBLAS_WORKSPACE_CONFIG=:4096:8")


class _Move(torch.autograd.Function):
    """Copies a tensor to a GPU, or from it to the CPU if `index` is None; backwards, its gradient
    the other way.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, index: int | None, non_blocking: bool) -> Tensor:
        machine = _machine()
        machine.check_process()
        ctx.back = tensor.index if isinstance(tensor, CudaTensor) else None
        machine.copies(tensor, to_gpu=index is not None, non_blocking=non_blocking)
        values = plain(tensor).detach().clone()
        if index is not None:
            return CudaTensor(values, index)
        return machine.pin(values) if non_blocking else values

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Move.apply(grad, ctx.back, False), None, None


class _Attention(torch.autograd.Function):
    """Attention as one operator, in the precision of CUDA's kernels: sums are in fp32."""

    @staticmethod
    def forward(
        ctx: Any, query: Any, key: Any, value: Any, mask: Any, p: float, scale: float
    ) -> Any:
        machine = _machine()
        machine.log.launched("scaled_dot_product_attention")
        kept = None
        if p:
            with machine.drawing(query.index):
                shares = torch.full((*query.shape[:-1], key.shape[-2]), 1 - p)
                kept = CudaTensor(shares.bernoulli() / (1 - p), query.index)
        ctx.scale = scale
        ctx.save_for_backward(query, key, value, mask, kept)
        return CudaTensor(
            _laid_out(_attended(*plain((query, key, value, mask, kept)), scale=scale)), query.index
        )

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        saved = ctx.saved_tensors
        machine = _machine()
        machine.log.launched("scaled_dot_product_attention backward")
        needs = [*ctx.needs_input_grad[:4], False]
        leaves = [
            x if x is None else x.detach().requires_grad_(need)
            for x, need in zip(plain(saved), needs, strict=True)
        ]
        with torch.enable_grad():
            out = _attended(*leaves, scale=ctx.scale)
        wanted = [leaf for leaf, need in zip(leaves, needs, strict=True) if need]
        found = iter(torch.autograd.grad(out, wanted, plain(grad)))
        grads = [
            CudaTensor(_laid_out(next(found)), grad.index) if need else None for need in needs[:4]
        ]
        return (*grads, None, None)


def _laid_out(x: Tensor) -> Tensor:
    """Return `x` (B, heads, L, dim) in the layout of CUDA's kernels, in which the heads of a
    position are neighbours.

    PyTorch's flash and memory-efficient kernels allocate outputs and gradients as (B, L, heads,
    dim) and return them transposed, so that putting the heads side by side is a view, and no copy.
    """
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _attended(
    query: Tensor, key: Tensor, value: Tensor, mask: Any, kept: Any, *, scale: float
) -> Tensor:
    scores = query.float() @ key.float().transpose(-2, -1) * scale
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask.float()
    shares = scores.softmax(-1)
    shares = shares if kept is None else shares * kept
    return (shares @ value.float()).to(query.dtype)


class _Functions(TorchFunctionMode):
    """Replaces functions that choose by the device of a tensor where `CudaTensor` can't tell:
    PyTorch sees a CPU's.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        is_on_gpu = bool(args) and isinstance(args[0], CudaTensor)
        if func is F.scaled_dot_product_attention and is_on_gpu:
            return self._attention(*args, **kwargs)
        if func in (F.dropout, torch.dropout) and is_on_gpu:
            return self._dropout(*args, **kwargs)
        device = kwargs.get("device")
        if _machine().index_of(device) is not None:
            return self._new(func, args, kwargs)
        if device is not None and is_on_gpu:  # such as `torch.zeros_like(x, device="cpu")`
            return func(args[0].inner, *args[1:], **kwargs)
        return func(*args, **kwargs)

    def _new(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        """Return a new tensor on a GPU."""
        machine, name = _machine(), func.__name__
        machine.check_process()
        index = machine.index_of(kwargs.pop("device"))
        assert index is not None
        requires_grad = kwargs.pop("requires_grad", False)
        is_copied = name in _COPIES_DATA and not isinstance(args[0], CudaTensor)
        with machine.drawing(index) if name in _DRAWS else contextlib.nullcontext():
            tensor = func(*args, **kwargs)
        if not isinstance(tensor, CudaTensor):
            tensor = CudaTensor(tensor, index)
            machine.log.launched(name)
        if is_copied:
            machine.wait(name)
        if tensor.dtype == torch.float64:
            machine.log.doubles[f"{_line()} {name}"] += 1
        return tensor.requires_grad_() if requires_grad else tensor

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        if is_causal:
            attn_mask = torch.ones(
                query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device
            ).tril()
        if torch.is_autocast_enabled("cpu"):  # as which that of CUDA is entered
            dtype = torch.get_autocast_dtype("cpu")
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
            is_cast = attn_mask is not None and attn_mask.dtype.is_floating_point
            attn_mask = attn_mask.to(dtype) if is_cast else attn_mask
        tensors = [query, key, value, *([] if attn_mask is None else [attn_mask])]
        if len({str(x.device) for x in tensors}) > 1:
            raise RuntimeError("Expected query, key, value and mask to be on the same device")
        if {x.dtype for x in tensors} - {query.dtype, torch.bool}:
            raise RuntimeError(
                "Expected query, key, value and mask to have the same dtype, or a mask of bool"
            )
        if enable_gqa or query.dim() < 4:
            raise NotImplementedError("attention of other shapes than (B, heads, L, dim)")
        if query.shape[0] > _MOST_SEQUENCES:
            raise RuntimeError("CUDA error: invalid configuration argument")
        return _Attention.apply(
            query, key, value, attn_mask, dropout_p, scale or query.shape[-1] ** -0.5
        )

    def _dropout(
        self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Any:
        if not training or not p:
            return x
        dropped = torch.native_dropout(x, p, True)[0]
        return x.copy_(dropped) if inplace else dropped


def _methods() -> dict[str, Callable[..., Any]]:
    """Return the methods of tensors that move them, by name."""
    to_dtype = Tensor.to

    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args and isinstance(args[0], Tensor):
            like, *others = args
            return to(tensor, like.device, like.dtype, *others, **kwargs)
        copy = kwargs.pop("copy", False)
        if (
            "device" in kwargs
        ):  # by position, since `_Functions` would take it for that of a new tensor
            args = (kwargs.pop("device"), *args)
        device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        moved = tensor
        here = tensor.index if isinstance(tensor, CudaTensor) else None
        target = here if device is None else _machine().index_of(device)
        if target is None and here is None:
            return to_dtype(tensor, *args, copy=copy, **kwargs)
        if target != here:
            moved = _Move.apply(tensor, target, non_blocking)
            copy = False
        options: dict[str, Any] = {} if memory_format is None else {"memory_format": memory_format}
        return to_dtype(moved, dtype or moved.dtype, copy=copy, **options)

    def cpu(tensor: Tensor, **_: Any) -> Tensor:
        return to(tensor, "cpu")

    def cuda(tensor: Tensor, device: Any = None, non_blocking: bool = False) -> Tensor:
        return to(tensor, "cuda" if device is None else device, non_blocking=non_blocking)

    def type_as(tensor: Tensor, like: Tensor) -> Tensor:
        return to(tensor, like)

    def pin_memory(tensor: Tensor, device: Any = None) -> Tensor:
        if isinstance(tensor, CudaTensor):
            raise RuntimeError("cannot pin a tensor of a GPU: only dense CPU tensors can be pinned")
        return _machine().pin(tensor)

    def is_pinned(tensor: Tensor, device: Any = None) -> bool:
        return not isinstance(tensor, CudaTensor) and _machine().is_pinned(tensor)

    return {f.__name__: f for f in (to, cpu, cuda, type_as, pin_memory, is_pinned)}


def _move_parameters(
    module: Any, function: Callable[[Tensor], Tensor], recurse: bool = True
) -> Any:
    """Do what `nn.Module._apply` does: parameters stay the same objects, with the attributes that
    were set on them.
    """
    if recurse:
        for child in module.children():
            child._apply(function)
    for parameter in module._parameters.values():
        if parameter is None:
            continue
        gradient = parameter.grad
        parameter.grad = None
        with torch.no_grad():
            moved = function(parameter)
        if moved is not parameter:
            attributes = _attributes(parameter)
            torch.utils.swap_tensors(parameter, nn.Parameter(moved, parameter.requires_grad))
            vars(parameter).update(attributes)
        if gradient is not None:
            parameter.grad = function(gradient)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = function(buffer)
    return module


def _cuda(machine: _Machine) -> dict[str, Any]:
    """Return what `torch.cuda` does, by name."""

    def index(device: Any = None) -> int:
        number = machine.index_of("cuda" if device is None else device)
        assert number is not None
        return number

    def set_device(device: Any) -> None:
        machine.current = index(device)

    @contextlib.contextmanager
    def on_device(device: Any) -> Iterator[None]:
        before = machine.current
        machine.current = before if device is None else index(device)
        yield
        machine.current = before

    def set_sync_debug_mode(mode: str) -> None:
        machine.sync_debug_mode = mode

    def set_rng_state(state: Tensor, device: Any = "cuda") -> None:
        machine.set_random_state(index(device), state)

    def set_rng_state_all(states: list[Tensor]) -> None:
        for number, state in enumerate(states):
            machine.set_random_state(number, state)

    def properties(device: Any = None) -> SimpleNamespace:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7").split(",")
        return SimpleNamespace(
            name="Pretended GPU",
            major=machine.capability[0],
            minor=machine.capability[1],
            total_memory=machine.free_bytes,
            multi_processor_count=1,
            uuid=f"GPU-{visible[index(device)]}",
        )

    return {
        "_initialized": True,
        "_lazy_init": lambda: None,
        "is_initialized": lambda: True,
        "is_available": lambda: True,
        "device_count": lambda: machine.num_gpus,
        "current_device": lambda: machine.current,
        "set_device": set_device,
        "device": on_device,
        "get_device_name": lambda device=None: properties(device).name,
        "get_device_capability": lambda device=None: machine.capability,
        "get_device_properties": properties,
        "is_bf16_supported": lambda including_emulation=True: (
            including_emulation or machine.capability >= (8, 0)
        ),
        "max_memory_allocated": lambda device=None: 2_000_000_000,
        "memory_allocated": lambda device=None: 1_000_000_000,
        "mem_get_info": lambda device=None: (machine.free_bytes, machine.free_bytes),
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "synchronize": lambda device=None: machine.wait("synchronize"),
        "set_sync_debug_mode": set_sync_debug_mode,
        "is_current_stream_capturing": lambda: False,
        "manual_seed": machine.seed,
        "manual_seed_all": machine.seed,
        "get_rng_state": lambda device="cuda": machine.random_state(index(device)),
        "get_rng_state_all": lambda: [
            machine.random_state(number) for number in range(machine.num_gpus)
        ],
        "set_rng_state": set_rng_state,
        "set_rng_state_all": set_rng_state_all,
    }


def _accelerator(machine: _Machine) -> dict[str, Any]:
    """Return what `torch.accelerator` does, by name: `DataLoader` asks it."""

    def set_device_index(index: int) -> None:
        machine.current = index

    return {
        "is_available": lambda: True,
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "device_count": lambda: machine.num_gpus,
        "current_device_index": lambda: machine.current,
        "set_device_index": set_device_index,
        "current_stream": lambda device=None: SimpleNamespace(is_capturing=lambda: False),
    }


def _enter_no_grad(self: Any) -> None:
    """Enter `torch.inference_mode`, in which PyTorch makes no views of `CudaTensor`s, as
    `no_grad`.
    """
    self.grad_before = torch.is_grad_enabled()
    torch._C._set_grad_enabled(not self.mode)


def _exit_no_grad(self: Any, *_: Any) -> None:
    torch._C._set_grad_enabled(self.grad_before)


def _torch_internals() -> list[tuple[Any, str, Any]]:
    """Return functions of PyTorch that look at devices out of Python's sight: owner, name and
    replacement.
    """
    group_on_cpu = torch._C._group_tensors_by_device_and_dtype
    init_autocast = torch.amp.autocast_mode.autocast.__init__
    save_plain = torch.save
    location_on_cpu = torch.serialization.location_tag
    run_backward = torch.autograd._engine_run_backward

    def backward(*args: Any, **kwargs: Any) -> Any:
        """Replace functions in layers that are computed again, too: no mode is active there."""
        with _Functions():
            return run_backward(*args, **kwargs)

    def group(lists: list[list[Any]], *args: Any) -> Any:
        """Group tensors, as optimizers do; each list's are on one device here."""
        devices = {str(x.device) for x in lists[0] if x is not None}
        if len(devices) > 1:
            raise NotImplementedError(f"an optimizer of parameters on several devices: {devices}")
        groups = group_on_cpu(lists, *args)
        return {(torch.device(*devices), dtype): tensors for (_, dtype), tensors in groups.items()}

    def init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        """Cast on CUDA as on a CPU, which is what PyTorch takes tensors for."""
        init_autocast(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    def save(value: Any, *args: Any, **kwargs: Any) -> None:
        """Save tensors with their devices, so that they open without a GPU only if `map_location`
        says so.
        """
        on_gpu = [x for x in tensors_of(value) if isinstance(x, CudaTensor)]
        devices = {x.inner.untyped_storage().data_ptr(): str(x.device) for x in on_gpu}

        def location_of(storage: Any) -> Any:
            return devices.get(storage.data_ptr()) or location_on_cpu(storage)

        with mock.patch.object(torch.serialization, "location_tag", location_of):
            save_plain(mapped(Tensor.detach, plain(value)), *args, **kwargs)

    return [
        (torch._C, "_group_tensors_by_device_and_dtype", group),
        (torch.amp.autocast_mode.autocast, "__init__", init),
        (torch.autograd, "_engine_run_backward", backward),
        (torch, "save", save),
        (torch.inference_mode, "__enter__", _enter_no_grad),
        (torch.inference_mode, "__exit__", _exit_no_grad),
        (nn.Module, "_apply", _move_parameters),
    ]


@contextlib.contextmanager
def pretended_gpu(
    *, capability: tuple[int, int] = (9, 0), num_gpus: int = 1, free_bytes: int = 80_000_000_000
) -> Iterator[Log]:
    """Pretend that this machine has GPUs.

    Parameters
    ----------
    capability : tuple of int
        Their compute capability: (9, 0) of an H100, (7, 0) of a V100, which has no bf16.
    num_gpus : int
    free_bytes : int
        Free memory of each.
    """
    global _running
    from histocoder.model import ngram

    assert _running is None
    machine = _Machine(capability=capability, num_gpus=num_gpus, free_bytes=free_bytes)
    patches = [
        *_torch_internals(),
        *((torch.cuda, name, value) for name, value in _cuda(machine).items()),
        *((torch.accelerator, name, value) for name, value in _accelerator(machine).items()),
        *((Tensor, name, method) for name, method in _methods().items()),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, value in patches:
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.callback(ngram.character_kinds.cache_clear)  # it keeps tensors
        stack.enter_context(_Functions())
        _running = machine
        try:
            yield machine.log
        finally:
            _running = None


def _main() -> None:
    from faulty import run_program

    parser = argparse.ArgumentParser()
    parser.add_argument("--capability", default="9.0")
    parser.add_argument("--gpus", type=int, default=1)
    end = sys.argv.index("--")
    flags = parser.parse_args(sys.argv[1:end])
    major, minor = map(int, flags.capability.split("."))
    with pretended_gpu(capability=(major, minor), num_gpus=flags.gpus):
        run_program(sys.argv[end + 1 :])


if __name__ == "__main__":
    _main()
