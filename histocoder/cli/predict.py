"""`histocoder predict`: code descriptions, or a file of them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from histocoder import distributed
from histocoder.checkpoints.model_files import CONFIG_FILE, WEIGHTS_FILE, local_folder
from histocoder.checkpoints.run_folder import METRICS_FILE, run_of
from histocoder.cli.arguments import config_of
from histocoder.cli.flags import PredictFlags
from histocoder.config import PredictConfig
from histocoder.data.codes import rules_of
from histocoder.data.languages import chosen_language
from histocoder.data.output import check_output
from histocoder.data.prepare import TRAIN_FILE, held_out
from histocoder.data.provenance import provenance_file, write_provenance
from histocoder.data.table import fingerprint
from histocoder.errors import UserError
from histocoder.files import is_same_file, sha256
from histocoder.inference.coder import Coder
from histocoder.inference.known import Known, training_files
from histocoder.inference.predict_file import predict_file
from histocoder.inference.table_coder import TableCoder
from histocoder.log import log


def run_predict(config: PredictFlags) -> None:
    """Code the descriptions; print or write their codes."""
    device = distributed.start(device=config.device)
    if config.output:  # before the model is read, which takes a while
        check_output(Path(config.output), excel=config.excel, overwrite=config.overwrite)
    folder = local_folder(config.model)
    known_file = _known_file(config.known, config, folder) if config.known else None
    coder = Coder.from_pretrained(folder, str(device), precision=config.precision)
    chosen_language(config.language, coder.model.config.languages)  # raises an error if it is not one
    known, known_id = _read_known(known_file, coder, config) if known_file else (None, "")
    how = config_of(PredictConfig, config)
    if config.input:
        of_model = {"sha256": sha256(folder / WEIGHTS_FILE), "config_sha256": sha256(folder / CONFIG_FILE)}
        model_id = f"{' '.join(of_model.values())} {coder.precision} {known_id}"
        told = predict_file(coder, how, model_id=model_id, known=known, say=log.info)
        mode, own = config.mode or coder.mode, coder.model.config
        log.info(f"Coded {config.input} into {config.output} in mode {mode}.")
        if distributed.is_primary():
            about: dict[str, Any] = {"system": coder.system, "model": {"folder": config.model, **of_model}}
            about |= {"mode": mode, "precision": coder.precision, "min_confidence": config.min_confidence}
            if mode == "flat":
                usual = own.thresholds or own.default_threshold
                about["threshold"] = usual if config.threshold is None else config.threshold
            if known_file is not None:
                about["known"] = {"file": known_file.name, "sha256": fingerprint(known_file)}
            methods = write_provenance("predict", config, {**about, "validation": _validation(folder, mode), **told})
            log.info(f"Wrote {provenance_file(config.output)}, with this methods paragraph: {methods}")
        return
    distinct = coder.distinct(config.texts, config.language)
    tables = TableCoder(coder, replace(how, language="unk"), known=known)  # which appends no column of languages
    table = tables.append(pa.table({"text": config.texts}), [tables.code(distinct)], distinct.rows).to_pandas()
    table = table.dropna(axis=1, how="all").fillna(np.nan)  # without codes where the description is blank
    print(table.to_string(index=False, na_rep="", float_format="{:.2f}".format))


def _validation(folder: Path, mode: str) -> dict[str, Any]:
    """Return the accuracy in the report of a model's run, which is of its last model; nothing if in another mode."""
    path = run_of(folder) / METRICS_FILE
    metrics = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if metrics.get("mode") != mode:
        return {}
    return {"rows": metrics["num_rows"], "accuracy": round(metrics["answer"]["overall"]["accuracy"], 4)}


def _known_file(known: str, config: PredictFlags, folder: Path) -> Path:
    """Return the file of hand-coded descriptions."""
    path = run_of(folder) / TRAIN_FILE if known == "auto" else Path(known)
    if known == "auto" and not path.is_file():
        raise UserError(f"--known auto reads the run's training data, and there is no {path}. Add --known FILE.")
    for flag, other in (("--input", config.input), ("--output", config.output)):
        if other and path.is_file() and is_same_file(path, other):
            raise UserError(f"{flag} {other} is the file of --known itself; choose another.")
    return path


def _read_known(path: Path, coder: Coder, config: PredictFlags) -> tuple[Known, str]:
    """Read hand-coded descriptions; return them and their identity."""
    rules, columns = replace(rules_of(config), drop_bad=True), (config.input_col, config.language_col)
    files, has_languages = training_files(path, coder, rules, input_col=columns[0], language_col=columns[1])
    if config.known == "auto":
        files = replace(files, paths=(path, *held_out(path.parent)))
    settings = {"any_language": not has_languages, "exact": config.known_exact}
    sources = " ".join(map(fingerprint, files.paths))
    known = Known(languages=coder.model.config.languages, **settings)
    for examples in files.chunks(say=log.info):
        known.add(examples.coded())
    return known, f"{sources} {files.input_col} {files.language_col} {rules} {settings}"
