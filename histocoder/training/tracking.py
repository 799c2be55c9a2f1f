"""Numbers of a run: measured, shown as it trains, written to `logs.csv`, and sent to W&B and
TensorBoard.
"""

import csv
import math
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from histocoder import distributed
from histocoder.checkpoints.run_files import LOG_FILE
from histocoder.checkpoints.run_folder import RunFolder
from histocoder.config import RunConfig, recorded
from histocoder.errors import UserError
from histocoder.files import replacing, write_text
from histocoder.log import log

DASHBOARD_NAMES = {
    "epoch": "train/epoch",
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
    "gpu_memory_gb": "perf/gpu_memory_gb",
    "skipped_steps": "train/skipped_steps",
}
"""Name of each number in W&B and TensorBoard."""
COLUMNS = ("step", *DASHBOARD_NAMES)  # columns of `logs.csv`, before those of attributes
_WANDB_SECONDS = {
    "WANDB_INIT_TIMEOUT": "15",
    "WANDB_LOGIN_TIMEOUT": "15",
    "WANDB_FINISH_TIMEOUT": "20",
}
"""W&B's own timeouts, which bound the time that it holds up a run's start and end."""


class Dashboard(NamedTuple):
    """Functions of a service that shows numbers."""

    send: Callable[[dict[str, float], int], object]  # takes the numbers of a step, by their names
    close: Callable[[], object]


class Tracker:
    """Takes a run's numbers; this one, of ranks but 0, ignores them."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """Take the numbers of a step; NaN stands for one that was not measured."""

    def close(self) -> None:
        """Finish what was begun."""


class RunLog(Tracker):
    """Appends to `logs.csv` on rank 0, and sends numbers to dashboards, of which one that fails is
    left out with a warning.
    """

    def __init__(self, path: Path, columns: Sequence[str] = COLUMNS) -> None:
        self._path = path
        self._columns = columns
        self._dashboards: dict[str, Dashboard] = {}

    def begin(self, *, start_step: int) -> None:
        """Write the header of `logs.csv`, and the lines of an earlier part of the run up to a
        step: later ones are behind the last checkpoint.
        """
        rows = []
        if start_step and self._path.exists():
            # a full disk may have cut the last line
            lines = self._path.read_text(encoding="utf-8").rpartition("\n")[0].splitlines()
            rows = [row for row in csv.DictReader(lines) if int(row["step"]) <= start_step]
        with (
            replacing(self._path) as temporary,
            temporary.open("w", encoding="utf-8", newline="") as file,
        ):
            writer = csv.DictWriter(file, self._columns, extrasaction="ignore", restval="")
            writer.writeheader()
            writer.writerows(rows)

    def add_dashboard(self, name: str, begin: Callable[[], Dashboard]) -> None:
        """Send the numbers to a further service, which `begin` opens."""
        with self._surviving(name):
            self._dashboards[name] = begin()

    def log(self, step: int, values: dict[str, float]) -> None:
        """Append a line; a cell is empty if the number was not measured."""
        # a number that was not measured has an empty cell, and no point in a curve
        measured = {name: value for name, value in values.items() if not math.isnan(value)}
        cells = {name: f"{value:.6g}" for name, value in measured.items()}
        try:
            with self._path.open("a", encoding="utf-8", newline="") as file:
                csv.DictWriter(file, self._columns, restval="").writerow({**cells, "step": step})
        except OSError as error:
            raise UserError(f"Could not write {self._path}: {error.strerror or error}.") from error

        # a dashboard groups numbers by their names
        shown = {
            DASHBOARD_NAMES.get(name, f"val/{name}"): value for name, value in measured.items()
        }
        for name, dashboard in list(self._dashboards.items()):
            with self._surviving(name):
                dashboard.send(shown, step)

    def close(self) -> None:
        for name, dashboard in list(self._dashboards.items()):
            with self._surviving(name):
                dashboard.close()

    @contextmanager
    def _surviving(self, name: str) -> Iterator[None]:
        """Leave a dashboard out, with a warning, if it fails."""
        try:
            yield
        except (Exception, SystemExit) as error:  # a service's client may raise anything
            self._dashboards.pop(name, None)
            reason = " ".join(str(error).split()) or type(error).__name__
            log.warning(
                f"Warning: {name} failed ({reason}); the run continues without it. {LOG_FILE} "
                "has all metrics."
            )


def open_tracker(config: RunConfig, run: RunFolder, *, start_step: int, system: str) -> Tracker:
    """Return what takes a run's numbers: on rank 0 `logs.csv`, and the dashboards that the settings
    ask for.
    """
    if not distributed.is_primary():
        return Tracker()
    # the columns are those of the first line, whatever is measured later
    columns = list(COLUMNS)
    for name in config.attribute_cols or ():
        columns.append(f"acc_{name}")
    tracker = RunLog(run.logs, columns)
    tracker.begin(start_step=start_step)
    if config.log_wandb:
        tracker.add_dashboard("W&B", partial(_begin_wandb, run, config, system))
    if config.log_tensorboard:
        tracker.add_dashboard("TensorBoard", partial(_begin_tensorboard, run, start_step))
    return tracker


def _begin_wandb(run: RunFolder, config: RunConfig, system: str) -> Dashboard:
    """Open a W&B run, whose id is kept in the run's folder, so that a resumed run continues its
    curves.
    """
    for variable, seconds in _WANDB_SECONDS.items():
        os.environ.setdefault(variable, seconds)
    import wandb

    # the id of an earlier part of this run, if there is one
    run_id = uuid.uuid4().hex[:8]
    if run.wandb_id.exists():
        run_id = run.wandb_id.read_text(encoding="utf-8").strip()
    encoder = Path(config.encoder).name
    opened = wandb.init(
        name=config.run_name or f"{encoder}_{system}_gpu{distributed.world_size()}",
        id=run_id,
        resume="allow",
        dir=str(run.path),
        project=config.wandb_project_name,
        config=recorded(config),
    )
    write_text(run.wandb_id, run_id + "\n")
    return Dashboard(opened.log, opened.finish)


def _begin_tensorboard(run: RunFolder, start_step: int) -> Dashboard:
    """Open event files in `tensorboard/`; points beyond `start_step`, from after the last
    checkpoint, are hidden.
    """
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(run.tensorboard), purge_step=start_step + 1)

    def send(values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return Dashboard(send, writer.close)


@dataclass
class Meter:
    """Sums loss, gradient norm and rows since the last read, on the device."""

    # sums over steps, without those skipped as not finite
    loss: Tensor | float = 0.0
    grad_norm: Tensor | float = 0.0
    steps: int = 0  # number of steps, skipped ones included
    skipped: Tensor | int = 0
    skipped_in_a_row: Tensor | int = 0  # consecutive skipped steps up to now; not reset by `read`
    rows: int = 0
    started: float = field(default_factory=time.monotonic)

    def add(self, loss: Tensor, grad_norm: Tensor, *, rows: int) -> None:
        is_skipped = ~grad_norm.isfinite()
        self.loss = self.loss + loss.masked_fill(is_skipped, 0.0)
        self.grad_norm = self.grad_norm + grad_norm.masked_fill(is_skipped, 0.0)
        self.skipped = self.skipped + is_skipped.int()
        self.skipped_in_a_row = (self.skipped_in_a_row + 1) * is_skipped.int()
        self.steps += 1
        self.rows += rows

    def read(self) -> dict[str, float]:
        """Return means over all ranks and the steps that were not skipped (NaN without any), and
        reset the meter.
        """
        # each rank has its part of the loss; norms are of all ranks' gradients
        loss = distributed.all_reduce(torch.as_tensor(self.loss).cpu().double())
        skipped = int(self.skipped)
        num_taken = self.steps - skipped or math.nan
        means = {
            "train_loss": float(loss) / num_taken,
            "grad_norm": float(self.grad_norm) / num_taken,
            "samples_per_sec": self.rows / (time.monotonic() - self.started),
            "skipped_steps": float(skipped),
        }

        # `skipped_in_a_row` stays
        self.loss = 0.0
        self.grad_norm = 0.0
        self.skipped = 0
        self.steps = 0
        self.rows = 0
        self.started = time.monotonic()
        return means


class Progress:
    """Shows the steps of a run on rank 0: a bar on a terminal, and lines of numbers with the time
    left.
    """

    def __init__(self, total: int, *, start: int = 0) -> None:
        self._total = total
        self._start = start
        self._started = time.monotonic()
        self._bar = tqdm(
            total=total,
            initial=start,
            unit="step",
            dynamic_ncols=True,
            smoothing=0.1,
            # None: unless standard error is a terminal
            disable=None if distributed.is_primary() else True,
        )

    def advance(self) -> None:
        self._bar.update()

    def line(self, step: int, values: dict[str, float]) -> None:
        """Print a line with the step, some numbers, and the time left."""
        numbers = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
        seconds_per_step = (time.monotonic() - self._started) / (step - self._start)
        seconds_left = timedelta(seconds=round(seconds_per_step * (self._total - step)))
        log.info(f"step {step}/{self._total}  {numbers}  {seconds_left} left")

    def close(self) -> None:
        self._bar.close()
