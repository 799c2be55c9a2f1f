"""`histocoder predict`: code descriptions, or a file of them."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from histocoder import distributed
from histocoder.checkpoints.model_files import local_folder
from histocoder.checkpoints.run_folder import run_of
from histocoder.cli.arguments import config_of
from histocoder.cli.flags import PredictFlags
from histocoder.config import PredictConfig
from histocoder.data.examples import HELD_OUT
from histocoder.data.labels import rules_of
from histocoder.data.prepare import SPLIT_FILES, TRAIN_FILE
from histocoder.errors import UserError
from histocoder.files import is_same_file
from histocoder.inference.coder import Coder
from histocoder.inference.known import Known, training_files
from histocoder.inference.predict_file import facts_of, predict_file
from histocoder.inference.provenance import provenance_file, write_provenance
from histocoder.inference.table_coder import TableCoder
from histocoder.log import log
from histocoder.tables.output import check_output
from histocoder.tables.table import fingerprint
from histocoder.text.languages import chosen_language


def run_predict(config: PredictFlags) -> None:
    """Code the descriptions; print or write their codes."""
    for text in config.texts:
        if text and os.path.exists(text):
            raise UserError(
                f"{text} is a file or folder, and would be coded as a description. For a "
                "table, write "
                f"--input {text} --output coded.csv."
            )
    device = distributed.start(device=config.device)
    folder = local_folder(config.model)
    known_file = _known_file(config.known, config, folder) if config.known else None
    if config.output:  # before the model is read, which takes a while
        inputs = (config.input, config.classes, known_file)
        check_output(
            Path(config.output), inputs=inputs, excel=config.excel, overwrite=config.overwrite
        )
    coder = Coder.from_pretrained(folder, str(device), precision=config.precision)
    chosen_language(
        config.language, coder.model.config.languages
    )  # raises an error if it is not one
    known, known_id = _read_known(known_file, coder, config) if known_file else (None, "")
    how = config_of(PredictConfig, config)
    if config.input:
        about = facts_of(coder, how, folder, name=config.model)
        model_id = (
            f"{about['model']['sha256']} {about['model']['config_sha256']} {coder.precision} "
            f"{known_id}"
        )
        told = predict_file(coder, how, model_id=model_id, known=known, say=log.info)
        log.info(f"Coded {config.input} into {config.output} in mode {about['mode']}.")
        if distributed.is_primary():
            if known_file is not None:
                about["known"] = {"file": known_file.name, "sha256": fingerprint(known_file)}
            methods = write_provenance(["predict"], config, {**about, **told})
            log.info(
                f"Wrote {provenance_file(config.output)}, with this methods paragraph: {methods}"
            )
        return
    distinct = coder.distinct(config.texts, config.language)
    tables = TableCoder(
        coder, replace(how, language="unk"), known=known
    )  # which appends no column of languages
    table = tables.append(
        pa.table({"text": config.texts}), [tables.code(distinct)], distinct.rows
    ).to_pandas()
    table = table.dropna(axis=1, how="all").fillna(
        np.nan
    )  # without codes where the description is blank
    print(table.to_string(index=False, na_rep="", float_format="{:.2f}".format))


def _known_file(known: str, config: PredictFlags, folder: Path) -> Path:
    """Return the file of hand-coded descriptions."""
    path = run_of(folder) / TRAIN_FILE if known == "auto" else Path(known)
    if known == "auto" and not path.is_file():
        raise UserError(
            f"--known auto reads the run's training data, and there is no {path}. Add --known FILE."
        )
    if config.input and path.is_file() and is_same_file(path, config.input):
        raise UserError(f"--input {config.input} is the file of --known itself; choose another.")
    return path


def _read_known(path: Path, coder: Coder, config: PredictFlags) -> tuple[Known, str]:
    """Read hand-coded descriptions; return them and their identity."""
    # the run's training data have no rows that nobody has coded: one without a code has no
    # occupation
    rules = replace(
        rules_of(config), drop_bad=True, blank_means_no_occupation=config.known == "auto"
    )
    columns = (config.input_col, config.language_col)
    files, has_languages = training_files(
        path, coder, rules, input_col=columns[0], language_col=columns[1]
    )
    if config.known == "auto":
        corrections = path.with_name(SPLIT_FILES[HELD_OUT])
        files = replace(files, paths=(path, *([corrections] if corrections.is_file() else ())))
    settings = {"any_language": not has_languages, "exact": config.known_exact}
    sources = " ".join(map(fingerprint, files.paths))
    known = Known(languages=coder.model.config.languages, **settings)
    for examples in files.chunks(say=log.info):
        known.add(examples)
    return known, f"{sources} {files.input_col} {files.language_col} {rules} {settings}"
