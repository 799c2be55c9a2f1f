"""A model in training: its device, its precision, its optimizer steps, and how it is spread over ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from histocoder import distributed
from histocoder.checkpoints.training_state import LearnerState
from histocoder.config import TrainConfig
from histocoder.data.dataset import Batch
from histocoder.model import MixerModel, MixerOutput
from histocoder.model.devices import computing_dtype
from histocoder.training.frozen import FrozenOutputs
from histocoder.training.losses import mixed_loss
from histocoder.training.optimizer import AdamW, is_table, parameter_groups


class Learner:
    """A model with its optimizer, schedule and loss scale; each rank has a replica, and DDP averages gradients.

    The model is on the CPU, with its frozen weights marked; it is moved to the device. `total_steps` is the length of
    the run. Methods that say so are collective calls. See `ShardedLearner` for FSDP.
    """

    def __init__(self, model: MixerModel, config: TrainConfig, device: torch.device, *, total_steps: int) -> None:
        self.model, self.config, self.device = model, config, device
        self.outputs: FrozenOutputs | None = None
        """A frozen encoder's, of the data that the next steps take, unless each step is to compute them."""
        model.to(device)
        model.dtype = computing_dtype(config.precision, device, use_amp=config.use_amp)
        self.wrapped = self.wrap()
        self.optimizer = AdamW(
            parameter_groups(model.named_parameters(), config),
            lr=config.learning_rate,
            weight_decay=config.weight_decay,
            max_grad_norm=config.max_grad_norm,
            total_norm=self.total_norm,
        )
        warmup = round(config.warmup_pct * total_steps)
        self.schedule = partial(linear_schedule, warmup_steps=warmup, total_steps=total_steps)
        self.scheduler = LambdaLR(self.optimizer, self.schedule)
        # for fp16; in other precisions it does nothing
        self.scaler = torch.amp.GradScaler(device.type, enabled=model.dtype == torch.float16)

    total_norm: Callable[[list[Tensor]], Tensor] | None = None
    """Function that returns the norm of gradients, if it is not that of this rank's."""

    @property
    def strategy(self) -> str:
        """Name of the way in which ranks share the work."""
        gradients = f", {self.config.ddp_comm_hook} gradients" if self.config.ddp_comm_hook != "none" else ""
        return f"DDP{gradients}" if distributed.world_size() > 1 else "one process"

    def wrap(self) -> nn.Module:
        """Return the model as training calls it; gradients are means over ranks."""
        if distributed.backend() is None:
            return self.model
        # `reduce_sparse` exchanges rows of tables: DDP would send the whole table
        tables = [name for name, p in self.model.named_parameters() if is_table(p)]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.model, tables)
        ids = [self.device.index] if self.device.type == "cuda" else None
        with warnings.catch_warnings():  # the argument's next name means another thing, and older torch lacks it
            warnings.simplefilter("ignore", FutureWarning)
            wrapped = DistributedDataParallel(
                self.model, device_ids=ids, gradient_as_bucket_view=True, broadcast_buffers=False
            )
        if self.config.ddp_comm_hook == "bf16":
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

            wrapped.register_comm_hook(None, bf16_compress_hook)
        return wrapped

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
            with self.accumulating() if i < len(parts) else nullcontext():
                output = self.forward(batch)
                part_loss = batch.weight * mixed_loss(output, batch, self.model.config, config)
                self.backward(part_loss)
            loss += part_loss.detach()
        return loss, self.step()

    def forward(self, batch: Batch) -> MixerOutput:
        """Return the model's outputs for a batch, for `backward`."""
        stride, encoded = self.config.decoder_stride, None if self.outputs is None else self.outputs.of(batch)
        return self.wrapped(batch.input_ids, batch.targets[::stride, :-2], encoded, decoder_stride=stride)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of this rank's part of a loss, which is the sum of all ranks' parts."""
        # gradients are averaged over ranks; 0 * loss makes them NaN on all ranks where one's loss is so
        self.scaler.scale(loss * (distributed.world_size() + 0 * loss.detach())).backward()

    def step(self) -> Tensor:
        """Take a step, which all ranks skip if gradients are not finite; return the norm of all gradients."""
        self.reduce_sparse()
        self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        return self.optimizer.grad_norm

    def accumulating(self) -> AbstractContextManager[Any]:
        """Keep ranks from exchanging the gradients of forward and backward passes."""
        return self.wrapped.no_sync() if isinstance(self.wrapped, DistributedDataParallel) else nullcontext()

    def reduce_sparse(self) -> None:
        """Average sparse gradients over ranks, before the loss scale is checked: all ranks see the same."""
        for table in filter(is_table, self.model.parameters()) if distributed.world_size() > 1 else ():
            if table.grad is not None:
                table.grad = _mean_of_rows(table.grad)

    def whole(self) -> AbstractContextManager[MixerModel]:
        """Give the whole model on each rank, for use without collective calls; a collective call itself."""
        return nullcontext(self.model)

    def own_parameters(self) -> list[Tensor]:
        """Return this rank's parameters, or its shards of them."""
        return list(self.model.parameters())

    def is_finite(self) -> bool:
        """Return whether all weights are finite; a collective call."""
        found = torch.stack([p.detach().isfinite().all() for p in self.own_parameters()]).all()
        return int(distributed.all_reduce((~found).int())) == 0

    def weights(self) -> dict[str, Tensor]:
        """Return the model's state dict, whole on rank 0; a collective call."""
        return self.model.state_dict()

    def optimizer_state(self) -> dict[str, Any]:
        """Return the optimizer's state dict in the form of one process, whole on rank 0; a collective call."""
        return self.optimizer.state_dict()

    def state(self) -> LearnerState:
        """Return the state dicts of a run, whole on rank 0; a collective call."""
        states = self.optimizer_state(), self.scheduler.state_dict(), self.scaler.state_dict()
        return LearnerState(self.weights(), *states)

    def load(self, weights: dict[str, Tensor], optimizer: dict[str, Any] | None = None) -> None:
        """Load state dicts that are whole on every rank."""
        self.model.load_state_dict(weights)
        if optimizer is not None:
            self.optimizer.load_state_dict(optimizer)

    def restart(self, weights: dict[str, Tensor], *, share: float, total_steps: int) -> None:
        """Train from weights, whole on every rank, at a share of the peak learning rate that falls to 0."""
        self.load(weights)
        self.optimizer.state.clear()  # moments of the gradients of other weights
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"]
        self.scheduler = LambdaLR(
            self.optimizer, lambda step: share * linear_schedule(step, warmup_steps=0, total_steps=total_steps)
        )

    def restore(self, state: LearnerState) -> None:
        """Restore a state, whole on every rank."""
        self.load(state.weights, state.optimizer)
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


def _mean_of_rows(gradient: Tensor) -> Tensor:
    """Average sparse gradients, each with its own rows, over all ranks."""
    gradient = gradient.coalesce()
    rows = torch.cat(distributed.gather(gradient.indices()[0]))
    values = torch.cat(distributed.gather(gradient.values() / distributed.world_size()))
    return torch.sparse_coo_tensor(rows[None], values, gradient.shape, check_invariants=False).coalesce()
