"""PyTorch's AdamW with clipping; of a table with sparse gradients, a step changes only the rows that have one."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from histocoder.config import TrainConfig
from histocoder.ops import kernels

_CLIP_EPS = 1e-6  # summand of a norm, as in PyTorch's `clip_grad_norm_`


class AdamW(torch.optim.AdamW):
    """Fused AdamW (Loshchilov and Hutter 2019) that first scales gradients to a norm of at most `max_grad_norm`.

    A step whose gradients are not all finite is skipped: weights and state stay as they are. State and arithmetic are
    those of `torch.optim.AdamW`. Of a table, a step changes only the rows that have a gradient, without weight decay,
    as `torch.optim.SparseAdam` does.

    All parameters are on one device, or DTensors; gradients are averaged over ranks before. `total_norm` returns the
    norm of all gradients (by default those of this rank); with it, a step waits for the norm.
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
        self._total_norm = total_norm or nn.utils.get_total_norm
        self._waits = not is_fused or total_norm is not None
        self.grad_norm = torch.zeros(())
        """Norm of all gradients at the last step, before they were scaled, of shape ()."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Clip and step; `grad_norm` is not finite if the step was skipped."""
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        tables = {p: _coalesced(p.grad) for p in parameters if is_table(p)}
        dense = [p for p in parameters if p not in tables]
        values = [gradient.values() for gradient in tables.values()]
        self.grad_norm = self._total_norm([*(p.grad for p in dense), *values])
        nn.utils.clip_grads_with_norm_(dense, self._max_grad_norm, self.grad_norm)
        for table in tables:
            table.grad = None  # so that PyTorch's step leaves it alone
        if not self._waits:  # the kernel itself skips the step
            self.found_inf = 1.0 - self.grad_norm.isfinite().float()
        if not self._waits or self.grad_norm.isfinite():
            super().step(closure)
        if tables and self.grad_norm.isfinite():
            scale = (self._max_grad_norm / (self.grad_norm + _CLIP_EPS)).clamp(max=1.0)
            for group in self.param_groups:
                for table in (p for p in group["params"] if p in tables):
                    self._step_rows(group, table, tables[table].indices()[0], tables[table].values() * scale)

    def _step_rows(self, group: dict[str, Any], table: nn.Parameter, rows: Tensor, gradient: Tensor) -> None:
        if not (state := self.state[table]):
            state["step"] = torch.zeros((), device=table.device if self.defaults["fused"] else None)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(table), torch.zeros_like(table)
        state["step"] += 1
        step, (beta1, beta2), lr, eps = float(state["step"]), group["betas"], group["lr"], group["eps"]
        if kernels.supports(table):
            moments = state["exp_avg"], state["exp_avg_sq"]
            kernels.adamw_rows(table, *moments, rows, gradient, lr=lr, betas=group["betas"], eps=eps, step=step)
            return
        mean = state["exp_avg"][rows].lerp_(gradient, 1 - beta1)
        square = state["exp_avg_sq"][rows].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        state["exp_avg"][rows], state["exp_avg_sq"][rows] = mean, square
        divisor = (square / (1 - beta2**step)).sqrt_().add_(eps)
        table.index_add_(0, rows, mean.div_(divisor), alpha=-lr / (1 - beta1**step))


def parameter_groups(named: Iterable[tuple[str, Tensor]], config: TrainConfig) -> list[dict[str, Any]]:
    """Return the trained parameters of a `MixerModel`, in its order, in groups by learning rate.

    New weights have the `learning_rate`; the encoder, and in it the table of n-grams, have their own if they are set.
    """

    def rate(item: tuple[str, Tensor]) -> float:
        name, parameter = item
        if is_table(parameter):
            return config.table_learning_rate or config.encoder_learning_rate or config.learning_rate
        return (config.encoder_learning_rate if name.startswith("encoder.") else None) or config.learning_rate

    trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    return [{"params": [p for _, p in group], "lr": lr} for lr, group in itertools.groupby(trained, key=rate)]


def is_table(parameter: Tensor) -> bool:
    """Return whether a parameter's gradients are sparse, with the rows that were looked up."""
    return getattr(parameter, "is_sparse_table", False)


def _coalesced(gradient: Tensor) -> Tensor:
    """Return `gradient.coalesce()`, which sorts the rows even where they are in order, as a single batch's are."""
    rows = gradient._indices()[0]
    return gradient._coalesced_(True) if bool((rows[1:] > rows[:-1]).all()) else gradient.coalesce()
