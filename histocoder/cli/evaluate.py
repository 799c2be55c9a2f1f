"""`histocoder evaluate`, `compare` and `review`: see how right codes are, and choose what to check
first.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np

from histocoder import distributed
from histocoder.checkpoints.model_files import WEIGHTS_FILE, local_folder, read_model_config
from histocoder.checkpoints.run_files import (
    ARGS_FILE,
    LOG_FILE,
    METRICS_FILE,
    REPORT_FILE,
    foreign_results,
)
from histocoder.checkpoints.run_folder import run_of, run_settings
from histocoder.cli.classes import classes_of_coded
from histocoder.cli.flags import CompareFlags, EvaluateFlags, KnownCodesFlags, ReviewFlags
from histocoder.config import ModelConfig
from histocoder.data.examples import HELD_OUT, TRAIN, VAL, Examples
from histocoder.data.labelled_files import other_cells
from histocoder.data.labels import rules_of
from histocoder.errors import UserError, counted
from histocoder.evaluation.baselines import Baselines, run_rows
from histocoder.evaluation.checked_file import (
    DecidedCodes,
    earlier_rounds,
    next_step,
    read_decisions,
    write_checked,
)
from histocoder.evaluation.evaluator import are_learned, named_groups
from histocoder.evaluation.review_file import Columns, answer_columns, open_coded, review
from histocoder.evaluation.summary import percent, points, table_of_shares
from histocoder.formatters import MISSING, build_formatter
from histocoder.inference.coder import Coder
from histocoder.inference.known import Known, files_of, training_files
from histocoder.log import log
from histocoder.tables.output import Form, check_output, write_frame
from histocoder.tables.table import open_table
from histocoder.text.languages import chosen_language
from histocoder.text.normalize import description_keys


def run_evaluate(config: EvaluateFlags) -> None:
    """Evaluate the model, and write the report."""
    # here, since drawing takes a second to import
    from histocoder.evaluation.evaluator import evaluate
    from histocoder.evaluation.report import write_report
    from histocoder.evaluation.summary import summary

    # mistakes are found before the model is read, which takes a while
    device = distributed.start(device=config.device)
    form: dict[str, Any] = {"sheet": config.sheet, "encoding": config.file_encoding}
    open_table(config.data, {config.input_col: "input_col"}, **form)
    output = Path(config.output)
    _check_report_folder(output, overwrite=config.overwrite)

    folder = local_folder(config.model)
    coder = Coder.from_pretrained(folder, str(device), precision=config.precision)
    examples = _coded_rows(config, coder)
    _say_learned(coder, examples, config.model)
    baselines = _baselines(config, coder, examples, folder)
    groups = {}
    for name in config.group_col or ():
        cells = other_cells(examples, config.data, name, setting="group_col", **form)
        groups[name] = named_groups(cells.to_pylist())

    # the figures, their report, and the most important of them in words
    evaluation = evaluate(
        coder, examples, baselines=baselines, groups=groups, batch_size=config.batch_size
    )
    title = f"{Path(config.model).name} on {Path(config.data).name}"
    report = write_report(output, evaluation, coder, title=title, logs=run_of(folder) / LOG_FILE)
    metrics = evaluation.metrics
    for name, by_group in metrics.by_group.items():
        log.info(f"Exactly right by {name}, with 95 % intervals:\n{table_of_shares(by_group)}")
    sentences = summary(metrics)
    sentences.append(f"Wrote the report to {report}.")
    log.info("\n".join(sentences))


def _check_report_folder(folder: Path, *, overwrite: bool) -> None:
    """Raise a UserError if a report can't be written to a folder without loss."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; name a folder for the report with --output.")
    if any((folder / name).exists() for name in (ARGS_FILE, WEIGHTS_FILE)):
        raise UserError(
            f"{folder} holds a run or a model, whose own report stays; choose another --output."
        )
    has_report = any((folder / name).exists() for name in (METRICS_FILE, REPORT_FILE))
    if has_report and not overwrite:
        raise UserError(
            f"{folder} already has a report. Add --overwrite to replace it, or choose "
            "another --output."
        )
    if foreign := foreign_results(folder):
        raise UserError(
            f"{folder} contains {', '.join(foreign)}, which a report would replace and "
            "histocoder did not write. Choose another --output."
        )


def run_compare(config: CompareFlags) -> None:
    """Print how far two models differ, and write the descriptions that they code differently."""
    from histocoder.evaluation.evaluator import compare

    device = distributed.start(device=config.device)
    output = Path(config.output)
    check_output(output, inputs=[config.data], overwrite=config.overwrite)
    first, second = (
        Coder.from_pretrained(name, str(device), precision=config.precision)
        for name in config.models
    )
    examples = _coded_rows(config, first)

    # a model is better on what it was trained on, which the reader should know
    for name, coder in zip(config.models, (first, second), strict=True):
        _rows_of_refit(coder, examples, local_folder(name))
        _say_learned(coder, examples, name)

    # how often each is right, and how sure the difference is
    comparison, changed = compare(first, second, examples)
    shares = []
    for scores, path in zip((comparison.first, comparison.second), config.models, strict=True):
        shares.append(f"{percent(scores.rows)} ({percent(scores.texts)}) by {path}")
    log.info(f"Exactly right, of rows (and of distinct descriptions): {' and '.join(shares)}.")
    log.info(
        "Difference in percentage points, with 95 % intervals: "
        f"{points(comparison.difference.rows)} of rows, "
        f"{points(comparison.difference.texts)} of distinct descriptions."
    )

    # sets of codes are a cell each
    for name in ("true", "codes_first", "codes_second"):
        changed[name] = changed[name].map(" ".join)
    write_frame(output, changed.round(4), Form(raw=config.raw))
    log.info(
        f"Wrote the {len(changed):,} rows that they code differently to {output}: "
        f"{changed['right_first'].sum():,} are right by the first model alone, "
        f"{changed['right_second'].sum():,} by the second alone."
    )


def _coded_rows(config: KnownCodesFlags, coder: Coder) -> Examples:
    """Return the rows of `--data` that have codes."""
    language = None
    if config.language is not None:
        language = chosen_language(config.language, coder.model.config.languages)
    files = files_of(
        coder,
        Path(config.data),
        target_cols=config.target_cols,
        needed=dict.fromkeys(config.target_cols or (), "target_cols"),
        input_col=config.input_col,
        language_col=config.language_col,
        language=language,
        rules=rules_of(config),
        sheet=config.sheet,
        encoding=config.file_encoding,
    )
    return files.read(say=log.info)


def _baselines(
    config: EvaluateFlags, coder: Coder, examples: Examples, folder: Path
) -> Baselines | None:
    """Return simple methods that have read what the model was trained on; None where that is not
    known.
    """
    run = run_of(folder)
    has_languages = True
    if config.train_data:
        files, has_languages = training_files(
            Path(config.train_data),
            coder,
            rules_of(config),
            input_col=config.input_col,
            language_col=config.language_col,
        )
        chunks = files.chunks(say=log.info)
    elif (rows := run_rows(run, coder, TRAIN)) is not None:
        chunks = rows.chunks()
    elif config.baselines:
        raise UserError(
            f"--baselines needs the training data, and {run} has none. Add --train-data FILE."
        )
    else:
        return None

    # the linear model is fitted when it is asked for, however long that takes
    known = Known(languages=coder.model.config.languages, any_language=not has_languages)
    baselines = Baselines(examples, known, max_size=math.inf if config.baselines else 0)
    rows_of_refit = _rows_of_refit(coder, examples, folder)
    for chunk in chunks:
        baselines.add(chunk)
    if rows_of_refit is not None:
        baselines.add(rows_of_refit)
    return baselines


def _say_learned(coder: Coder, examples: Examples, name: str) -> None:
    """Say how many descriptions a model was trained on, as far as it has a record of them."""
    num_learned = int(are_learned(coder, examples.texts).sum())
    if num_learned:
        log.info(
            f"Notice: {name} was trained on {num_learned:,} of these {len(examples):,} "
            "descriptions."
        )


def _rows_of_refit(coder: Coder, examples: Examples, folder: Path) -> Examples | None:
    """Return the rows on which a model was trained after its report, if any, and say how many of
    `examples` they have.
    """
    if not coder.model.config.fitted_to_validation:
        return None
    run = run_of(folder)
    rows = run_rows(run, coder, VAL, HELD_OUT)
    if rows is None:
        return None
    num_seen = int(np.isin(description_keys(examples.texts), description_keys(rows.texts)).sum())
    if num_seen:
        log.info(
            f"Notice: {num_seen:,} of these {len(examples):,} descriptions are in the run's "
            f"validation data or held-out corrections, on which {folder} was trained after "
            f"{run / REPORT_FILE} had measured it."
        )
    return rows


def _apply_decisions(config: ReviewFlags, columns: Columns, model: ModelConfig) -> None:
    """Write the coded table with the codes of files that a person has filled in; of several for a
    row, the last.
    """
    known = set(model.codes) - {MISSING}
    system = build_formatter(**model.formatter).system
    decisions: dict[tuple[str, str], DecidedCodes] = {}
    for path in map(Path, config.apply or ()):
        decisions |= read_decisions(path, columns, known=known, system=system)

    # what follows from the codes follows from people's
    coded = Path(config.predictions)
    file = open_coded(coded, columns, sheet=config.sheet)
    classes = classes_of_coded(
        file,
        answer_columns(file, columns.target_cols),
        codes=known,
        attributes=model.attributes,
    )
    output = Path(config.output)
    num_rows = write_checked(
        coded,
        output,
        decisions,
        columns,
        titles=model.descriptions,
        classes=classes.known,
        unknown_classes=classes.unknown_cols,
        sheet=config.sheet,
        raw=config.raw,
        overwrite=config.overwrite,
    )
    log.info(
        f"Wrote {output}: {counted(num_rows, 'row has', 'rows have')} the codes of "
        f"{counted(len(decisions), 'checked description', 'checked descriptions')}; the "
        "model's are in model_…."
    )
    if classes.unknown_cols and num_rows:
        log.info(
            f"Notice: these rows have no {', '.join(classes.unknown_cols)}, whose table of classes "
            "is not known, is missing or has changed. Add the columns again: histocoder classes "
            f"--table TABLE --input {output} --columns new_ --output FILE."
        )


def run_review(config: ReviewFlags) -> None:
    """Write the rows to check, and say what to do with them; or the table with what people have
    decided.
    """
    folder = local_folder(config.model)
    run = run_of(folder)
    model = read_model_config(folder)
    settings = run_settings(run)
    columns = Columns(
        config.input_col,
        config.language_col,
        target_cols=model.written_cols,
        run_input_col=settings.get("input_col"),
        run_language_col=settings.get("language_col"),
    )
    if config.apply:
        _apply_decisions(config, columns, model)
        return

    output = Path(config.output)
    review(
        Path(config.predictions),
        output,
        budget=config.budget,
        columns=columns,
        overwrite=config.overwrite,
        sheet=config.sheet,
        raw=config.raw,
        decided_in=earlier_rounds(output, run),
    )
    log.info(next_step(config.model, output, run, written_cols=model.written_cols))
