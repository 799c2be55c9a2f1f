"""Ways to spread a model in training over ranks: a replica on each, whose gradients DDP averages, or
shards with FSDP (see `fsdp.Shards`).
"""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from histocoder import distributed
from histocoder.config import TrainConfig
from histocoder.model import MixerModel
from histocoder.training.optimizer import is_table


class Strategy(Protocol):
    """A model on all ranks. Methods that return or load what is whole are collective calls."""

    wrapped: nn.Module
    """The model as training calls it; gradients are means over ranks."""
    total_norm: Callable[[list[Tensor]], Tensor] | None
    """Function that returns the norm of gradients, if it is not that of this rank's."""

    def accumulating(self) -> AbstractContextManager[Any]:
        """Keep ranks from exchanging the gradients of forward and backward passes."""

    def average_sparse_gradients(self) -> None:
        """Average sparse gradients over ranks."""

    def whole(self) -> AbstractContextManager[MixerModel]:
        """Give the whole model on each rank, for use without collective calls."""

    def weights(self) -> dict[str, Tensor]:
        """Return the model's state dict, whole on rank 0."""

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Load a state dict that is whole on every rank."""

    def whole_optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return an optimizer's state dict in the form of one process, whole on rank 0."""

    def local_optimizer_state(
        self, optimizer: torch.optim.Optimizer, state: dict[str, Any]
    ) -> dict[str, Any]:
        """Return this rank's part of an optimizer's state dict that is whole on every rank."""


def build_strategy(model: MixerModel, config: TrainConfig, device: torch.device) -> Strategy:
    """Return the strategy of the settings, which wraps a model for all ranks."""
    if config.fsdp is None:
        return Replicas(model, config, device)
    # here, since it takes a second to import
    from histocoder.training.fsdp import Shards

    return Shards(model, config, device)


class Replicas:
    """A replica of the model on each rank, with DDP if there are several; see `Strategy`."""

    total_norm: Callable[[list[Tensor]], Tensor] | None = None

    def __init__(self, model: MixerModel, config: TrainConfig, device: torch.device) -> None:
        self._model = model
        self.wrapped: nn.Module = model
        if distributed.backend() is not None:
            self.wrapped = _with_ddp(model, config, device)

    def accumulating(self) -> AbstractContextManager[Any]:
        if isinstance(self.wrapped, DistributedDataParallel):
            return self.wrapped.no_sync()
        return nullcontext()

    def average_sparse_gradients(self) -> None:
        """Average the rows of tables that ranks have gradients of."""
        world_size = distributed.world_size()
        if world_size == 1:
            return
        for table in filter(is_table, self._model.parameters()):
            if table.grad is not None:
                gradient = table.grad.coalesce()
                rows = torch.cat(distributed.gather(gradient.indices()[0]))
                values = torch.cat(distributed.gather(gradient.values() / world_size))
                mean = torch.sparse_coo_tensor(
                    rows[None], values, gradient.shape, check_invariants=False
                )
                table.grad = mean.coalesce()

    def whole(self) -> AbstractContextManager[MixerModel]:
        return nullcontext(self._model)

    def weights(self) -> dict[str, Tensor]:
        return self._model.state_dict()

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        self._model.load_state_dict(weights)

    def whole_optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return optimizer.state_dict()

    def local_optimizer_state(
        self, optimizer: torch.optim.Optimizer, state: dict[str, Any]
    ) -> dict[str, Any]:
        return state


def _with_ddp(model: MixerModel, config: TrainConfig, device: torch.device) -> nn.Module:
    """Return a model that averages gradients over ranks, but for those of tables."""
    # of a table, rows are exchanged: DDP would send the whole of it
    tables = [name for name, parameter in model.named_parameters() if is_table(parameter)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, tables)
    ids = [device.index] if device.type == "cuda" else None

    # the argument's next name means another thing, and older torch lacks it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        wrapped = DistributedDataParallel(
            model, device_ids=ids, gradient_as_bucket_view=True, broadcast_buffers=False
        )
    if config.bf16_gradients:
        wrapped.register_comm_hook(None, distributed.averaged_in_bf16)
    return wrapped
