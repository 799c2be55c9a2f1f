"""Output of a run in the terminal: its description at the start, and its progress."""

from __future__ import annotations

import socket
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from histocoder import distributed
from histocoder.log import log
from histocoder.model.devices import computing_dtype, device_name, precision_name

if TYPE_CHECKING:
    from histocoder.training.trainer import Trainer

ESTIMATE_AFTER = 20  # steps after which a run estimates how long it will take
_FIRST_STEPS = 5  # steps left out of the estimate: they start workers, compile, and choose kernels


def banner(trainer: Trainer, *, encoder: str) -> list[str]:
    """Return the lines that describe a run at its start; a collective call."""
    config, model, data = trainer.config, trainer.model, trainer.train_data
    epochs = max(config.num_epochs, trainer.total_steps // trainer.sampler.num_batches(0))  # --min-steps repeats them
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = f", {_millions(total - trained)} frozen" if total > trained else ""
    devices = distributed.gather_objects(device_name(trainer.device))
    nodes = _counted(len(set(distributed.gather_objects(socket.gethostname()))), "node", "nodes")
    processes = _counted(len(devices), "process", "processes")
    names = (f"{count} × {name}" if count > 1 else name for name, count in Counter(devices).items())
    precision = precision_name(computing_dtype(config.precision, trainer.device, use_amp=config.use_amp))
    parts = config.gradient_accumulation_steps
    size, unit = (
        (config.batch_size, "rows") if config.tokens_per_batch is None else (config.tokens_per_batch, "positions")
    )
    lines = {
        "script": Path(sys.argv[0]).name,
        "encoder": encoder,
        "parameters": f"{_millions(total)}: {_millions(trained)} trainable{frozen}",
        "data": f"{len(data):,} training rows ({data.arrays.num_distinct:,} distinct descriptions), "
        f"{len(trainer.val_data):,} validation rows, {_counted(model.config.num_classes, 'code', 'codes')}",
        "machine": ", ".join([processes, nodes, *names]),
        "strategy": ", ".join(filter(None, [trainer.learner.strategy.name, distributed.backend(), precision])),
        "batch": f"{size:,} × {f'{parts:,} accumulated × ' if parts > 1 else ''}{processes} "
        f"= {config.step_size(len(devices)):,} {unit} a step",
        "steps": f"{trainer.total_steps:,}"
        + ("" if config.max_steps else f" in {_counted(epochs, 'epoch', 'epochs')}"),
    }
    width = max(map(len, lines)) + 2
    return [f"{name:{width}}{text}" for name, text in lines.items()]


def _counted(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"


def _millions(number: int) -> str:
    return f"{number / 1e6:,.1f} million" if number >= 100_000 else f"{number:,}"


class Progress:
    """Shows the steps done: a bar on a terminal if `show`, and lines of numbers; `start` steps are done already."""

    def __init__(self, total: int, *, start: int = 0, show: bool = True) -> None:
        self._total = total
        self._started, self._start = time.monotonic(), start
        self._done = 0
        self._counted_since = self._started
        self._bar = None
        if show and sys.stderr.isatty():
            self._bar = tqdm(total=total, initial=start, unit="step", dynamic_ncols=True, smoothing=0.1)

    def advance(self, **values: float) -> None:
        """Advance by a step, and show `values` in the bar."""
        self._done += 1
        if self._done == _FIRST_STEPS:
            self._counted_since = time.monotonic()
        if self._done == ESTIMATE_AFTER:
            self._say_estimate()
        if self._bar is not None:
            if values:
                self._bar.set_postfix({k: f"{v:.4g}" for k, v in values.items()}, refresh=False)
            self._bar.update()

    def pause(self, seconds: float) -> None:
        """Leave time that was not spent on steps out of the estimate."""
        self._counted_since += seconds

    def _say_estimate(self) -> None:
        seconds = (time.monotonic() - self._counted_since) / (ESTIMATE_AFTER - _FIRST_STEPS)
        steps = self._total - self._start
        each = f"{_duration(seconds * steps)} ({seconds:.3g} s each)"
        log.info(f"estimated time for {steps:,} steps, without validation: {each}")

    def line(self, step: int, values: dict[str, float]) -> None:
        """Print a line with the step, some numbers, and the time left."""
        done = step - self._start
        left = (time.monotonic() - self._started) / done * (self._total - step) if done else 0
        numbers = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
        log.info(f"step {step}/{self._total}  {numbers}  {_duration(left)} left")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
