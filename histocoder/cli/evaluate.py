"""`histocoder evaluate`: see how right a model is on descriptions whose codes are known."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from histocoder import distributed
from histocoder.checkpoints.model_files import change_config, local_folder
from histocoder.checkpoints.run_folder import LOG_FILE, METRICS_FILE, REPORT_FILE, run_of
from histocoder.checkpoints.training_state import is_checkpoint
from histocoder.cli.flags import EvaluateFlags
from histocoder.data.examples import ExampleFiles, Examples
from histocoder.data.labels import LabelRules
from histocoder.data.languages import chosen_language
from histocoder.data.normalize import description_keys
from histocoder.data.prepare import TRAIN_FILE, VAL_FILE, held_out
from histocoder.data.table import open_table
from histocoder.errors import UserError, counted
from histocoder.evaluation.evaluate import evaluate, times_seen
from histocoder.evaluation.summary import summary
from histocoder.inference.coder import Coder
from histocoder.inference.known import Known, training_files
from histocoder.log import log


def run(config: EvaluateFlags) -> None:
    """Evaluate the model, and write the report."""
    from histocoder.evaluation.baselines import Baselines
    from histocoder.evaluation.report import write_report

    device = distributed.start(device=config.device)
    open_table(
        config.data, {config.input_col: "input_col"}, sheet=config.sheet
    )  # raises a UserError if it can't be read
    _check_report_folder(Path(config.output), overwrite=config.overwrite)
    if config.save_thresholds:
        _check_may_change(Path(config.model))
    folder = local_folder(config.model)
    run = run_of(folder)
    train_data = Path(config.train_data or run / TRAIN_FILE)
    has_train_data = bool(config.train_data) or train_data.is_file()
    if config.baselines and not has_train_data:
        raise UserError(f"--baselines needs the training data, and there is no {train_data}. Add --train-data FILE.")
    coder = Coder.from_pretrained(folder, str(device), precision=config.precision, verify=not config.no_verify)
    rules = LabelRules(
        zero_pad=config.zero_pad_codes,
        allow_short=config.allow_codes_shorter_than_block_size,
        drop_bad=config.drop_bad_labels,
        is_training=False,
    )
    examples = _coded_rows(config, coder, rules)
    seen: dict = {}
    if has_train_data:
        own = LabelRules()  # of prepared data
        columns = {"input_col": config.input_col, "language_col": config.language_col}
        trained, has_languages = training_files(train_data, coder, rules if config.train_data else own, **columns)
        known = Known(languages=coder.model.config.languages, any_language=not has_languages)
        baselines = Baselines(examples, known, max_size=math.inf if config.baselines else 0)
        chunks = trained.chunks(say=log.info) if config.train_data else trained.chunks()
        if coder.model.config.fitted_to_validation and (run / VAL_FILE).is_file():
            measured = training_files(run / VAL_FILE, coder, own, **columns)[0]
            measured = replace(measured, paths=(*measured.paths, *held_out(run)))
            chunks = itertools.chain(chunks, _measured_rows(measured, examples, run))
        counts = times_seen(baselines.watch(chunks), examples.texts)
        seen = dict(zip(("texts_seen", "codes_seen"), counts, strict=True))
    found = evaluate(coder, examples, batch_size=config.batch_size, **seen)
    if has_train_data:
        found.metrics["baselines"] = baselines.compare(found.rows["right"].to_numpy())
    report = write_report(
        Path(config.output),
        found,
        coder,
        title=f"{Path(config.model).name} on {Path(config.data).name}",
        logs=run / LOG_FILE,
    )
    for line in summary(found.metrics):
        log.info(line)
    if config.save_thresholds:
        change_config(folder, replace(coder.model.config, thresholds=found.thresholds()))
        log.info(f"Saved the flat head's thresholds in {folder / 'config.json'}.")
    log.info(f"Wrote the report to {report}.")


def _coded_rows(config: EvaluateFlags, coder: Coder, rules: LabelRules) -> Examples:
    """Return the rows of `--data` that have codes."""
    languages = coder.model.config.languages
    files = ExampleFiles(
        (Path(config.data),),
        tuple(config.target_cols or coder.model.config.target_cols),
        coder.formatter,
        all_needed=config.target_cols is not None,
        input_col=config.input_col,
        language_col=config.language_col,
        language=None if config.language is None else chosen_language(config.language, languages),
        known=coder.codes,
        rules=rules,
        sheet=config.sheet,
    )
    rows = files.read(say=log.info)
    examples = rows.coded()
    if num_uncoded := len(rows) - len(examples):
        log.info(
            f"{config.data}: {counted(num_uncoded, 'row without any code is', 'rows without any code are')} left out."
        )
    return examples


def _measured_rows(files: ExampleFiles, examples: Examples, run: Path) -> Iterator[Examples]:
    """Yield what a run was measured on, with a notice if some of it is among the evaluated descriptions."""
    measured = files.read()
    num_seen = sum(map(set(description_keys(measured.texts)).__contains__, description_keys(examples.texts)))
    if num_seen:
        data = "validation data" + " or held-out corrections" * (len(files.paths) > 1)
        log.info(
            f"Notice: {num_seen:,} of these {len(examples):,} descriptions are in the run's {data}, on which "
            f"the model was trained after its report. For its accuracy before that, see {run / REPORT_FILE}."
        )
    yield measured


def _check_report_folder(output: Path, *, overwrite: bool) -> None:
    """Raise a UserError if the folder for the report is a file, or holds a report."""
    if output.exists() and not output.is_dir():
        raise UserError(f"{output} is a file; name a folder for the report with --output.")
    if not overwrite and any((output / name).exists() for name in (METRICS_FILE, REPORT_FILE)):
        raise UserError(f"{output} already has a report. Add --overwrite to replace it, or choose another --output.")


def _check_may_change(model: Path) -> None:
    """Raise a UserError if the model is the hub's or a checkpoint, whose config.json must not change."""
    if not model.is_dir():
        raise UserError(f"--save-thresholds: there is no folder {model}. Save a model from the hub to a folder first.")
    if is_checkpoint(model):
        raise UserError(f"{model} is a checkpoint, which is never changed. Name its run's folder, or best/.")
