"""Memory: amounts used and present, and work in pieces that fit."""

import os
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from histocoder.distributed import gather
from histocoder.errors import Notice, UserError, warn_user


def peak_gpu_memory(device: torch.device) -> dict[str, float]:
    """Return the peak of the memory of tensors in GB, on the GPU that uses most; nothing without GPUs."""
    if device.type != "cuda":
        return {}
    mine = torch.tensor([torch.cuda.max_memory_allocated(device) / 1e9], dtype=torch.float64)
    return {"gpu_memory_gb": max(map(float, gather(mine)))}


def total_bytes() -> float:
    """Return the machine's memory; infinity if it is unknown."""
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (ValueError, OSError, AttributeError):  # the last on Windows
        return float("inf")


Result = TypeVar("Result")

OUT_OF_MEMORY = (
    "In training, halve --batch-size and double --gradient-accumulation-steps, which gives the same steps, or add "
    "--gradient-checkpointing; otherwise stop other programs that use this memory, or compute with --device cpu."
)
"""Advice where memory runs out."""
_SIGNS = ("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED", "bad_alloc")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is no more memory on the device or the machine."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


class RowsAtOnce:
    """Does work on rows in as few pieces as memory allows: where it runs out, in halves from then on.

    Parameters
    ----------
    device : torch.device
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._limit: int | None = None

    def each(self, work: Callable[..., Result], rows: Tensor, *others: Tensor | None) -> Iterator[tuple[slice, Result]]:
        """The pieces of a tensor's rows, in order, each with what `work` gives for them, and for those of others.

        Raises
        ------
        UserError
            Where there is too little memory for one row.
        """
        start = 0
        while start < len(rows):
            piece = slice(start, len(rows) if self._limit is None else min(start + self._limit, len(rows)))
            result = self._attempt(work, *(None if x is None else x[piece] for x in (rows, *others)))
            if result is None:
                self._halve(piece.stop - start)
            else:
                yield piece, result
                start = piece.stop

    def _attempt(self, work: Callable[..., Result], *args: Tensor | None) -> Result | None:
        """Return the result of `work`, or None if memory runs out, in which case all its tensors are freed."""
        try:
            return work(*args)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return None

    def _halve(self, num_rows: int) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        if num_rows == 1:
            raise UserError(
                f"Out of memory ({self._device}) with a single description. Stop other programs that use it"
                + ("." if self._device.type == "cpu" else ", or compute on the CPU with --device cpu.")
            )
        self._limit = num_rows // 2
        warn_user(
            Notice(f"Out of memory with {num_rows:,} descriptions at once; continuing with {self._limit:,} at once.")
        )
