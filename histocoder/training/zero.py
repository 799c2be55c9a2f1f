"""ZeRO-1: each process steps a share of the parameters, and alone holds the optimizer's state of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer

from histocoder.training.optimizer import AdamW


class _AdamW(AdamW):
    """Of a share of the parameters, which comes as groups."""

    def __init__(self, groups: Iterable[dict[str, Any]], **options: Any) -> None:
        super().__init__(groups, **options)


class ZeroAdamW(ZeroRedundancyOptimizer):
    """`AdamW` whose state is shared out (Rajbhandari et al. 2020, the first stage).

    Parameters are those of `AdamW`; gradients are the same on all processes, as after DDP's backward pass.
    """

    optim: AdamW

    def __init__(
        self,
        parameters: Iterable[dict[str, Any]],
        *,
        lr: float,
        weight_decay: float,
        max_grad_norm: float,
        norm_of_all: Callable[[Tensor], Tensor],
    ) -> None:
        # what is given to it by name becomes a part of the groups, and of checkpoints
        shares = partial(_AdamW, max_grad_norm=max_grad_norm, norm_of_all=norm_of_all)
        super().__init__(parameters, shares, lr=lr, weight_decay=weight_decay)  # type: ignore[arg-type]
        self._step_supports_amp_scaling = True  # AdamW finds out by itself whether to leave a step out

    @property
    def grad_norm(self) -> Tensor:
        """See `AdamW`."""
        return self.optim.grad_norm

    def whole_state(self) -> dict[str, Any]:
        """The state dict that `AdamW` has of all parameters, on rank 0; empty on others. All processes call this."""
        self.consolidate_state_dict(to=0)
        state = self.state_dict() if self.rank == 0 else {}
        self._all_state_dicts: list[dict[str, Any]] = []  # as large as what is shared out
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this process's share of `AdamW`'s state dict of all parameters; the dict stays as it is."""
        super().load_state_dict({**state_dict, "state": dict(state_dict["state"])})
