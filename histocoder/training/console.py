"""What a run says in the terminal: at its start, and how far it has come."""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from histocoder import distributed
from histocoder.distributed.launch import node_name
from histocoder.distributed.log import log
from histocoder.model.devices import device_name
from histocoder.model.precision import computing_dtype, precision_name

if TYPE_CHECKING:
    from histocoder.training.trainer import Trainer

ESTIMATE_AFTER = 20
"""Steps, after which is said how long all will take."""
_FIRST_STEPS = 5
"""Not counted in that: they start workers, compile, and choose kernels."""


class Progress:
    """Steps done: a bar on a terminal, and a line now and then.

    Parameters
    ----------
    total, start : int
        Steps of the run, and those done already.
    show : bool
        Whether this process may show a bar.
    """

    def __init__(self, total: int, *, start: int = 0, show: bool = True) -> None:
        self._total = total
        self._started, self._start = time.monotonic(), start
        self._done = 0
        self._counted_since = self._started
        self._bar = None
        if show and sys.stderr.isatty():
            self._bar = tqdm(total=total, initial=start, unit="step", dynamic_ncols=True, smoothing=0.1)

    def advance(self, **values: float) -> None:
        """Advance by a step; `values` are shown in the progress bar, if there is one."""
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
        """Leave out, of the estimate, what was not spent on steps."""
        self._counted_since += seconds

    def _say_estimate(self) -> None:
        seconds = (time.monotonic() - self._counted_since) / (ESTIMATE_AFTER - _FIRST_STEPS)
        steps = self._total - self._start
        say(f"about {_duration(seconds * steps)} for {steps:,} steps, {seconds:.3g} s each, without validation")

    def line(self, step: int, values: dict[str, float]) -> None:
        """Say some numbers in a line of their own."""
        done = step - self._start
        left = (time.monotonic() - self._started) / done * (self._total - step) if done else 0
        numbers = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
        say(f"step {step}/{self._total}  {numbers}  {_duration(left)} left")

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.close()


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def say(text: str) -> None:
    """Print a line, on rank 0."""
    log.info(text)


def banner(trainer: Trainer, *, encoder: str) -> list[str]:
    """Return what a run says at its start; all ranks call this together.

    Examples
    --------
    >>> _counted(1, "process", "processes"), _counted(8, "process", "processes")
    ('1 process', '8 processes')
    """
    config, model, data = trainer.config, trainer.model, trainer.train_data
    epochs = max(config.num_epochs, trainer.total_steps // trainer.sampler.num_batches(0))  # --min-steps repeats them
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = f", {_millions(total - trained)} frozen" if total > trained else ""
    devices = distributed.gather_texts(device_name(trainer.device))
    nodes = _counted(len(set(distributed.gather_texts(node_name()))), "node", "nodes")
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
        "parameters": f"{_millions(total)}: {_millions(trained)} trained{frozen}",
        "data": f"{len(data):,} rows to train on ({data.arrays.num_distinct:,} distinct descriptions), "
        f"{len(trainer.val_data):,} to validate on, {_counted(model.config.num_classes, 'code', 'codes')}",
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
