"""The largest batch that fits into memory, found before training."""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from histocoder import distributed
from histocoder.config import StrategyConfig, TrainConfig
from histocoder.data.dataset import Batch
from histocoder.data.tokens import LANG_SEP, UNKNOWN, tokenize
from histocoder.errors import UserError
from histocoder.formatters import BOS, EOS
from histocoder.model import MixerModel
from histocoder.ops.memory import available_bytes, is_out_of_memory, resident_bytes
from histocoder.training.learner import Learner
from histocoder.training.out_of_memory import advice
from histocoder.training.strategies import Replicated
from histocoder.training.trainer import mixed_loss

MAX_ROWS = 1024
"""Of a batch; larger ones are no faster."""
_SHARE_OF_MEMORY = {"cuda": 0.9, "cpu": 0.8}
"""Of what is free at most, since it comes in pieces, and others may want some."""
_NUM_TRIED = 4
"""Sizes that are tried on a CPU in any case."""
_CLEAR_GROWTH = 1.5
"""Twice the rows take twice as much more: from so many times on, nothing else hides it, and the rest is reckoned."""


def find_batch_size(
    build: Callable[[], MixerModel], config: TrainConfig, device: torch.device, *, num_rows: int
) -> tuple[int, float]:
    """The largest power of two of rows for which a step fits, on all processes; all of them call this.

    Steps are taken with a model that is thrown away, and with the longest texts and most codes that there can be. On a
    GPU each size is tried, until memory runs out or is about to. A CPU's memory does not run out cleanly: small sizes
    are tried, and from how memory grows with them it is reckoned what larger ones would take.

    Parameters
    ----------
    build : callable
        Gives the model, frozen as far as it is to be; on the CPU.
    config : TrainConfig
    device : torch.device
    num_rows : int
        Rows to train on.

    Returns
    -------
    size : int
        At most `MAX_ROWS`, and no more than the data have for one step.
    used : float
        The share of memory that may be used that a step is reckoned to take, on this process.

    Raises
    ------
    UserError
        Where not even one row fits, or memory can't be measured here.
    """
    limit = min(num_rows // config.num_parts(distributed.world_size()), MAX_ROWS)
    trial = _Trial(build(), config, device)
    size, used = largest_that_fits(trial.peak, room=trial.room, limit=limit, reckons=device.type == "cpu")
    max_len = trial.max_len
    del trial
    _release()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)  # the run's peak is its own
    if size == 0 and limit > 0:
        raise UserError(advice(replace(config, batch_size=1), device, max_len=max_len))
    return max(size, 1), used


def largest_that_fits(
    peak: Callable[[int], float], *, room: float, limit: int, reckons: bool = False
) -> tuple[int, float]:
    """The largest power of two up to a limit for which all processes have room, 0 if there is none; and the share used.

    Parameters
    ----------
    peak : callable
        Takes rows; gives the bytes that a step of so many needs, infinity where memory runs out.
    room : float
        Bytes that there are.
    limit : int
    reckons : bool
        Whether larger sizes are reckoned from smaller ones, instead of being tried, once memory grows clearly.

    Examples
    --------
    >>> largest_that_fits(lambda rows: 10 + 3 * rows, room=60, limit=1000)
    (16, 0.966...)
    """
    peaks: list[float] = []
    size = 1
    while size <= limit:
        growths = [after - before for before, after in itertools.pairwise(peaks)]
        expected = peaks[-1] + 2 * growths[-1] if growths else 0.0
        if not _all_agree(expected <= room):
            break
        is_clear = len(peaks) >= _NUM_TRIED and growths[-1] >= _CLEAR_GROWTH * growths[-2] > 0
        found = expected if reckons and _all_agree(is_clear) else peak(size)
        if not _all_agree(found <= room):
            break
        peaks.append(found)
        size *= 2
    return size // 2, peaks[-1] / room if peaks else 0.0


def _all_agree(yes: bool) -> bool:
    return int(distributed.reduce_sum(torch.tensor(int(not yes)))) == 0


class _Trial:
    """Steps of a model that is thrown away."""

    def __init__(self, model: MixerModel, config: TrainConfig, device: torch.device) -> None:
        self._model, self._config, self._device = model, config, device
        self.max_len = model.config.max_len
        self._num_blocks = model.config.formatter["num_blocks"]
        self._has_stepped = False
        self._is_alone = config.fsdp is None or distributed.world_size() == 1
        free = free_bytes(device)
        self.room = _SHARE_OF_MEMORY[device.type] * free
        self._before = 0.0 if device.type == "cuda" else resident_bytes()
        gradients = sum(4 * p.numel() for p in model.parameters() if p.requires_grad)
        if self._is_alone and (distributed.world_size() > 1 or config.gradient_accumulation_steps > 1):
            self.room -= gradients  # DDP's buckets hold them in the forward pass, too, or sums of earlier batches do
        strategy = _Unconnected(StrategyConfig()) if config.fsdp is None else None
        self._learner = Learner(model, config, device, total_steps=1 << 30, strategy=strategy)
        model.train()

    def peak(self, num_rows: int) -> float:
        """Bytes that a step needs, of all that is in use then; infinity where there are not so many."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        try:
            if not self._has_stepped:
                self._step(num_rows)  # at the end of which the optimizer's state is made
                self._has_stepped = True
            self._step(num_rows)
        except RuntimeError as error:
            if not (self._is_alone and is_out_of_memory(error)):  # elsewhere other processes wait within the step
                raise
            return math.inf
        finally:
            self._learner.optimizer.zero_grad(set_to_none=True)
            _release()
        if self._device.type == "cuda":
            return float(torch.cuda.max_memory_allocated(self._device))
        # torch keeps for later what it has freed (`keep_freed_memory`), so that peaks stay
        return resident_bytes() - self._before

    def _step(self, num_rows: int) -> None:
        batch = self._longest(num_rows).to(self._device)
        output = self._learner.forward(batch)
        self._learner.backward(mixed_loss(output, batch, self._model.config, self._config.seq2seq_weight))
        self._learner.step()

    def _longest(self, num_rows: int) -> Batch:
        """As many characters and codes as there can be in so many rows."""
        num_tokens = self._num_blocks * self._model.config.formatter["block_size"]
        targets = torch.full((num_rows, num_tokens + 2), EOS + 2)
        targets[:, 0], targets[:, -1] = BOS, EOS
        text = UNKNOWN + LANG_SEP + "a " * self.max_len
        tokens = tokenize([text], max_len=self.max_len, tokenizer=self._model.tokenizer)
        row = torch.from_numpy(tokens.pad(np.arange(1), max_len=self.max_len))
        return Batch(
            input_ids=row.repeat(num_rows, 1),
            targets=targets,
            class_ids=torch.zeros((num_rows, self._num_blocks), dtype=torch.int64),
            num_rows=num_rows,
            num_target_blocks=self._num_blocks,
            weight=1.0,
            rows=np.arange(num_rows),
            counts=torch.ones(num_rows),
        )


class _Unconnected(Replicated):
    """One process by itself, whatever others do, so that none waits for one that is out of memory."""

    def wrap(self, model: MixerModel, device: torch.device) -> MixerModel:
        """Not wrapped."""
        return model


def _release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def free_bytes(device: torch.device) -> float:
    """Memory that this process may still use, if others on its machine take as much.

    Raises
    ------
    UserError
        Where that can't be measured.
    """
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device))
    try:
        return available_bytes() / distributed.local_world_size()
    except (OSError, KeyError) as error:
        raise UserError("--auto-batch-size works on GPUs, and on CPUs under Linux; set --batch-size.") from error
