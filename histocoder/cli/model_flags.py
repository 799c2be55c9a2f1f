"""Flags of commands that open a model, the run that a model belongs to, and files of training data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from histocoder.checkpoints.run_folder import ARGS_FILE
from histocoder.checkpoints.training_state import BEST_FOLDER, CHECKPOINTS_FOLDER
from histocoder.config import PRECISIONS, Settings
from histocoder.config.settings import free
from histocoder.data.examples import LANG_COL, TEXT_COL, ExampleFiles
from histocoder.data.labels import LabelRules
from histocoder.data.table import open_table
from histocoder.inference.coder import Coder


@dataclass(frozen=True, kw_only=True)
class ModelFlags(Settings):
    """The model, and how it computes."""

    model: str = free(None, "folder of a run or a checkpoint, or a hub repo", metavar="DIR", is_required=True)
    device: str = free("auto", "where to compute", choices=("auto", "cpu", "cuda", "mps"))
    no_verify: bool = free(False, "do not compare a large model's files with its manifest.json first")
    precision: str = free(
        "auto",
        "auto: bf16 where the hardware has it, several times as fast and a little less exact",
        choices=PRECISIONS,
    )


def training_files(
    path: Path,
    coder: Coder,
    rules: LabelRules,
    *,
    input_col: str,
    language_col: str | None,
    sheet: str | None = None,
) -> tuple[ExampleFiles, bool]:
    """Return a file of training data, and whether it has a column of languages.

    A column that is missing under the given name is read under its name in prepared data.
    """
    languages = (language_col or LANG_COL, LANG_COL)
    header = open_table(path, (), optional=(input_col, TEXT_COL, *languages), sheet=sheet).header
    text_col = TEXT_COL if TEXT_COL in header and input_col not in header else input_col
    lang_col = next((name for name in languages if name in header), None)
    files = ExampleFiles(
        (path,),
        coder.model.config.target_cols,
        coder.formatter,
        input_col=text_col,
        language_col=lang_col or LANG_COL,
        language=None if lang_col else "unk",
        rules=rules,
        sheet=sheet,
    )
    return files, lang_col is not None


def run_of(folder: Path) -> Path:
    """Return the folder of the run that a model belongs to: the model's own, or above best/ and checkpoints/step-…/."""
    folder = folder.resolve()
    if folder.parent.name == CHECKPOINTS_FOLDER:
        return folder.parents[1]
    return folder.parent if folder.name == BEST_FOLDER else folder


def settings_of_run(run: Path) -> dict[str, Any]:
    """Return the settings in a run's args.yaml; none where there is no such file."""
    path = run / ARGS_FILE
    return yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}
