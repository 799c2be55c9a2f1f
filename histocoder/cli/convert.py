"""`histocoder convert`: convert models from and to OccCANINE's format."""

from pathlib import Path

from histocoder.checkpoints.model_files import read_json
from histocoder.checkpoints.occcanine import save_occcanine
from histocoder.cli.flags import ConvertFlags
from histocoder.errors import UserError
from histocoder.files import make_folder
from histocoder.inference.coder import load_occcanine
from histocoder.log import log


def run(config: ConvertFlags) -> None:
    """Write the model in its other form."""
    output = Path(config.output)
    if output.exists() and (output.is_file() or any(output.iterdir())):
        raise UserError(f"{output} already exists; choose another --output.")
    if config.to_occcanine:
        save_occcanine(config.to_occcanine, output)
    elif config.from_occcanine:
        if config.formatter is None:
            raise UserError("Name the model's kind of code with --formatter: hisco, occ1950 or general.")
        coder = load_occcanine(
            config.from_occcanine,
            formatter=config.formatter,
            key=config.key,
            target_cols=config.target_cols,
            block_size=config.block_size,
            encoder_config=read_json(Path(config.encoder_config)) if config.encoder_config else None,
            text_normalization=config.text_normalization,
        )
        make_folder(output)
        coder.save_pretrained(output)
    log.info(f"Wrote {output}.")
