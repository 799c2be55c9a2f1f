"""Modules made without random weights, since theirs are loaded next."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_FILLING = (Tensor.normal_, Tensor.uniform_, nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_)


class Unfilled(TorchFunctionMode):
    """Within it, what would be filled with random numbers keeps whatever lies in its memory.

    Of CANINE's sizes these numbers take longer than all else that is done to open a model.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As `func`, but for filling."""
        kwargs = kwargs or {}
        if func in _FILLING:
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)
