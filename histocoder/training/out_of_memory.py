"""Errors of a run that is out of memory: what it asked for, and what to try."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from histocoder import distributed
from histocoder.config import TrainConfig
from histocoder.errors import UserError

_MIN_MAX_LEN = 32
_SIGNS = ("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED", "bad_alloc")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that there is no more memory on the device or the machine."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


@contextmanager
def explaining_out_of_memory(config: TrainConfig, device: torch.device, *, max_len: int) -> Iterator[None]:
    """Raise a UserError that says what to try, in place of PyTorch's error, where memory runs out."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(advice(config, device, max_len=max_len, requested=_requested(error))) from error


def advice(config: TrainConfig, device: torch.device, *, max_len: int, requested: str = "") -> str:
    """Return what to try where memory has run out, in order, without what is in use already."""
    size = f"{config.batch_size} rows" if config.tokens_per_batch is None else f"{config.tokens_per_batch} positions"
    allocating = f" while allocating {requested}" if requested else ""
    remedies = "".join(f"\n  {i}. {remedy}" for i, remedy in enumerate(_remedies(config, device, max_len), 1))
    what = " Try these in order, each in addition to those before it:" if remedies else " No other flag saves memory."
    return (
        f"Out of memory ({device}){allocating}, with batches of {size} of up to {max_len} characters each."
        f"{what}{remedies}"
    )


def full_memory_message(error: BaseException) -> str:
    """Return what to say where memory has run out in a program that does not train."""
    asked = f": {size} could not be allocated" if (size := _requested(error)) else ""
    return f"Out of memory{asked}. Set a smaller --batch-size, stop other programs, or compute with --device cpu."


def _remedies(config: TrainConfig, device: torch.device, max_len: int) -> Iterator[str]:
    flag, size, least = "--batch-size", config.batch_size, 1
    if config.tokens_per_batch is not None:
        flag, size, least = "--tokens-per-batch", config.tokens_per_batch, max_len
    if size // 2 >= least:
        num_parts = 2 * config.gradient_accumulation_steps
        same = "; the steps stay the same" if size % 2 == 0 and flag == "--batch-size" else ""
        yield f"{flag} {size // 2} with --gradient-accumulation-steps {num_parts}{same}"
    if not config.gradient_checkpointing:
        yield "--gradient-checkpointing; the same results in more time"
    if max_len > _MIN_MAX_LEN:
        yield f"--max-len {max(max_len // 8 * 4, _MIN_MAX_LEN)}, which cuts longer descriptions, in a new run"
    is_alone, on_gpu = distributed.world_size() == 1, device.type == "cuda"
    if is_alone and config.fsdp is None and on_gpu:
        yield "--fsdp full_shard --fsdp-cpu-offload, which keep weights and optimizer state in CPU memory"
    if is_alone:
        yield "several processes with --fsdp full_shard, which shard the model"
    elif config.fsdp is None:
        yield "--fsdp full_shard, which shards the model over the processes"
    elif config.fsdp == "shard_grad_op":
        yield "--fsdp full_shard in place of shard_grad_op"
    if config.fsdp is not None and not config.fsdp_cpu_offload and on_gpu:
        yield "--fsdp-cpu-offload"


def _requested(error: BaseException) -> str:
    """Return the size that an error says could not be allocated; empty if it says none."""
    found = re.search(r"tried to allocate ([\d.]+) (bytes|[KMG]i?B)", str(error), re.IGNORECASE)
    if found is None:
        return ""
    number, unit = found.groups()
    return f"{float(number) / 2**30:,.2f} GiB" if unit == "bytes" else f"{number} {unit}"
