"""The optimizer of a run: AdamW with clipping and steps of rows, groups of parameters, schedule."""

import itertools
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from histocoder.config import TrainConfig
from histocoder.ops import kernels

_CLIP_EPS = 1e-6  # summand of a norm, as in PyTorch's `clip_grad_norm_`


def linear_schedule(step: int, *, warmup_steps: int, total_steps: int) -> float:
    """Return the share of the peak learning rate, which rises over the warm-up and falls to 0 at
    the end.
    """
    if step < warmup_steps:
        return step / warmup_steps
    return max(total_steps - step, 0) / max(total_steps - warmup_steps, 1)


def is_table(parameter: Tensor) -> bool:
    """Return whether a parameter's gradients are sparse, with the rows that were looked up."""
    return getattr(parameter, "is_sparse_table", False)


def parameter_groups(
    named: Iterable[tuple[str, Tensor]], config: TrainConfig
) -> list[dict[str, Any]]:
    """Return the trained parameters of a `MixerModel`, in its order, in groups by learning rate.

    New weights have the `learning_rate`; the encoder, and in it the table of n-grams, have their
    own if they are set.
    """

    def rate(item: tuple[str, Tensor]) -> float | None:
        name, parameter = item
        encoder_rate = config.encoder_learning_rate or config.learning_rate
        if is_table(parameter):
            return config.table_learning_rate or encoder_rate
        if name.startswith("encoder."):
            return encoder_rate
        return config.learning_rate

    trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    # Neighbours alone are grouped: saved optimizer states number parameters in the model's order.
    groups = []
    for lr, group in itertools.groupby(trained, key=rate):
        groups.append({"params": [parameter for _, parameter in group], "lr": lr})
    return groups


def trained_parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return an optimizer's parameters in the order in which its state dict numbers them."""
    parameters: list[nn.Parameter] = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    return parameters


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
        device_type = groups[0]["params"][0].device.type
        is_fused = device_type in ("cpu", "cuda")
        super().__init__(groups, lr=lr, weight_decay=weight_decay, fused=is_fused)
        self._max_grad_norm = max_grad_norm
        self._waits = not is_fused or total_norm is not None
        if total_norm is None:
            # on a GPU in a few kernels, as by default
            is_gpu = device_type == "cuda"
            total_norm = partial(nn.utils.get_total_norm, foreach=is_gpu or None)
        self._total_norm = total_norm
        self.grad_norm = torch.zeros(())
        """Norm of all gradients at the last step, before they were scaled, of shape ()."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Clip and step; `grad_norm` is not finite if the step was skipped."""
        tables: dict[nn.Parameter, _RowGradient] = {}
        dense = []
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if is_table(parameter):
                    tables[parameter] = _RowGradient.of(parameter.grad)
                    parameter.grad = None  # so that PyTorch's step leaves it alone
                else:
                    dense.append(parameter)

        # of the norm, a row of a table counts once, however often it was looked up
        gradients = [parameter.grad for parameter in dense]
        for gradient in tables.values():
            gradients.append(gradient.sums)
        self.grad_norm = self._total_norm(gradients)

        # the kernel itself scales dense gradients, and skips the step where the norm is not finite
        divisor = ((self.grad_norm + _CLIP_EPS) / self._max_grad_norm).clamp(min=1.0)
        if not self._waits:
            self.found_inf = 1.0 - self.grad_norm.isfinite().float()
            self.grad_scale = divisor.float()
            super().step(closure)
        else:
            nn.utils.clip_grads_with_norm_(dense, self._max_grad_norm, self.grad_norm)
            if self.grad_norm.isfinite():
                super().step(closure)

        # beside the dense parameters, the rows of tables
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter in tables:
                    gradient = tables[parameter]
                    values = gradient.values / divisor
                    self._step_rows(group, parameter, gradient.rows, values)

    def _step_rows(
        self, group: dict[str, Any], table: nn.Parameter, rows: Tensor, gradient: Tensor
    ) -> None:
        """Step the rows (n,) of a table with their gradients (n, dim), where the norm is finite."""
        state = self.state[table]
        if not state:
            device = table.device if self.defaults["fused"] else None
            state["step"] = torch.zeros((), device=device)
            state["exp_avg"] = torch.zeros_like(table)
            state["exp_avg_sq"] = torch.zeros_like(table)
        beta1, beta2 = group["betas"]
        lr = group["lr"]
        eps = group["eps"]
        is_finite = self.grad_norm.isfinite()
        if kernels.supports(table):
            if is_finite:
                state["step"] += 1
                kernels.adamw_rows(
                    table,
                    state["exp_avg"],
                    state["exp_avg_sq"],
                    rows,
                    gradient,
                    lr=lr,
                    betas=group["betas"],
                    eps=eps,
                    step=float(state["step"]),
                )
            return

        # whether a row steps is decided on the device, since a GPU would have to be waited for
        state["step"] += is_finite.to(state["step"])
        steps = (gradient.ne(0).any(1) & is_finite)[:, None]
        old_mean = state["exp_avg"][rows]
        old_square = state["exp_avg_sq"][rows]
        mean = old_mean.lerp(gradient, 1 - beta1)
        square = (old_square * beta2).addcmul_(gradient, gradient, value=1 - beta2)

        # 1 - beta ** step, which is exact in fp32 so: GPUs of Macs have no doubles
        mean_correction = -torch.expm1(state["step"] * math.log(beta1))
        square_correction = -torch.expm1(state["step"] * math.log(beta2))
        root = (square / square_correction).sqrt_().add_(eps)
        change = mean / root * (-lr / mean_correction)

        # a row that is repeated is written several times, with the same values
        state["exp_avg"][rows] = torch.where(steps, mean, old_mean)
        state["exp_avg_sq"][rows] = torch.where(steps, square, old_square)
        weights = table[rows]
        table[rows] = torch.where(steps, weights + change, weights)


class _RowGradient(NamedTuple):
    """The gradient of a table's rows."""

    rows: Tensor  # indices, of shape (n,), in ascending order; off a CPU's kernels they may repeat
    values: Tensor  # gradient of each of these rows, of shape (n, dim)
    sums: Tensor  # gradient of each row once, and zeros, of shape (n, dim)

    @classmethod
    def of(cls, gradient: Tensor) -> "_RowGradient":
        """Return a sparse gradient, in which several lookups of a row are added up."""
        rows = gradient._indices()[0]
        values = gradient._values()
        if kernels.supports(values):
            # `coalesce` sorts the rows even where they are in order, as a single batch's are
            if (rows[1:] > rows[:-1]).all():
                gradient._coalesced_(True)
            gradient = gradient.coalesce()
            return cls(gradient.indices()[0], gradient.values(), gradient.values())

        # `coalesce` makes the host wait for the number of distinct rows, so there is room for all
        # of them
        rows, order = rows.sort()
        position = rows.diff(prepend=rows[:1]).ne(0).cumsum(0)
        sums = torch.zeros_like(values).index_add_(0, position, values[order])
        return cls(rows, sums[position], sums)
