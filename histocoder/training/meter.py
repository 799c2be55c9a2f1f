"""Sums of the numbers of training steps."""

import math
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from histocoder import distributed


@dataclass
class Meter:
    """Sums loss, gradient norm and rows since the last read, on the device."""

    loss: Tensor | float = 0.0  # sum over steps, as `grad_norm` is, without those skipped as not finite
    grad_norm: Tensor | float = 0.0
    steps: int = 0  # number of steps, skipped ones included
    skipped: Tensor | int = 0
    skipped_in_a_row: Tensor | int = 0  # consecutive skipped steps up to now; not reset by `read`
    rows: int = 0
    started: float = field(default_factory=time.monotonic)

    def add(self, loss: Tensor, grad_norm: Tensor, *, rows: int) -> None:
        is_skipped = ~grad_norm.isfinite()  # in the CPU's memory with --fsdp-cpu-offload
        self.loss = self.loss + loss.masked_fill(is_skipped.to(loss.device), 0.0)
        self.grad_norm = self.grad_norm + grad_norm.masked_fill(is_skipped, 0.0)
        self.skipped = self.skipped + is_skipped.int()
        self.skipped_in_a_row = (self.skipped_in_a_row + 1) * is_skipped.int()
        self.steps, self.rows = self.steps + 1, self.rows + rows

    def read(self) -> dict[str, float]:
        """Return means over all ranks and the steps that were not skipped (NaN without any), and reset the meter."""
        loss = distributed.all_reduce(torch.as_tensor(self.loss).cpu().double())
        skipped = int(self.skipped)
        taken = self.steps - skipped or math.nan
        means = {
            "train_loss": float(loss) / taken,
            "grad_norm": float(self.grad_norm) / taken,
            "samples_per_sec": self.rows / (time.monotonic() - self.started),
            "skipped_steps": float(skipped),
        }
        self.__init__(skipped_in_a_row=self.skipped_in_a_row)  # type: ignore[misc]
        return means

    def state(self) -> Tensor:
        """Return this rank's sums, of shape (7,)."""
        sums = (self.loss, self.grad_norm, self.skipped, self.skipped_in_a_row)
        seconds = time.monotonic() - self.started
        return torch.tensor([*map(float, sums), self.steps, self.rows, seconds], dtype=torch.float64)

    def restore(self, states: Tensor) -> None:
        """Restore from the states of all ranks, of shape (num_ranks, 7); the number of ranks may have changed."""
        mine = states[min(distributed.rank(), len(states) - 1)]
        loss = mine[0]
        if len(states) != distributed.world_size():  # only the sum over ranks matters
            loss = states[:, 0].sum() if distributed.is_primary() else torch.zeros(())
        self.loss, self.grad_norm = loss.float(), mine[1].float()
        self.skipped, self.skipped_in_a_row, self.steps, self.rows = mine[2:6].int().tolist()
        self.started = time.monotonic() - float(mine[6])
