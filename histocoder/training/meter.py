"""Measurements of training steps: means of their numbers, their progress, and a profile of some of them."""

import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, schedule
from tqdm import tqdm

from histocoder import distributed
from histocoder.files import make_folder
from histocoder.log import log

SKIPPED_STEPS = 5  # steps before those that are profiled, which start workers, compile, and choose kernels
_WARM_UP_STEPS = 2  # of the profiler's own
_TABLE_ROWS = 30

ESTIMATE_AFTER = 20  # steps after which a run estimates how long it will take
_FIRST_STEPS = 5  # steps left out of the estimate: they start workers, compile, and choose kernels


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
        self.loss = self.grad_norm = 0.0
        self.skipped = self.steps = self.rows = 0
        self.started = time.monotonic()
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


class Progress:
    """Shows the steps done: a bar on a terminal if `show`, and lines of numbers; `start` steps are done already."""

    def __init__(self, total: int, *, start: int = 0, show: bool = True) -> None:
        self._total = total
        self._started = self._counted_since = time.monotonic()
        self._start, self._done = start, 0
        self._bar = None
        if show and sys.stderr.isatty():
            self._bar = tqdm(total=total, initial=start, unit="step", dynamic_ncols=True, smoothing=0.1)

    def advance(self, **values: float) -> None:
        """Advance by a step, and show `values` in the bar."""
        self._done += 1
        if self._done == _FIRST_STEPS:
            self._counted_since = time.monotonic()
        if self._done == ESTIMATE_AFTER:
            seconds = (time.monotonic() - self._counted_since) / (ESTIMATE_AFTER - _FIRST_STEPS)
            steps = self._total - self._start
            each = f"{_duration(seconds * steps)} ({seconds:.3g} s each)"
            log.info(f"estimated time for {steps:,} steps, without validation: {each}")
        if self._bar is not None:
            if values:
                self._bar.set_postfix({k: f"{v:.4g}" for k, v in values.items()}, refresh=False)
            self._bar.update()

    def pause(self, seconds: float) -> None:
        """Exclude time that was not spent on steps from the estimate."""
        self._counted_since += seconds

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


@contextmanager
def profiling(num_steps: int | None, path: Path, device: torch.device) -> Iterator[Callable[[], None]]:
    """Profile some steps on rank 0, unless `num_steps` is None; yield a function to call after each step.

    Writes `trace.json.gz`, for chrome://tracing or ui.perfetto.dev, and `table.txt` to the folder `path`.
    """
    if num_steps is None or not distributed.is_primary():
        yield lambda: None
        return

    def write(done: profile) -> None:
        """Write the profile, and say where it is."""
        by = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
        table = done.key_averages().table(sort_by=by, row_limit=_TABLE_ROWS)
        make_folder(path)
        done.export_chrome_trace(str(path / "trace.json.gz"))
        (path / "table.txt").write_text(table, encoding="utf-8")
        log.info(f"{table}\nThe profile is in {path}.")

    gpu = [ProfilerActivity.CUDA] if device.type == "cuda" else []
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's own notices on standard error
    steps = schedule(wait=SKIPPED_STEPS - _WARM_UP_STEPS, warmup=_WARM_UP_STEPS, active=num_steps, repeat=1)
    with profile(activities=[ProfilerActivity.CPU, *gpu], schedule=steps, on_trace_ready=write) as running:
        yield running.step
