"""Resuming a run: find the newest intact checkpoint, and compare its settings with the current ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from histocoder import distributed
from histocoder.checkpoints.training_state import Checkpoint, is_checkpoint, list_checkpoints, verify_checkpoint
from histocoder.distributed.log import log
from histocoder.errors import DamagedError, UserError

BATCH_SETTINGS = {
    "--batch-size": "rows a step",
    "--tokens-per-batch": "positions a step",
}
"""Settings aggregated over all ranks, by the flag that sets the value per rank."""


def find_checkpoint(folder: Path, resume: str) -> Path | None:
    """Find and verify the checkpoint that a run resumes from; damaged ones that are skipped are named.

    Parameters
    ----------
    folder : Path
        The run's.
    resume : str
        "auto" (the newest intact one, if any), "never", or the path of a checkpoint or of a run.

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
            log.info(f"Warning: {error} Looking for an older checkpoint.")
        else:
            return checkpoint
    if damage:
        raise UserError(f"{damage} No older checkpoint in {path} is intact; start a new run with --resume never.")
    if resume != "auto":
        raise UserError(f"--resume {resume}: no checkpoint is there. Name a folder checkpoints/step-…, or a run's.")
    return None


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
