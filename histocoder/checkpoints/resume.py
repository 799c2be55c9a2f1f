"""Resuming a run: find the newest intact checkpoint, load it, and compare its settings with the current ones."""

from __future__ import annotations

import json
import math
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from histocoder import distributed
from histocoder.checkpoints.lock import LOCK_FILE
from histocoder.checkpoints.model_files import MANIFEST_FILE
from histocoder.checkpoints.training_state import (
    CHECKPOINTS_FOLDER,
    Checkpoint,
    is_checkpoint,
    list_checkpoints,
    load_checkpoint,
    step_of,
    verify_checkpoint,
)
from histocoder.distributed.launch import launcher, restarts
from histocoder.distributed.nodes import on_each_node
from histocoder.distributed.signals import STOP_SIGNALS
from histocoder.errors import DamagedError, Interrupted, UserError
from histocoder.files import is_same_file, replacing

INTERRUPTED_FILE, LAUNCHER_FILE = "interrupted.json", ".launcher"
BATCH_SETTINGS = {
    "--batch-size": "rows a step",
    "--tokens-per-batch": "positions a step",
}
"""Settings aggregated over all ranks, by the flag that sets the value per rank."""


def find_checkpoint(folder: Path, resume: str, *, warn: Callable[[str], None] = print) -> Path | None:
    """Find and verify the checkpoint that a run resumes from.

    Parameters
    ----------
    folder : Path
        The run's.
    resume : str
        "auto" (the newest intact one, if any), "never", or the path of a checkpoint or of a run.
    warn : callable
        Receives a message for each damaged checkpoint that is skipped.

    Raises
    ------
    UserError
        If there are checkpoints but none is intact, if the given path holds none, or if one was written in a format
        that this version does not read.
    """
    if resume == "never":
        return None
    path = folder if resume == "auto" else Path(resume)
    if resume != "auto" and is_checkpoint(path):
        verify_checkpoint(path)
        return path
    damage = ""
    for checkpoint in reversed(list_checkpoints(path)):
        try:
            verify_checkpoint(checkpoint)
        except DamagedError as error:
            damage = damage or str(error)
            warn(f"Warning: {error} Looking for an older checkpoint.")
        else:
            return checkpoint
    if damage:
        raise UserError(f"{damage} No older checkpoint in {path} is intact; start a new run with --resume never.")
    if resume != "auto":
        raise UserError(f"--resume {resume}: no checkpoint is there. Name a folder checkpoints/step-…, or a run's.")
    return None


def open_checkpoint(folder: Path, resume: str) -> Checkpoint | None:
    """Call `find_checkpoint` on rank 0, and load the result on every rank; nodes that do not see it receive a copy.

    Processes that their launcher has restarted resume their own run, whatever `resume` says. The validation results in
    another run's checkpoint are dropped: the best model that they refer to is not in this folder.
    """

    def find() -> tuple[str, bool]:
        began_here = restarts() > 0 and _read(folder / LAUNCHER_FILE) == _launcher()
        found = find_checkpoint(folder, "auto" if began_here else resume)
        return str(found or ""), found is not None and is_same_file(found.parent, folder / CHECKPOINTS_FOLDER)

    found, is_own = distributed.from_primary(distributed.run_on_primary(find, doing="verifying checkpoints"))
    if not found:
        return None
    copy = folder / f".{Path(found).name}.copy.tmp"
    path = on_each_node(Path(found), marker=MANIFEST_FILE, copy=copy, files="**/*")
    checkpoint = load_checkpoint(path)
    if not is_own:
        state = checkpoint.state
        state.best_accuracy, state.best_val_loss, state.num_worse, state.results = -math.inf, math.inf, 0, None
    distributed.wait_for_all(doing="loading the checkpoint")
    if path == copy and distributed.is_first_here():
        shutil.rmtree(copy)
        with suppress(OSError):
            folder.rmdir()  # where nothing else is kept on this node
    return checkpoint


def refuse_other_settings(
    checkpoint: Checkpoint, settings: dict[str, Any], folder: Path, *, gradient_accumulation_steps: int
) -> None:
    """Raise a UserError with a table of the settings that differ between a checkpoint and the current run.

    Settings that an earlier histocoder did not record are assumed to agree.
    """
    then = checkpoint.settings
    rows = [
        (name, str(then[name]), str(value)) for name, value in settings.items() if name in then and then[name] != value
    ]
    if not rows:
        return
    rows.insert(0, ("setting", "then", "now"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    raise UserError(
        f"The run in {folder} can't be resumed with other settings. Use the earlier ones, or start a new run with "
        "--resume never:\n" + "\n".join([*table, *_what_keeps_the_batch(then, settings, gradient_accumulation_steps)])
    )


def _what_keeps_the_batch(then: dict[str, Any], now: dict[str, Any], num_accumulated: int) -> Iterator[str]:
    """Yield sentences on what to set for this number of processes and of accumulated batches."""
    processes = distributed.world_size()
    what = f"{processes} process{'es' * (processes > 1)}"
    if num_accumulated > 1:
        what += f" and --gradient-accumulation-steps {num_accumulated}"
    num_parts = processes * num_accumulated
    for flag, name in BATCH_SETTINGS.items():
        if (wanted := then.get(name)) is not None and now[name] is not None and wanted != now[name]:
            if wanted % num_parts == 0:
                yield f"With {what}, set {flag} {wanted // num_parts}."
            else:
                yield f"{wanted} can't be shared equally by {what}; choose numbers that divide it."


def mark_begun(folder: Path) -> None:
    """Note in a run's folder by which launcher it was opened, and that it is not interrupted; rank 0's part."""
    (folder / INTERRUPTED_FILE).unlink(missing_ok=True)
    if launcher() is not None:
        with replacing(folder / LAUNCHER_FILE) as temporary:
            temporary.write_text(_launcher(), encoding="utf-8")


def mark_interrupted(folder: Path, *, step: int, signum: int) -> None:
    """Write `interrupted.json`, which says that a run was asked to stop, and the step that it has saved."""
    record = {"step": step, "reason": signal.Signals(signum).name, "status": 128 + signum}
    with replacing(folder / INTERRUPTED_FILE) as temporary:
        temporary.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


@contextmanager
def marking_interruptions(folder: Path) -> Iterator[None]:
    """End the run with a message and `interrupted.json` when it is asked to stop before or after training.

    Raises
    ------
    Interrupted
        When a stop signal arrives.
    """

    def end(signum: int, _frame: object) -> None:
        raise Interrupted(f"{signal.Signals(signum).name}: ended. When started again, the run resumes.", signum)

    before = {signum: signal.signal(signum, end) for signum in STOP_SIGNALS}
    try:
        yield
    except Interrupted as error:
        if (folder / LOCK_FILE).exists() and not (folder / INTERRUPTED_FILE).exists():  # and on rank 0's node
            with suppress(UserError):
                mark_interrupted(
                    folder, step=max(map(step_of, list_checkpoints(folder)), default=0), signum=error.signum
                )
        raise
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def stay_interrupted(folder: Path) -> None:
    """End processes that a launcher restarts (--max-restarts) although they had been asked to stop.

    Raises
    ------
    Interrupted
        On every process.
    """

    def find() -> str:
        return _read(folder / INTERRUPTED_FILE) if restarts() else ""

    if record := distributed.from_primary(distributed.run_on_primary(find, doing="looking for interrupted.json")):
        values = json.loads(record)
        raise Interrupted(f"{values['reason']}: saved at step {values['step']}.", values["status"] - 128)


def _launcher() -> str:
    return f"process {launcher()} of {socket.gethostname()}"


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""
