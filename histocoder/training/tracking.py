"""Numbers of a run: measured, shown as it trains, written to `logs.csv`, and sent to W&B and TensorBoard."""

import csv
import importlib.util
import math
import os
import re
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, schedule
from tqdm import tqdm

from histocoder import distributed
from histocoder.checkpoints.model_files import CARD_FILE, CONFIG_FILE, TOKENIZER_FOLDER, WEIGHTS_FILE
from histocoder.checkpoints.run_folder import LOG_FILE, RunFolder
from histocoder.config import RunConfig, recorded
from histocoder.errors import UserError
from histocoder.files import make_folder, replacing, write_text
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
    **{f"{name}_{k}": f"val/{name}_{k}_codes" for name in ("flat_acc", "greedy_seq_acc") for k in (1, 2, 3)},
    "lr": "hyperparams/lr",
    "grad_norm": "train/grad_norm",
    "samples_per_sec": "perf/rows_per_sec",
    "skipped_steps": "train/skipped_steps",
}
"""Name of each number in W&B and TensorBoard."""
COLUMNS = ("step", *DASHBOARD_NAMES)  # columns of `logs.csv`
_WANDB_SECONDS = {"WANDB_INIT_TIMEOUT": "15", "WANDB_LOGIN_TIMEOUT": "15", "WANDB_FINISH_TIMEOUT": "20"}
"""W&B's own timeouts, which bound the time that it holds up a run's start and end."""
_UPLOAD_SECONDS = "600"
_Result = TypeVar("_Result")

SKIPPED_STEPS = 5  # steps before those that are profiled, which start workers, compile, and choose kernels
_WARM_UP_STEPS = 2  # of the profiler's own
_TABLE_ROWS = 30

ESTIMATE_AFTER = 20  # steps after which a run estimates how long it will take
_FIRST_STEPS = 5  # steps left out of the estimate: they start workers, compile, and choose kernels


class Tracker:
    """Takes a run's numbers and its final model; this one, of ranks but 0, ignores them."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """Take the numbers of a step; NaN stands for one that was not measured."""

    def keep_model(self, folder: Path) -> None:
        """Take the final model, which stays as it is until `close`."""

    def close(self) -> None:
        """Finish what was begun."""


class Trackers(Tracker):
    """Rank 0's trackers: `logs.csv`, and dashboards, of which one that fails is left out after a warning."""

    def __init__(self, logs: Tracker, dashboards: dict[str, Callable[[], Tracker]]) -> None:
        self._logs, self._dashboards = logs, dict[str, Tracker]()
        for name, begin in dashboards.items():
            if (dashboard := self._attempt(name, begin)) is not None:
                self._dashboards[name] = dashboard

    def log(self, step: int, values: dict[str, float]) -> None:
        self._logs.log(step, values)
        named = {DASHBOARD_NAMES[name]: value for name, value in values.items() if not math.isnan(value)}
        for name, dashboard in list(self._dashboards.items()):
            self._attempt(name, partial(dashboard.log, step, named))

    def keep_model(self, folder: Path) -> None:
        for name, dashboard in list(self._dashboards.items()):
            self._attempt(name, partial(dashboard.keep_model, folder))

    def close(self) -> None:
        for name, dashboard in list(self._dashboards.items()):
            self._attempt(name, dashboard.close)

    def _attempt(self, name: str, call: Callable[[], _Result]) -> _Result | None:
        try:
            return call()
        except (Exception, SystemExit) as error:  # a service's client may raise anything
            self._dashboards.pop(name, None)
            why = " ".join(str(error).split()) or type(error).__name__
            log.warning(f"Warning: {name} failed ({why}); the run continues without it. {LOG_FILE} has all metrics.")
            return None


def check_dashboards(config: RunConfig) -> None:
    """Raise a UserError if the package of a dashboard is missing."""
    for name, is_requested in (("wandb", config.log_wandb), ("tensorboard", config.log_tensorboard)):
        if is_requested and importlib.util.find_spec(name) is None:
            raise UserError(f"--log-{name} needs {name}: pip install {name}.")


def open_trackers(config: RunConfig, run: RunFolder, *, start_step: int, system: str) -> Tracker:
    """Return what takes a run's numbers on rank 0: `logs.csv`, and the dashboards that the settings ask for."""
    if not distributed.is_primary():
        return Tracker()
    dashboards: dict[str, Callable[[], Tracker]] = {}
    if config.log_wandb:
        name = config.run_name or f"{Path(config.encoder).name}_{system}_gpu{distributed.world_size()}"
        dashboards["W&B"] = lambda: WandbRun(run, config, name)
    if config.log_tensorboard:
        dashboards["TensorBoard"] = lambda: TensorBoardRun(run.tensorboard, start_step=start_step)
    return Trackers(CsvLog(run.logs, start_step=start_step), dashboards)


class CsvLog(Tracker):
    """Writes `logs.csv`, a line per log call; lines beyond `start_step`, behind the last checkpoint, are removed."""

    def __init__(self, path: Path, *, start_step: int = 0) -> None:
        self._path = path
        kept = []
        if self._path.exists() and start_step:
            whole, _, _ = self._path.read_text(encoding="utf-8").rpartition("\n")  # a full disk may cut the last line
            kept = [row for row in csv.DictReader(whole.splitlines()) if int(row["step"]) <= start_step]
        with replacing(self._path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", restval="")
            writer.writeheader()
            writer.writerows(kept)

    def log(self, step: int, values: dict[str, float]) -> None:
        """Append a line; a cell is empty if the number was not measured."""
        cells = {name: f"{value:.6g}" for name, value in values.items() if not math.isnan(value)}
        try:
            with self._path.open("a", encoding="utf-8", newline="") as file:
                csv.DictWriter(file, COLUMNS, restval="").writerow({**cells, "step": step})
        except OSError as error:
            raise UserError(f"Could not write {self._path}: {error.strerror or error}.") from error


class WandbRun(Tracker):
    """A W&B run whose id is kept in the run's folder, so that a resumed run continues its curves."""

    def __init__(self, run: RunFolder, config: RunConfig, name: str) -> None:
        upload = {"WANDB_FINISH_TIMEOUT": _UPLOAD_SECONDS} if config.wandb_artifact else {}
        # W&B copies models before it sends them: to the run's folder, which has room, not to the user's home
        for variable, value in {**_WANDB_SECONDS, **upload, "WANDB_DATA_DIR": str(run.path / "wandb")}.items():
            os.environ.setdefault(variable, value)
        import wandb

        run_id = run.wandb_id.read_text(encoding="utf-8").strip() if run.wandb_id.exists() else uuid.uuid4().hex[:8]
        self._name = name
        options: dict[str, Any] = {"project": config.wandb_project_name, "config": recorded(config)}
        self._run = wandb.init(name=name, id=run_id, resume="allow", dir=str(run.path), **options)
        write_text(run.wandb_id, run_id + "\n")

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def keep_model(self, folder: Path) -> None:
        """Send the final model as a new version of the artifact with the run's name."""
        import wandb

        artifact = wandb.Artifact(re.sub(r"[^\w.-]", "-", self._name, flags=re.ASCII), type="model")
        tokenizer = sorted(path for path in (folder / TOKENIZER_FOLDER).rglob("*") if path.is_file())
        model = [folder / name for name in (CONFIG_FILE, WEIGHTS_FILE, CARD_FILE)]
        for path in (*model, *tokenizer):
            artifact.add_file(str(path), name=path.relative_to(folder).as_posix(), skip_cache=True)
        self._run.log_artifact(artifact)

    def close(self) -> None:
        self._run.finish()


class TensorBoardRun(Tracker):
    """Event files in `tensorboard/`; points beyond `start_step`, from after the last checkpoint, are hidden."""

    def __init__(self, folder: Path, *, start_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=start_step + 1)

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


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
