"""The `histocoder` command."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pandas as pd

from histocoder import distributed
from histocoder.cli import Parser
from histocoder.errors import Interrupted, UserError
from histocoder.precision import PRECISIONS
from histocoder.script import run_script

# What computes is imported where it is called for, so that --help comes at once.

_BATCH_HELP = "descriptions at once, fewer where memory runs out (default: 256)"


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `histocoder` and `python -m histocoder`."""
    run_script(lambda: _main(argv))


def build_parser() -> Parser:
    """The commands and their flags."""
    parser = Parser("Use a model that histocoder trained.", prog="histocoder", config=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (_add_predict, _add_evaluate, _add_review, _add_convert, _add_doctor):
        add(commands)
    return parser


def _main(argv: Sequence[str] | None) -> None:
    args = build_parser().parse(argv)
    args.run(args)


def _command(commands: argparse._SubParsersAction, name: str, text: str) -> argparse.ArgumentParser:
    return commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", config=False)


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="DIR", help="folder of a run or a checkpoint, or a hub repo")
    parser.add_argument(
        "--device", default="auto", choices=("auto", "cpu", "cuda", "mps"), help="where to compute (default: auto)"
    )
    parser.add_argument(
        "--no-verify", action="store_true", help="do not compare a large model's files with its manifest.json first"
    )


def _add_predict(commands: argparse._SubParsersAction) -> None:
    parser = _command(commands, "predict", "code descriptions, or a file of them")
    _add_model(parser)
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="descriptions")
    parser.add_argument("--input", metavar="FILE", help="CSV or Parquet of descriptions, instead; -: standard input")
    parser.add_argument("--output", metavar="FILE", help="where to write it with its codes; -: standard output")
    parser.add_argument("--overwrite", action="store_true", help="replace an --output that is there already")
    parser.add_argument("--input-col", default="occ1", metavar="COL", help="column of descriptions (default: occ1)")
    parser.add_argument("--language", default="unk", metavar="LANG", help="of all of them (default: unk, unknown)")
    parser.add_argument("--language-col", metavar="COL", help="column of each one's language, instead of --language")
    parser.add_argument(
        "--mode", default="greedy", choices=("greedy", "flat", "topk", "full"), help="way of decoding (default: greedy)"
    )
    parser.add_argument("--k", type=int, default=5, metavar="N", help="codes of topk and flat (default: 5)")
    parser.add_argument("--threshold", type=float, metavar="P", help="flat: codes above it (default: the model's own)")
    parser.add_argument("--constrain", action="store_true", help="greedy: only codes of the model's key")
    parser.add_argument("--batch-size", type=int, default=256, metavar="N", help=_BATCH_HELP)
    parser.add_argument(
        "--precision",
        default="auto",
        choices=PRECISIONS,
        help="auto: bf16 where the hardware has it, several times as fast and a little less exact (default: auto)",
    )
    parser.add_argument("--compile", action="store_true", help="let torch compile the encoder's layers first")
    parser.set_defaults(run=_predict)


def _predict(args: argparse.Namespace) -> None:
    if bool(args.texts) == bool(args.input) or bool(args.input) != bool(args.output):
        raise UserError('Give descriptions ("wine merchant" …), or a file with --input in.csv --output out.csv.')
    device = distributed.start(device=args.device)

    from histocoder.files import sha256
    from histocoder.hub import local_folder
    from histocoder.predict import Coder
    from histocoder.predict_file import PredictConfig, predict_file

    folder = local_folder(args.model)
    coder = Coder.from_pretrained(
        folder, str(device), precision=args.precision, compile=args.compile, verify=not args.no_verify
    )
    if args.input:
        options = ("input", "output", "input_col", "language", "language_col", "mode", "k", "threshold", "constrain")
        model_id = f"{sha256(folder / 'model.safetensors')} {coder.precision}"
        with _standard_streams(args) as say:
            config = PredictConfig(**{name: getattr(args, name) for name in options}, batch_size=args.batch_size)
            predict_file(coder, config, model_id=model_id, overwrite=args.overwrite, say=say)
        return
    table = coder.predict(
        args.texts,
        args.language,
        mode=args.mode,
        k=args.k,
        threshold=args.threshold,
        constrain=args.constrain or None,
        batch_size=args.batch_size,
    )
    _print_table(args.texts, table)


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
    parser = _command(commands, "evaluate", "see how right a model is on descriptions whose codes are known")
    _add_model(parser)
    parser.add_argument("--data", required=True, metavar="FILE", help="CSV or Parquet of descriptions and codes")
    parser.add_argument("--target-cols", nargs="+", metavar="COL", help="columns of codes (default: the model's)")
    parser.add_argument(
        "--input-col", default="occ1", metavar="COL", help="column of descriptions, of --train-data too (default: occ1)"
    )
    parser.add_argument("--language", metavar="LANG", help="of all of them (default: by --language-col)")
    parser.add_argument("--language-col", default="lang", metavar="COL", help="column of languages (default: lang)")
    parser.add_argument("--zero-pad-codes", action="store_true", help="give codes of digits their leading zeros back")
    parser.add_argument("--drop-bad-labels", action="store_true", help="leave out rows whose labels do not fit")
    parser.add_argument(
        "--train-data", metavar="FILE", help="what it was trained on, to tell seen from new (default: as saved)"
    )
    parser.add_argument("--output", default="evaluation", metavar="DIR", help="for the report (default: evaluation)")
    parser.add_argument("--overwrite", action="store_true", help="replace a report that is in --output already")
    parser.add_argument(
        "--save-thresholds", action="store_true", help="keep the flat head's best thresholds in the model"
    )
    parser.add_argument("--batch-size", type=int, default=256, metavar="N", help=_BATCH_HELP)
    parser.set_defaults(run=_evaluate)


def _evaluate(args: argparse.Namespace) -> None:
    device = distributed.start(device=args.device)

    from histocoder.data.examples import ExampleFiles
    from histocoder.data.labels import LabelRules
    from histocoder.data.prepare import TRAIN_FILE
    from histocoder.evaluate import evaluate, times_seen
    from histocoder.hub import local_folder
    from histocoder.predict import Coder
    from histocoder.report import METRICS_FILE, REPORT_FILE, write_report
    from histocoder.saved_model import change_config
    from histocoder.summary import summary
    from histocoder.tracking import LOG_FILE

    output = Path(args.output)
    if output.exists() and not output.is_dir():
        raise UserError(f"{output} is a file; name a folder for the report with --output.")
    if not args.overwrite and any((output / name).exists() for name in (METRICS_FILE, REPORT_FILE)):
        raise UserError(f"A report is in {output} already. Add --overwrite to replace it, or choose another --output.")
    if args.save_thresholds:
        _check_may_change(Path(args.model))
    folder = local_folder(args.model)
    coder = Coder.from_pretrained(folder, str(device), verify=not args.no_verify)
    rules = LabelRules(args.zero_pad_codes, True, args.drop_bad_labels)
    files = ExampleFiles(
        (Path(args.data),),
        tuple(args.target_cols or coder.model.config.target_cols),
        coder.formatter,
        input_col=args.input_col,
        language_col=args.language_col,
        language=args.language,
        rules=rules,
    )
    examples = files.read(say=_say)
    run = _run_of(folder)
    train_data = Path(args.train_data or run / TRAIN_FILE)
    seen: dict = {}
    if args.train_data or train_data.is_file():
        text_col = _text_column(train_data, args.input_col)
        target_cols = coder.model.config.target_cols
        trained = ExampleFiles((train_data,), target_cols, coder.formatter, input_col=text_col, rules=rules)
        seen = dict(zip(("texts_seen", "codes_seen"), times_seen(trained.chunks(), examples.texts), strict=True))
    found = evaluate(coder, examples, batch_size=args.batch_size, **seen)
    title = f"{Path(args.model).name} on {Path(args.data).name}"
    report = write_report(output, found, coder, title=title, logs=run / LOG_FILE)
    for line in summary(found.metrics):
        _say(line)
    if args.save_thresholds:
        change_config(folder, replace(coder.model.config, thresholds=found.thresholds()))
        _say(f"The flat head's thresholds are kept in {folder / 'config.json'}.")
    _say(f"The report is {report}.")


def _check_may_change(model: Path) -> None:
    """Refuse a model whose config.json must stay as it is: the hub's, or a checkpoint's."""
    from histocoder.checkpoint import is_checkpoint

    if not model.is_dir():
        raise UserError(f"There is no folder {model} to keep thresholds in; a model of the hub's must be saved in one.")
    if is_checkpoint(model):
        raise UserError(f"{model} is a checkpoint, which is never altered. Name its run's folder, or best/.")


def _text_column(path: Path, wanted: str) -> str:
    """The column of descriptions of training data: the one that was named, else that of prepared data."""
    from histocoder.data.examples import TEXT_COL
    from histocoder.data.table import open_table

    header = open_table(path, (), optional=(wanted, TEXT_COL)).header
    return TEXT_COL if TEXT_COL in header and wanted not in header else wanted


def _run_of(folder: Path) -> Path:
    """The folder of the run that a model belongs to: the model's own, or above best/ and checkpoints/step-…/."""
    from histocoder.checkpoint import BEST_FOLDER, CHECKPOINTS_FOLDER

    folder = folder.resolve()
    if folder.parent.name == CHECKPOINTS_FOLDER:
        return folder.parents[1]
    return folder.parent if folder.name == BEST_FOLDER else folder


def _add_review(commands: argparse._SubParsersAction) -> None:
    parser = _command(commands, "review", "choose the rows of a coded file that a person should check first")
    parser.add_argument("--predictions", required=True, metavar="FILE", help="what histocoder predict wrote")
    parser.add_argument("--output", default="review.csv", metavar="FILE", help="to fill in (default: review.csv)")
    parser.add_argument("--budget", type=int, default=200, metavar="N", help="descriptions to check (default: 200)")
    parser.add_argument("--input-col", default="occ1", metavar="COL", help="column of descriptions (default: occ1)")
    parser.add_argument("--language-col", metavar="COL", help="column of languages")
    parser.add_argument("--overwrite", action="store_true", help="replace an --output that is there already")
    parser.set_defaults(run=_review)


def _review(args: argparse.Namespace) -> None:
    from histocoder.review import review

    review(
        Path(args.predictions),
        Path(args.output),
        budget=args.budget,
        input_col=args.input_col,
        language_col=args.language_col,
        overwrite=args.overwrite,
        say=_say,
    )


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
