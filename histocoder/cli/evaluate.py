"""`histocoder evaluate`: see how right a model is on descriptions whose codes are known."""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from histocoder import distributed
from histocoder.cli.model_flags import (
    BATCH_HELP,
    SHEET_HELP,
    TABLE_HELP,
    add_command,
    add_label_flags,
    add_model_flags,
    add_precision_flag,
    run_of,
    training_files,
)
from histocoder.data import languages
from histocoder.errors import UserError
from histocoder.training.console import say

if TYPE_CHECKING:
    from histocoder.data.examples import ExampleFiles, Examples
    from histocoder.data.labels import LabelRules
    from histocoder.inference.coder import Coder


def add(commands: argparse._SubParsersAction) -> None:
    """Add the command and its flags."""
    parser = add_command(
        commands, "evaluate", "see how right a model is on descriptions whose codes are known", epilog=languages.HELP
    )
    add_model_flags(parser)
    parser.add_argument("--data", required=True, metavar="FILE", help=f"{TABLE_HELP} of descriptions and codes")
    parser.add_argument("--sheet", metavar="NAME", help=f"--data: {SHEET_HELP}")
    parser.add_argument("--target-cols", nargs="+", metavar="COL", help="columns of codes (default: the model's)")
    parser.add_argument(
        "--input-col", default="occ1", metavar="COL", help="column of descriptions, of --train-data too (default: occ1)"
    )
    parser.add_argument(
        "--language", metavar="LANG", help="of all of them, a code or a name: see below (default: by --language-col)"
    )
    parser.add_argument("--language-col", default="lang", metavar="COL", help="column of languages (default: lang)")
    add_label_flags(parser)
    parser.add_argument("--drop-bad-labels", action="store_true", help="leave out rows whose labels do not fit")
    parser.add_argument(
        "--train-data", metavar="FILE", help="what it was trained on, to tell seen from new (default: as saved)"
    )
    parser.add_argument(
        "--baselines",
        action="store_true",
        help="compare with a linear model on character n-grams, fitted on the training data; takes minutes with many "
        "rows and codes",
    )
    parser.add_argument("--output", default="evaluation", metavar="DIR", help="for the report (default: evaluation)")
    parser.add_argument("--overwrite", action="store_true", help="replace a report that is in --output already")
    parser.add_argument(
        "--save-thresholds", action="store_true", help="keep the flat head's best thresholds in the model"
    )
    parser.add_argument("--batch-size", type=int, default=256, metavar="N", help=BATCH_HELP)
    add_precision_flag(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Evaluate the model, and write the report."""
    device = distributed.start(device=args.device)

    from histocoder.checkpoints.hub import local_folder
    from histocoder.checkpoints.model_files import change_config
    from histocoder.checkpoints.run_folder import LOG_FILE
    from histocoder.data.labels import LabelRules
    from histocoder.data.prepare import TRAIN_FILE, VAL_FILE
    from histocoder.evaluation.baselines import RIGHT_COL, Baselines
    from histocoder.evaluation.evaluate import evaluate, times_seen
    from histocoder.evaluation.report import write_report
    from histocoder.evaluation.summary import summary
    from histocoder.inference.coder import Coder
    from histocoder.inference.known import Known

    _check_report_folder(Path(args.output), overwrite=args.overwrite)
    if args.save_thresholds:
        _check_may_change(Path(args.model))
    folder = local_folder(args.model)
    run = run_of(folder)
    train_data = Path(args.train_data or run / TRAIN_FILE)
    has_train_data = bool(args.train_data) or train_data.is_file()
    if args.baselines and not has_train_data:
        raise UserError(f"--baselines needs the training data, and there is no {train_data}. Add --train-data FILE.")
    coder = Coder.from_pretrained(folder, str(device), precision=args.precision, verify=not args.no_verify)
    rules = LabelRules(
        args.zero_pad_codes, args.allow_codes_shorter_than_block_size, args.drop_bad_labels, is_training=False
    )
    examples = _coded_rows(args, coder, rules)
    seen: dict = {}
    if has_train_data:
        own = LabelRules(allow_short=True)  # of prepared data
        trained, has_languages = training_files(train_data, coder, args, rules if args.train_data else own)
        known = Known(languages=coder.model.config.languages, any_language=not has_languages)
        baselines = Baselines(examples, known, max_size=math.inf if args.baselines else 0)
        chunks = baselines.watch(trained.chunks())
        if coder.model.config.fitted_to_validation and (run / VAL_FILE).is_file():
            validation = training_files(run / VAL_FILE, coder, args, own)[0]
            chunks = itertools.chain(chunks, _validation_rows(validation, examples, run))
        counts = times_seen(chunks, examples.texts)
        seen = dict(zip(("texts_seen", "codes_seen"), counts, strict=True))
    found = evaluate(coder, examples, batch_size=args.batch_size, **seen)
    if has_train_data:
        found.metrics["baselines"] = baselines.compare(found.rows[RIGHT_COL].to_numpy())
    report = write_report(
        Path(args.output),
        found,
        coder,
        title=f"{Path(args.model).name} on {Path(args.data).name}",
        logs=run / LOG_FILE,
    )
    for line in summary(found.metrics):
        say(line)
    if args.save_thresholds:
        change_config(folder, replace(coder.model.config, thresholds=found.thresholds()))
        say(f"The flat head's thresholds are kept in {folder / 'config.json'}.")
    say(f"The report is {report}.")


def _coded_rows(args: argparse.Namespace, coder: Coder, rules: LabelRules) -> Examples:
    """Return the rows of `--data` that have codes."""
    from histocoder.data.examples import ExampleFiles
    from histocoder.inference.known import coded

    files = ExampleFiles(
        (Path(args.data),),
        tuple(args.target_cols or coder.model.config.target_cols),
        coder.formatter,
        input_col=args.input_col,
        language_col=args.language_col,
        language=args.language,
        rules=rules,
        sheet=args.sheet,
    )
    rows = files.read(say=say)
    examples = coded(rows)
    if num_uncoded := len(rows) - len(examples):
        say(f"{args.data}: {num_uncoded:,} rows without any code are left out.")
    return examples


def _validation_rows(files: ExampleFiles, examples: Examples, run: Path) -> Iterator[Examples]:
    """Yield a run's validation data, with a notice if some of them are among the evaluated descriptions."""
    from histocoder.checkpoints.run_folder import REPORT_FILE
    from histocoder.data.normalize import folded

    validation = files.read()
    num_seen = sum(map(set(folded(validation.texts)).__contains__, folded(examples.texts)))
    if num_seen:
        say(
            f"Notice: {num_seen:,} of these {len(examples):,} descriptions are among the run's validation data, to "
            f"which the model was fitted after they were measured. Accuracy on them is in {run / REPORT_FILE}."
        )
    yield validation


def _check_report_folder(output: Path, *, overwrite: bool) -> None:
    """Refuse a folder for a report that is a file, or that holds a report."""
    from histocoder.checkpoints.run_folder import METRICS_FILE, REPORT_FILE

    if output.exists() and not output.is_dir():
        raise UserError(f"{output} is a file; name a folder for the report with --output.")
    if not overwrite and any((output / name).exists() for name in (METRICS_FILE, REPORT_FILE)):
        raise UserError(f"A report is in {output} already. Add --overwrite to replace it, or choose another --output.")


def _check_may_change(model: Path) -> None:
    """Refuse a model whose config.json must stay as it is: the hub's, or a checkpoint's."""
    from histocoder.checkpoints.training_state import is_checkpoint

    if not model.is_dir():
        raise UserError(f"There is no folder {model} to keep thresholds in; a model of the hub's must be saved in one.")
    if is_checkpoint(model):
        raise UserError(f"{model} is a checkpoint, which is never altered. Name its run's folder, or best/.")
