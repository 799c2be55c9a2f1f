"""Strategies that spread a model over ranks while it is trained."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from histocoder import distributed
from histocoder.config import StrategyConfig, TrainConfig
from histocoder.errors import UserError
from histocoder.model import MixerModel
from histocoder.training.optimizer import AdamW, build_optimizer, is_table

if TYPE_CHECKING:
    from histocoder.training.fsdp import Sharded

Strategy: TypeAlias = "Replicated | Sharded"


def strategy_of(config: StrategyConfig) -> Strategy:
    if config.fsdp is None:
        return Replicated(config if distributed.world_size() > 1 else StrategyConfig())
    from histocoder.training.fsdp import Sharded  # here, since it takes a while to import

    return Sharded(config)


def check_strategy(config: StrategyConfig, device: torch.device, dtype: torch.dtype) -> None:
    """Raise a UserError if the device can't do what the settings ask for, or not in the precision of the run."""
    if config.fsdp is not None and device.type == "mps":
        raise UserError("--fsdp is for NVIDIA GPUs and CPUs; omit it, or add --device cpu.")
    if config.fsdp_cpu_offload and device.type != "cuda":
        raise UserError("--fsdp-cpu-offload keeps shards out of a GPU's memory, and there is no GPU; omit it.")
    if config.fsdp_cpu_offload and dtype == torch.float16:  # torch's GradScaler does not wait for copies from the GPU
        raise UserError(
            "--fsdp-cpu-offload does not work with fp16; use --precision bf16, or fp32 if the GPU has no bf16."
        )
    if config.ddp_comm_hook == "bf16" and device.type != "cuda":
        raise UserError("--ddp-comm-hook bf16 needs GPUs: torch supports it with NCCL only; omit it.")


class Replicated:
    """Each rank holds all of the model; DDP exchanges gradients. Methods of a strategy are collective calls."""

    def __init__(self, config: StrategyConfig) -> None:
        self._config = config
        gradients = f", {config.ddp_comm_hook} gradients" if config.ddp_comm_hook != "none" else ""
        self.name = f"DDP{gradients}" if distributed.world_size() > 1 else "one process"

    def wrap(self, model: MixerModel, device: torch.device) -> nn.Module:
        """Return the model as training calls it; gradients are means over ranks."""
        if distributed.backend() is None:
            return model
        ids = [device.index] if device.type == "cuda" else None
        # `reduce_sparse` exchanges rows of tables: DDP would send the whole table
        tables = [name for name, p in model.named_parameters() if is_table(p)]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, tables)
        with warnings.catch_warnings():  # the argument's next name means another thing, and older torch lacks it
            warnings.simplefilter("ignore", FutureWarning)
            wrapped = DistributedDataParallel(
                model, device_ids=ids, gradient_as_bucket_view=True, broadcast_buffers=False
            )
        if self._config.ddp_comm_hook == "bf16":
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

            wrapped.register_comm_hook(None, bf16_compress_hook)
        return wrapped

    def optimizer(self, model: MixerModel, config: TrainConfig) -> AdamW:
        """Build the optimizer of a wrapped model."""
        return build_optimizer(model, config)

    def accumulating(self, wrapped: nn.Module) -> AbstractContextManager[Any]:
        """Keep ranks from exchanging the gradients of forward and backward passes."""
        return wrapped.no_sync() if isinstance(wrapped, DistributedDataParallel) else nullcontext()

    def reduce_sparse(self, model: MixerModel) -> None:
        """Average sparse gradients over ranks, before the loss scale is checked: all ranks see the same."""
        if distributed.world_size() > 1:
            for table in filter(is_table, model.parameters()):
                if table.grad is not None:
                    table.grad = _mean_of_rows(table.grad)

    def own_parameters(self, model: MixerModel) -> list[Tensor]:
        """Return this rank's parameters, or its shards of them."""
        return list(model.parameters())

    def whole(self, model: MixerModel) -> AbstractContextManager[MixerModel]:
        """Give the whole model, which each rank can call any number of times."""
        return nullcontext(model)

    def weights(self, model: MixerModel) -> dict[str, Tensor]:
        """Return the model's state dict, whole on rank 0; not copied."""
        return model.state_dict()

    def state(self, model: MixerModel, optimizer: AdamW) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the state dicts of model and optimizer in the form of one process, whole on rank 0."""
        return self.weights(model), optimizer.state_dict()

    def load(self, model: MixerModel, weights: dict[str, Tensor]) -> None:
        """Load weights from a state dict that is whole on every rank."""
        model.load_state_dict(weights)

    def load_optimizer(self, optimizer: AdamW, state: dict[str, Any]) -> None:
        """Load the optimizer's state dict, in the form of one process and whole on every rank."""
        optimizer.load_state_dict(state)


def _mean_of_rows(gradient: Tensor) -> Tensor:
    """Average sparse gradients, each with its own rows, over all ranks."""
    gradient = gradient.coalesce()
    rows = torch.cat(distributed.gather(gradient.indices()[0]))
    values = torch.cat(distributed.gather(gradient.values() / distributed.world_size()))
    return torch.sparse_coo_tensor(rows[None], values, gradient.shape, check_invariants=False).coalesce()
