"""FSDP: each process holds a share of weights, gradients and optimizer state; layers are whole while they compute."""

from __future__ import annotations

import copy
import shutil
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from histocoder import distributed
from histocoder.checkpoints.model_files import SHARDS_FOLDER
from histocoder.checkpoints.sharded import write_shards
from histocoder.config import StrategyConfig, TrainConfig
from histocoder.errors import UserError
from histocoder.model import MixerModel
from histocoder.training.optimizer import AdamW, parameter_groups

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Sharded:
    """FSDP by PyTorch's `fully_shard` (Zhao et al. 2023).

    Each layer is its own FSDP unit, gathered in the precision of the run (in fp32 for encoders other than CANINE). All
    other parameters are gathered with the model, in fp32.
    """

    def __init__(self, config: StrategyConfig) -> None:
        self.name = f"FSDP {config.fsdp}" + (", CPU offload" if config.fsdp_cpu_offload else "")
        self._config = config
        self._empty: MixerModel
        """A model without weights, for the form of its state dict."""
        self._shares: dict[str, DTensor] = {}
        """Shards by parameter name."""

    def wrap(self, model: MixerModel, device: torch.device) -> nn.Module:
        """Shard the model; see `Strategy` for this and the following methods."""
        self._device, self._functions = device, model.layer_functions
        self._empty = copy.deepcopy(
            model, {id(p): nn.Parameter(p.to("meta"), p.requires_grad) for p in model.parameters()}
        )
        for layers, function in zip(model.layers(), self._functions, strict=True):
            if function is not None:
                for layer in layers:
                    layer.forward = MethodType(function, layer)
        model.layer_functions = (self._functions[0] and nn.Module.__call__, nn.Module.__call__)  # so that hooks run
        options: dict[str, Any] = {
            "mesh": init_device_mesh(device.type, (distributed.world_size(),)),
            "reshard_after_forward": self._config.fsdp == "full_shard",
            "offload_policy": CPUOffloadPolicy() if self._config.fsdp_cpu_offload else OffloadPolicy(),
        }
        reduce_dtype = _DTYPES[self._config.fsdp_reduce_dtype]
        param_dtype = None if model.dtype == torch.float32 else model.dtype
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
        in_fp32 = MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
        for layers, function in zip(model.layers(), self._functions, strict=True):
            for layer in layers:
                if sum(p.numel() for p in layer.parameters()) >= (self._config.fsdp_min_num_params or 1):
                    # layers of other encoders than CANINE are under autocast, which looks for weights in fp32
                    fully_shard(layer, mp_policy=policy if function is not None else in_fp32, **options)
        fully_shard(model, mp_policy=in_fp32, **options)
        self._shares = dict(model.named_parameters())  # type: ignore[arg-type]
        # logits are a view, as of each linear layer; nothing changes them in place
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view", category=UserWarning)
        return model

    def optimizer(self, model: MixerModel, config: TrainConfig) -> ShareAdamW:
        """Build the optimizer of the shards."""
        options = {name: getattr(config, name) for name in ("weight_decay", "max_grad_norm")}
        return ShareAdamW(parameter_groups(self._shares.items(), config), lr=config.learning_rate, **options)

    def accumulating(self, wrapped: nn.Module) -> AbstractContextManager[Any]:
        """Nothing: gradients that processes have not exchanged would be whole ones."""
        return nullcontext()

    def unscale(self, scaler: torch.amp.GradScaler, optimizer: ShareAdamW) -> None:
        """Gradients that are not finite in one share count for all."""
        optimizer.take_gradients()
        if not scaler.is_enabled():
            return
        scaler.unscale_(optimizer)
        for found in scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
            found.copy_(distributed.reduce_sum(found))

    def own_parameters(self, model: MixerModel) -> list[Tensor]:
        """Return this rank's shards."""
        return list(map(_local, self._shares.values()))

    @contextmanager
    def whole(self, model: MixerModel) -> Iterator[None]:
        """Replace the shards by whole parameters, and call layers without FSDP's hooks."""
        functions = model.layer_functions
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        whole = {name: self._gathered(share) for name, share in self._shares.items()}
        with _replaced(model, whole), _unhooked([layer for layers in model.layers() for layer in layers]):
            model.layer_functions = self._functions
            try:
                yield
            finally:
                model.layer_functions = functions

    def weights(self, model: MixerModel) -> dict[str, Tensor]:
        """Return the weights in the CPU's memory; they are gathered one by one."""
        gathered = {name: self._on_primary(share) for name, share in self._shares.items()}
        return self._state_dict(gathered) if distributed.is_primary() else {}

    def state(
        self, model: MixerModel, optimizer: ShareAdamW, *, into: Path | None
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return weights and optimizer state; with --fsdp-state-dict sharded, each rank writes its shard."""
        if into is None or self._config.fsdp_state_dict == "full":
            return self.weights(model), self._gathered_state(optimizer)
        moments = {
            i: {name: _like(share, value) if value.dim() else value for name, value in optimizer.state[own].items()}
            for i, (own, share) in enumerate(optimizer.pairs)
        }
        try:
            write_shards(into / SHARDS_FOLDER, self._shared_weights(), moments)
        except UserError:
            if distributed.is_primary():
                shutil.rmtree(into, ignore_errors=True)
            raise
        return {}, {**optimizer.state_dict(), "state": {}}

    def load(self, model: MixerModel, weights: dict[str, Tensor]) -> None:
        """Load weights in place, each rank its shards."""
        with _replaced(self._empty, {}):
            self._empty.load_state_dict(weights, assign=True)
            for name, whole in self._empty.named_parameters():
                _local(self._shares[name]).copy_(_share_of(whole.detach()))
            for name, buffer in model.named_buffers():
                buffer.copy_(self._empty.get_buffer(name))

    def load_optimizer(self, optimizer: ShareAdamW, state: dict[str, Any]) -> None:
        """Load the optimizer's state, each rank its shards."""
        shares = {
            i: {name: _share_of(value).clone() if value.dim() else value for name, value in values.items()}
            for i, values in state["state"].items()
        }
        optimizer.load_state_dict({**state, "state": shares})

    def _gathered_state(self, optimizer: ShareAdamW) -> dict[str, Any]:
        """Return the optimizer's, in rank 0's CPU memory; gathered one by one."""
        gathered = {
            i: {
                name: self._on_primary(_like(share, value)) if value.dim() else value.cpu()
                for name, value in optimizer.state[own].items()
            }
            for i, (own, share) in enumerate(optimizer.pairs)
            if own in optimizer.state
        }
        return {**optimizer.state_dict(), "state": gathered} if distributed.is_primary() else {}

    def _state_dict(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the state dict of a model with these parameters, by name."""
        with _replaced(self._empty, parameters):
            return self._empty.state_dict()

    def _shared_weights(self) -> dict[str, Tensor]:
        """Return the model's state dict, of shares but where it holds other tensors than parameters."""
        differing = [
            name
            for name, tensor in self._state_dict({}).items()
            if name in self._shares and tensor.shape != self._shares[name].shape
        ]
        whole = self._state_dict({name: self._gathered(self._shares[name]) for name in differing})
        return {name: tensor if name in differing else self._shares.get(name, tensor) for name, tensor in whole.items()}

    def _gathered(self, share: DTensor) -> Tensor:
        """Return the whole tensor, on this process's device."""
        return _like(share, _local(share).to(self._device)).full_tensor()

    def _on_primary(self, share: DTensor) -> Tensor:
        """Return the whole tensor in rank 0's CPU memory; nothing on others."""
        whole = self._gathered(share)
        return whole.cpu() if distributed.is_primary() else torch.empty(0)


class ShareAdamW(AdamW):
    """`AdamW` of shares: their gradients are clipped by the norm of all.

    Parameters
    ----------
    shares : list of dict
        Groups of the DTensors that gradients are set at.
    options
        Those of `AdamW`.
    """

    def __init__(self, shares: list[dict[str, Any]], **options: Any) -> None:
        self._shares: list[DTensor] = [share for group in shares for share in group["params"]]
        own = [{**group, "params": [nn.Parameter(_local(share)) for share in group["params"]]} for group in shares]
        super().__init__(own, norm_of_all=distributed.norm_of_all, **options)
        self.pairs = list(zip(self._parameters, self._shares, strict=True))
        """Each parameter of this optimizer's, which is this process's part of a share."""

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Take the gradients of the shares for those of the parameters; before a step, and before they are unscaled."""
        for own, share in self.pairs:
            own.data = _local(share)  # FSDP may move shares when they are first used
            own.grad = None if share.grad is None else _local(share.grad)  # type: ignore[arg-type]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, those of shares as well."""
        super().zero_grad(set_to_none)
        for share in self._shares:
            share.grad = None


@contextmanager
def _replaced(model: MixerModel, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Have tensors for parameters, by name; afterwards all parameters are those from before."""
    before = dict(model.named_parameters())
    for name, tensor in tensors.items():
        _set(model, name, nn.Parameter(tensor, before[name].requires_grad))
    try:
        yield
    finally:
        for name, parameter in before.items():
            _set(model, name, parameter)


@contextmanager
def _unhooked(modules: list[nn.Module]) -> Iterator[None]:
    """Have modules called without FSDP's hooks, where encoders call their layers themselves."""
    before = [(module._forward_pre_hooks, module._forward_hooks) for module in modules]
    for module in modules:
        module._forward_pre_hooks, module._forward_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        for module, (of_before, of_after) in zip(modules, before, strict=True):
            module._forward_pre_hooks, module._forward_hooks = of_before, of_after


def _set(model: MixerModel, name: str, parameter: nn.Parameter) -> None:
    path, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(path), attribute, parameter)


def _local(share: DTensor) -> Tensor:
    """Return what this process holds, in its place."""
    return share.to_local().detach()


def _like(share: DTensor, local: Tensor) -> DTensor:
    """Return a tensor that is shared out as another is, of what this process holds of it."""
    if local.device.type != share.device_mesh.device_type:  # offloaded; `from_local` would bring it back
        found: Any = torch.empty_like(share.detach())
        _local(found).copy_(local)
        return found
    return DTensor.from_local(
        local, share.device_mesh, share.placements, run_check=False, shape=share.shape, stride=share.stride()
    )


def _share_of(whole: Tensor) -> Tensor:
    """Return what this process holds of a tensor; FSDP cuts along the first dimension."""
    parts = whole.chunk(distributed.world_size())
    return parts[distributed.rank()] if distributed.rank() < len(parts) else whole[:0]
