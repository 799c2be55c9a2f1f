"""`histocoder convert` and `histocoder export`: write models in OccCANINE's format, and as ONNX
graphs.
"""

from pathlib import Path

import numpy as np

from histocoder.checkpoints.model_files import local_folder, read_json
from histocoder.checkpoints.occcanine import save_occcanine
from histocoder.checkpoints.run_folder import run_of
from histocoder.cli.flags import ConvertFlags, ExportFlags
from histocoder.data.labels import LabelRules
from histocoder.data.prepare import VAL_FILE
from histocoder.errors import UserError
from histocoder.files import make_folder
from histocoder.inference.coder import Coder, load_occcanine
from histocoder.inference.known import training_files
from histocoder.log import log

_MOST_ROWS = 1000  # largest number of rows on which an export is checked


def run_convert(config: ConvertFlags) -> None:
    """Write the model in its other form."""
    output = Path(config.output)
    if output.exists() and (output.is_file() or any(output.iterdir())):
        raise UserError(f"{output} already exists; choose another --output.")
    if config.to_occcanine:
        save_occcanine(config.to_occcanine, output)
    elif config.from_occcanine:
        if config.formatter is None:
            raise UserError(
                "Name the model's kind of code with --formatter: hisco, occ1950 or general."
            )
        coder = load_occcanine(
            config.from_occcanine,
            formatter=config.formatter,
            key=config.key,
            target_cols=config.target_cols,
            block_size=config.block_size,
            encoder_config=read_json(Path(config.encoder_config))
            if config.encoder_config
            else None,
            text_normalization=config.text_normalization,
        )
        make_folder(output)
        coder.save_pretrained(output)
    log.info(f"Wrote {output}.")


def run_export(config: ExportFlags) -> None:
    """Write the graphs, if they give the model's probabilities."""
    from histocoder.inference.onnx_export import check_installed, export

    output, data = Path(config.onnx), config.data or run_of(local_folder(config.model)) / VAL_FILE
    if output.exists():
        raise UserError(f"{output} already exists; choose another folder for --onnx.")
    check_installed()
    if not config.data and not Path(data).is_file():
        raise UserError(
            f"The graphs are checked on validation data, and there is no {data}. Add --data FILE."
        )
    coder = Coder.from_pretrained(local_folder(config.model), "cpu")
    files, _ = training_files(
        Path(data), coder, LabelRules(), input_col=config.input_col, language_col=None
    )
    examples = files.read(say=log.info)
    examples = examples.take(np.random.default_rng(0).permutation(len(examples))[:_MOST_ROWS])
    export(coder, output, examples.texts, examples.langs)
    size = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    log.info(f"Wrote {output}, {size / 1e6:,.0f} MB.")
