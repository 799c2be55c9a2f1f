"""FSDP: each process holds a shard of weights, gradients and optimizer state; layers are whole while they compute."""

from __future__ import annotations

import copy
import itertools
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from histocoder import distributed
from histocoder.checkpoints.model_files import SHARDS_FOLDER
from histocoder.checkpoints.sharded import write_shards
from histocoder.config import StrategyConfig, TrainConfig
from histocoder.errors import UserError
from histocoder.model import MixerModel
from histocoder.model.layers import TransformerLayer
from histocoder.training.optimizer import parameter_groups

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Sharded:
    """FSDP by PyTorch's `fully_shard` (Zhao et al. 2023). For the methods see `Replicated`.

    Each layer is its own FSDP unit, gathered in the precision of the run (in fp32 for encoders other than CANINE). All
    other parameters are gathered with the model, in fp32.
    """

    def __init__(self, config: StrategyConfig) -> None:
        self.name = f"FSDP {config.fsdp}" + (", CPU offload" if config.fsdp_cpu_offload else "")
        self._config = config
        self._empty: MixerModel
        """The model as it was before it was sharded, without weights."""

    def wrap(self, model: MixerModel, device: torch.device) -> nn.Module:
        """Shard the model in place."""
        self._device = device
        self._empty = copy.deepcopy(
            model, {id(p): nn.Parameter(p.to("meta"), p.requires_grad) for p in model.parameters()}
        )
        if model.is_compiled:
            self._empty.compile_layers()  # which no copy is
        options: dict[str, Any] = {
            "mesh": init_device_mesh(device.type, (distributed.world_size(),)),
            "reshard_after_forward": self._config.fsdp == "full_shard",
            "offload_policy": CPUOffloadPolicy() if self._config.fsdp_cpu_offload else OffloadPolicy(),
        }
        reduce_dtype = _DTYPES[self._config.fsdp_reduce_dtype]
        param_dtype = None if model.dtype == torch.float32 else model.dtype
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
        in_fp32 = MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
        for layer in itertools.chain(*model.layers()):
            if sum(p.numel() for p in layer.parameters()) >= (self._config.fsdp_min_num_params or 1):
                # layers of other encoders than CANINE are under autocast, which looks for weights in fp32
                fully_shard(layer, mp_policy=policy if isinstance(layer, TransformerLayer) else in_fp32, **options)
        fully_shard(model, mp_policy=in_fp32, **options)
        # logits are a view, as of each linear layer; nothing changes them in place
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view", category=UserWarning)
        return model

    def optimizer(self, model: MixerModel, config: TrainConfig) -> ShardedAdamW:
        """Build torch's optimizer of the shards."""
        options = {name: getattr(config, name) for name in ("weight_decay", "max_grad_norm")}
        return ShardedAdamW(parameter_groups(model.named_parameters(), config), lr=config.learning_rate, **options)

    def accumulating(self, wrapped: nn.Module) -> AbstractContextManager[Any]:
        """Do nothing: gradients that processes have not exchanged would be whole ones."""
        return nullcontext()

    def own_parameters(self, model: MixerModel) -> list[Tensor]:
        """Return this rank's shards."""
        return list(map(_local, model.parameters()))

    @contextmanager
    def whole(self, model: MixerModel) -> Iterator[MixerModel]:
        """Give a second model, with the whole weights on this process's device."""
        with self._filled(self._gathered(model.state_dict(), lambda tensor: tensor)) as whole:
            yield whole.train(model.training)

    def weights(self, model: MixerModel) -> dict[str, Tensor]:
        """Return the weights in rank 0's CPU memory; they are gathered one by one."""
        return self._gathered(model.state_dict(), _on_primary)

    def state(
        self, model: MixerModel, optimizer: ShardedAdamW, *, into: Path | None
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return weights and optimizer state; with --fsdp-state-dict sharded, each rank writes its shard."""
        state = optimizer.state_dict()
        if into is None or self._config.fsdp_state_dict == "full":
            moments = {i: self._gathered(values, _on_primary) for i, values in state["state"].items()}
            return self.weights(model), {**state, "state": moments}
        try:
            write_shards(into / SHARDS_FOLDER, model.state_dict(), state["state"])
        except UserError:
            if distributed.is_primary():
                shutil.rmtree(into, ignore_errors=True)
            raise
        return {}, {**state, "state": {}}

    @torch.no_grad()
    def load(self, model: MixerModel, weights: dict[str, Tensor]) -> None:
        """Load weights in place, each rank its shards."""
        with self._filled(weights) as whole:
            for name, parameter in model.named_parameters():
                _local(parameter).copy_(_shard_of(whole.get_parameter(name)))
            for name, buffer in model.named_buffers():
                buffer.copy_(whole.get_buffer(name))

    def load_optimizer(self, optimizer: ShardedAdamW, state: dict[str, Any]) -> None:
        """Load the optimizer's state, each rank its shards."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        shards = {
            i: {
                name: _like(parameters[i], _shard_of(value)) if value.dim() else value for name, value in values.items()
            }
            for i, values in state["state"].items()
        }
        optimizer.load_state_dict({**state, "state": shards})

    @contextmanager
    def _filled(self, weights: dict[str, Tensor]) -> Iterator[MixerModel]:
        """Give the model as it was before it was sharded, with these weights, which are not copied."""
        self._empty.load_state_dict(weights, assign=True)
        try:
            yield self._empty
        finally:
            for module in self._empty.modules():
                for name, parameter in module.named_parameters(recurse=False):
                    setattr(module, name, nn.Parameter(parameter.to("meta"), parameter.requires_grad))

    def _gathered(self, tensors: dict[str, Tensor], kept: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Return what is kept of each of some tensors, when it is whole on this process's device."""

        def whole(tensor: Any) -> Tensor:
            if not isinstance(tensor, DTensor):
                return tensor
            shard: Any = tensor.to(self._device)
            return shard.full_tensor()

        return {name: kept(whole(tensor)) for name, tensor in tensors.items()}


class ShardedAdamW(torch.optim.AdamW):
    """Torch's fused AdamW of DTensors, with `optimizer.AdamW`'s clipping; steps that are not finite are left out."""

    def __init__(
        self, parameters: list[dict[str, Any]], *, lr: float, weight_decay: float, max_grad_norm: float
    ) -> None:
        super().__init__(parameters, lr=lr, weight_decay=weight_decay, fused=True)
        self._max_grad_norm = max_grad_norm
        self.grad_norm = torch.zeros(())
        """Of shape (): the norm of all gradients at the last step, before they were scaled."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Clip by the norm over all ranks, and step; read `grad_norm` to know whether it was left out."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        gradients = [_local(p.grad) for p in parameters if p.grad is not None]
        self.grad_norm = distributed.reduce_sum(nn.utils.get_total_norm(gradients).square()).sqrt()
        if self.grad_norm.isfinite():
            nn.utils.clip_grads_with_norm_(parameters, self._max_grad_norm, self.grad_norm)
            super().step(closure)


def _local(tensor: Any) -> Tensor:
    """Return what this process holds of a tensor, in its place."""
    return tensor.to_local().detach()


def _on_primary(tensor: Tensor) -> Tensor:
    return tensor.cpu() if distributed.is_primary() else torch.empty(0)


def _like(parameter: Tensor, shard: Tensor) -> Tensor:
    """Return a DTensor that is sharded as a parameter is, of this process's shard."""
    found = torch.empty_like(parameter.detach())
    _local(found).copy_(shard)
    return found


def _shard_of(whole: Tensor) -> Tensor:
    """Return this process's shard of a tensor; FSDP cuts along the first dimension."""
    parts = whole.chunk(distributed.world_size())
    return parts[distributed.rank()] if distributed.rank() < len(parts) else whole[:0]
