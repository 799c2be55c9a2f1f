"""Copies of weights in the precision of the computation, which save the cast at each use."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn


def in_precision(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight in the precision `dtype`: its kept copy if it has one, else a new one."""
    copy = kept_copy(weight)
    if copy is None or dtype == weight.dtype or torch.compiler.is_compiling():
        return weight.to(dtype)
    return copy.to(dtype)


def stacked(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor | None:
    """Return weights in the precision `dtype`, concatenated by rows; None if no such copy is kept."""
    copy = kept_copy(weights[0])
    if copy is None or dtype == weights[0].dtype or torch.compiler.is_compiling():
        return None
    return copy.stack.to(dtype) if len(copy.stack.weights) == len(weights) > 1 else None


class Stack:
    """Copies of weights in another precision, concatenated by rows; gradients accumulate here, not in the weights."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.weights = list(weights)
        self.tensor: Tensor | None = None
        self.versions = [-1] * len(weights)
        """Versions of the weights that were copied."""

    def to(self, dtype: torch.dtype) -> Tensor:
        """Return the copies in `dtype`, which follow changes of the weights."""
        is_trained = self.weights[0].requires_grad
        with torch.inference_mode(mode=False), torch.no_grad():  # trainable, even if first used for inference
            if self.tensor is None or (self.tensor.dtype, self.tensor.requires_grad) != (dtype, is_trained):
                self.tensor = torch.cat([weight.detach().to(dtype) for weight in self.weights])
                self.tensor.requires_grad_(is_trained)
            elif self.versions != [weight._version for weight in self.weights]:
                for part, weight in zip(self.tensor.split(list(map(len, self.weights))), self.weights, strict=True):
                    part.copy_(weight)
        self.versions = [weight._version for weight in self.weights]
        return self.tensor


class KeptCopy:
    """Rows of one weight in a `Stack`."""

    def __init__(self, stack: Stack, place: int) -> None:
        start = sum(map(len, stack.weights[:place]))
        self.stack, self._place = stack, place
        self._rows = slice(start, start + len(stack.weights[place]))

    def to(self, dtype: torch.dtype) -> Tensor:
        """Return the copy in `dtype`, which follows changes of the weight."""
        return self._part(self.stack.to(dtype))

    @property
    def tensor(self) -> Tensor | None:
        """The copy as it is; None before its first use."""
        return None if self.stack.tensor is None else self._part(self.stack.tensor)

    @property
    def gradient(self) -> Tensor | None:
        """The gradient of the copy, if there is one."""
        if self.stack.tensor is None or self.stack.tensor.grad is None:
            return None
        return self._part(self.stack.tensor.grad)

    def mark_fresh(self) -> None:
        """Mark the copy as equal to the weight."""
        self.stack.versions[self._place] = self.stack.weights[self._place]._version

    def forget_gradient(self) -> None:
        """Drop the gradients of the stack, as `zero_grad` does for weights."""
        if self.stack.tensor is not None:
            self.stack.tensor.grad = None

    def _part(self, tensor: Tensor) -> Tensor:
        return tensor if len(self.stack.weights) == 1 else tensor[self._rows]


def keep_copies(module: nn.Module, *, together: Iterable[Sequence[nn.Linear]] = ()) -> None:
    """Keep copies of a module's weights in the precision of its computations; stack those of the layers in `together`.

    This saves a pass over all weights in each step on a CPU, and the casts on a GPU. The optimizer must update the
    copies, as `training.optimizer.AdamW` does. Changes of a weight's `data` go unnoticed.
    """
    groups = [[getattr(m, name) for m in modules] for modules in together for name in ("weight", "bias")]
    grouped = {weight for group in groups for weight in group}
    for group in [*groups, *([p] for p in module.parameters() if p not in grouped)]:
        stack = Stack(group)
        for place, weight in enumerate(group):
            weight.kept_copy = KeptCopy(stack, place)


def kept_copy(weight: Tensor) -> KeptCopy | None:
    return getattr(weight, "kept_copy", None)
