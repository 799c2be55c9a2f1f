"""AdamW that clips; on a CPU in one pass over the weights, since there a step waits for memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from histocoder import kernels
from histocoder.model.copies import KeptCopy, kept_copy


class AdamW(torch.optim.AdamW):
    """AdamW (Loshchilov and Hutter 2019), fused, which scales gradients to a norm of at most `max_grad_norm` first.

    A step whose gradients are not all finite is left out: weights and state stay as they are.

    Parameters
    ----------
    parameters : iterable of Parameter
        All on one device.
    lr, weight_decay, max_grad_norm : float
    norm_of_all : callable, optional
        Takes the norm of these parameters' gradients, a tensor of shape (); gives that of all, also of those that other
        processes step.

    Notes
    -----
    State and arithmetic are those of `torch.optim.AdamW`. Gradients are those of the parameters, or of the copies that
    `keep_copies` keeps, which a step brings up to date.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        lr: float,
        weight_decay: float,
        max_grad_norm: float,
        norm_of_all: Callable[[Tensor], Tensor] = lambda norm: norm,
    ) -> None:
        parameters = list(parameters)
        device = parameters[0].device
        super().__init__(parameters, lr=lr, weight_decay=weight_decay, fused=device.type in ("cpu", "cuda"))
        self._parameters, self._max_grad_norm, self._norm_of_all = parameters, max_grad_norm, norm_of_all
        self.grad_norm = torch.zeros((), device=device)
        """Of shape (): the norm of all gradients at the last step, before they were scaled."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Clip and step; read `grad_norm` to know whether it was left out."""
        if self._parameters[0].device.type == "cpu" and kernels.library() is not None:
            self._step_in_one_pass({p: gradient for p in self._parameters if (gradient := _gradient(p)) is not None})
            return
        collect(self._parameters)
        gradients = {p: p.grad for p in self._parameters if p.grad is not None}
        norm = nn.utils.get_total_norm(list(gradients.values()))
        self.grad_norm = self._norm_of_all(norm.to(self.grad_norm.device))
        nn.utils.clip_grads_with_norm_(self._parameters, self._max_grad_norm, self.grad_norm)
        if self.defaults["fused"]:
            self.found_inf = 1.0 - self.grad_norm.isfinite().float()  # the kernel looks at it, without a wait
        if self.defaults["fused"] or self.grad_norm.isfinite():
            super().step(closure)
            for parameter in gradients:
                torch.autograd.graph.increment_version(parameter)  # which torch's kernel leaves as it is
            _refresh_copies(gradients)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, those of copies as well."""
        super().zero_grad(set_to_none)
        for parameter in self._parameters:
            if (copy := kept_copy(parameter)) is not None:
                copy.forget_gradient()

    def _step_in_one_pass(self, gradients: dict[nn.Parameter, Tensor]) -> None:
        for parameter in gradients:
            if not (state := self.state[parameter]):
                state["step"] = torch.zeros(())
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        copies = [_copy_in_bf16(p) for p in gradients]
        states = [self.state[p] for p in gradients]
        parts = kernels.Parts(
            weights=list(gradients),
            means=[state["exp_avg"] for state in states],
            squares=[state["exp_avg_sq"] for state in states],
            gradients=list(gradients.values()),
            copies=[None if copy is None else copy.tensor for copy in copies],
        )
        self.grad_norm = self._norm_of_all(torch.tensor(math.sqrt(parts.sum_of_squares())))
        norm = float(self.grad_norm.numpy())
        if not gradients or not math.isfinite(norm):
            return
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1.0)
        (group,) = self.param_groups
        settings = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
        scale = min(self._max_grad_norm / (norm + 1e-6), 1.0)
        parts.adamw(torch.stack(steps).tolist(), scale=scale, **settings)
        for parameter, copy in zip(gradients, copies, strict=True):
            torch.autograd.graph.increment_version(parameter)
            if copy is not None:
                torch.autograd.graph.increment_version(cast(Tensor, copy.tensor))
                copy.is_fresh()


def _gradient(parameter: nn.Parameter) -> Tensor | None:
    """A parameter's, and its kept copy's, in the precision of either."""
    copied = None if (copy := kept_copy(parameter)) is None else copy.gradient
    if parameter.grad is None or copied is None:
        return copied if parameter.grad is None else parameter.grad
    return parameter.grad + copied


def collect(parameters: Iterable[nn.Parameter]) -> None:
    """Add gradients that are in kept copies to the parameters' own, in the precision of those.

    To be called between batches that accumulate, since sums in bf16 would lose what is small.
    """
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
    """Bring kept copies up to date, all in one go."""
    copies = {p: copy for p in parameters if (copy := kept_copy(p)) is not None and copy.tensor is not None}
    if copies:
        torch._foreach_copy_([cast(Tensor, copy.tensor) for copy in copies.values()], list(copies))
    for copy in copies.values():
        copy.is_fresh()


def _copy_in_bf16(parameter: nn.Parameter) -> KeptCopy | None:
    """Where a parameter's copy is kept, if one in bf16 is."""
    copy = kept_copy(parameter)
    return copy if copy is not None and copy.tensor is not None and copy.tensor.dtype == torch.bfloat16 else None
