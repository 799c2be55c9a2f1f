"""`histocoder review`: choose the rows of a coded file that a person should check first."""

from pathlib import Path

from histocoder.checkpoints.model_files import local_folder, read_model_config
from histocoder.checkpoints.run_folder import run_of, run_settings
from histocoder.cli.flags import ReviewFlags
from histocoder.evaluation.review_file import Columns, next_step, review
from histocoder.log import log


def run(config: ReviewFlags) -> None:
    """Write the rows to check, and say what to do with them."""
    folder = local_folder(config.model)
    run = run_of(folder)
    settings, output = run_settings(run), Path(config.output)
    columns = Columns(
        config.input_col,
        config.language_col,
        target_cols=read_model_config(folder).target_cols,
        run_input_col=settings.get("input_col"),
        run_language_col=settings.get("language_col"),
    )
    review(
        Path(config.predictions),
        output,
        budget=config.budget,
        columns=columns,
        overwrite=config.overwrite,
        sheet=config.sheet,
        raw=config.raw,
    )
    log.info(next_step(config.model, output, run))
