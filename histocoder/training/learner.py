"""A model in training: its device, its precision, its optimizer steps, and how it is spread over
ranks.
"""

import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
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
from histocoder.model import MixerModel, MixerOutput, NgramEncoder
from histocoder.model.devices import computing_dtype
from histocoder.ops import kernels
from histocoder.training.compiling import check_compiler
from histocoder.training.encoded_rows import FrozenOutputs
from histocoder.training.losses import mixed_loss

_CLIP_EPS = 1e-6  # summand of a norm, as in PyTorch's `clip_grad_norm_`


class Learner:
    """A model with its optimizer, schedule and loss scale; each rank has a replica, and DDP
    averages gradients.

    The model is on the CPU, with its frozen weights marked; it is moved to the device.
    `total_steps` is the length of the run. Methods that say so are collective calls. See
    `ShardedLearner` for FSDP.
    """

    def __init__(
        self, model: MixerModel, config: TrainConfig, device: torch.device, *, total_steps: int
    ) -> None:
        self.model = model
        self.config = config
        self.device = device
        self.outputs: FrozenOutputs | None = None
        """A frozen encoder's, of the data that the next steps take, unless each step is to compute them."""

        # how the model computes, before it is wrapped
        model.to(device)
        model.dtype = computing_dtype(config.precision, device, use_amp=config.use_amp)
        if config.gradient_checkpointing:
            model.checkpoint_layers()
        if config.compile:
            check_compiler(model, device)
            model.compile(dynamic=True)  # in place: names of weights stay as they are
        self.wrapped = self.wrap()
        self.optimizer = AdamW(
            parameter_groups(model.named_parameters(), config),
            lr=config.learning_rate,
            weight_decay=config.weight_decay,
            max_grad_norm=config.max_grad_norm,
            total_norm=self.total_norm,
        )
        # a first step of the warm-up has rate 0, so a single step is none
        warmup = min(round(config.warmup_pct * total_steps), total_steps - 1)
        self.schedule = partial(linear_schedule, warmup_steps=warmup, total_steps=total_steps)
        self.scheduler = LambdaLR(self.optimizer, self.schedule)
        # for fp16; in other precisions it does nothing
        self.scaler = torch.amp.GradScaler(device.type, enabled=model.dtype == torch.float16)

    total_norm: Callable[[list[Tensor]], Tensor] | None = None
    """Function that returns the norm of gradients, if it is not that of this rank's."""

    def wrap(self) -> nn.Module:
        """Return the model as training calls it; gradients are means over ranks."""
        if distributed.backend() is None:
            return self.model
        # `reduce_sparse` exchanges rows of tables: DDP would send the whole table
        tables = [name for name, p in self.model.named_parameters() if is_table(p)]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.model, tables)
        ids = [self.device.index] if self.device.type == "cuda" else None
        with (
            warnings.catch_warnings()
        ):  # the argument's next name means another thing, and older torch lacks it
            warnings.simplefilter("ignore", FutureWarning)
            wrapped = DistributedDataParallel(
                self.model, device_ids=ids, gradient_as_bucket_view=True, broadcast_buffers=False
            )
        if self.config.bf16_gradients:
            wrapped.register_comm_hook(None, distributed.averaged_in_bf16)
        return wrapped

    def train_step(self, parts: Sequence[Batch]) -> tuple[Tensor, Tensor]:
        """Take an optimizer step over accumulated batches; all ranks skip it if gradients are not
        finite.

        Returns this rank's part of the loss, and the norm of all gradients.
        """
        loss = torch.zeros((), device=self.device)
        for i, part in enumerate(parts, 1):
            batch = part.to(self.device)
            with self.accumulating() if i < len(parts) else nullcontext():
                output = self.forward(batch)
                part_loss = batch.weight * mixed_loss(output, batch, self.model.config, self.config)
                self.backward(part_loss)
            loss += part_loss.detach()
        return loss, self.step()

    def forward(self, batch: Batch) -> MixerOutput:
        """Return the model's outputs for a batch, for `backward`."""
        stride, encoded = (
            self.config.decoder_stride,
            None if self.outputs is None else self.outputs.of(batch),
        )
        targets = batch.targets[::stride, :-2]
        return self.wrapped(
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
        self.reduce_sparse()
        self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        return self.optimizer.grad_norm

    def accumulating(self) -> AbstractContextManager[Any]:
        """Keep ranks from exchanging the gradients of forward and backward passes."""
        return (
            self.wrapped.no_sync()
            if isinstance(self.wrapped, DistributedDataParallel)
            else nullcontext()
        )

    def reduce_sparse(self) -> None:
        """Average sparse gradients over ranks, before the loss scale is checked: all ranks see the
        same.
        """
        for table in (
            filter(is_table, self.model.parameters()) if distributed.world_size() > 1 else ()
        ):
            if table.grad is not None:
                own = table.grad.coalesce()
                rows = torch.cat(distributed.gather(own.indices()[0]))
                values = torch.cat(distributed.gather(own.values() / distributed.world_size()))
                mean = torch.sparse_coo_tensor(
                    rows[None], values, own.shape, check_invariants=False
                )
                table.grad = mean.coalesce()

    def whole(self) -> AbstractContextManager[MixerModel]:
        """Give the whole model on each rank, for use without collective calls; a collective call
        itself.
        """
        return nullcontext(self.model)

    def weights(self) -> dict[str, Tensor]:
        """Return the model's state dict, whole on rank 0; a collective call."""
        return self.model.state_dict()

    @torch.no_grad()
    def trained_weights(self) -> dict[str, Tensor]:
        """Return `weights` with zeros for the rows of a table that no step has changed; a
        collective call.
        """
        weights = self.weights()
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

    def optimizer_state(self) -> dict[str, Any]:
        """Return the optimizer's state dict in the form of one process, whole on rank 0; a
        collective call.
        """
        return self.optimizer.state_dict()

    def state(self, *, is_compact: bool = False) -> LearnerState:
        """Return the state dicts of a run, whole on rank 0; a collective call.

        Of a table they have the rows that were trained. If they are to be compact, those and all
        moments are no longer exact, which is enough to train on from after the end of a run.
        """
        state = LearnerState(
            self.weights(),
            self.optimizer_state(),
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
        moments_of = {}  # by the order of parameters, whichever was the first to take a step
        for i, parameter in enumerate(self._parameters()):
            moments = optimizer["state"].get(i)
            if moments and is_table(parameter):
                moments = {
                    name: values[rows] if values.dim() else values
                    for name, values in moments.items()
                }
            if moments and is_compact:
                moments = compact_moments(moments)
            if moments:
                moments_of[i] = moments
        return {**optimizer, "state": moments_of}

    def _parameters(self) -> list[nn.Parameter]:
        """Return the trained parameters, in the order of the optimizer's state dict."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def load(self, weights: dict[str, Tensor], optimizer: dict[str, Any] | None = None) -> None:
        """Load state dicts that are whole on every rank."""
        self.model.load_state_dict(weights)
        if optimizer is not None:
            self.optimizer.load_state_dict(optimizer)
            for group in (
                self.optimizer.param_groups
            ):  # the state may come from a machine that fuses no step
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
        self.optimizer.state.clear()  # moments of the gradients of other weights
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"]
        self.scheduler = LambdaLR(
            self.optimizer,
            lambda step: share * linear_schedule(step, warmup_steps=0, total_steps=total_steps),
        )

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
                drawn = table.clone() if encoder.table.requires_grad else torch.zeros_like(table)
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
        for i, parameter in enumerate(self._parameters()):
            if i not in optimizer["state"]:
                continue
            moments = expand_moments(optimizer["state"][i])
            if is_table(parameter):
                for name in ("exp_avg", "exp_avg_sq"):
                    zeros = torch.zeros(parameter.shape)
                    moments[name] = fill_rows(zeros, members, moments[name])
            moments_of[i] = moments
        return {**optimizer, "state": moments_of}


def linear_schedule(step: int, *, warmup_steps: int, total_steps: int) -> float:
    """Return the share of the peak learning rate, which rises over the warm-up and falls to 0 at
    the end.
    """
    if step < warmup_steps:
        return step / warmup_steps
    return max(total_steps - step, 0) / max(total_steps - warmup_steps, 1)


class AdamW(torch.optim.AdamW):
    """Fused AdamW (Loshchilov and Hutter 2019) that first scales gradients to a norm of at most
    `max_grad_norm`.

    A step whose gradients are not all finite is skipped: weights and state stay as they are. State
    and arithmetic are those of `torch.optim.AdamW`. Of a table, a step changes only the rows that
    have a gradient, without weight decay, as `torch.optim.SparseAdam` does.

    All parameters are on one device, or DTensors; gradients are averaged over ranks before.
    `total_norm` returns the norm of all gradients (by default those of this rank); with it, and on
    the GPU of a Mac, a step waits for the norm, else never.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        weight_decay: float,
        max_grad_norm: float,
        total_norm: Callable[[list[Tensor]], Tensor] | None = None,
    ) -> None:
        is_fused = groups[0]["params"][0].device.type in ("cpu", "cuda")
        super().__init__(groups, lr=lr, weight_decay=weight_decay, fused=is_fused)
        self._max_grad_norm = max_grad_norm
        # as by default on a GPU, in a few kernels
        is_gpu = groups[0]["params"][0].device.type == "cuda"
        self._total_norm = total_norm or partial(nn.utils.get_total_norm, foreach=is_gpu or None)
        self._waits = not is_fused or total_norm is not None
        self.grad_norm = torch.zeros(())
        """Norm of all gradients at the last step, before they were scaled, of shape ()."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Clip and step; `grad_norm` is not finite if the step was skipped."""
        parameters = [
            p for group in self.param_groups for p in group["params"] if p.grad is not None
        ]
        tables = {p: _RowGradient.of(p.grad) for p in parameters if is_table(p)}
        dense = [p for p in parameters if p not in tables]
        sums = [gradient.sums for gradient in tables.values()]
        self.grad_norm = self._total_norm([*(p.grad for p in dense), *sums])
        scale = ((self.grad_norm + _CLIP_EPS) / self._max_grad_norm).clamp(
            min=1.0
        )  # by which gradients are divided
        for table in tables:
            table.grad = None  # so that PyTorch's step leaves it alone
        if self._waits:
            nn.utils.clip_grads_with_norm_(dense, self._max_grad_norm, self.grad_norm)
        else:  # the kernel itself scales them, and skips the step
            self.found_inf, self.grad_scale = 1.0 - self.grad_norm.isfinite().float(), scale.float()
        if not self._waits or self.grad_norm.isfinite():
            super().step(closure)
        for group in self.param_groups:
            for table in (p for p in group["params"] if p in tables):
                rows, values, _ = tables[table]
                self._step_rows(group, table, rows, values / scale)

    def _step_rows(
        self, group: dict[str, Any], table: nn.Parameter, rows: Tensor, gradient: Tensor
    ) -> None:
        """Step the rows (n,) of a table with their gradients (n, dim), where the norm is finite."""
        if not (state := self.state[table]):
            state["step"] = torch.zeros((), device=table.device if self.defaults["fused"] else None)
            state["exp_avg"] = torch.zeros_like(table)
            state["exp_avg_sq"] = torch.zeros_like(table)
        beta1, beta2 = group["betas"]
        lr = group["lr"]
        eps = group["eps"]
        is_finite = self.grad_norm.isfinite()
        if kernels.supports(table):
            if is_finite:
                state["step"] += 1
                moments, step = (state["exp_avg"], state["exp_avg_sq"]), float(state["step"])
                kernels.adamw_rows(
                    table, *moments, rows, gradient, lr=lr, betas=group["betas"], eps=eps, step=step
                )
            return

        # Whether a row steps is decided on the device, since a GPU would have to be waited for.
        state["step"] += is_finite.to(state["step"])
        steps = (gradient.ne(0).any(1) & is_finite)[:, None]
        old_mean, old_square = state["exp_avg"][rows], state["exp_avg_sq"][rows]
        mean = old_mean.lerp(gradient, 1 - beta1)
        square = (old_square * beta2).addcmul_(gradient, gradient, value=1 - beta2)

        # 1 - beta ** step, which is exact in fp32 so: GPUs of Macs have no doubles
        correction1, correction2 = (
            -torch.expm1(state["step"] * math.log(beta)) for beta in (beta1, beta2)
        )
        change = mean / (square / correction2).sqrt_().add_(eps) * (-lr / correction1)

        # A row that is repeated is written several times, with the same values.
        state["exp_avg"][rows] = torch.where(steps, mean, old_mean)
        state["exp_avg_sq"][rows] = torch.where(steps, square, old_square)
        weights = table[rows]
        table[rows] = torch.where(steps, weights + change, weights)


def parameter_groups(
    named: Iterable[tuple[str, Tensor]], config: TrainConfig
) -> list[dict[str, Any]]:
    """Return the trained parameters of a `MixerModel`, in its order, in groups by learning rate.

    New weights have the `learning_rate`; the encoder, and in it the table of n-grams, have their
    own if they are set.
    """

    def rate(item: tuple[str, Tensor]) -> float:
        name, parameter = item
        if is_table(parameter):
            return (
                config.table_learning_rate or config.encoder_learning_rate or config.learning_rate
            )
        return (
            config.encoder_learning_rate if name.startswith("encoder.") else None
        ) or config.learning_rate

    trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    return [
        {"params": [p for _, p in group], "lr": lr}
        for lr, group in itertools.groupby(trained, key=rate)
    ]


def is_table(parameter: Tensor) -> bool:
    """Return whether a parameter's gradients are sparse, with the rows that were looked up."""
    return getattr(parameter, "is_sparse_table", False)


class _RowGradient(NamedTuple):
    """The gradient of a table's rows."""

    rows: Tensor  # indices, of shape (n,), in ascending order; off a CPU's kernels they may repeat
    values: Tensor  # gradient of each of these rows, of shape (n, dim)
    sums: Tensor  # gradient of each row once, and zeros, of shape (n, dim)

    @classmethod
    def of(cls, gradient: Tensor) -> "_RowGradient":
        """Return a sparse gradient, in which several lookups of a row are added up."""
        rows, values = gradient._indices()[0], gradient._values()
        if kernels.supports(values):
            # `coalesce` sorts the rows even where they are in order, as a single batch's are
            is_sorted = bool((rows[1:] > rows[:-1]).all())
            gradient = gradient._coalesced_(True) if is_sorted else gradient.coalesce()
            return cls(gradient.indices()[0], gradient.values(), gradient.values())

        # `coalesce` makes the host wait for the number of distinct rows, so there is room for all
        # of them.
        rows, order = rows.sort()
        position = rows.diff(prepend=rows[:1]).ne(0).cumsum(0)
        sums = torch.zeros_like(values).index_add_(0, position, values[order])
        return cls(rows, sums[position], sums)
