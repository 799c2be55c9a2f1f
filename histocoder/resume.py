"""What a run goes on from: the newest checkpoint that is whole, with the settings of then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from histocoder import distributed
from histocoder.checkpoint import MANIFEST_FILE, Checkpoint, list_checkpoints, load_checkpoint, verify_checkpoint
from histocoder.errors import DamagedError, UserError

BATCH_SETTINGS = {
    "--batch-size": "rows a step (--batch-size × processes)",
    "--tokens-per-batch": "positions a step (--tokens-per-batch × processes)",
}
"""Settings of all processes together, by the flag that says each one's part."""


def find_checkpoint(folder: Path, resume: str, *, warn: Callable[[str], None] = print) -> Path | None:
    """The checkpoint that a run goes on from, verified.

    Parameters
    ----------
    folder : Path
        The run's.
    resume : str
        "auto" (the newest that is whole, if any), "never", or the path of a checkpoint or of a run.
    warn : callable
        Told of each damaged checkpoint that is passed over.

    Raises
    ------
    UserError
        Where there are checkpoints but none is whole, a path is given that holds none, or one has another form than
        this program's.
    """
    if resume == "never":
        return None
    path = folder if resume == "auto" else Path(resume)
    if resume != "auto" and (path / MANIFEST_FILE).is_file():
        verify_checkpoint(path)
        return path
    damage = ""
    for checkpoint in reversed(list_checkpoints(path)):
        try:
            verify_checkpoint(checkpoint)
        except DamagedError as error:
            damage = damage or str(error)
            warn(f"Warning: {error} An older checkpoint is looked for.")
        else:
            return checkpoint
    if damage:
        raise UserError(f"{damage} No older checkpoint of {path} is whole; begin anew with --resume never.")
    if resume != "auto":
        raise UserError(f"--resume {resume}: no checkpoint is there. Name a folder checkpoints/step-…, or a run's.")
    return None


def open_checkpoint(folder: Path, resume: str) -> Checkpoint | None:
    """`find_checkpoint` on rank 0, and load what it finds on every rank."""

    def find() -> str:
        return str(find_checkpoint(folder, resume) or "")

    found = distributed.from_primary(distributed.run_on_primary(find, doing="verifying checkpoints"))
    return load_checkpoint(Path(found)) if found else None


def refuse_other_settings(checkpoint: Checkpoint, settings: dict[str, Any], folder: Path) -> None:
    """Raise a UserError with a table of what a checkpoint was trained with and what is asked for now."""
    rows = [
        (name, str(checkpoint.settings.get(name)), str(value))
        for name, value in settings.items()
        if checkpoint.settings.get(name) != value
    ]
    if not rows:
        return
    rows.insert(0, ("setting", "then", "now"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    raise UserError(
        f"The run in {folder} can't go on with other settings. Use those of then, or begin anew with --resume never:\n"
        + "\n".join([*table, *_what_keeps_the_batch(checkpoint.settings, settings)])
    )


def _what_keeps_the_batch(then: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """Sentences on what to set with this number of processes."""
    processes = distributed.world_size()
    for flag, name in BATCH_SETTINGS.items():
        if (wanted := then.get(name)) is not None and now[name] is not None and wanted != now[name]:
            if wanted % processes == 0:
                yield f"With {processes} process{'es' * (processes > 1)}, set {flag} {wanted // processes}."
            else:
                yield f"{wanted} can't be shared equally by {processes} processes; start a number that divides it."
