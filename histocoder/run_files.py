"""What a run leaves in its folder, by name: what is a run's, may be replaced; what is not, may not."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from histocoder import distributed
from histocoder.checkpoint import BEST_FOLDER, CHECKPOINTS_FOLDER, LAST_BIN_FILE
from histocoder.dashboards import TENSORBOARD_FOLDER, WANDB_ID_FILE
from histocoder.data.prepare import PREPARED_FILE, PREPARED_TABLES
from histocoder.errors import UserError
from histocoder.hub import CARD_FILE
from histocoder.profiling import PROFILE_FOLDER
from histocoder.saved_model import CONFIG_FILE, MANIFEST_FILE, TOKENIZER_FOLDER, WEIGHTS_FILE
from histocoder.tracking import LOG_FILE

ARGS_FILE = "args.yaml"
"""The first that training writes: where it is, all below are a run's."""
_MODEL_FILES = (CONFIG_FILE, WEIGHTS_FILE, MANIFEST_FILE, CARD_FILE)
_FILES = (*_MODEL_FILES, LAST_BIN_FILE, LOG_FILE, WANDB_ID_FILE, "metrics.json", "report.html")
_FOLDERS = (CHECKPOINTS_FOLDER, BEST_FOLDER, TOKENIZER_FOLDER, "report", TENSORBOARD_FOLDER, PROFILE_FOLDER)
"""What training leaves, but for what it only adds to, and `cache/`, in which it deletes nothing but its own."""


def clear_run(folder: Path) -> None:
    """Delete what training has left in a run's folder; prepared data and other files stay."""
    for name in _FOLDERS:
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in _FILES:
        (folder / name).unlink(missing_ok=True)


def refuse_others_files(folder: Path) -> None:
    """Raise a UserError, on every process, where a run would replace or delete in its folder what no run has made."""

    def look() -> None:
        """Rank 0's part."""
        if (folder / ARGS_FILE).is_file():
            return
        prepared = () if (folder / PREPARED_FILE).is_file() else PREPARED_TABLES
        found = [name for name in (*prepared, *_FILES, *_FOLDERS) if os.path.lexists(folder / name)]
        if found:
            raise UserError(
                f"{folder} is no run's folder, and holds {', '.join(found)}, which a run would replace. Choose a new "
                "folder."
            )

    distributed.run_on_primary(look, doing="looking at the run's folder")
