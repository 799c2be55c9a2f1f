"""A model in training: its device, its precision, its optimizer steps, and its state."""

import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from histocoder import distributed
from histocoder.checkpoints.compact import (
    MEMBERS,
    compact_moments,
    expand_moments,
    fill_rows,
    unpack_bits,
    with_table_rows,
    with_whole_table,
)
from histocoder.checkpoints.training_state import LearnerState
from histocoder.config import TrainConfig
from histocoder.data.dataset import Batch
from histocoder.errors import UserError
from histocoder.model import MixerModel, MixerOutput, NgramEncoder
from histocoder.model.devices import computing_dtype
from histocoder.training.encoded_rows import FrozenOutputs
from histocoder.training.losses import mixed_loss
from histocoder.training.optimizer import (
    AdamW,
    is_table,
    linear_schedule,
    parameter_groups,
    trained_parameters,
)
from histocoder.training.strategy import build_strategy

_MOMENTS = ("exp_avg", "exp_avg_sq")  # of the optimizer's state, in the shape of a parameter


class Learner:
    """A model with its optimizer, schedule and loss scale, on all ranks.

    The model is on the CPU, with its frozen weights marked; it is moved to the device.
    `total_steps` is the length of the run. Methods that say so are collective calls.
    """

    def __init__(
        self, model: MixerModel, config: TrainConfig, device: torch.device, *, total_steps: int
    ) -> None:
        self.model = model
        self.config = config
        self.device = device
        self.outputs: FrozenOutputs | None = None
        """A frozen encoder's, of the data that the next steps take, unless each step is to compute them."""

        # Precision, recomputation and compilation are set before a strategy wraps the model.
        model.to(device)
        model.dtype = computing_dtype(config.precision, device, use_amp=config.use_amp)
        if config.gradient_checkpointing:
            model.checkpoint_layers()
        if config.compile:
            _check_compiler(model, device)
            model.compile(dynamic=True)  # in place: names of weights stay as they are
        self.strategy = build_strategy(model, config, device)
        self.optimizer = AdamW(
            parameter_groups(model.named_parameters(), config),
            lr=config.learning_rate,
            weight_decay=config.weight_decay,
            max_grad_norm=config.max_grad_norm,
            total_norm=self.strategy.total_norm,
        )

        # A warm-up begins with a step of rate 0, so a run of one step has none.
        warmup = min(round(config.warmup_pct * total_steps), total_steps - 1)
        self.schedule = partial(linear_schedule, warmup_steps=warmup, total_steps=total_steps)
        self.scheduler = LambdaLR(self.optimizer, self.schedule)
        # for fp16; in other precisions it does nothing
        self.scaler = torch.amp.GradScaler(device.type, enabled=model.dtype == torch.float16)

    def train_step(self, parts: Sequence[Batch]) -> tuple[Tensor, Tensor]:
        """Take an optimizer step over accumulated batches; all ranks skip it if gradients are not
        finite.

        Returns this rank's part of the loss, and the norm of all gradients.
        """
        loss = torch.zeros((), device=self.device)
        for i, part in enumerate(parts, 1):
            batch = part.to(self.device)
            is_last = i == len(parts)
            with nullcontext() if is_last else self.strategy.accumulating():
                output = self.forward(batch)
                part_loss = batch.weight * mixed_loss(output, batch, self.model.config, self.config)
                self.backward(part_loss)
            loss += part_loss.detach()
        return loss, self.step()

    def forward(self, batch: Batch) -> MixerOutput:
        """Return the model's outputs for a batch, for `backward`."""
        encoded = None
        if self.outputs is not None:
            encoded = self.outputs.of(batch)
        stride = self.config.decoder_stride
        targets = batch.targets[::stride, :-2]
        return self.strategy.wrapped(
            batch.input_ids, targets, encoded, decoder_stride=stride, lookup=batch.lookup
        )

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of this rank's part of a loss, which is the sum of all ranks' parts."""
        # gradients are averaged over ranks; 0 * loss makes them NaN on all ranks where one's loss
        # is so
        self.scaler.scale(loss * (distributed.world_size() + 0 * loss.detach())).backward()

    def step(self) -> Tensor:
        """Take a step, which all ranks skip if gradients are not finite; return the norm of all
        gradients.
        """
        # before the loss scale is checked, so that all ranks see the same
        self.strategy.average_sparse_gradients()
        self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        return self.optimizer.grad_norm

    @torch.no_grad()
    def trained_weights(self) -> dict[str, Tensor]:
        """Return the weights, whole on rank 0, with zeros for the rows of a table that no step has
        changed; a collective call.
        """
        weights = self.strategy.weights()
        for name, parameter in self.model.named_parameters():
            if is_table(parameter):
                weights[name] = weights[name] * self.trained_rows(parameter)[:, None]
        return weights

    def trained_rows(self, table: nn.Parameter) -> Tensor:
        """Return whether each row of a table was trained, by this run or before, bool (num_rows,).

        Rows that were not have random values, which say nothing to a saved model.
        """
        state = self.optimizer.state.get(table)
        is_trained = torch.zeros(len(table), dtype=torch.bool, device=table.device)
        if state:
            is_trained = state["exp_avg"].any(1) | state["exp_avg_sq"].any(1)
        assert isinstance(self.model.encoder, NgramEncoder)
        before = self.model.encoder.is_trained
        if before is not None:
            is_trained = is_trained | before.to(table.device)
        return is_trained

    def state(self, *, is_compact: bool = False) -> LearnerState:
        """Return the state dicts of a run, whole on rank 0; a collective call.

        Of a table they have the rows that were trained. If they are to be compact, those and all
        moments are no longer exact, which is enough to train on from after the end of a run.
        """
        state = LearnerState(
            self.strategy.weights(),
            self.strategy.whole_optimizer_state(self.optimizer),
            self.scheduler.state_dict(),
            self.scaler.state_dict(),
        )
        for parameter in self.model.parameters():
            if is_table(parameter):
                rows = self.trained_rows(parameter)
                state.weights = with_table_rows(state.weights, rows, is_compact=is_compact)
                state.optimizer = self._with_trained_moments(state.optimizer, rows, is_compact)
        return state

    def _with_trained_moments(
        self, optimizer: dict[str, Any], rows: Tensor, is_compact: bool
    ) -> dict[str, Any]:
        """Return the optimizer's state dict with the moments of a table's trained rows alone."""
        # in the order of parameters, whichever was the first to take a step
        moments_of = {}
        for i, parameter in enumerate(trained_parameters(self.optimizer)):
            if i not in optimizer["state"]:
                continue
            moments = dict(optimizer["state"][i])
            if is_table(parameter):
                for name in _MOMENTS:
                    moments[name] = moments[name][rows]
            if is_compact:
                moments = compact_moments(moments)
            moments_of[i] = moments
        return optimizer | {"state": moments_of}

    def load(self, weights: dict[str, Tensor], optimizer: dict[str, Any] | None = None) -> None:
        """Load state dicts that are whole on every rank."""
        self.strategy.load_weights(weights)
        if optimizer is None:
            return
        state = self.strategy.local_optimizer_state(self.optimizer, optimizer)
        self.optimizer.load_state_dict(state)
        # the state may come from a machine that fuses no step
        for group in self.optimizer.param_groups:
            group["fused"] = self.optimizer.defaults["fused"]

    def restart(self, weights: dict[str, Tensor], *, share: float, total_steps: int) -> None:
        """Train from weights, whole on every rank, at a share of the peak learning rate that falls
        to 0.
        """
        encoder = self.model.encoder
        if isinstance(encoder, NgramEncoder):
            table = encoder.table.detach().clone()
            self.load(weights)
            encoder.fill_empty_rows(table)
        else:
            self.load(weights)

        # moments are of the gradients of other weights
        self.optimizer.state.clear()
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"]

        def schedule(step: int) -> float:
            return share * linear_schedule(step, warmup_steps=0, total_steps=total_steps)

        self.scheduler = LambdaLR(self.optimizer, schedule)

    @torch.no_grad()
    def restore(self, state: LearnerState) -> None:
        """Restore a state, whole on every rank.

        Rows of a table that are not in it stay as they were drawn from the run's seed, or zeros if
        the table is frozen.
        """
        weights = state.weights
        optimizer = state.optimizer
        encoder = self.model.encoder
        if isinstance(encoder, NgramEncoder):
            table = encoder.table.detach()
            encoder.is_trained = torch.ones(len(table), dtype=torch.bool)  # as earlier versions say
            if MEMBERS in weights:
                encoder.is_trained = unpack_bits(weights[MEMBERS], len(table))
                optimizer = self._with_all_moments(optimizer, weights[MEMBERS])
                drawn = torch.zeros_like(table)
                if encoder.table.requires_grad:
                    drawn = table.clone()
                weights = with_whole_table(weights, drawn)
        self.load(weights, optimizer)
        # the next step's learning rate is that of this run's steps and warm-up, which may have
        # changed
        self.scheduler = LambdaLR(
            self.optimizer, self.schedule, last_epoch=state.scheduler["last_epoch"] - 1
        )
        self.scheduler.load_state_dict(state.scheduler)
        if state.scaler:
            self.scaler.load_state_dict(state.scaler)

    def _with_all_moments(self, optimizer: dict[str, Any], members: Tensor) -> dict[str, Any]:
        """Return the optimizer's state dict with the moments of all rows of a table, zeros for those
        that were not trained.
        """
        moments_of = {}
        for i, parameter in enumerate(trained_parameters(self.optimizer)):
            if i not in optimizer["state"]:
                continue
            moments = expand_moments(optimizer["state"][i])
            if is_table(parameter):
                for name in _MOMENTS:
                    zeros = torch.zeros(parameter.shape)
                    moments[name] = fill_rows(zeros, members, moments[name])
            moments_of[i] = moments
        return optimizer | {"state": moments_of}


def _check_compiler(model: MixerModel, device: torch.device) -> None:
    """Raise a UserError if a model can't be compiled for a device."""
    # here, since it takes a second to import
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch.utils._triton import has_triton

    if isinstance(model.encoder, NgramEncoder):
        raise UserError(
            "--compile is not for n-gram encoders, whose gradients are sparse; omit it."
        )
    if device.type not in ("cpu", "cuda"):
        raise UserError(
            f"--compile is for CPUs and NVIDIA GPUs; omit it with --device {device.type}."
        )
    has_c_compiler = any(map(shutil.which, ("cc", "gcc", "clang")))
    if device.type == "cuda" and not (has_triton() and has_c_compiler):
        raise UserError(
            "--compile needs Triton and a C compiler (gcc) for a GPU; install them, or omit it."
        )
    if device.type == "cpu":
        try:
            get_cpp_compiler()
        except RuntimeError as error:
            raise UserError(
                "--compile needs a C++ compiler, and there is none; install g++, name "
                "another one in CXX, or omit it."
            ) from error
