"""What a run leaves in its folder, by name: what is a run's, may be replaced; what is not, may not."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from histocoder import distributed
from histocoder.checkpoints.hub import CARD_FILE
from histocoder.checkpoints.lock import LOCK_FILE, holding
from histocoder.checkpoints.model_files import CONFIG_FILE, MANIFEST_FILE, TOKENIZER_FOLDER, WEIGHTS_FILE
from histocoder.checkpoints.training_state import BEST_FOLDER, CHECKPOINTS_FOLDER, LAST_BIN_FILE
from histocoder.data.prepare import PREPARED_FILE, PREPARED_TABLES
from histocoder.errors import UserError
from histocoder.files import make_folder

REPORT_FILE, METRICS_FILE, FIGURES_FOLDER = "report.html", "metrics.json", "report"
LOG_FILE, WANDB_ID_FILE = "logs.csv", "wandb_run_id"
TENSORBOARD_FOLDER, PROFILE_FOLDER = "tensorboard", "profile"
CACHE_FOLDER = "cache"
ARGS_FILE = "args.yaml"
"""The first that training writes: where it is, all below are a run's."""
_MODEL_FILES = (CONFIG_FILE, WEIGHTS_FILE, MANIFEST_FILE, CARD_FILE)
_FILES = (*_MODEL_FILES, LAST_BIN_FILE, LOG_FILE, WANDB_ID_FILE, METRICS_FILE, REPORT_FILE)
_FOLDERS = (CHECKPOINTS_FOLDER, BEST_FOLDER, TOKENIZER_FOLDER, FIGURES_FOLDER, TENSORBOARD_FOLDER, PROFILE_FOLDER)
"""What training leaves, but for what it only adds to, and `cache/`, in which it deletes nothing but its own."""


@contextmanager
def run_folder(folder: Path) -> Iterator[None]:
    """Make a run's folder and hold it, as `holding` does.

    Raises
    ------
    UserError
        On every process, where another run holds the folder, or where it can't be written to.
    """
    is_new = not folder.exists()
    distributed.run_on_primary(lambda: make_folder(folder), doing="making the run's folder")
    try:
        with holding(folder / LOCK_FILE, what=f"works in {folder}", instead="another folder"):
            yield
    finally:
        if is_new and distributed.is_primary():
            with suppress(OSError):
                folder.rmdir()  # which it can be where nothing has come of the run


def clear_run(folder: Path) -> None:
    """Delete what training has left in a run's folder; prepared data and other files stay."""
    for name in _FOLDERS:
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in _FILES:
        (folder / name).unlink(missing_ok=True)


def refuse_others_files(folder: Path) -> None:
    """Raise a UserError, on every rank, if a run would replace or delete files that histocoder did not create."""

    def look() -> None:
        """Check the folder; called on rank 0 only."""
        if (folder / ARGS_FILE).is_file():
            return
        prepared = () if (folder / PREPARED_FILE).is_file() else PREPARED_TABLES
        found = [name for name in (*prepared, *_FILES, *_FOLDERS) if os.path.lexists(folder / name)]
        if found:
            raise UserError(
                f"{folder} is not the folder of a run, and holds {', '.join(found)}, which a run would replace. "
                "Choose a new folder."
            )

    distributed.run_on_primary(look, doing="looking at the run's folder")
