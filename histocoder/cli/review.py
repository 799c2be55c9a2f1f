"""`histocoder review`: choose the rows of a coded file that a person should check first."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from histocoder.checkpoints.hub import local_folder
from histocoder.checkpoints.model_files import read_model_config
from histocoder.checkpoints.run_folder import run_of, run_settings
from histocoder.config import Settings
from histocoder.config.prediction import RAW_HELP, SHEET_HELP
from histocoder.config.settings import free
from histocoder.distributed import log
from histocoder.evaluation.review import Columns, next_step, review


@dataclass(frozen=True, kw_only=True)
class Flags(Settings):
    """Choose the rows of a coded file that a person should check first."""

    model: str = free(None, "model that coded the file, to be improved by corrections", metavar="DIR", is_required=True)
    predictions: str = free(None, "output of histocoder predict", metavar="FILE", is_required=True)
    output: str = free("review.csv", "file to fill in", metavar="FILE")
    budget: int = free(200, "number of descriptions to check", at_least=1)
    input_col: str = free("occ1", "column of descriptions", metavar="COL")
    language_col: str | None = free(
        None, "column of languages (default: lang, where predict --language added it)", metavar="COL"
    )
    overwrite: bool = free(False, "replace an existing --output")
    sheet: str | None = free(None, f"--predictions: {SHEET_HELP}", metavar="NAME")
    raw: bool = free(False, RAW_HELP)


def run(config: Flags) -> None:
    """Write the rows to check, and say what to do with them."""
    folder = local_folder(config.model)
    run = run_of(folder)
    settings = run_settings(run)
    columns = Columns(
        config.input_col,
        config.language_col,
        target_cols=read_model_config(folder).target_cols,
        run_input_col=settings.get("input_col"),
        run_language_col=settings.get("language_col"),
    )
    review(
        Path(config.predictions),
        Path(config.output),
        budget=config.budget,
        columns=columns,
        overwrite=config.overwrite,
        sheet=config.sheet,
        raw=config.raw,
    )
    log.info(next_step(config.model, Path(config.output), run))
