"""The `histocoder` command."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from histocoder import distributed
from histocoder.cli import Parser
from histocoder.data import languages
from histocoder.errors import Interrupted, UserError
from histocoder.precision import PRECISIONS
from histocoder.script import run_script

if TYPE_CHECKING:
    from histocoder.data.examples import ExampleFiles, Examples
    from histocoder.data.labels import LabelRules
    from histocoder.inference.known import Known
    from histocoder.predict import Coder

# What computes is imported where it is called for, so that --help comes at once.

_BATCH_HELP = "descriptions at once, fewer where memory runs out (default: 256)"


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `histocoder` and `python -m histocoder`."""
    run_script(lambda: _main(argv))


def build_parser() -> Parser:
    """The commands and their flags."""
    parser = Parser("Use a model that histocoder trained.", prog="histocoder", config=False)
    parser.add_version()
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (_add_predict, _add_evaluate, _add_review, _add_convert, _add_doctor):
        add(commands)
    return parser


def _main(argv: Sequence[str] | None) -> None:
    args = build_parser().parse(argv)
    args.run(args)


def _command(
    commands: argparse._SubParsersAction, name: str, text: str, *, epilog: str | None = None
) -> argparse.ArgumentParser:
    description = f"{text[0].upper()}{text[1:]}."
    return commands.add_parser(name, help=text, description=description, epilog=epilog, config=False)


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="DIR", help="folder of a run or a checkpoint, or a hub repo")
    parser.add_argument(
        "--device", default="auto", choices=("auto", "cpu", "cuda", "mps"), help="where to compute (default: auto)"
    )
    parser.add_argument(
        "--no-verify", action="store_true", help="do not compare a large model's files with its manifest.json first"
    )


def _add_precision(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--precision",
        default="auto",
        choices=PRECISIONS,
        help="auto: bf16 where the hardware has it, several times as fast and a little less exact (default: auto)",
    )


def _add_label_rules(parser: argparse.ArgumentParser, *, of: str = "") -> None:
    parser.add_argument(
        "--zero-pad-codes", action="store_true", help=f"{of}give codes of digits their leading zeros back"
    )
    parser.add_argument(
        "--allow-codes-shorter-than-block-size",
        action="store_true",
        help=f"{of}take codes shorter than the model's block size as meant",
    )


def _add_predict(commands: argparse._SubParsersAction) -> None:
    parser = _command(commands, "predict", "code descriptions, or a file of them", epilog=languages.HELP)
    _add_model(parser)
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="descriptions")
    parser.add_argument("--input", metavar="FILE", help="CSV or Parquet of descriptions, instead; -: standard input")
    parser.add_argument("--output", metavar="FILE", help="where to write it with its codes; -: standard output")
    parser.add_argument("--overwrite", action="store_true", help="replace an --output that is there already")
    parser.add_argument("--input-col", default="occ1", metavar="COL", help="column of descriptions (default: occ1)")
    parser.add_argument(
        "--language",
        default="unk",
        metavar="LANG",
        help="of all of them, a code or a name: see below (default: unk, unknown)",
    )
    parser.add_argument("--language-col", metavar="COL", help="column of each one's language, instead of --language")
    parser.add_argument(
        "--mode",
        choices=("combined", "greedy", "flat", "topk", "full"),
        help="way of decoding (default: the one that validated best)",
    )
    parser.add_argument("--k", type=int, default=5, metavar="N", help="codes of topk (default: 5)")
    parser.add_argument(
        "--threshold", type=float, metavar="P", help="flat: further codes above it (default: the model's own)"
    )
    parser.add_argument(
        "--min-confidence", type=float, default=0.0, metavar="P", help="leave rows below it without codes (default: 0)"
    )
    parser.add_argument("--constrain", action="store_true", help="greedy: only codes of the model's key")
    parser.add_argument("--batch-size", type=int, default=256, metavar="N", help=_BATCH_HELP)
    _add_precision(parser)
    parser.add_argument(
        "--known",
        metavar="FILE|auto",
        help="hand-coded descriptions, which get those codes instead of the model's; auto: the run's data_train.csv",
    )
    parser.add_argument(
        "--known-exact",
        action="store_true",
        help="--known: compare descriptions letter by letter, case and blanks included",
    )
    _add_label_rules(parser, of="--known: ")
    parser.add_argument("--compile", action="store_true", help="let torch compile the encoder's layers first")
    parser.add_argument(
        "--columns",
        default="",
        metavar="PREFIX",
        help="what the names of the new columns begin with (default: nothing)",
    )
    parser.add_argument(
        "--excel", action="store_true", help="CSV that Excel opens as it is: marked as UTF-8, separated as the input is"
    )
    parser.set_defaults(run=_predict)


def _predict(args: argparse.Namespace) -> None:
    if bool(args.texts) == bool(args.input) or bool(args.input) != bool(args.output):
        raise UserError('Give descriptions ("wine merchant" …), or a file with --input in.csv --output out.csv.')
    _check_known(args)
    device = distributed.start(device=args.device)

    from histocoder.files import sha256
    from histocoder.hub import local_folder
    from histocoder.predict import Coder
    from histocoder.predict_file import PredictConfig, predict_file
    from histocoder.saved_model import CONFIG_FILE, WEIGHTS_FILE

    folder = local_folder(args.model)
    known_file = _known_file(args, folder) if args.known else None
    coder = Coder.from_pretrained(
        folder, str(device), precision=args.precision, compile=args.compile, verify=not args.no_verify
    )
    known = _read_known(known_file, coder, args) if known_file else None
    if args.input:
        columns, decoding = ("input_col", "language", "language_col"), ("k", "threshold", "constrain", "min_confidence")
        fields = ("input", "output", *columns, *decoding, "batch_size", "columns", "excel")
        model_id = f"{sha256(folder / WEIGHTS_FILE)} {sha256(folder / CONFIG_FILE)} {coder.precision}"
        with _standard_streams(args) as say:
            config = PredictConfig(**{name: getattr(args, name) for name in fields}, mode=args.mode or coder.mode)
            say(f"Coding in mode {config.mode}.")
            predict_file(coder, config, model_id=model_id, known=known, overwrite=args.overwrite, say=say)
        return
    options = {name: getattr(args, name) for name in ("mode", "k", "threshold", "min_confidence", "batch_size")}
    options["constrain"] = args.constrain or None
    if known is not None:
        table = known.predict(coder, args.texts, [args.language] * len(args.texts), **options)
    else:
        table = coder.predict(args.texts, args.language, **options)
    _print_table(args.texts, table)


def _check_known(args: argparse.Namespace) -> None:
    """Raise a UserError where flags about hand-coded descriptions do not fit."""
    of_known = ("known_exact", "zero_pad_codes", "allow_codes_shorter_than_block_size")
    for name in of_known if args.known is None else ():
        if getattr(args, name):
            raise UserError(f"--{name.replace('_', '-')} is for --known; add that, or omit it.")
    if args.known and args.mode == "full":
        raise UserError("--known gives codes, for which --mode full has no columns; choose another mode.")


def _known_file(args: argparse.Namespace, folder: Path) -> Path:
    """The file of hand-coded descriptions."""
    from histocoder.data.prepare import TRAIN_FILE
    from histocoder.files import is_same_file

    path = _run_of(folder) / TRAIN_FILE if args.known == "auto" else Path(args.known)
    if args.known == "auto" and not path.is_file():
        raise UserError(f"--known auto reads the run's training data, and there is no {path}. Add --known FILE.")
    for flag, other in (("--input", args.input), ("--output", args.output)):
        if other and path.is_file() and is_same_file(path, other):
            raise UserError(f"{flag} {other} is the file of --known itself; choose another.")
    return path


def _read_known(path: Path, coder: Coder, args: argparse.Namespace) -> Known:
    """Read hand-coded descriptions, and say what there is to know of them."""
    from histocoder.data.labels import LabelRules
    from histocoder.data.table import fingerprint
    from histocoder.inference.known import Known, coded

    short = args.allow_codes_shorter_than_block_size or args.known == "auto"
    rules = LabelRules(args.zero_pad_codes, short, True)
    files, has_languages = _training_files(path, coder, args, rules)
    settings = {"any_language": not has_languages, "exact": args.known_exact}
    read = f"{files.input_col} {files.language_col} {rules} {settings}"
    known = Known(f"{fingerprint(path)} {read}", languages=coder.model.config.languages, **settings)
    for examples in files.chunks(say=_say):
        known.add(coded(examples))
    if number := known.num_contradictory:
        _say(
            f"{path}: {number:,} descriptions have several sets of codes; the most frequent counts, of equally "
            "frequent ones the first in the file."
        )
    return known


@contextmanager
def _standard_streams(args: argparse.Namespace) -> Iterator[Callable[[str], None]]:
    """Have files stand in for standard input and output, where `-` names them; give what tells the user of them."""
    if "-" not in (args.input, args.output):
        yield _say
        return
    if distributed.world_size() > 1:
        raise UserError("Standard input and output are those of one process; name files, or start one process.")
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder, "standard input"), Path(folder, "standard output")
        if args.input == "-":
            with source.open("wb") as file:
                shutil.copyfileobj(sys.stdin.buffer, file)
            args.input = str(source)
        if args.output == "-":
            args.output = str(output)
        try:
            yield lambda text: print(text.replace(f"{folder}/", ""), file=sys.stderr, flush=True)
        except Interrupted as error:
            message = (
                "Interrupted. Nothing is kept where - is input or output; name files to resume from what is coded."
            )
            raise Interrupted(message, error.signum) from None
        except UserError as error:
            raise UserError(str(error).replace(f"{folder}/", "")) from error
        if args.output == str(output):
            with output.open("rb") as file:
                shutil.copyfileobj(file, sys.stdout.buffer)


def _print_table(texts: list[str], table: pd.DataFrame) -> None:
    table = table.dropna(axis=1, how="all").copy()
    for column in table.columns:
        if pd.api.types.is_numeric_dtype(table[column]):
            table[column] = table[column].map(lambda p: "" if pd.isna(p) else f"{p:.2f}")
    table.insert(0, "text", texts)
    print(table.fillna("").to_string(index=False))


def _add_evaluate(commands: argparse._SubParsersAction) -> None:
    parser = _command(
        commands, "evaluate", "see how right a model is on descriptions whose codes are known", epilog=languages.HELP
    )
    _add_model(parser)
    parser.add_argument("--data", required=True, metavar="FILE", help="CSV or Parquet of descriptions and codes")
    parser.add_argument("--target-cols", nargs="+", metavar="COL", help="columns of codes (default: the model's)")
    parser.add_argument(
        "--input-col", default="occ1", metavar="COL", help="column of descriptions, of --train-data too (default: occ1)"
    )
    parser.add_argument(
        "--language", metavar="LANG", help="of all of them, a code or a name: see below (default: by --language-col)"
    )
    parser.add_argument("--language-col", default="lang", metavar="COL", help="column of languages (default: lang)")
    _add_label_rules(parser)
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
    parser.add_argument("--batch-size", type=int, default=256, metavar="N", help=_BATCH_HELP)
    _add_precision(parser)
    parser.set_defaults(run=_evaluate)


def _evaluate(args: argparse.Namespace) -> None:
    device = distributed.start(device=args.device)

    from histocoder.data.examples import ExampleFiles
    from histocoder.data.labels import LabelRules
    from histocoder.data.prepare import TRAIN_FILE, VAL_FILE
    from histocoder.evaluate import evaluate, times_seen
    from histocoder.evaluation.baselines import RIGHT_COL, Baselines
    from histocoder.hub import local_folder
    from histocoder.inference.known import Known, coded
    from histocoder.predict import Coder
    from histocoder.report import write_report
    from histocoder.saved_model import change_config
    from histocoder.summary import summary
    from histocoder.tracking import LOG_FILE

    _check_report_folder(Path(args.output), overwrite=args.overwrite)
    if args.save_thresholds:
        _check_may_change(Path(args.model))
    folder = local_folder(args.model)
    run = _run_of(folder)
    train_data = Path(args.train_data or run / TRAIN_FILE)
    has_train_data = bool(args.train_data) or train_data.is_file()
    if args.baselines and not has_train_data:
        raise UserError(f"--baselines needs the training data, and there is no {train_data}. Add --train-data FILE.")
    coder = Coder.from_pretrained(folder, str(device), precision=args.precision, verify=not args.no_verify)
    rules = LabelRules(
        args.zero_pad_codes, args.allow_codes_shorter_than_block_size, args.drop_bad_labels, is_training=False
    )
    files = ExampleFiles(
        (Path(args.data),),
        tuple(args.target_cols or coder.model.config.target_cols),
        coder.formatter,
        input_col=args.input_col,
        language_col=args.language_col,
        language=args.language,
        rules=rules,
    )
    rows = files.read(say=_say)
    examples = coded(rows)
    if num_uncoded := len(rows) - len(examples):
        _say(f"{args.data}: {num_uncoded:,} rows without any code are left out.")
    seen: dict = {}
    if has_train_data:
        own = LabelRules(allow_short=True)  # of prepared data
        trained, has_languages = _training_files(train_data, coder, args, rules if args.train_data else own)
        known = Known(languages=coder.model.config.languages, any_language=not has_languages)
        baselines = Baselines(examples, known, max_size=math.inf if args.baselines else 0)
        chunks = baselines.watch(trained.chunks())
        if coder.model.config.fitted_to_validation and (run / VAL_FILE).is_file():
            validation = _training_files(run / VAL_FILE, coder, args, own)[0]
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
        _say(line)
    if args.save_thresholds:
        change_config(folder, replace(coder.model.config, thresholds=found.thresholds()))
        _say(f"The flat head's thresholds are kept in {folder / 'config.json'}.")
    _say(f"The report is {report}.")


def _validation_rows(files: ExampleFiles, examples: Examples, run: Path) -> Iterator[Examples]:
    """A run's validation data; a user is told where they are among what is evaluated."""
    from histocoder.data.normalize import folded
    from histocoder.report import REPORT_FILE

    validation = files.read()
    num_seen = sum(map(set(folded(validation.texts)).__contains__, folded(examples.texts)))
    if num_seen:
        _say(
            f"Notice: {num_seen:,} of these {len(examples):,} descriptions are among the run's validation data, which "
            f"the linear expert has learned since they were measured. Accuracy on them is in {run / REPORT_FILE}."
        )
    yield validation


def _check_report_folder(output: Path, *, overwrite: bool) -> None:
    """Refuse a folder for a report that is a file, or that holds a report."""
    from histocoder.report import METRICS_FILE, REPORT_FILE

    if output.exists() and not output.is_dir():
        raise UserError(f"{output} is a file; name a folder for the report with --output.")
    if not overwrite and any((output / name).exists() for name in (METRICS_FILE, REPORT_FILE)):
        raise UserError(f"A report is in {output} already. Add --overwrite to replace it, or choose another --output.")


def _check_may_change(model: Path) -> None:
    """Refuse a model whose config.json must stay as it is: the hub's, or a checkpoint's."""
    from histocoder.checkpoint import is_checkpoint

    if not model.is_dir():
        raise UserError(f"There is no folder {model} to keep thresholds in; a model of the hub's must be saved in one.")
    if is_checkpoint(model):
        raise UserError(f"{model} is a checkpoint, which is never altered. Name its run's folder, or best/.")


def _training_files(path: Path, coder: Coder, args: argparse.Namespace, rules: LabelRules) -> tuple[ExampleFiles, bool]:
    """A file of training data, and whether it has a column of languages.

    Columns that are not there by the names that were given are sought by those of prepared data.
    """
    from histocoder.data.examples import LANG_COL, TEXT_COL, ExampleFiles
    from histocoder.data.table import open_table

    languages = (args.language_col or LANG_COL, LANG_COL)
    header = open_table(path, (), optional=(args.input_col, TEXT_COL, *languages)).header
    text_col = TEXT_COL if TEXT_COL in header and args.input_col not in header else args.input_col
    lang_col = next((name for name in languages if name in header), None)
    files = ExampleFiles(
        (path,),
        coder.model.config.target_cols,
        coder.formatter,
        input_col=text_col,
        language_col=lang_col or LANG_COL,
        language=None if lang_col else "unk",
        rules=rules,
    )
    return files, lang_col is not None


def _run_of(folder: Path) -> Path:
    """The folder of the run that a model belongs to: the model's own, or above best/ and checkpoints/step-…/."""
    from histocoder.checkpoint import BEST_FOLDER, CHECKPOINTS_FOLDER

    folder = folder.resolve()
    if folder.parent.name == CHECKPOINTS_FOLDER:
        return folder.parents[1]
    return folder.parent if folder.name == BEST_FOLDER else folder


def _add_review(commands: argparse._SubParsersAction) -> None:
    parser = _command(commands, "review", "choose the rows of a coded file that a person should check first")
    parser.add_argument("--model", required=True, metavar="DIR", help="that coded it, which corrections are to improve")
    parser.add_argument("--predictions", required=True, metavar="FILE", help="what histocoder predict wrote")
    parser.add_argument("--output", default="review.csv", metavar="FILE", help="to fill in (default: review.csv)")
    parser.add_argument("--budget", type=int, default=200, metavar="N", help="descriptions to check (default: 200)")
    parser.add_argument("--input-col", default="occ1", metavar="COL", help="column of descriptions (default: occ1)")
    parser.add_argument(
        "--language-col", metavar="COL", help="column of languages (default: lang, where predict --language added it)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an --output that is there already")
    parser.set_defaults(run=_review)


def _review(args: argparse.Namespace) -> None:
    import yaml

    from histocoder.hub import local_folder
    from histocoder.review import next_step, review
    from histocoder.run_files import ARGS_FILE
    from histocoder.saved_model import read_model_config

    folder = local_folder(args.model)
    run = _run_of(folder)
    has_run = (run / ARGS_FILE).is_file()
    settings = yaml.safe_load((run / ARGS_FILE).read_text(encoding="utf-8")) if has_run else {}
    columns = ((args.input_col, settings.get("input_col")), (args.language_col, settings.get("language_col")))
    review(
        Path(args.predictions),
        Path(args.output),
        budget=args.budget,
        input_col=args.input_col,
        language_col=args.language_col,
        target_cols=read_model_config(folder).target_cols,
        renamed={here: there for here, there in columns if here and there},
        overwrite=args.overwrite,
        say=_say,
    )
    _say(next_step(args.model, Path(args.output), run, settings))


def _add_convert(commands: argparse._SubParsersAction) -> None:
    parser = _command(commands, "convert", "turn models from and to OccCANINE's form, or shares into one")
    direction = parser.add_mutually_exclusive_group(required=True)
    direction.add_argument("--from-occcanine", metavar="PATH", help="last.bin, or a folder as on the hub")
    direction.add_argument("--to-occcanine", metavar="DIR", help="the folder of a model of this program's")
    direction.add_argument(
        "--from-shards", metavar="DIR", help="a checkpoint of --fsdp-state-dict sharded, to be put together"
    )
    parser.add_argument("--output", required=True, metavar="PATH", help="folder, or file (last.bin), to write")
    parser.add_argument(
        "--formatter", choices=("hisco", "occ1950", "general", "gpf"), help="kind of code it was trained on"
    )
    parser.add_argument("--key", metavar="CSV", help="its key: system_code,code, and desc if there is one")
    parser.add_argument("--target-cols", nargs="+", metavar="COL", help="general: its columns of codes")
    parser.add_argument("--block-size", type=int, metavar="N", help="general: longest code's characters (default: 5)")
    parser.add_argument("--encoder-config", metavar="JSON", help="its CanineConfig's file (default: CANINE-s's sizes)")
    parser.add_argument(
        "--text-normalization",
        default="lower_ascii",
        choices=("none", "lower_ascii"),
        help="what was done to its training texts (default: lower_ascii, as by published models)",
    )
    parser.set_defaults(run=_convert)


def _convert(args: argparse.Namespace) -> None:
    from histocoder.files import make_folder
    from histocoder.occcanine import load_occcanine, save_occcanine

    output = Path(args.output)
    if output.exists() and (output.is_file() or any(output.iterdir())):
        raise UserError(f"{output} is there already; choose another --output.")
    if args.from_shards:
        _put_together(Path(args.from_shards), output)
    elif args.to_occcanine:
        save_occcanine(args.to_occcanine, output)
    else:
        if args.formatter is None:
            raise UserError("Say with --formatter what kind of code the model gives: hisco, occ1950 or general.")
        coder = load_occcanine(
            args.from_occcanine,
            formatter=args.formatter,
            key=args.key,
            target_cols=args.target_cols,
            block_size=args.block_size,
            encoder_config=_read_json(args.encoder_config) if args.encoder_config else None,
            text_normalization=args.text_normalization,
        )
        make_folder(output)
        coder.save_pretrained(output)
    _say(f"Wrote {output}.")


def _add_doctor(commands: argparse._SubParsersAction) -> None:
    parser = _command(commands, "doctor", "see what this machine has for training, and what is missing")
    parser.add_argument("--folder", default=".", metavar="DIR", help="where runs are to be saved (default: .)")
    parser.set_defaults(run=_doctor)


def _doctor(args: argparse.Namespace) -> None:
    from histocoder.doctor import examine, print_findings

    if not print_findings(examine(Path(args.folder)), _say):
        raise SystemExit(1)


def _put_together(path: Path, output: Path) -> None:
    from histocoder.checkpoint import is_checkpoint, load_checkpoint, save_whole, verify_checkpoint
    from histocoder.saved_model import SHARDS_FOLDER

    if not (path / SHARDS_FOLDER).is_dir() or not is_checkpoint(path):
        raise UserError(f"{path} is no checkpoint in shares; name a folder checkpoints/step-….")
    verify_checkpoint(path)
    save_whole(load_checkpoint(path), output)


def _read_json(path: str) -> dict:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--encoder-config {path} can't be read: {error}") from error


def _say(text: str) -> None:
    if distributed.is_primary():
        print(text, flush=True)


if __name__ == "__main__":
    main()
