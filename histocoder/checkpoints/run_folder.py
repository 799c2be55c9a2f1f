"""The folder of a run: the names of its files, the lock on it, and the checkpoint that the run
resumes from.
"""

import filecmp
import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import yaml
from filelock import FileLock, Timeout

from histocoder import distributed
from histocoder.checkpoints import run_files, training_state
from histocoder.checkpoints.model_files import WEIGHTS_FILE
from histocoder.checkpoints.run_files import (
    ARGS_FILE,
    LOG_FILE,
    RECORD_FILE,
    TENSORBOARD_FOLDER,
    WANDB_ID_FILE,
)
from histocoder.checkpoints.training_state import (
    BEST_FOLDER,
    CHECKPOINTS_FOLDER,
    STATE_FILE,
    Checkpoint,
)
from histocoder.config import NO_COLUMN
from histocoder.data import prepared_folder
from histocoder.errors import Interrupted, UserError
from histocoder.files import (
    existing,
    is_same_file,
    make_folder,
    remove_files,
    remove_leftovers,
    replace_by_link,
    write_text,
)
from histocoder.signals import handling_stop_signals

LOCK_FILE = ".lock"
_LATE_SECONDS = 5.0  # time after which a network disk shows a file that another machine has written


def run_of(model: Path) -> Path:
    """Return the folder of the run that a model belongs to: the model's own, or above best/ and
    checkpoints/step-…/.
    """
    model = model.resolve()
    if model.parent.name == CHECKPOINTS_FOLDER:
        return model.parents[1]
    return model.parent if model.name == BEST_FOLDER else model


def run_settings(run: Path) -> dict[str, Any]:
    """Return the content of a run's `args.yaml`, None as the column of languages "none"; an empty
    dict without one.
    """
    path = run / ARGS_FILE
    if not path.is_file():
        return {}
    settings: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    if settings.get("language_col") == NO_COLUMN:
        settings["language_col"] = None
    return settings


@contextmanager
def holding(lock: Path, *, path: Path, instead: str) -> Iterator[None]:
    """Hold a lock file, shared by all ranks; a second run that tries to take it ends at once.

    The operating system or the file server releases the lock when its process ends, however it
    ends, so the file of a killed run blocks nobody. Loader workers do not inherit it. On a file
    system without locks, nothing is held. The error says that `path` is in use, and what to choose
    `instead`.
    """
    # a run that is just ending deletes its file within this time
    file_lock = FileLock(lock, timeout=0.2, fallback_to_soft=False)

    def take() -> None:
        try:
            file_lock.acquire()
        except Timeout as error:
            raise UserError(
                f"{path} is in use by another run. Wait until it ends, or choose {instead}."
            ) from error
        except OSError:
            pass  # the file system has no locks

    distributed.run_on_primary(take, doing="locking the folder")
    try:
        yield
    finally:
        if distributed.is_primary():
            with suppress(OSError):
                lock.unlink()  # while the lock is held, so that no other run's file is deleted
        file_lock.release()


def check_shared(path: Path) -> None:
    """Raise a UserError, on all ranks, unless each sees a file as rank 0 does."""

    def content() -> bytes | None:
        return path.read_bytes() if path.is_file() else None

    # A network disk may show for some seconds what the file was before.
    original = distributed.broadcast(content())
    deadline = time.monotonic() + _LATE_SECONDS
    while content() != original and time.monotonic() < deadline:
        time.sleep(0.1)
    if not all(distributed.gather_objects(content() == original)):
        raise UserError(
            f"{path.parent} is not the folder that rank 0 writes to. Name one that all nodes see."
        )


def _stop(signum: int, _frame: object) -> NoReturn:
    """End a run at a stop signal before or after training, which saves first."""
    raise Interrupted(
        f"{signal.Signals(signum).name}: stopped. Run the same command again to resume.", signum
    )


class RunFolder:
    """A folder that a run writes to, with the paths of what the run keeps there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.best = path / BEST_FOLDER
        self.tensorboard = path / TENSORBOARD_FOLDER
        self.logs = path / LOG_FILE
        self.wandb_id = path / WANDB_ID_FILE
        self._args = path / ARGS_FILE

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator["RunFolder"]:
        """Make a run's folder and lock it; a stop signal ends the run.

        All ranks raise a UserError if another run holds the folder, it can't be written to, or a
        run would replace or delete files that histocoder did not create.
        """
        run = cls(path)
        is_new = not path.exists()
        distributed.run_on_primary(lambda: make_folder(path), doing="making the run's folder")
        try:
            with (
                holding(path / LOCK_FILE, path=path, instead="another folder"),
                handling_stop_signals(_stop),
            ):
                distributed.run_on_primary(run._claim, doing="looking at the run's folder")
                with run._keeping_earlier_data():
                    yield run
        finally:
            if is_new and distributed.is_primary():
                with suppress(OSError):
                    path.rmdir()  # succeeds if the run has written nothing

    @contextmanager
    def _keeping_earlier_data(self) -> Iterator[None]:
        """Put the data of an earlier run back if this one fails; delete the record of a run that
        has written nothing.
        """
        try:
            yield
        except BaseException:
            if distributed.is_primary():
                prepared_folder.put_back_earlier(self.path)
            raise
        else:
            if distributed.is_primary():
                prepared_folder.forget_earlier(self.path)
        finally:
            if distributed.is_primary() and not run_files.has_files(self.path):
                (self.path / RECORD_FILE).unlink(missing_ok=True)

    def _claim(self) -> None:
        """Record that the folder is this run's, and restore data that a killed run replaced."""
        run_files.claim(self.path)
        prepared_folder.put_back_earlier(self.path)

    def begin(self, settings: dict[str, Any], checkpoint: Checkpoint | None) -> None:
        """Write `args.yaml`, and delete what an earlier run wrote after the checkpoint, if any;
        called on rank 0.
        """
        for part in (self.path, self.path / CHECKPOINTS_FOLDER, self.best):
            remove_leftovers(part)
        if checkpoint is not None and self._is_own(checkpoint.path):
            for path in training_state.list_checkpoints(self.path):
                if training_state.step_of(path) > checkpoint.state.step:
                    training_state.delete_checkpoint(path)
        else:
            remove_files(run_files.trained_files(self.path))
        run_files.record_begin(self.path)
        write_text(self._args, yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
        prepared_folder.forget_earlier(self.path)

    def load_checkpoint(self, resume: str, *, overwrite: bool = False) -> Checkpoint | None:
        """Find a checkpoint on rank 0 and load it on every rank.

        Processes that their launcher has restarted resume their own run, whatever `resume` is. The
        validation results in another run's checkpoint are dropped.

        Raises a UserError if the folder holds a model that a new run would delete, unless it may
        `overwrite` it.
        """
        # Rank 0 looks for an intact checkpoint, and has then read it; elsewhere `checkpoint` is None.
        checkpoint = distributed.run_on_primary(
            lambda: self._find_checkpoint(resume, overwrite=overwrite), doing="reading checkpoints"
        )
        path = distributed.broadcast(None if checkpoint is None else checkpoint.path)
        if path is None:
            return None

        # The other ranks read the same files, which a network disk may show late.
        check_shared(path / STATE_FILE)
        if checkpoint is None:
            checkpoint = training_state.load_checkpoint(path)

        # The best model of another run is not in this folder, so none is better than the next.
        if not self._is_own(path):
            checkpoint.state.best_accuracy = -math.inf
            checkpoint.state.best_val_loss = math.inf
            checkpoint.state.results = None
        return checkpoint

    def _find_checkpoint(self, resume: str, *, overwrite: bool) -> Checkpoint | None:
        """Load an intact checkpoint, if any, as `load_checkpoint` describes; called on rank 0."""
        is_restarted = run_files.was_restarted(self.path)
        checkpoint = None
        if is_restarted:
            checkpoint = training_state.find_checkpoint(self.path, "auto")
        if checkpoint is None:
            source = "never" if overwrite and resume == "auto" else resume
            checkpoint = training_state.find_checkpoint(self.path, source)

        # A new run deletes the model of an earlier one only if it is asked to.
        is_own = checkpoint is not None and self._is_own(checkpoint.path)
        if is_restarted or is_own or overwrite:
            return checkpoint
        models = self._models()
        # a run that was killed without a checkpoint, before the first one or because it adapts a
        # model without a step, is repeated by "auto"
        if resume != "auto":
            models.append(self.best)
        elif run_files.was_interrupted(self.path):
            models = training_state.list_checkpoints(self.path)
        if any(map(os.path.lexists, models)):
            raise UserError(
                f"{self.path} holds the model of an earlier run, which a new run would delete. "
                "Choose another folder, or add --overwrite."
            )
        return checkpoint

    def refuse_model(self) -> None:
        """Raise a UserError if there is a model, beside which new data would be prepared; called on
        rank 0.
        """
        if any(map(os.path.lexists, [*self._models(), self.best])):
            raise UserError(
                f"{self.path} holds the model of an earlier run, beside which --prepare-only "
                "would leave other data. Choose another folder, or omit --prepare-only to replace "
                "both."
            )

    def _models(self) -> list[Path]:
        return [self.path / WEIGHTS_FILE, *training_state.list_checkpoints(self.path)]

    def _is_own(self, checkpoint: Path) -> bool:
        return is_same_file(checkpoint.parent, self.path / CHECKPOINTS_FOLDER)

    def end(self, *, keep_checkpoints: bool) -> None:
        """Keep what a run that has ended needs: equal models share their weights' file, and saved
        states go if they are not to be kept; called on rank 0.
        """
        last_weights = self.path / WEIGHTS_FILE
        best_weights = self.best / WEIGHTS_FILE
        are_two = best_weights.is_file() and not is_same_file(last_weights, best_weights)
        if are_two and filecmp.cmp(last_weights, best_weights, shallow=False):
            replace_by_link(best_weights, last_weights)

        # without its checkpoints, a run that has ended is not one that was killed
        run_files.record_end(self.path)
        if not keep_checkpoints:
            for checkpoint in training_state.list_checkpoints(self.path):
                training_state.delete_checkpoint(checkpoint)
            with suppress(OSError):
                (self.path / CHECKPOINTS_FOLDER).rmdir()  # unless it holds other files

    def forget_results(self) -> None:
        """Delete what an earlier end of the run wrote about its model: the report, and last.bin."""
        remove_files(existing(self.path, run_files.RESULTS))
