"""The folder of a run: the names of its files, the lock on it, and the checkpoint that the run resumes from."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from histocoder import distributed
from histocoder.checkpoints.lock import LOCK_FILE, holding
from histocoder.checkpoints.model_files import (
    CARD_FILE,
    CONFIG_FILE,
    MANIFEST_FILE,
    TOKENIZER_FOLDER,
    WEIGHTS_FILE,
    save_model,
)
from histocoder.checkpoints.nodes import on_each_node
from histocoder.checkpoints.training_state import (
    BEST_FOLDER,
    CHECKPOINTS_FOLDER,
    LAST_BIN_FILE,
    Checkpoint,
    drop_checkpoints_after,
    find_checkpoint,
    list_checkpoints,
    load_checkpoint,
    step_of,
)
from histocoder.config import ModelConfig
from histocoder.data.prepare import PREPARED_TABLES
from histocoder.data.store import PREPARED_FILE
from histocoder.errors import Interrupted, UserError
from histocoder.files import is_same_file, make_folder, remove_leftovers, replacing_folder, write_text
from histocoder.model import Tokenizer
from histocoder.signals import handling_stop_signals

REPORT_FILE, METRICS_FILE, FIGURES_FOLDER = "report.html", "metrics.json", "report"
LOG_FILE, WANDB_ID_FILE = "logs.csv", "wandb_run_id"
TENSORBOARD_FOLDER, PROFILE_FOLDER = "tensorboard", "profile"
CACHE_FOLDER = "cache"
INTERRUPTED_FILE, LAUNCHER_FILE = "interrupted.json", ".launcher"
ARGS_FILE = "args.yaml"
"""First file that training writes; in a folder that holds it, the files and folders below belong to a run."""
_MODEL_FILES = (CONFIG_FILE, WEIGHTS_FILE, MANIFEST_FILE, CARD_FILE)
_FILES = (*_MODEL_FILES, LAST_BIN_FILE, LOG_FILE, WANDB_ID_FILE, METRICS_FILE, REPORT_FILE)
_FOLDERS = (CHECKPOINTS_FOLDER, BEST_FOLDER, TOKENIZER_FOLDER, FIGURES_FOLDER, TENSORBOARD_FOLDER, PROFILE_FOLDER)
"""Folders that a new run deletes; prepared data and `cache/` stay."""


def run_of(model: Path) -> Path:
    """Return the folder of the run that a model belongs to: the model's own, or above best/ and checkpoints/step-…/."""
    model = model.resolve()
    if model.parent.name == CHECKPOINTS_FOLDER:
        return model.parents[1]
    return model.parent if model.name == BEST_FOLDER else model


def run_settings(run: Path) -> dict[str, Any]:
    """Return the content of a run's `args.yaml`; an empty dict where there is none."""
    path = run / ARGS_FILE
    return yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}


class RunFolder:
    """A folder that a run writes to, with the paths of what the run keeps there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.best, self.cache = path / BEST_FOLDER, path / CACHE_FOLDER
        self.profile, self.tensorboard = path / PROFILE_FOLDER, path / TENSORBOARD_FOLDER
        self.logs, self.wandb_id = path / LOG_FILE, path / WANDB_ID_FILE
        self._args, self._interrupted = path / ARGS_FILE, path / INTERRUPTED_FILE
        self._launcher = path / LAUNCHER_FILE

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[RunFolder]:
        """Make a run's folder and lock it; a stop signal ends the run and is recorded in `interrupted.json`.

        All ranks raise a UserError if another run holds the folder, it can't be written to, or a run would replace or
        delete files that histocoder did not create.
        """
        run, is_new = cls(path), not path.exists()
        distributed.run_on_primary(lambda: make_folder(path), doing="making the run's folder")
        try:
            with (
                holding(path / LOCK_FILE, path=path, instead="another folder"),
                run._marking_interruptions(),
            ):
                distributed.run_on_primary(run._refuse_others_files, doing="looking at the run's folder")
                yield run
        finally:
            if is_new and distributed.is_primary():
                with suppress(OSError):
                    path.rmdir()  # succeeds if the run has written nothing

    def _refuse_others_files(self) -> None:
        if self._args.is_file():
            return
        prepared = () if (self.path / PREPARED_FILE).is_file() else PREPARED_TABLES
        found = [name for name in (*prepared, *_FILES, *_FOLDERS) if os.path.lexists(self.path / name)]
        if found:
            raise UserError(
                f"{self.path} is not a run's folder, and contains {', '.join(found)}, which a run would replace. "
                "Choose a new folder."
            )

    def begin(self, settings: dict[str, Any], checkpoint: Checkpoint | None) -> None:
        """Write `args.yaml`, and delete what an earlier run wrote after the checkpoint, if any; called on rank 0."""
        for part in (self.path, self.path / CHECKPOINTS_FOLDER, self.best, self.cache):
            remove_leftovers(part)
        if checkpoint is not None and self._is_own(checkpoint.path):
            drop_checkpoints_after(self.path, checkpoint.state.step)
        elif self._args.is_file():
            for name in _FOLDERS:
                shutil.rmtree(self.path / name, ignore_errors=True)
            for name in _FILES:
                (self.path / name).unlink(missing_ok=True)
        self._interrupted.unlink(missing_ok=True)
        if distributed.launcher() is not None:
            write_text(self._launcher, _launcher())
        write_text(self._args, yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))

    def checkpoint(self, resume: str, *, overwrite: bool = False) -> Checkpoint | None:
        """Find a checkpoint on rank 0 and load it on every rank; nodes that do not see it receive a copy.

        Processes that their launcher has restarted resume their own run, whatever `resume` is. The validation results
        in another run's checkpoint are dropped: the best model that they refer to is not in this folder.

        Raises a UserError if the folder holds a model that a new run would delete, unless it may `overwrite` it.
        """
        asked = "never" if overwrite and resume == "auto" else resume

        def find() -> tuple[str, bool]:
            began_here = distributed.restarts() > 0 and _read(self._launcher) == _launcher()
            found = find_checkpoint(self.path, "auto") if began_here else None
            found = found or find_checkpoint(self.path, asked)
            is_own = found is not None and self._is_own(found)
            if not (is_own or overwrite or began_here):
                self._refuse_to_delete(resume)
            return str(found or ""), is_own

        found, is_own = distributed.broadcast_from_primary(find, doing="verifying checkpoints")
        if not found:
            return None
        copy = self.path / f".{Path(found).name}.copy.tmp"
        path = on_each_node(Path(found), marker=MANIFEST_FILE, copy=copy, files=("**/*",))
        checkpoint = load_checkpoint(path)
        if not is_own:
            state = checkpoint.state
            state.best_accuracy, state.best_val_loss, state.num_worse, state.results = -math.inf, math.inf, 0, None
        distributed.barrier(doing="loading the checkpoint")
        if path == copy and distributed.is_local_primary():
            shutil.rmtree(copy)
            with suppress(OSError):
                self.path.rmdir()  # succeeds if this node keeps nothing else
        return checkpoint

    def _is_own(self, checkpoint: Path) -> bool:
        return is_same_file(checkpoint.parent, self.path / CHECKPOINTS_FOLDER)

    def _refuse_to_delete(self, resume: str) -> None:
        """Raise a UserError if there is a model, but for best/ alone of a run killed before its first checkpoint."""
        found = [self.path / WEIGHTS_FILE, *list_checkpoints(self.path), *([self.best] if resume != "auto" else [])]
        if any(map(os.path.lexists, found)):
            raise UserError(
                f"{self.path} holds the model of an earlier run, which a new run would delete. Choose another folder, "
                "or add --overwrite."
            )

    def save_model(
        self, folder: Path, config: ModelConfig, weights: dict[str, Tensor], *, tokenizer: Tokenizer, card: str | None
    ) -> None:
        """Write a model and its card: best/ as a whole, the run's own folder file by file, as it holds more."""
        whole = replacing_folder(folder) if folder == self.best else nullcontext(folder)
        with whole as target:
            save_model(target, config, weights, tokenizer=tokenizer, card=card)

    def forget_results(self) -> None:
        """Delete what an earlier end of the run wrote about its model: the report, and last.bin."""
        for name in (REPORT_FILE, METRICS_FILE, LAST_BIN_FILE):
            (self.path / name).unlink(missing_ok=True)
        shutil.rmtree(self.path / FIGURES_FOLDER, ignore_errors=True)

    def mark_interrupted(self, *, step: int, signum: int) -> None:
        """Write `interrupted.json` with the signal that ended a run, and the step that was saved."""
        record = {"step": step, "reason": signal.Signals(signum).name, "status": 128 + signum}
        write_text(self._interrupted, json.dumps(record, indent=2) + "\n")

    @contextmanager
    def _marking_interruptions(self) -> Iterator[None]:
        """End the run with a message and `interrupted.json` at a stop signal before or after training."""

        def end(signum: int, _frame: object) -> None:
            raise Interrupted(f"{signal.Signals(signum).name}: stopped. Run the same command again to resume.", signum)

        try:
            with handling_stop_signals(end):
                yield
        except Interrupted as error:
            if (self.path / LOCK_FILE).exists() and not self._interrupted.exists():  # on rank 0's node
                step = max(map(step_of, list_checkpoints(self.path)), default=0)
                with suppress(UserError):
                    self.mark_interrupted(step=step, signum=error.signum)
            raise

    def raise_if_interrupted(self) -> None:
        """Raise Interrupted, on all ranks, if a launcher restarts (--max-restarts) a run that was asked to stop."""
        record = distributed.broadcast_from_primary(
            lambda: _read(self._interrupted) if distributed.restarts() else "", doing="reading interrupted.json"
        )
        if record:
            values = json.loads(record)
            raise Interrupted(f"{values['reason']}: saved at step {values['step']}.", values["status"] - 128)


def _launcher() -> str:
    return f"process {distributed.launcher()} of {socket.gethostname()}"


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""
