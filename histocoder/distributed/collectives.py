"""Collective calls: sums, gathers and votes; with one process each returns what it was given."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from histocoder.distributed.process_group import shared_group, world_size


def reduce_sum(values: Tensor) -> Tensor:
    """Return the sum of `values` over all ranks, on each of them."""
    if (group := shared_group()) is not None:
        values = values.clone()
        dist.all_reduce(values, group=group.control if values.device.type == "cpu" else None)
    return values


def gather(values: Tensor) -> list[Tensor]:
    """Return the CPU tensors of all ranks, which have the same shape, in order of rank."""
    if (group := shared_group()) is None:
        return [values]
    gathered = [torch.empty_like(values) for _ in range(world_size())]
    dist.all_gather(gathered, values, group=group.control)
    return gathered


def gather_texts(text: str) -> list[str]:
    """Return the texts of all ranks, in order of rank."""
    texts = [text]
    if (group := shared_group()) is not None:
        texts *= world_size()
        dist.all_gather_object(texts, text, group=group.control)
    return texts


def mean_of_rows(gradient: Tensor) -> Tensor:
    """Average sparse tensors, each with its own rows, over all ranks."""
    if shared_group() is None:
        return gradient
    gradient = gradient.coalesce()
    rows, values = gradient.indices()[0], gradient.values() / world_size()
    counts = [torch.zeros_like(rows[:1]) for _ in range(world_size())]
    dist.all_gather(counts, torch.full_like(counts[0], len(rows)))
    sizes = torch.cat(counts).tolist()
    parts = []
    for part in (rows, values):
        padded = part.new_zeros(max(sizes), *part.shape[1:])
        padded[: len(part)] = part
        found = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(found, padded)
        parts.append(torch.cat([x[:size] for x, size in zip(found, sizes, strict=True)]))
    return torch.sparse_coo_tensor(parts[0][None], parts[1], gradient.shape, check_invariants=False).coalesce()


class Ballot:
    """Asks at each step whether a rank wants to stop, without waiting for the answer within that step.

    A call to `cast` returns the outcome of the votes before, which is the same on all ranks; `close` that of the last.
    """

    def __init__(self) -> None:
        self._votes: Tensor | None = None
        self._work: Any = None

    def cast(self, vote: int) -> int:
        """Cast this rank's vote (0 to continue); return the largest vote of the step before."""
        if (group := shared_group()) is None:
            return vote
        outcome = self.close()
        self._votes = torch.tensor(vote)
        self._work = dist.all_reduce(self._votes, op=dist.ReduceOp.MAX, group=group.control, async_op=True)
        return outcome

    def close(self) -> int:
        """Wait for the last votes, if any; return the largest."""
        if self._votes is None:
            return 0
        self._work.wait()
        outcome, self._votes = int(self._votes), None
        return outcome
