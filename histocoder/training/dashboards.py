"""Weights & Biases and TensorBoard, which show a run's curves while it trains; a run depends on neither."""

import importlib.util
import os
import queue
import re
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from histocoder import distributed
from histocoder.checkpoints.model_files import CARD_FILE, CONFIG_FILE, MANIFEST_FILE, TOKENIZER_FOLDER, WEIGHTS_FILE
from histocoder.checkpoints.run_folder import LOG_FILE, RunFolder
from histocoder.config import RunConfig, recorded
from histocoder.errors import UserError
from histocoder.files import write_text
from histocoder.log import log
from histocoder.training.tracking import CsvLog, Tracker, dashboard_values

UPLOAD_SECONDS = 600.0  # time that an upload of the final model may hold up a run's end
_WANDB_SECONDS = {"WANDB_INIT_TIMEOUT": "15", "WANDB_LOGIN_TIMEOUT": "15", "WANDB_FINISH_TIMEOUT": "20"}
"""W&B's own timeouts, so that it gives up within `PATIENCE_SECONDS`."""


def check_dashboards(config: RunConfig) -> None:
    for name, is_requested in (("wandb", config.log_wandb), ("tensorboard", config.log_tensorboard)):
        if is_requested and importlib.util.find_spec(name) is None:
            raise UserError(f"--log-{name} needs {name}: pip install {name}.")


def run_name(encoder: str, system: str, *, world_size: int) -> str:
    """Return a run's name in W&B, such as canine-s_hisco_gpu4."""
    return f"{Path(encoder).name}_{system}_gpu{world_size}"


def open_trackers(config: RunConfig, run: RunFolder, *, start_step: int, system: str) -> Tracker:
    """Return what takes a run's numbers on rank 0: `logs.csv`, and the dashboards that the settings ask for."""
    if not distributed.is_primary():
        return Tracker()
    trackers: list[Tracker] = [CsvLog(run.logs, start_step=start_step)]
    if config.log_wandb:
        name = config.run_name or run_name(config.encoder, system, world_size=distributed.world_size())
        trackers.append(InBackground("W&B", lambda: WandbRun(run, config, name), patience_with_model=UPLOAD_SECONDS))
    if config.log_tensorboard:
        trackers.append(InBackground("TensorBoard", lambda: TensorBoardRun(run.tensorboard, start_step=start_step)))
    return Tracker(*trackers)


class WandbRun(Tracker):
    """A W&B run whose id is kept in the run's folder, so that a resumed run continues its curves."""

    def __init__(self, run: RunFolder, config: RunConfig, name: str) -> None:
        upload = {"WANDB_FINISH_TIMEOUT": f"{UPLOAD_SECONDS:g}"} if config.wandb_artifact else {}
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
        self._run.log(dashboard_values(values), step=step)

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

        _hush_writers()
        self._writer = SummaryWriter(str(folder), purge_step=start_step + 1)

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in dashboard_values(values).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _hush_writers() -> None:
    """Keep TensorBoard's threads from printing errors, which they pass on as well."""
    before = threading.excepthook

    def print_error(args: threading.ExceptHookArgs, /) -> None:
        if not type(args.thread).__module__.startswith("tensorboard."):
            before(args)

    threading.excepthook = print_error


PATIENCE_SECONDS = 30.0  # time that a service may hold up a run's start, and its end


class InBackground(Tracker):
    """Runs a tracker in its own thread: if it hangs or fails, one warning is shown and training continues without it.

    It waits `patience` seconds for the tracker at the start, and at the end for what it has not taken in yet, there
    `patience_with_model` if it was given the model. The tracker may lag behind by `room` calls.
    """

    def __init__(
        self,
        name: str,
        begin: Callable[[], Tracker],
        *,
        patience: float = PATIENCE_SECONDS,
        patience_with_model: float | None = None,
        room: int = 10_000,
    ) -> None:
        self._name, self._patience = name, patience
        self._patience_with_model = patience if patience_with_model is None else patience_with_model
        self._lines: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(room)
        self._begun = threading.Event()
        self._given_up = False
        self._thread = threading.Thread(target=self._work, args=(begin,), daemon=True)
        self._thread.start()
        if not self._begun.wait(patience):
            self._give_up(f"did not respond within {patience:g} s")

    def log(self, step: int, values: dict[str, float]) -> None:
        self._put(lambda tracker: tracker.log(step, values))

    def keep_model(self, folder: Path) -> None:
        self._patience = self._patience_with_model
        self._put(lambda tracker: tracker.keep_model(folder))

    def close(self) -> None:
        self._put(None)
        if not self._given_up:
            self._thread.join(self._patience)
        if self._thread.is_alive():
            self._give_up(f"did not receive everything within {self._patience:g} s")

    def _put(self, line: Callable[[Tracker], None] | None) -> None:
        try:
            if not self._given_up:
                self._lines.put_nowait(line)
        except queue.Full:
            self._give_up("is too far behind")

    def _work(self, begin: Callable[[], Tracker]) -> None:
        try:
            tracker = begin()
            self._begun.set()
            if self._given_up:
                tracker.close()
                return
            while (line := self._lines.get()) is not None:
                line(tracker)
            tracker.close()
        except (Exception, SystemExit) as error:  # a service's client may raise anything
            self._give_up(f"failed ({' '.join(str(error).split()) or type(error).__name__})")
        finally:
            self._begun.set()

    def _give_up(self, why: str) -> None:
        if not self._given_up:
            self._given_up = True
            log.warning(f"Warning: {self._name} {why}; the run continues without it. {LOG_FILE} has all metrics.")
