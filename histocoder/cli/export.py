"""`histocoder export`: write a model as ONNX graphs, which run without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from histocoder.checkpoints.hub import local_folder
from histocoder.checkpoints.run_folder import run_of
from histocoder.cli.model_flags import training_files
from histocoder.config import Settings
from histocoder.config.prediction import TABLE_HELP
from histocoder.config.settings import free
from histocoder.data.examples import Examples
from histocoder.data.labels import LabelRules
from histocoder.data.prepare import VAL_FILE
from histocoder.distributed import log
from histocoder.errors import UserError
from histocoder.inference.coder import Coder
from histocoder.inference.known import coded
from histocoder.inference.onnx_export import check_installed, export

_MOST_ROWS = 10_000
"""Largest number of rows on which an export is checked."""


@dataclass(frozen=True, kw_only=True)
class Flags(Settings):
    """Write a model as ONNX graphs, which run without torch."""

    model: str = free(None, "folder of a run or a checkpoint, or a hub repo", metavar="DIR", is_required=True)
    onnx: str = free(None, "folder to write the graphs to", metavar="DIR", is_required=True)
    int8: bool = free(False, "store weights in 8 bits: a quarter of the size")
    max_loss: float = free(
        0.5, "--int8: write nothing if more points of accuracy are lost", metavar="POINTS", between=(0, 100)
    )
    data: str | None = free(
        None,
        f"table of descriptions and codes to check the graphs on: {TABLE_HELP} (default: the run's data_val.csv)",
        metavar="FILE",
    )
    input_col: str = free("occ1", "--data: column of descriptions", metavar="COL")
    language_col: str = free("lang", "--data: column of languages", metavar="COL")


def run(config: Flags) -> None:
    """Write the graphs, if they give the model's codes."""
    output = Path(config.onnx)
    if output.exists():
        raise UserError(f"{output} exists already; choose another folder for --onnx.")

    check_installed()
    folder = local_folder(config.model)
    coder = Coder.from_pretrained(folder, "cpu")
    examples = _examples(config, coder, folder)
    export(coder, output, examples, max_loss=config.max_loss if config.int8 else None)
    size = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    log.info(f"Wrote {output}, {size / 1e6:,.0f} MB.")


def _examples(config: Flags, coder: Coder, folder: Path) -> Examples:
    """Return the rows with codes on which the graphs are checked."""
    path = Path(config.data) if config.data else run_of(folder) / VAL_FILE
    if not config.data and not path.is_file():
        raise UserError(f"The graphs are checked on validation data, and there is no {path}. Add --data FILE.")
    rules = LabelRules(allow_short=True, is_training=False)
    files, _ = training_files(path, coder, rules, input_col=config.input_col, language_col=config.language_col)
    examples = coded(files.read(say=log.info))
    if len(examples) == 0:
        raise UserError(f"{path} has no description with a code; the graphs can't be checked on it.")
    if not config.data and config.int8 and coder.model.config.fitted_to_validation:
        log.info(f"Notice: the model has learned from {path.name} as well. Check on other rows with --data.")
    return examples.take(np.random.default_rng(0).permutation(len(examples))[:_MOST_ROWS])
