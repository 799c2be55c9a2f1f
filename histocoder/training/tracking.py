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
from pathlib import Path
from typing import Any, TypeAlias

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
_Dashboard: TypeAlias = tuple[Callable[[dict[str, float], int], object], Callable[[], object]]
"""Function that takes the numbers of a step, and one that ends the dashboard."""


class Tracker:
    """Takes a run's numbers; this one, of ranks but 0, ignores them."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """Take the numbers of a step; NaN stands for one that was not measured."""

    def close(self) -> None:
        """Finish what was begun."""


class RunLog(Tracker):
    """Writes `logs.csv` on rank 0, and sends numbers to dashboards, of which one that fails is left
    out with a warning.

    Lines of `logs.csv` beyond `start_step`, behind the last checkpoint, are removed.
    """

    def __init__(
        self,
        path: Path,
        dashboards: dict[str, Callable[[], _Dashboard]],
        *,
        start_step: int,
        attribute_cols: Sequence[str] = (),
    ) -> None:
        self._path, self._dashboards = path, dict[str, _Dashboard]()
        self._columns = (*COLUMNS, *(f"acc_{name}" for name in attribute_cols))
        kept = []
        if path.exists() and start_step:
            whole, _, _ = path.read_text(encoding="utf-8").rpartition(
                "\n"
            )  # a full disk may cut the last line
            kept = [
                row for row in csv.DictReader(whole.splitlines()) if int(row["step"]) <= start_step
            ]
        with (
            replacing(path) as temporary,
            temporary.open("w", encoding="utf-8", newline="") as file,
        ):
            writer = csv.DictWriter(file, self._columns, extrasaction="ignore", restval="")
            writer.writeheader()
            writer.writerows(kept)
        for name, begin in dashboards.items():
            with self._surviving(name):
                self._dashboards[name] = begin()

    def log(self, step: int, values: dict[str, float]) -> None:
        """Append a line; a cell is empty if the number was not measured."""
        measured = {name: value for name, value in values.items() if not math.isnan(value)}
        cells = {name: f"{value:.6g}" for name, value in measured.items()}
        try:
            with self._path.open("a", encoding="utf-8", newline="") as file:
                csv.DictWriter(file, self._columns, restval="").writerow({**cells, "step": step})
        except OSError as error:
            raise UserError(f"Could not write {self._path}: {error.strerror or error}.") from error
        for name, (send, _) in list(self._dashboards.items()):
            with self._surviving(name):
                send(
                    {
                        DASHBOARD_NAMES.get(column, f"val/{column}"): value
                        for column, value in measured.items()
                    },
                    step,
                )

    def close(self) -> None:
        for name, (_, close) in list(self._dashboards.items()):
            with self._surviving(name):
                close()

    @contextmanager
    def _surviving(self, name: str) -> Iterator[None]:
        """Leave a dashboard out, with a warning, if it fails."""
        try:
            yield
        except (Exception, SystemExit) as error:  # a service's client may raise anything
            self._dashboards.pop(name, None)
            why = " ".join(str(error).split()) or type(error).__name__
            log.warning(
                f"Warning: {name} failed ({why}); the run continues without it. {LOG_FILE} "
                "has all metrics."
            )


def open_tracker(config: RunConfig, run: RunFolder, *, start_step: int, system: str) -> Tracker:
    """Return what takes a run's numbers: on rank 0 `logs.csv`, and the dashboards that the settings
    ask for.
    """
    if not distributed.is_primary():
        return Tracker()
    dashboards: dict[str, Callable[[], _Dashboard]] = {}
    if config.log_wandb:
        dashboards["W&B"] = lambda: _begin_wandb(run, config, system)
    if config.log_tensorboard:
        dashboards["TensorBoard"] = lambda: _begin_tensorboard(run, start_step)
    return RunLog(
        run.logs, dashboards, start_step=start_step, attribute_cols=config.attribute_cols or ()
    )


def _begin_wandb(run: RunFolder, config: RunConfig, system: str) -> _Dashboard:
    """Open a W&B run, whose id is kept in the run's folder, so that a resumed run continues its
    curves.
    """
    for variable, seconds in _WANDB_SECONDS.items():
        os.environ.setdefault(variable, seconds)
    import wandb

    name = config.run_name or f"{Path(config.encoder).name}_{system}_gpu{distributed.world_size()}"
    run_id = (
        run.wandb_id.read_text(encoding="utf-8").strip()
        if run.wandb_id.exists()
        else uuid.uuid4().hex[:8]
    )
    options: dict[str, Any] = {"project": config.wandb_project_name, "config": recorded(config)}
    opened = wandb.init(name=name, id=run_id, resume="allow", dir=str(run.path), **options)
    write_text(run.wandb_id, run_id + "\n")
    return opened.log, opened.finish


def _begin_tensorboard(run: RunFolder, start_step: int) -> _Dashboard:
    """Open event files in `tensorboard/`; points beyond `start_step`, from after the last
    checkpoint, are hidden.
    """
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(run.tensorboard), purge_step=start_step + 1)

    def send(values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return send, writer.close


@dataclass
class Meter:
    """Sums loss, gradient norm and rows since the last read, on the device."""

    loss: Tensor | float = (
        0.0  # sum over steps, as `grad_norm` is, without those skipped as not finite
    )
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
        self.steps, self.rows = self.steps + 1, self.rows + rows

    def read(self) -> dict[str, float]:
        """Return means over all ranks and the steps that were not skipped (NaN without any), and
        reset the meter.
        """
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


class Progress:
    """Shows the steps of a run on rank 0: a bar on a terminal, and lines of numbers with the time
    left.
    """

    def __init__(self, total: int, *, start: int = 0) -> None:
        self._total, self._start, self._started = total, start, time.monotonic()
        show = (
            None if distributed.is_primary() else True
        )  # None: disabled unless standard error is a terminal
        self._bar = tqdm(
            total=total, initial=start, unit="step", dynamic_ncols=True, smoothing=0.1, disable=show
        )

    def advance(self) -> None:
        self._bar.update()

    def line(self, step: int, values: dict[str, float]) -> None:
        """Print a line with the step, some numbers, and the time left."""
        numbers = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
        seconds = (time.monotonic() - self._started) / (step - self._start) * (self._total - step)
        log.info(f"step {step}/{self._total}  {numbers}  {timedelta(seconds=round(seconds))} left")

    def close(self) -> None:
        self._bar.close()
