"""What a run says in the terminal: at its start, and how far it has come."""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import dataclass

from tqdm import tqdm

from histocoder import distributed

ESTIMATE_AFTER = 20
"""Steps, after which is said how long all will take."""
_FIRST_STEPS = 5
"""Not counted in that: they start workers, compile, and choose kernels."""


class Progress:
    """Steps done: a bar on a terminal, a line now and then elsewhere, nothing where `show` is false.

    Parameters
    ----------
    total, start : int
        Steps of the run, and those done already.
    show : bool
        Whether this process prints.
    """

    def __init__(self, total: int, *, start: int = 0, show: bool = True) -> None:
        self._total, self._show = total, show
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
        self.say(f"about {_duration(seconds * steps)} for {steps:,} steps, {seconds:.3g} s each, without validation")

    def line(self, step: int, values: dict[str, float]) -> None:
        """Say some numbers in a line of their own."""
        if not self._show:
            return
        done = step - self._start
        left = (time.monotonic() - self._started) / done * (self._total - step) if done else 0
        numbers = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
        self.say(f"step {step}/{self._total}  {numbers}  {_duration(left)} left")

    def say(self, text: str) -> None:
        """Print a line without breaking the bar."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stdout)
        elif self._show:
            print(text, flush=True)

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
    if distributed.is_primary():
        print(text, flush=True)


@dataclass(frozen=True)
class RunFacts:
    """What the banner tells."""

    script: str
    encoder: str
    num_trained: int
    """Parameters that are trained."""
    num_frozen: int
    """Those that are not."""
    num_train: int
    """Rows to train on."""
    num_distinct: int
    """Distinct descriptions among them."""
    num_val: int
    num_codes: int
    devices: tuple[str, ...]
    """Of each process, by rank."""
    num_nodes: int
    backend: str | None
    """None for one process."""
    strategy: str
    precision: str
    batch_size: int
    """Batch size of one process."""
    batch_unit: str
    """What it counts."""
    accumulation: int
    """Batches whose gradients are added up to one step."""
    step_size: int
    """Rows, or positions, of a step, over all ranks."""
    num_steps: int
    num_epochs: int | None
    """None where the number of steps was asked for."""


def banner(facts: RunFacts) -> list[str]:
    """Return the lines that say it.

    Examples
    --------
    >>> _counted(1, "process", "processes"), _counted(8, "process", "processes")
    ('1 process', '8 processes')
    """
    total = facts.num_trained + facts.num_frozen
    frozen = f", {_millions(facts.num_frozen)} frozen" if facts.num_frozen else ""
    processes = len(facts.devices)
    names = (f"{count} × {name}" if count > 1 else name for name, count in Counter(facts.devices).items())
    machine = [_counted(processes, "process", "processes"), _counted(facts.num_nodes, "node", "nodes"), *names]
    accumulated = f"{facts.accumulation:,} accumulated × " if facts.accumulation > 1 else ""
    epochs = "" if facts.num_epochs is None else f" in {_counted(facts.num_epochs, 'epoch', 'epochs')}"
    lines = {
        "script": facts.script,
        "encoder": facts.encoder,
        "parameters": f"{_millions(total)}: {_millions(facts.num_trained)} trained{frozen}",
        "data": f"{facts.num_train:,} rows to train on ({facts.num_distinct:,} distinct descriptions), "
        f"{facts.num_val:,} to validate on, {_counted(facts.num_codes, 'code', 'codes')}",
        "machine": ", ".join(machine),
        "strategy": ", ".join(filter(None, [facts.strategy, facts.backend, facts.precision])),
        "batch": f"{facts.batch_size:,} × {accumulated}{_counted(processes, 'process', 'processes')} "
        f"= {facts.step_size:,} {facts.batch_unit} a step",
        "steps": f"{facts.num_steps:,}{epochs}",
    }
    width = max(map(len, lines)) + 2
    return [f"{name:{width}}{text}" for name, text in lines.items()]


def _counted(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"


def _millions(number: int) -> str:
    return f"{number / 1e6:,.1f} million" if number >= 100_000 else f"{number:,}"
