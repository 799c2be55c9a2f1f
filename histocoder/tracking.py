"""Where a run's numbers go: the terminal, `logs.csv`, and Weights & Biases."""

from __future__ import annotations

import csv
import sys
import time
import uuid
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
)


@dataclass
class Meter:
    """Sums what was trained since it was last read, on the device."""

    loss: Tensor | float = 0.0
    grad_norm: Tensor | float = 0.0
    steps: int = 0
    rows: int = 0
    started: float = field(default_factory=time.monotonic)

    def add(self, loss: Tensor, grad_norm: Tensor, *, rows: int) -> None:
        """One step more."""
        self.loss, self.grad_norm = self.loss + loss, self.grad_norm + grad_norm
        self.steps, self.rows = self.steps + 1, self.rows + rows

    def read(self) -> dict[str, float]:
        """Means over the steps and over all ranks, and begin anew."""
        loss = distributed.reduce_sum(torch.as_tensor(self.loss).double().cpu())
        means = {
            "train_loss": float(loss) / self.steps,
            "grad_norm": float(self.grad_norm) / self.steps,
            "samples_per_sec": self.rows / (time.monotonic() - self.started),
        }
        self.__init__()  # type: ignore[misc]
        return means

    def state(self) -> Tensor:
        """What this rank has summed, of shape (5,)."""
        loss, grad_norm = (float(torch.as_tensor(value)) for value in (self.loss, self.grad_norm))
        seconds = time.monotonic() - self.started
        return torch.tensor([loss, grad_norm, self.steps, self.rows, seconds], dtype=torch.float64)

    def restore(self, states: Tensor) -> None:
        """Go on from the states of all ranks, of shape (num_ranks, 5); there may have been more or fewer of them."""
        mine = states[min(distributed.rank(), len(states) - 1)]
        loss = mine[0]
        if len(states) != distributed.world_size():  # the sum is what counts
            loss = states[:, 0].sum() if distributed.is_primary() else torch.zeros(())
        self.loss, self.grad_norm = loss.float(), mine[1].float()
        self.steps, self.rows = int(mine[2]), int(mine[3])
        self.started = time.monotonic() - float(mine[4])


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
        cells = {name: f"{value:.6g}" for name, value in values.items()}
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
    }

    def __init__(self, folder: Path, *, project: str, name: str | None, config: dict[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UserError("--log-wandb needs wandb: pip install wandb.") from error
        id_file = folder / WANDB_ID_FILE
        run_id = id_file.read_text(encoding="utf-8").strip() if id_file.exists() else uuid.uuid4().hex[:8]
        try:
            self._run = wandb.init(
                project=project, name=name, id=run_id, resume="allow", dir=str(folder), config=config
            )
        except (wandb.Error, OSError) as error:
            raise UserError(
                f"W&B could not start ({error}). Log in with 'wandb login', set WANDB_MODE=offline, or leave out "
                "--log-wandb."
            ) from error
        with replacing(id_file) as temporary:
            temporary.write_text(run_id + "\n", encoding="utf-8")

    def log(self, step: int, values: dict[str, float]) -> None:
        """Send numbers under W&B's names."""
        self._run.log({self._NAMES.get(name, name): value for name, value in values.items()}, step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


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
