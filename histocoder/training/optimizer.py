"""AdamW with clipping; on a CPU in one pass over the weights, since a step there is bound by memory."""

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from histocoder.config import TrainConfig
from histocoder.model.copies import KeptCopy, kept_copy
from histocoder.ops import kernels

_CLIP_EPS = 1e-6  # summand of a norm, as in PyTorch's `clip_grad_norm_`


class AdamW(torch.optim.AdamW):
    """Fused AdamW (Loshchilov and Hutter 2019) that first scales gradients to a norm of at most `max_grad_norm`.

    A step whose gradients are not all finite is skipped: weights and state stay as they are. State and arithmetic are
    those of `torch.optim.AdamW`. Gradients are those of the parameters, or of the copies that `keep_copies` keeps,
    which a step updates. Of a parameter with a sparse gradient, a step changes only the rows that have one, without
    weight decay, as `torch.optim.SparseAdam` does.

    All parameters are on one device. Gradients are averaged over ranks before.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        *,
        lr: float,
        weight_decay: float,
        max_grad_norm: float,
    ) -> None:
        listed: list[Any] = list(parameters)
        device = (listed[0]["params"][0] if isinstance(listed[0], dict) else listed[0]).device
        super().__init__(listed, lr=lr, weight_decay=weight_decay, fused=device.type in ("cpu", "cuda"))
        self._parameters = [p for group in self.param_groups for p in group["params"]]
        self._max_grad_norm = max_grad_norm
        self.grad_norm = torch.zeros((), device=device)
        """Norm of all gradients at the last step, before they were scaled, of shape ()."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Clip and step; `grad_norm` is not finite if the step was skipped."""
        sparse = {p: p.grad for p in self._parameters if is_table(p) and p.grad is not None}
        tables = {p: _coalesced(gradient) for p, gradient in sparse.items()}
        for table in tables:
            table.grad = None  # from here on, all gradients are dense
        if kept_copy(self._parameters[-1]) is not None and kernels.supports(self._parameters[-1]):
            self._step_in_one_pass(tables)
            return
        collect(self._parameters)
        gradients = {p: p.grad for p in self._parameters if p.grad is not None}
        values = [rows.values() for rows in tables.values()]
        self.grad_norm = nn.utils.get_total_norm([*gradients.values(), *values]).to(self.grad_norm.device)
        nn.utils.clip_grads_with_norm_(self._parameters, self._max_grad_norm, self.grad_norm)
        if self.defaults["fused"]:
            self.found_inf = 1.0 - self.grad_norm.isfinite().float()  # the kernel skips the step, without a wait
        if self.defaults["fused"] or self.grad_norm.isfinite():
            super().step(closure)
            for parameter in gradients:
                torch.autograd.graph.increment_version(parameter)  # the fused kernel does not
            _refresh_copies(gradients)
        if tables and self.grad_norm.isfinite():
            scale = (self._max_grad_norm / (self.grad_norm + _CLIP_EPS)).clamp(max=1.0)
            self._step_rows(tables, scale=scale)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, those of copies as well."""
        super().zero_grad(set_to_none)
        for parameter in self._parameters:
            if (copy := kept_copy(parameter)) is not None:
                copy.forget_gradient()

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        if not (state := self.state[parameter]):
            state["step"] = torch.zeros((), device=parameter.device if self.defaults["fused"] else None)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        return state

    def _step_in_one_pass(self, tables: dict[nn.Parameter, Tensor]) -> None:
        parts = []
        for group in self.param_groups:
            gradients = {p: gradient for p in group["params"] if (gradient := _gradient(p)) is not None}
            states = list(map(self._state_of, gradients))
            copies = [_copy_in_bf16(p) for p in gradients]
            of_group = kernels.Parts(
                weights=list(gradients),
                means=[state["exp_avg"] for state in states],
                squares=[state["exp_avg_sq"] for state in states],
                gradients=list(gradients.values()),
                copies=[None if copy is None else copy.tensor for copy in copies],
            )
            parts.append((group, gradients, states, copies, of_group))
        total = sum(of_group.sum_of_squares() for *_, of_group in parts)
        total += sum(float(rows.values().square().sum()) for rows in tables.values())
        self.grad_norm = torch.tensor(math.sqrt(total))
        norm = float(self.grad_norm.numpy())
        if not math.isfinite(norm):
            return
        scale = min(self._max_grad_norm / (norm + _CLIP_EPS), 1.0)
        for group, gradients, states, copies, of_group in parts:
            steps = [state["step"] for state in states]
            if steps:
                torch._foreach_add_(steps, 1.0)
                settings = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
                of_group.adamw(torch.stack(steps).tolist(), scale=scale, **settings)
            for parameter, copy in zip(gradients, copies, strict=True):
                torch.autograd.graph.increment_version(parameter)
                if copy is not None:
                    torch.autograd.graph.increment_version(cast(Tensor, copy.tensor))
                    copy.mark_fresh()
        self._step_rows(tables, scale=scale)

    def _step_rows(self, tables: dict[nn.Parameter, Tensor], *, scale: float | Tensor) -> None:
        for group in self.param_groups:
            (beta1, beta2), lr, eps = group["betas"], group["lr"], group["eps"]
            for table in (p for p in group["params"] if p in tables):
                state = self._state_of(table)
                state["step"] += 1
                step = float(state["step"])
                rows, gradient = tables[table].indices()[0], tables[table].values()
                if kernels.supports(table):
                    parts = kernels.Parts([table], [state["exp_avg"]], [state["exp_avg_sq"]], [gradient], [None])
                    parts.adamw_rows(rows, step, lr=lr, betas=group["betas"], eps=eps, scale=float(scale))
                    torch.autograd.graph.increment_version(table)
                    continue
                gradient = gradient * scale
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


def _gradient(parameter: nn.Parameter) -> Tensor | None:
    """Return the sum of a parameter's gradient and its kept copy's, or either of them."""
    copied = None if (copy := kept_copy(parameter)) is None else copy.gradient
    if parameter.grad is None or copied is None:
        return copied if parameter.grad is None else parameter.grad
    return parameter.grad + copied


def collect(parameters: Iterable[nn.Parameter]) -> None:
    """Add the gradients of kept copies to the parameters' own, between batches: sums in bf16 would lose small ones."""
    copies = {p: copy for p in parameters if (copy := kept_copy(p)) is not None}
    gradients = {p: gradient for p, copy in copies.items() if (gradient := copy.gradient) is not None}
    with_own = {p: p.grad for p in gradients if p.grad is not None}
    if with_own:
        torch._foreach_add_(list(with_own.values()), [gradients[p] for p in with_own])
    without = {p: torch.empty_like(p) for p in gradients if p not in with_own}
    if without:
        torch._foreach_copy_(list(without.values()), [gradients[p] for p in without])  # in one go, for GPUs
    for parameter in gradients:
        parameter.grad = without.get(parameter, parameter.grad)
        copies[parameter].forget_gradient()


def _refresh_copies(parameters: Iterable[nn.Parameter]) -> None:
    """Update kept copies, all in one call."""
    copies = {p: copy for p in parameters if (copy := kept_copy(p)) is not None and copy.tensor is not None}
    if copies:
        torch._foreach_copy_([cast(Tensor, copy.tensor) for copy in copies.values()], list(copies))
    for copy in copies.values():
        copy.mark_fresh()


def _copy_in_bf16(parameter: nn.Parameter) -> KeptCopy | None:
    """Return a parameter's kept copy in bf16, if there is one."""
    copy = kept_copy(parameter)
    return copy if copy is not None and copy.tensor is not None and copy.tensor.dtype == torch.bfloat16 else None
