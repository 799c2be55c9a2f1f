"""Resuming a run: find the newest intact checkpoint, and compare its settings with the current ones."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from histocoder import distributed
from histocoder.checkpoints.training_state import Checkpoint, is_checkpoint, list_checkpoints, verify_checkpoint
from histocoder.errors import DamagedError, UserError
from histocoder.log import log

BATCH_SETTINGS = {"--batch-size": "rows a step", "--tokens-per-batch": "positions a step"}  # over all ranks, by flag


def find_checkpoint(folder: Path, resume: str) -> Path | None:
    """Return the checkpoint that a run resumes from, verified; print a warning for each damaged one that is skipped.

    `resume` is "auto" (the newest intact checkpoint in the run's folder, if any), "never", or the path of a checkpoint
    or of a run. A UserError is raised if there are checkpoints but none is intact, or the given path holds none.
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
        raise UserError(f"{damage} No older checkpoint in {path} is intact; start a new run in another folder.")
    if resume != "auto":
        raise UserError(
            f"--resume {resume}: there is no checkpoint. Name a run's folder, or a folder checkpoints/step-… in it."
        )
    return None


def refuse_other_settings(
    checkpoint: Checkpoint, settings: dict[str, Any], folder: Path, *, gradient_accumulation_steps: int
) -> None:
    """Raise a UserError with a table of the settings that differ between a checkpoint and the current run.

    Settings that an earlier histocoder did not record are assumed to agree.
    """
    then = checkpoint.settings
    names = [name for name, value in settings.items() if then.get(name, value) != value]
    if not names:
        return
    rows = [("setting", "then", "now"), *((name, str(then[name]), str(settings[name])) for name in names)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    raise UserError(
        f"The run in {folder} can't be resumed with other settings. Use the earlier settings, choose another folder, "
        "or add --overwrite to delete that run:\n"
        + "\n".join([*table, *_advice_on_batches(then, settings, gradient_accumulation_steps)])
    )


def _advice_on_batches(then: dict[str, Any], now: dict[str, Any], num_accumulated: int) -> Iterator[str]:
    """Yield what to set for the same rows per step with this number of processes and accumulated batches."""
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
                yield f"{wanted} can't be divided equally among {what}; choose numbers that divide it."
