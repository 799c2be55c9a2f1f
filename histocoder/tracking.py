"""Where a run's numbers go: the terminal, `logs.csv`, and Weights & Biases."""

from __future__ import annotations

import csv
import importlib.util
import math
import os
import queue
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from histocoder import distributed
from histocoder.errors import UserError
from histocoder.files import replacing

LOG_FILE = "logs.csv"
WANDB_ID_FILE = "wandb_run_id"
PATIENCE_SECONDS = 30.0
"""How long a service may hold up a run's start, and its end."""
_WANDB_SECONDS = {"WANDB_INIT_TIMEOUT": "15", "WANDB_LOGIN_TIMEOUT": "15", "WANDB_FINISH_TIMEOUT": "20"}
"""What W&B is told, so that it gives up by itself within these, which differ by what it does besides."""
COLUMNS = (
    "step",
    "epoch",
    "train_loss",
    "val_loss",
    "val_loss_linear",
    "val_loss_seq2seq",
    "seq_acc",
    "token_acc",
    "flat_acc",
    "greedy_seq_acc",
    "lr",
    "grad_norm",
    "samples_per_sec",
    "skipped_steps",
)


@dataclass
class Meter:
    """Sums what was trained since it was last read, on the device."""

    loss: Tensor | float = 0.0
    """Without steps that were skipped because gradients were not finite; likewise below."""
    grad_norm: Tensor | float = 0.0
    steps: int = 0
    """Those skipped among them."""
    skipped: Tensor | int = 0
    skipped_in_a_row: Tensor | int = 0
    """Up to now; reading leaves it as it is."""
    rows: int = 0
    started: float = field(default_factory=time.monotonic)

    def add(self, loss: Tensor, grad_norm: Tensor, *, rows: int) -> None:
        """One step more."""
        is_skipped = ~grad_norm.isfinite()
        self.loss = self.loss + loss.masked_fill(is_skipped, 0.0)
        self.grad_norm = self.grad_norm + grad_norm.masked_fill(is_skipped, 0.0)
        self.skipped = self.skipped + is_skipped.int()
        self.skipped_in_a_row = (self.skipped_in_a_row + 1) * is_skipped.int()
        self.steps, self.rows = self.steps + 1, self.rows + rows

    def read(self) -> dict[str, float]:
        """Means over the steps that were not skipped (NaN without any) and over all ranks; begin anew."""
        loss = distributed.reduce_sum(torch.as_tensor(self.loss).cpu().double())
        skipped = int(self.skipped)
        taken = self.steps - skipped or math.nan
        means = {
            "train_loss": float(loss) / taken,
            "grad_norm": float(self.grad_norm) / taken,
            "samples_per_sec": self.rows / (time.monotonic() - self.started),
            "skipped_steps": float(skipped),
        }
        self.__init__(skipped_in_a_row=self.skipped_in_a_row)  # type: ignore[misc]
        return means

    def state(self) -> Tensor:
        """What this rank has summed, of shape (7,)."""
        sums = (self.loss, self.grad_norm, self.skipped, self.skipped_in_a_row)
        seconds = time.monotonic() - self.started
        return torch.tensor([*map(float, sums), self.steps, self.rows, seconds], dtype=torch.float64)

    def restore(self, states: Tensor) -> None:
        """Go on from the states of all ranks, of shape (num_ranks, 7); there may have been more or fewer of them."""
        mine = states[min(distributed.rank(), len(states) - 1)]
        loss = mine[0]
        if len(states) != distributed.world_size():  # the sum is what counts
            loss = states[:, 0].sum() if distributed.is_primary() else torch.zeros(())
        self.loss, self.grad_norm = loss.float(), mine[1].float()
        self.skipped, self.skipped_in_a_row, self.steps, self.rows = mine[2:6].int().tolist()
        self.started = time.monotonic() - float(mine[6])


class Tracker(Protocol):
    """Takes a run's numbers."""

    def log(self, step: int, values: dict[str, float]) -> None: ...
    def close(self) -> None: ...


class NullRun:
    """Takes numbers and keeps none: on all processes but rank 0."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class CsvLog:
    """`logs.csv`: one line for each time that something was logged; empty where a number was not measured.

    Parameters
    ----------
    folder : Path
    start_step : int
        Lines beyond it, of a run that went on further than its last checkpoint, are taken out.
    """

    def __init__(self, folder: Path, *, start_step: int = 0) -> None:
        self._path = folder / LOG_FILE
        kept = []
        if self._path.exists() and start_step:
            whole, _, _ = self._path.read_text(encoding="utf-8").rpartition("\n")  # a full disk may cut the last line
            kept = [row for row in csv.DictReader(whole.splitlines()) if int(row["step"]) <= start_step]
        with replacing(self._path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", restval="")
            writer.writeheader()
            writer.writerows(kept)

    def log(self, step: int, values: dict[str, float]) -> None:
        """Add a line."""
        cells = {name: f"{value:.6g}" for name, value in values.items() if not math.isnan(value)}
        try:
            with self._path.open("a", encoding="utf-8", newline="") as file:
                csv.DictWriter(file, COLUMNS, restval="").writerow({**cells, "step": step})
        except OSError as error:
            raise UserError(f"Could not write {self._path}: {error.strerror or error}.") from error

    def close(self) -> None:
        """Nothing is open."""


class WandbRun:
    """A W&B run whose id is kept in the run's folder, so that a resumed run goes on with its curves."""

    _NAMES: ClassVar = {
        "train_loss": "train/loss",
        "val_loss": "val/loss",
        "val_loss_linear": "val/loss_linear",
        "val_loss_seq2seq": "val/loss_seq2seq",
        "seq_acc": "val/seq_acc",
        "token_acc": "val/token_acc",
        "flat_acc": "val/flat_acc",
        "greedy_seq_acc": "val/greedy_seq_acc",
        "lr": "hyperparams/lr",
        "grad_norm": "train/grad_norm",
        "samples_per_sec": "perf/rows_per_sec",
        "skipped_steps": "train/skipped_steps",
    }

    def __init__(self, folder: Path, *, project: str, name: str | None, config: dict[str, Any]) -> None:
        for variable, seconds in _WANDB_SECONDS.items():
            os.environ.setdefault(variable, seconds)
        import wandb

        id_file = folder / WANDB_ID_FILE
        run_id = id_file.read_text(encoding="utf-8").strip() if id_file.exists() else uuid.uuid4().hex[:8]
        self._run = wandb.init(project=project, name=name, id=run_id, resume="allow", dir=str(folder), config=config)
        with replacing(id_file) as temporary:
            temporary.write_text(run_id + "\n", encoding="utf-8")

    def log(self, step: int, values: dict[str, float]) -> None:
        """Send numbers under W&B's names."""
        self._run.log({self._NAMES.get(name, name): value for name, value in values.items()}, step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def open_wandb(folder: Path, *, project: str, name: str | None, config: dict[str, Any]) -> Tracker:
    """A `WandbRun` that training does not depend on; raises UserError where wandb is not installed."""
    if importlib.util.find_spec("wandb") is None:
        raise UserError("--log-wandb needs wandb: pip install wandb.")
    return InBackground("W&B", lambda: WandbRun(folder, project=project, name=name, config=config))


class InBackground:
    """A tracker in a thread of its own: where it hangs or fails, there is one warning, and training goes on without it.

    Parameters
    ----------
    name : str
        What the warning calls it.
    begin : callable
        Makes the tracker.
    patience : float
        Seconds to wait for it at the start, and at the end for what it has not taken in yet.
    room : int
        Lines that it may lag behind.
    """

    def __init__(
        self, name: str, begin: Callable[[], Tracker], *, patience: float = PATIENCE_SECONDS, room: int = 10_000
    ) -> None:
        self._name, self._patience = name, patience
        self._lines: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(room)
        self._begun = threading.Event()
        self._given_up = False
        self._thread = threading.Thread(target=self._work, args=(begin,), daemon=True)
        self._thread.start()
        if not self._begun.wait(patience):
            self._give_up(f"has not answered within {patience:g} s")

    def log(self, step: int, values: dict[str, float]) -> None:
        """Hand numbers over."""
        self._put((step, values))

    def close(self) -> None:
        """Let the tracker finish."""
        self._put(None)
        if not self._given_up:
            self._thread.join(self._patience)
        if self._thread.is_alive():
            self._give_up(f"has not taken in all numbers within {self._patience:g} s")

    def _put(self, line: tuple[int, dict[str, float]] | None) -> None:
        try:
            if not self._given_up:
                self._lines.put_nowait(line)
        except queue.Full:
            self._give_up("takes in no more numbers")

    def _work(self, begin: Callable[[], Tracker]) -> None:
        try:
            tracker = begin()
            self._begun.set()
            if self._given_up:
                tracker.close()
                return
            while (line := self._lines.get()) is not None:
                tracker.log(*line)
            tracker.close()
        except (Exception, SystemExit) as error:  # a service's client may raise anything
            self._give_up(f"failed ({' '.join(str(error).split()) or type(error).__name__})")
        finally:
            self._begun.set()

    def _give_up(self, why: str) -> None:
        if not self._given_up:
            self._given_up = True
            text = f"warning: {self._name} {why}; the run goes on, with all numbers in {LOG_FILE}."
            tqdm.write(text, file=sys.stderr)


class Tee:
    """Several trackers as one."""

    def __init__(self, *trackers: Tracker) -> None:
        self._trackers = trackers

    def log(self, step: int, values: dict[str, float]) -> None:
        """Tell each."""
        for tracker in self._trackers:
            tracker.log(step, values)

    def close(self) -> None:
        """Close each."""
        for tracker in self._trackers:
            tracker.close()


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
        self._bar = None
        if show and sys.stderr.isatty():
            self._bar = tqdm(total=total, initial=start, unit="step", dynamic_ncols=True, smoothing=0.1)

    def advance(self, **values: float) -> None:
        """One step more; `values` are shown where there is a bar."""
        if self._bar is not None:
            if values:
                self._bar.set_postfix({k: f"{v:.4g}" for k, v in values.items()}, refresh=False)
            self._bar.update()

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
