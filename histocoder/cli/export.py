"""`histocoder export`: write a model as ONNX graphs, which run without torch."""

from pathlib import Path

import numpy as np

from histocoder.checkpoints.model_files import local_folder
from histocoder.checkpoints.run_folder import run_of
from histocoder.cli.flags import ExportFlags
from histocoder.data.codes import LabelRules
from histocoder.data.prepare import VAL_FILE
from histocoder.errors import UserError
from histocoder.inference.coder import Coder
from histocoder.inference.known import training_files
from histocoder.inference.onnx_export import check_installed, export
from histocoder.log import log

_MOST_ROWS = 1000
"""Largest number of rows on which an export is checked."""


def run(config: ExportFlags) -> None:
    """Write the graphs, if they give the model's probabilities."""
    output = Path(config.onnx)
    if output.exists():
        raise UserError(f"{output} already exists; choose another folder for --onnx.")
    check_installed()
    folder = local_folder(config.model)
    path = Path(config.data) if config.data else run_of(folder) / VAL_FILE
    if not config.data and not path.is_file():
        raise UserError(f"The graphs are checked on validation data, and there is no {path}. Add --data FILE.")
    coder = Coder.from_pretrained(folder, "cpu")
    columns = {"input_col": config.input_col, "language_col": config.language_col}
    examples = training_files(path, coder, LabelRules(), **columns)[0].read(say=log.info)
    examples = examples.take(np.random.default_rng(0).permutation(len(examples))[:_MOST_ROWS])
    export(coder, output, examples.texts, examples.langs, int8=config.int8)
    size = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    log.info(f"Wrote {output}, {size / 1e6:,.0f} MB.")
