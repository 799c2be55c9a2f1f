"""The largest batch that fits into a GPU's memory, found before training."""

from __future__ import annotations

import gc
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
from histocoder.ops.memory import is_out_of_memory
from histocoder.training.learner import Learner
from histocoder.training.losses import mixed_loss
from histocoder.training.out_of_memory import advice
from histocoder.training.strategies import Replicated

MAX_ROWS = 1024
"""Of a batch; larger ones are no faster."""
_SHARE_OF_MEMORY = 0.9
"""Of what is free, since it comes in pieces, and others may want some."""


def find_batch_size(
    build: Callable[[], MixerModel], config: TrainConfig, device: torch.device, *, num_rows: int
) -> tuple[int, float]:
    """Return the largest power of two of rows for which a step fits on all processes, and the share of memory it takes.

    All processes call this. Steps are taken with a model that is thrown away, and with the longest texts and most codes
    that there can be.

    Parameters
    ----------
    build : callable
        Gives the model, frozen as far as it is to be; on the CPU.
    config : TrainConfig
    device : torch.device
        A GPU.
    num_rows : int
        Rows to train on. A step takes no more, and a batch at most `MAX_ROWS`.

    Raises
    ------
    UserError
        Where not even one row fits.
    """
    limit = min(num_rows // config.num_parts(distributed.world_size()), MAX_ROWS)
    room = _SHARE_OF_MEMORY * (torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device))
    trial = _Trial(build(), config, device)
    size, used = largest_that_fits(trial.peak, room=room, limit=limit)
    max_len = trial.max_len
    del trial
    _release()
    torch.cuda.reset_peak_memory_stats(device)  # the run's peak is its own
    if size == 0 and limit > 0:
        raise UserError(advice(replace(config, batch_size=1), device, max_len=max_len))
    return max(size, 1), used


def largest_that_fits(peak: Callable[[int], float], *, room: float, limit: int) -> tuple[int, float]:
    """Double the rows until memory runs out or is about to on some process; return half of them, and the share used.

    Parameters
    ----------
    peak : callable
        Takes rows; returns the bytes that a step of so many needs, infinity where memory runs out.
    room : float
        Bytes that there are.
    limit : int
        The most rows to try.

    Examples
    --------
    >>> largest_that_fits(lambda rows: 10 + 3 * rows, room=60, limit=1000)
    (16, 0.966...)
    """
    peaks: list[float] = []
    size = 1
    while size <= limit:
        expected = 3 * peaks[-1] - 2 * peaks[-2] if len(peaks) > 1 else 0.0  # twice the rows take twice as much more
        if not _all_agree(expected <= room) or not _all_agree((found := peak(size)) <= room):
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
        # DDP's buckets hold gradients in the forward pass, too, as sums of earlier batches do
        is_alone = distributed.world_size() == 1
        self._parts = (False,) if is_alone and config.gradient_accumulation_steps == 1 else (True, False)
        self._can_run_out = is_alone or config.fsdp is None  # else other processes wait within the step
        strategy = _Unconnected(StrategyConfig()) if config.fsdp is None else None
        self._learner = Learner(model, config, device, total_steps=1 << 30, strategy=strategy)
        model.train()

    def peak(self, num_rows: int) -> float:
        """Bytes that a step needs, of all that is in use then; infinity where there are not so many."""
        torch.cuda.reset_peak_memory_stats(self._device)
        try:
            for _ in range(2):  # the first makes the optimizer's state
                self._step(num_rows)
        except RuntimeError as error:
            if not (self._can_run_out and is_out_of_memory(error)):
                raise
            return math.inf
        finally:
            self._learner.optimizer.zero_grad(set_to_none=True)
            _release()
        return float(torch.cuda.max_memory_allocated(self._device))

    def _step(self, num_rows: int) -> None:
        for more in self._parts:
            with self._learner.accumulating(more=more):
                batch = self._longest(num_rows).to(self._device)
                output = self._learner.forward(batch)
                config = self._config
                weights = config.seq2seq_weight, config.decoder_stride
                self._learner.backward(mixed_loss(output, batch, self._model.config, *weights))
        self._learner.step()

    def _longest(self, num_rows: int) -> Batch:
        """As many characters and codes as there can be in so many rows."""
        formatter = self._model.config.formatter
        targets = torch.full((num_rows, formatter["num_blocks"] * formatter["block_size"] + 2), EOS + 2)
        targets[:, 0], targets[:, -1] = BOS, EOS
        text = UNKNOWN + LANG_SEP + "a " * self.max_len
        tokens = tokenize([text], max_len=self.max_len, tokenizer=self._model.tokenizer)
        row = torch.from_numpy(tokens.pad(np.arange(1), max_len=self.max_len))
        return Batch(
            input_ids=row.repeat(num_rows, 1),
            targets=targets,
            class_ids=torch.zeros((num_rows, formatter["num_blocks"]), dtype=torch.int64),
            num_rows=num_rows,
            num_target_blocks=formatter["num_blocks"],
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
    torch.cuda.empty_cache()
