"""Trackers of a run's numbers: `logs.csv`, Weights & Biases and TensorBoard; a run needs `logs.csv` only."""

import csv
import importlib.util
import math
import os
import re
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from histocoder import distributed
from histocoder.checkpoints.model_files import CARD_FILE, CONFIG_FILE, MANIFEST_FILE, TOKENIZER_FOLDER, WEIGHTS_FILE
from histocoder.checkpoints.run_folder import LOG_FILE, RunFolder
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
    **{f"{name}_{k}": f"val/{name}_{k}_codes" for name in ("flat_acc", "greedy_seq_acc") for k in (1, 2, 3)},
    "lr": "hyperparams/lr",
    "grad_norm": "train/grad_norm",
    "samples_per_sec": "perf/rows_per_sec",
    "skipped_steps": "train/skipped_steps",
    "gpu_memory_gb": "perf/gpu_memory_gb",
}
"""Name of each number in W&B and TensorBoard."""
COLUMNS = ("step", *DASHBOARD_NAMES)  # columns of `logs.csv`
_WANDB_SECONDS = {"WANDB_INIT_TIMEOUT": "15", "WANDB_LOGIN_TIMEOUT": "15", "WANDB_FINISH_TIMEOUT": "20"}
"""W&B's own timeouts, which bound the time that it holds up a run's start and end."""
_UPLOAD_SECONDS = "600"
_Result = TypeVar("_Result")


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
        model = [folder / name for name in (CONFIG_FILE, WEIGHTS_FILE, MANIFEST_FILE, CARD_FILE)]
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
