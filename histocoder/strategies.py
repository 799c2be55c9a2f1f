"""How a model is spread over processes while it is trained."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from histocoder import distributed
from histocoder.config import TrainConfig
from histocoder.model import MixerModel, keep_copies, used_together
from histocoder.optimizer import AdamW


class Strategy(Protocol):
    """What `Learner` leaves to the way in which processes work together. All of them call each method."""

    name: str
    """For people."""

    def wrap(self, model: MixerModel, device: torch.device) -> nn.Module:
        """The model as training calls it; gradients are means over processes."""

    def optimizer(self, model: MixerModel, config: TrainConfig) -> AdamW:
        """Of the parameters that are trained."""

    def accumulating(self, wrapped: nn.Module) -> AbstractContextManager[Any]:
        """Within it, forward and backward passes add to gradients that processes do not exchange yet."""

    def whole(self, model: MixerModel) -> AbstractContextManager[Any]:
        """Within it, each process can use all of the model, as often as it likes, whatever the others do."""

    def weights(self, model: MixerModel) -> dict[str, Tensor]:
        """The model's state dict, whole on rank 0."""

    def optimizer_state(self, optimizer: AdamW) -> dict[str, Any]:
        """The optimizer's state dict as one process would have it, whole on rank 0."""

    def load(self, model: MixerModel, weights: dict[str, Tensor]) -> None:
        """Set the weights from a state dict, whole on every process."""

    def load_optimizer(self, optimizer: AdamW, state: dict[str, Any]) -> None:
        """Set the optimizer's state from a dict as one process has it, whole on every process."""


class Replicated:
    """Each process holds all of the model and of the optimizer's state; DDP exchanges gradients."""

    def __init__(self) -> None:
        self.name = "DDP" if distributed.world_size() > 1 else "one process"

    def wrap(self, model: MixerModel, device: torch.device) -> nn.Module:
        """See `Strategy`, likewise below."""
        return distributed.wrap(model, device)

    def optimizer(self, model: MixerModel, config: TrainConfig) -> AdamW:
        """With copies of weights in the precision of the run where that pays."""
        trained = [p for p in model.parameters() if p.requires_grad]
        if trained[0].device.type == "cpu" and distributed.world_size() == 1 and not config.compile:
            keep_copies(model, together=used_together(model.encoder))
        return AdamW(
            trained, lr=config.learning_rate, weight_decay=config.weight_decay, max_grad_norm=config.max_grad_norm
        )

    def accumulating(self, wrapped: nn.Module) -> AbstractContextManager[Any]:
        """DDP's `no_sync`."""
        return wrapped.no_sync() if isinstance(wrapped, DistributedDataParallel) else nullcontext()

    def whole(self, model: MixerModel) -> AbstractContextManager[Any]:
        """It is so always."""
        return nullcontext()

    def weights(self, model: MixerModel) -> dict[str, Tensor]:
        """Not copied."""
        return model.state_dict()

    def optimizer_state(self, optimizer: AdamW) -> dict[str, Any]:
        """Not copied."""
        return optimizer.state_dict()

    def load(self, model: MixerModel, weights: dict[str, Tensor]) -> None:
        """In place."""
        model.load_state_dict(weights)

    def load_optimizer(self, optimizer: AdamW, state: dict[str, Any]) -> None:
        """In place."""
        optimizer.load_state_dict(state)
