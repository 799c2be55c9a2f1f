"""`histocoder predict`: code descriptions, or a file of them."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from histocoder import distributed
from histocoder.checkpoints.model_files import local_folder
from histocoder.checkpoints.run_folder import run_of
from histocoder.cli.arguments import config_of
from histocoder.cli.flags import PIPE, PredictFlags
from histocoder.cli.pipes import as_typed, files_for_pipes
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
from histocoder.tables.table import READ_ONLY, fingerprint, kind_of
from histocoder.text.languages import chosen_language


def run_predict(config: PredictFlags) -> None:
    """Code the descriptions and print their codes, or write the tables with theirs."""
    if config.engine is not None:
        # imported here, since it takes a while and few need it
        from histocoder.cli.engines import predict_on_engine

        predict_on_engine(config)
        return
    device = distributed.start(device=config.device)
    folder = local_folder(config.model)
    if not config.input:
        _check_texts(config)
        print_codes(_coder(config, folder, device), config, folder)
        return
    tables = _settings_of_tables(config)
    with files_for_pipes(tables[0]) as first:
        tables[0] = first

        # mistakes are found before the model is read, which takes a while
        for table in tables:
            known_file = _known_file(config.known, table, folder)
            check_output(
                Path(table.output),
                inputs=(table.input, table.classes, known_file),
                excel=table.excel,
                overwrite=table.overwrite,
            )
        coder = _coder(config, folder, device)
        for table in tables:
            write_codes(coder, table, folder)


def _check_texts(config: PredictFlags) -> None:
    """Raise a UserError if a description is a file's name."""
    for text in config.texts:
        if text and os.path.exists(text):
            raise UserError(
                f"{text} is a file or folder, and would be coded as a description. For a table, "
                f"write --input {text} --output coded.csv."
            )


def _settings_of_tables(config: PredictFlags) -> list[PredictFlags]:
    """Return the settings of each table; the outputs of several are in a folder, with their
    names.
    """
    if not config.texts:
        return [config]
    folder = Path(config.output)
    if folder.is_file() or (folder.suffix and not folder.is_dir()) or config.output == PIPE:
        raise UserError(
            f"--input names {len(config.texts) + 1} tables; name a folder for what comes of them "
            f"with --output, not {folder}."
        )
    tables: dict[str, PredictFlags] = {}
    for name in (config.input, *config.texts):
        path = Path(name)

        # a form that is only read, such as .sav, is written in another
        suffix = READ_ONLY.get(kind_of(path), path.suffix)
        output = str(folder / path.with_suffix(suffix).name)
        if output in tables:
            raise UserError(f"Two tables of --input would be written to {output}; rename one.")
        tables[output] = replace(config, input=name, output=output, texts=())
    return list(tables.values())


def _coder(config: PredictFlags, folder: Path, device: torch.device) -> Coder:
    coder = Coder.from_pretrained(folder, str(device), precision=config.precision)
    chosen_language(config.language, coder.model.config.languages)  # an error if it is not one
    return coder


def write_codes(coder: Coder, config: PredictFlags, folder: Path) -> None:
    """Write a table with its codes, and where they come from."""

    def say(line: str) -> None:
        log.info(as_typed(line, config))

    known_file = _known_file(config.known, config, folder)
    known = None
    known_id = ""
    if known_file is not None:
        known, known_id = _read_known(known_file, coder, config)
    options = config_of(PredictConfig, config)
    facts = facts_of(coder, options, folder, name=config.model)
    model_id = (
        f"{facts['model']['sha256']} {facts['model']['config_sha256']} {coder.precision} {known_id}"
    )
    counts = predict_file(coder, options, model_id=model_id, known=known, say=say)
    say(f"Coded {config.input} into {config.output} in mode {facts['mode']}.")

    # standard output has no file beside it
    is_to_pipe = as_typed(config.output, config) != config.output
    if is_to_pipe or not distributed.is_primary():
        return

    def as_sent(word: str) -> str:
        return PIPE if as_typed(word, config) != word else word

    if known_file is not None:
        facts["known"] = {"file": known_file.name, "sha256": fingerprint(known_file)}
    methods = write_provenance(["predict"], config, facts | counts, as_sent=as_sent)
    log.info(f"Wrote {provenance_file(config.output)}, with this methods paragraph: {methods}")


def print_codes(coder: Coder, config: PredictFlags, folder: Path) -> None:
    """Print the codes of descriptions."""
    known_file = _known_file(config.known, config, folder)
    known = None
    if known_file is not None:
        known, _ = _read_known(known_file, coder, config)
    distinct = coder.distinct(config.texts, config.language)
    options = replace(config_of(PredictConfig, config), language="unk")  # no column of languages
    tables = TableCoder(coder, options, known=known)
    texts = pa.table({"text": config.texts})
    table = tables.append(texts, [tables.code(distinct)], distinct.rows).to_pandas()

    # columns that no description has anything in say nothing; a blank description has no codes
    table = table.dropna(axis=1, how="all").fillna(np.nan)
    print(table.to_string(index=False, na_rep="", float_format="{:.2f}".format))


def _known_file(known: str | None, config: PredictFlags, folder: Path) -> Path | None:
    """Return the file of hand-coded descriptions, if there is one."""
    if not known:
        return None
    path = Path(known)
    if known == "auto":
        path = run_of(folder) / TRAIN_FILE
        if not path.is_file():
            raise UserError(
                f"--known auto reads the run's training data, and there is no {path}. Add --known "
                "FILE."
            )
    if config.input and path.is_file() and is_same_file(path, config.input):
        raise UserError(f"--input {config.input} is the file of --known itself; choose another.")
    return path


def _read_known(path: Path, coder: Coder, config: PredictFlags) -> tuple[Known, str]:
    """Read hand-coded descriptions; return them and their identity."""
    # the run's training data have no rows that nobody has coded: one without a code has no
    # occupation
    is_of_run = config.known == "auto"
    rules = replace(rules_of(config), drop_bad=True, blank_means_no_occupation=is_of_run)
    files, has_languages = training_files(
        path, coder, rules, input_col=config.input_col, language_col=config.language_col
    )
    corrections = path.with_name(SPLIT_FILES[HELD_OUT])
    if is_of_run and corrections.is_file():
        files = replace(files, paths=(path, corrections))

    # rows that resume a file must have been coded beside the same descriptions
    settings = {"any_language": not has_languages, "exact": config.known_exact}
    sources = " ".join(map(fingerprint, files.paths))
    known = Known(languages=coder.model.config.languages, **settings)
    for examples in files.chunks(say=log.info):
        known.add(examples)
    return known, f"{sources} {files.input_col} {files.language_col} {rules} {settings}"
