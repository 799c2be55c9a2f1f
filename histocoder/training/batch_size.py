"""The largest batch that fits into a GPU's memory, found before training."""

import gc
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from histocoder import distributed
from histocoder.config import LANG_SEP, StrategyConfig, TrainConfig
from histocoder.data.dataset import Batch
from histocoder.data.tokens import UNKNOWN, tokenize
from histocoder.errors import UserError
from histocoder.formatters import BOS, EOS
from histocoder.model import MixerModel
from histocoder.ops.memory import is_out_of_memory
from histocoder.training.learner import Learner
from histocoder.training.out_of_memory import advice
from histocoder.training.strategies import Replicated

MAX_ROWS = 1024  # rows of the largest batch to try; larger ones are no faster
_SHARE_OF_MEMORY = 0.9  # of the free memory, which is fragmented, and of which other programs may need some


def find_batch_size(
    build: Callable[[], MixerModel], config: TrainConfig, device: torch.device, *, num_rows: int
) -> tuple[int, float]:
    """Return the largest power of two of rows for which a step fits on all ranks, and the share of memory it takes.

    A collective call. Steps are taken with a model that is thrown away, on the longest texts and the most codes
    possible. Raises a UserError if not even one row fits.
    """
    limit = min(num_rows // config.num_parts(distributed.world_size()), MAX_ROWS)
    room = _SHARE_OF_MEMORY * (torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device))
    strategy = _Unconnected(StrategyConfig()) if config.fsdp is None else None
    learner = Learner(build(), config, device, total_steps=1 << 30, strategy=strategy)
    size, used = largest_that_fits(partial(peak_of_step, learner), room=room, limit=limit)
    max_len = learner.model.config.max_len
    del learner
    _release()
    torch.cuda.reset_peak_memory_stats(device)  # the run's peak is its own
    if size == 0 and limit > 0:
        raise UserError(advice(replace(config, batch_size=1), device, max_len=max_len))
    return max(size, 1), used


def largest_that_fits(peak: Callable[[int], float], *, room: float, limit: int) -> tuple[int, float]:
    """Return the most rows, a power of two up to `limit`, whose peak is within `room` on all ranks, and its share.

    The rows double until the peak of a step exceeds the room, or is expected to: ranks that shard a model can't catch
    an error of memory, since the others wait for them.
    """
    size, peaks = 1, [0.0]
    while size <= limit:
        expected = 3 * peaks[-1] - 2 * peaks[-2] if len(peaks) > 2 else 0.0  # memory is linear in the rows
        if _any(expected > room) or _any((found := peak(size)) > room):
            break
        peaks.append(found)
        size *= 2
    return size // 2, peaks[-1] / room


def _any(yes: bool) -> bool:
    """Return whether it is so on any rank."""
    return bool(distributed.all_reduce(torch.tensor(int(yes))))


def peak_of_step(learner: Learner, num_rows: int) -> float:
    """Return the bytes in use at the peak of a step on so many rows; infinity where memory runs out."""
    is_alone, config = distributed.world_size() == 1, learner.config
    # gradients are in memory in the forward pass too if batches accumulate, and in DDP's buckets
    num_parts = 1 if is_alone and config.gradient_accumulation_steps == 1 else 2
    batch = _longest_batch(learner.model, num_rows)
    learner.model.train()
    torch.cuda.reset_peak_memory_stats(learner.device)
    try:
        for _ in range(2):  # the first creates the optimizer's state
            learner.train_step([batch] * num_parts)
    except RuntimeError as error:
        if not is_out_of_memory(error) or not (is_alone or config.fsdp is None):
            raise
        return math.inf
    finally:
        learner.optimizer.zero_grad(set_to_none=True)
        _release()
    return float(torch.cuda.max_memory_allocated(learner.device))


def _longest_batch(model: MixerModel, num_rows: int) -> Batch:
    """Return a batch of rows with as many characters and codes as there can be."""
    config, num_blocks = model.config, model.config.formatter["num_blocks"]
    targets = torch.full((num_rows, num_blocks * config.formatter["block_size"] + 2), EOS + 2)
    targets[:, 0], targets[:, -1] = BOS, EOS
    tokens = tokenize([UNKNOWN + LANG_SEP + "a " * config.max_len], max_len=config.max_len, tokenizer=model.tokenizer)
    return Batch(
        input_ids=torch.from_numpy(tokens.pad(np.arange(1), max_len=config.max_len)).repeat(num_rows, 1),
        targets=targets,
        class_ids=torch.zeros((num_rows, num_blocks), dtype=torch.int64),
        num_rows=num_rows,
        num_target_blocks=num_blocks,
        weight=1.0,
        rows=np.arange(num_rows),
        counts=torch.ones(num_rows),
    )


class _Unconnected(Replicated):
    """Each rank by itself, so that none waits for one that is out of memory."""

    def wrap(self, model: MixerModel, device: torch.device) -> MixerModel:
        return model


def _release() -> None:
    gc.collect()
    torch.cuda.empty_cache()
