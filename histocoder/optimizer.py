"""AdamW that clips; on a CPU in pieces that stay in its cache, since there a step waits for memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from histocoder.model.layers import kept_copy

_PIECE = 1 << 18
"""Numbers of a piece: with its gradient, moments and copy they fit into a core's second cache."""


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
        if self._parameters[0].device.type == "cpu":
            self._step_in_pieces()
        else:
            gradients = [p.grad for p in self._parameters if p.grad is not None]
            self.grad_norm = self._norm_of_all(nn.utils.get_total_norm(gradients).to(self.grad_norm.device))
            nn.utils.clip_grads_with_norm_(self._parameters, self._max_grad_norm, self.grad_norm)
            if self.defaults["fused"]:
                self.found_inf = 1.0 - self.grad_norm.isfinite().float()  # the kernel looks at it, without a wait
            if self.defaults["fused"] or self.grad_norm.isfinite():
                super().step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, those of copies as well."""
        super().zero_grad(set_to_none)
        for parameter in self._parameters:
            if (copy := kept_copy(parameter)) is not None:
                copy.forget_gradient()

    def _step_in_pieces(self) -> None:
        (group,) = self.param_groups
        beta1, beta2 = group["betas"]
        stepping = {p: part for p in self._parameters if (part := self._part(p)) is not None}
        parts = list(stepping.values())
        bundles = list(_bundles(parts))
        self.grad_norm = self._norm_of_all(_norm(bundles))
        shrink = ((self.grad_norm + 1e-6) / self._max_grad_norm).clamp(min=1.0)
        is_finite = self.grad_norm.isfinite().float()
        torch._foreach_add_([part.step for part in parts], [is_finite] * len(parts))
        buffer = torch.empty(_PIECE)
        for bundle in bundles:
            torch._fused_adamw_(
                [piece.values for piece in bundle],
                _gathered(buffer, [piece.gradient for piece in bundle]),
                [piece.mean for piece in bundle],
                [piece.square for piece in bundle],
                [],
                [piece.step for piece in bundle],
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
                grad_scale=shrink,  # what gradients are divided by
                found_inf=1.0 - is_finite,
            )
            for piece in bundle:
                if piece.copy is not None:
                    piece.copy.copy_(piece.values)
        for parameter in stepping:
            if (copy := kept_copy(parameter)) is not None:
                copy.is_fresh(parameter)

    def _part(self, parameter: nn.Parameter) -> _Part | None:
        copy = kept_copy(parameter)
        copied = None if copy is None else copy.tensor
        gradient = parameter.grad
        if copied is not None and copied.grad is not None:
            gradient = copied.grad if gradient is None else gradient + copied.grad
        if gradient is None:
            return None
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        return _Part(
            parameter.view(-1),
            gradient.view(-1),
            state["exp_avg"].view(-1),
            state["exp_avg_sq"].view(-1),
            state["step"],
            None if copied is None else copied.view(-1),
        )


class _Part(NamedTuple):
    """A parameter, or a piece of it, with what belongs to it; each of shape (n,)."""

    values: Tensor
    gradient: Tensor
    mean: Tensor
    square: Tensor
    step: Tensor
    """Of shape ()."""
    copy: Tensor | None

    def pieces(self) -> Iterator[_Part]:
        """Pieces of like size, none of more than `_PIECE` numbers."""
        if not len(self.values):  # a share may be empty
            return
        count = -(-len(self.values) // _PIECE)
        copies = repeat(None) if self.copy is None else self.copy.chunk(count)
        chunks = [x.chunk(count) for x in (self.values, self.gradient, self.mean, self.square)]
        for values, gradient, mean, square, copy in zip(*chunks, copies, strict=False):
            yield _Part(values, gradient, mean, square, self.step, copy)


def _bundles(parts: list[_Part]) -> Iterator[list[_Part]]:
    """Pieces, as many small ones together as make up a large one."""
    bundle: list[_Part] = []
    for part in parts:
        for piece in part.pieces():
            if bundle and sum(len(p.values) for p in bundle) + len(piece.values) > _PIECE:
                yield bundle
                bundle = []
            bundle.append(piece)
    if bundle:
        yield bundle


def _gathered(buffer: Tensor, gradients: list[Tensor]) -> list[Tensor]:
    """Gradients of any precision, in a buffer."""
    places = buffer[: sum(map(len, gradients))].split(list(map(len, gradients)))
    for place, gradient in zip(places, gradients, strict=True):
        place.copy_(gradient)
    return list(places)


def _norm(bundles: list[list[_Part]]) -> Tensor:
    squares = [torch.dot(x, x) for bundle in bundles for piece in bundle for x in (piece.gradient.float(),)]
    return torch.stack(squares).sum().sqrt()
