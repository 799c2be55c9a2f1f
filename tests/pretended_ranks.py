"""Processes that train together, each on a pretended GPU, with gloo in the place of NCCL.

`python tests/pretended_ranks.py VISIBLE -- SCRIPT ARG …` runs a program as one rank, on a machine
whose GPUs are those that `VISIBLE` names as `CUDA_VISIBLE_DEVICES` does: "0,1" are two, "" is none,
and of "MIG-a,MIG-b", parts of one GPU, CUDA uses the first alone.

What NCCL refuses is refused: tensors on the CPU, sparse ones, a group whose device is not the
current one. DDP and FSDP work on memory that a pretended GPU lacks, in C++: `_Replica` does for DDP
what its documentation says, on the arguments that it was given; FSDP can't be pretended.
"""

import contextlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from pretended_gpu import CudaTensor, plain, pretended_gpu
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


class _Replica(nn.Module):
    """What `DistributedDataParallel` does: one replica's weights for all, and means of gradients,
    unless `no_sync`.
    """

    ignored: frozenset[str] = frozenset()

    def __init__(
        self,
        module: nn.Module,
        *,
        device_ids: list[int],
        gradient_as_bucket_view: bool,
        broadcast_buffers: bool,
    ) -> None:
        super().__init__()
        assert gradient_as_bucket_view and not broadcast_buffers
        assert device_ids == [torch.cuda.current_device()]
        assert all(
            isinstance(p, CudaTensor) and [p.index] == device_ids for p in module.parameters()
        )
        self.module, self._is_syncing = module, True
        parameters = {name: p for name, p in module.named_parameters() if name not in self.ignored}
        for parameter in parameters.values():
            dist.broadcast(parameter.detach().inner, 0)
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._average)

    @classmethod
    def _set_params_and_buffers_to_ignore_for_model(
        cls, module: nn.Module, names: list[str]
    ) -> None:
        cls.ignored = frozenset(names)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self._is_syncing = False
        try:
            yield
        finally:
            self._is_syncing = True

    def _average(self, parameter: Tensor) -> None:
        if self._is_syncing:
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(dist.get_world_size())


def _by_gloo(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Return a collective that has gloo do on the values of a GPU's tensors what NCCL does; others
    stay gloo's own.
    """
    signature = inspect.signature(collective)

    def run(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        is_nccl = call.arguments.get("group") is None
        for tensor in (x for x in tree_leaves((call.args, call.kwargs)) if isinstance(x, Tensor)):
            if isinstance(tensor, CudaTensor) != is_nccl or tensor.layout != torch.strided:
                raise RuntimeError("Tensors must be on the device of their backend, and dense")
        return collective(*plain(call.args), **plain(call.kwargs))

    return run


def _start_nccl(backend: str, *, device_id: Any = None, **kwargs: Any) -> None:
    if backend == "nccl":
        assert device_id == torch.device("cuda", torch.cuda.current_device())
    _start_gloo("gloo", **kwargs)


_start_gloo = dist.init_process_group


def _backend(group: Any = None) -> str:
    return "nccl" if group is None else "gloo"


def _no_gpus() -> None:
    raise RuntimeError("No CUDA GPUs are available")


@contextlib.contextmanager
def pretended_rank(visible: str) -> Iterator[None]:
    """Pretend to have some GPUs, as `CUDA_VISIBLE_DEVICES` names them, and NCCL."""
    from histocoder.training import strategy

    os.environ["CUDA_VISIBLE_DEVICES"] = visible
    names = [name for name in visible.split(",") if name]
    num_gpus = 1 if visible.startswith("MIG-") else len(names)
    patches: list[Any] = [mock.patch.object(torch.backends.cuda, "is_built", lambda: True)]
    if num_gpus:
        patches += [
            pretended_gpu(num_gpus=num_gpus),
            mock.patch.object(dist, "init_process_group", _start_nccl),
            mock.patch.object(dist, "get_backend", _backend),
            mock.patch.object(dist, "all_reduce", _by_gloo(dist.all_reduce)),
            mock.patch.object(dist, "all_gather", _by_gloo(dist.all_gather)),
            mock.patch.object(strategy, "DistributedDataParallel", _Replica),
        ]
    else:
        patches.append(mock.patch.object(torch.cuda, "init", _no_gpus))
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


if __name__ == "__main__":
    from faulty import run_program

    with pretended_rank(sys.argv[1]):
        run_program(sys.argv[sys.argv.index("--") + 1 :])
