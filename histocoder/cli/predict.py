"""`histocoder predict`: code descriptions, or a file of them."""

from dataclasses import replace
from pathlib import Path

import pandas as pd

from histocoder import distributed
from histocoder.checkpoints.model_files import CONFIG_FILE, WEIGHTS_FILE, local_folder
from histocoder.checkpoints.run_folder import run_of
from histocoder.cli.arguments import config_of
from histocoder.cli.flags import PredictFlags
from histocoder.config import PredictConfig
from histocoder.data.codes import LabelRules
from histocoder.data.languages import chosen_language
from histocoder.data.output import check_output
from histocoder.data.prepare import TRAIN_FILE, held_out
from histocoder.data.table import fingerprint
from histocoder.errors import UserError, counted
from histocoder.files import is_same_file, sha256
from histocoder.inference.coder import Coder
from histocoder.inference.descriptions import Descriptions
from histocoder.inference.known import Known, training_files
from histocoder.inference.predict_file import predict_file
from histocoder.log import log


def run(config: PredictFlags) -> None:
    """Code the descriptions; print or write their codes."""
    device = distributed.start(device=config.device)
    if config.output:  # before the model is read, which takes a while
        check_output(Path(config.output), excel=config.excel)
        if Path(config.output).exists() and not config.overwrite:
            raise UserError(
                f"{config.output} already exists. Add --overwrite to replace it, or choose another --output."
            )
    folder = local_folder(config.model)
    known_file = _known_file(config.known, config, folder) if config.known else None
    coder = Coder.from_pretrained(
        folder, str(device), precision=config.precision, compile=config.compile, verify=not config.no_verify
    )
    chosen_language(config.language, coder.model.config.languages)  # raises an error if it is not one
    known = _read_known(known_file, coder, config) if known_file else None
    how = config_of(PredictConfig, config)
    if config.input:
        model_id = f"{sha256(folder / WEIGHTS_FILE)} {sha256(folder / CONFIG_FILE)} {coder.precision}"
        predict_file(coder, how, model_id=model_id, known=known, say=log.info)
        log.info(f"Coded {config.input} into {config.output} in mode {config.mode or coder.mode}.")
        return
    distinct = Descriptions.of(config.texts, config.language, languages=coder.model.config.languages)
    if known is None:
        found = coder.code_distinct(distinct.texts, distinct.langs, how).frame(coder.model.config)
    else:
        found = known.code(coder, distinct.texts, distinct.langs, how)
    _print_table(config.texts, found.reindex(distinct.rows))  # without codes where the description is blank


def _known_file(known: str, config: PredictFlags, folder: Path) -> Path:
    """Return the file of hand-coded descriptions."""
    path = run_of(folder) / TRAIN_FILE if known == "auto" else Path(known)
    if known == "auto" and not path.is_file():
        raise UserError(f"--known auto reads the run's training data, and there is no {path}. Add --known FILE.")
    for flag, other in (("--input", config.input), ("--output", config.output)):
        if other and path.is_file() and is_same_file(path, other):
            raise UserError(f"{flag} {other} is the file of --known itself; choose another.")
    return path


def _read_known(path: Path, coder: Coder, config: PredictFlags) -> Known:
    """Read hand-coded descriptions; tell the user of contradictory ones."""
    short = config.allow_codes_shorter_than_block_size
    rules = LabelRules(zero_pad=config.zero_pad_codes, allow_short=short, drop_bad=True)
    files, has_languages = training_files(
        path, coder, rules, input_col=config.input_col, language_col=config.language_col
    )
    if config.known == "auto":
        files = replace(files, paths=(path, *held_out(path.parent)))
    settings = {"any_language": not has_languages, "exact": config.known_exact}
    sources = " ".join(map(fingerprint, files.paths))
    source_id = f"{sources} {files.input_col} {files.language_col} {rules} {settings}"
    known = Known(source_id, languages=coder.model.config.languages, **settings)
    for examples in files.chunks(say=log.info):
        known.add(examples.coded())
    if number := known.num_contradictory:
        log.info(
            f"{path}: {counted(number, 'description has', 'descriptions have')} several sets of codes. The most "
            "frequent set is used, or in a tie the first in the file."
        )
    return known


def _print_table(texts: tuple[str, ...], table: pd.DataFrame) -> None:
    table = table.dropna(axis=1, how="all").copy()
    for column in table.columns:
        if pd.api.types.is_numeric_dtype(table[column]):
            table[column] = table[column].map(lambda p: "" if pd.isna(p) else f"{p:.2f}")
    table.insert(0, "text", list(texts))
    print(table.fillna("").to_string(index=False))
