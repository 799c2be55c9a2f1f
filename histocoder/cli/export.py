"""`histocoder export`: write a model as ONNX graphs, which run without torch."""

from pathlib import Path

import numpy as np

from histocoder.checkpoints.model_files import local_folder
from histocoder.checkpoints.run_folder import run_of
from histocoder.cli.flags import ExportFlags
from histocoder.data.examples import Examples
from histocoder.data.labels import LabelRules
from histocoder.data.prepare import VAL_FILE
from histocoder.errors import UserError
from histocoder.inference.coder import Coder
from histocoder.inference.known import training_files
from histocoder.inference.onnx_export import check_installed, export
from histocoder.log import log

_MOST_ROWS = 10_000
"""Largest number of rows on which an export is checked."""


def run(config: ExportFlags) -> None:
    """Write the graphs, if they give the model's codes."""
    output = Path(config.onnx)
    if output.exists():
        raise UserError(f"{output} already exists; choose another folder for --onnx.")

    check_installed()
    folder = local_folder(config.model)
    coder = Coder.from_pretrained(folder, "cpu")
    examples = _examples(config, coder, folder)
    export(coder, output, examples, max_loss=config.max_loss if config.int8 else None)
    size = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    log.info(f"Wrote {output}, {size / 1e6:,.0f} MB.")


def _examples(config: ExportFlags, coder: Coder, folder: Path) -> Examples:
    """Return the rows with codes on which the graphs are checked."""
    path = Path(config.data) if config.data else run_of(folder) / VAL_FILE
    if not config.data and not path.is_file():
        raise UserError(f"The graphs are checked on validation data, and there is no {path}. Add --data FILE.")
    rules = LabelRules(is_training=False)
    files, _ = training_files(path, coder, rules, input_col=config.input_col, language_col=config.language_col)
    examples = files.read(say=log.info).coded()
    if len(examples) == 0:
        raise UserError(f"{path} has no description with a code; the graphs can't be checked on it.")
    if not config.data and config.int8 and coder.model.config.fitted_to_validation:
        log.info(f"Notice: the model was trained on {path.name} as well. Check it on other rows with --data.")
    return examples.take(np.random.default_rng(0).permutation(len(examples))[:_MOST_ROWS])
