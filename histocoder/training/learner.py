"""A model in training: its device, its precision, and its optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from histocoder import distributed
from histocoder.checkpoints.training_state import LearnerState
from histocoder.config import TrainConfig
from histocoder.data.dataset import Batch
from histocoder.model import MixerModel, MixerOutput
from histocoder.model.devices import choose_tf32, computing_dtype
from histocoder.training.losses import mixed_loss
from histocoder.training.optimizer import AdamW
from histocoder.training.strategies import Strategy, strategy_of


class Learner:
    """A model with its optimizer, schedule and loss scale, spread over ranks.

    The model is on the CPU, with its frozen weights marked; it is moved to the device. `total_steps` is the length of
    the run.
    """

    def __init__(
        self,
        model: MixerModel,
        config: TrainConfig,
        device: torch.device,
        *,
        total_steps: int,
    ) -> None:
        self.model, self.config, self.device = model, config, device
        self.strategy: Strategy = strategy_of(config)
        model.to(device)
        model.dtype = computing_dtype(config.precision, device, use_amp=config.use_amp)
        choose_tf32(model.dtype, device)
        if config.compile:
            model.compile_layers()
        if config.gradient_checkpointing:
            model.checkpoint_layers()
        self.wrapped = self.strategy.wrap(model, device)
        self.optimizer: AdamW = self.strategy.optimizer(model, config)
        warmup = round(config.warmup_pct * total_steps)
        self.schedule = partial(linear_schedule, warmup_steps=warmup, total_steps=total_steps)
        self.scheduler = LambdaLR(self.optimizer, self.schedule)
        # for fp16; in other precisions it does nothing
        self.scaler = torch.amp.GradScaler(device.type, enabled=model.dtype == torch.float16)

    @property
    def learning_rate(self) -> float:
        """Learning rate of the flat head in the next step."""
        return float(self.scheduler.get_last_lr()[-1])

    def train_step(self, parts: Sequence[Batch]) -> tuple[Tensor, Tensor]:
        """Take an optimizer step over accumulated batches; all ranks skip it if gradients are not finite.

        Returns this rank's part of the loss, and the norm of all gradients.
        """
        loss, config = torch.zeros((), device=self.device), self.config
        for i, part in enumerate(parts, 1):
            batch = part.to(self.device)
            with self.strategy.accumulating(self.wrapped) if i < len(parts) else nullcontext():
                output = self.forward(batch)
                part_loss = batch.weight * mixed_loss(output, batch, self.model.config, config)
                self.backward(part_loss)
            loss += part_loss.detach()
        return loss, self.step()

    def forward(self, batch: Batch) -> MixerOutput:
        """Return the model's outputs for a batch, for `backward`."""
        stride = self.config.decoder_stride
        return self.wrapped(batch.input_ids, batch.targets[::stride, :-2], batch.encoded, decoder_stride=stride)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of this rank's part of a loss, which is the sum of all ranks' parts."""
        # gradients are averaged over ranks; 0 * loss makes them NaN on all ranks where one's loss is so
        self.scaler.scale(loss * (distributed.world_size() + 0 * loss.detach())).backward()

    def step(self) -> Tensor:
        """Take a step, which all ranks skip if gradients are not finite; return the norm of all gradients."""
        self.strategy.reduce_sparse(self.model)
        self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        return self.optimizer.grad_norm

    def whole(self) -> AbstractContextManager[MixerModel]:
        """Give the whole model on each rank, for use without collective calls; a collective call itself."""
        return self.strategy.whole(self.model)

    def is_finite(self) -> bool:
        """Return whether all weights are finite; a collective call."""
        own = self.strategy.own_parameters(self.model)
        found = torch.stack([p.detach().isfinite().all() for p in own]).all()
        return int(distributed.all_reduce((~found).int())) == 0

    def weights(self) -> dict[str, Tensor]:
        """Return the model's state dict, whole on rank 0; a collective call."""
        return self.strategy.weights(self.model)

    def state(self) -> LearnerState:
        """Return the state dicts of a run, whole on rank 0; a collective call."""
        weights, optimizer = self.strategy.state(self.model, self.optimizer)
        return LearnerState(weights, optimizer, self.scheduler.state_dict(), self.scaler.state_dict())

    def restart(self, weights: dict[str, Tensor], *, share: float, total_steps: int) -> None:
        """Train from weights, whole on every rank, at a share of the peak learning rate that falls to 0."""
        self.strategy.load(self.model, weights)
        self.optimizer.state.clear()  # moments of the gradients of other weights
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"]
        self.scheduler = LambdaLR(
            self.optimizer, lambda step: share * linear_schedule(step, warmup_steps=0, total_steps=total_steps)
        )

    def restore(self, state: LearnerState) -> None:
        """Restore a state, whole on every rank."""
        self.strategy.load(self.model, state.weights)
        self.strategy.load_optimizer(self.optimizer, state.optimizer)
        # the next step's learning rate is that of this run's steps and warm-up, which may have changed
        self.scheduler = LambdaLR(self.optimizer, self.schedule, last_epoch=state.scheduler["last_epoch"] - 1)
        self.scheduler.load_state_dict(state.scheduler)
        if state.scaler:
            self.scaler.load_state_dict(state.scaler)


def linear_schedule(step: int, *, warmup_steps: int, total_steps: int) -> float:
    """Return the share of the peak learning rate, which rises over the warm-up and falls to 0 at the end."""
    if step < warmup_steps:
        return step / warmup_steps
    return max(total_steps - step, 0) / max(total_steps - warmup_steps, 1)
