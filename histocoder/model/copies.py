"""Copies of weights in the precision of computations, so that weights are not converted at each use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn


def in_precision(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight in the precision of a computation: its kept copy if it has one, else a new one."""
    copy = kept_copy(weight)
    if copy is None or dtype == weight.dtype or torch.compiler.is_compiling():
        return weight.to(dtype)
    return copy.of(dtype)


def stacked(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor | None:
    """Return weights in the precision of a computation, concatenated by rows; None if they are not kept so."""
    copy = kept_copy(weights[0])
    if copy is None or dtype == weights[0].dtype or torch.compiler.is_compiling():
        return None
    return copy.stack.of(dtype) if len(copy.stack.weights) == len(weights) > 1 else None


class Stack:
    """Weights in another precision, one below the other, made when they are first asked for, and again when one of the
    weights has changed.

    Gradients collect here: the weights get none.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.weights = list(weights)
        self.tensor: Tensor | None = None
        self.versions = [-1] * len(weights)
        """Of the weights, when they were copied."""

    def of(self, dtype: torch.dtype) -> Tensor:
        """Return the copies, up to date."""
        is_trained = self.weights[0].requires_grad
        with torch.inference_mode(mode=False), torch.no_grad():  # whoever asks first, they are there to train with
            if self.tensor is None or (self.tensor.dtype, self.tensor.requires_grad) != (dtype, is_trained):
                self.tensor = torch.cat([weight.detach().to(dtype) for weight in self.weights])
                self.tensor.requires_grad_(is_trained)
            elif self.versions != [weight._version for weight in self.weights]:
                for part, weight in zip(self.tensor.split(list(map(len, self.weights))), self.weights, strict=True):
                    part.copy_(weight)
        self.versions = [weight._version for weight in self.weights]
        return self.tensor


class KeptCopy:
    """A weight's place in a `Stack`."""

    def __init__(self, stack: Stack, place: int) -> None:
        start = sum(map(len, stack.weights[:place]))
        self.stack, self._place = stack, place
        self._rows = slice(start, start + len(stack.weights[place]))

    def of(self, dtype: torch.dtype) -> Tensor:
        """Return the copy, up to date."""
        return self._part(self.stack.of(dtype))

    @property
    def tensor(self) -> Tensor | None:
        """The copy as it is; None where there is none yet."""
        return None if self.stack.tensor is None else self._part(self.stack.tensor)

    @property
    def gradient(self) -> Tensor | None:
        """What has collected in the copy."""
        if self.stack.tensor is None or self.stack.tensor.grad is None:
            return None
        return self._part(self.stack.tensor.grad)

    def is_fresh(self) -> None:
        """Note that the copy is as the weight now is."""
        self.stack.versions[self._place] = self.stack.weights[self._place]._version

    def forget_gradient(self) -> None:
        """Drop the gradient, as `zero_grad` does for the weight."""
        if self.stack.tensor is not None:
            self.stack.tensor.grad = None

    def _part(self, tensor: Tensor) -> Tensor:
        return tensor if len(self.stack.weights) == 1 else tensor[self._rows]


def keep_copies(module: nn.Module, *, together: Iterable[Sequence[nn.Linear]] = ()) -> None:
    """Keep copies of a module's weights in the precision of its computations from now on.

    Worth it where one process trains: on a CPU a step is shorter by the time it takes to read all weights, on a GPU it
    launches no casts of them. An optimizer must know of it; `training.optimizer.AdamW` does. Changes of a weight's
    `data` go unnoticed.

    Parameters
    ----------
    module : Module
    together : iterable of sequences of Linear
        Those that `branch` is called with.
    """
    groups = [[getattr(m, name) for m in modules] for modules in together for name in ("weight", "bias")]
    grouped = {weight for group in groups for weight in group}
    for group in [*groups, *([p] for p in module.parameters() if p not in grouped)]:
        stack = Stack(group)
        for place, weight in enumerate(group):
            weight.kept_copy = KeptCopy(stack, place)


def kept_copy(weight: Tensor) -> KeptCopy | None:
    """Return a weight's kept copy, if there is one."""
    return getattr(weight, "kept_copy", None)
