"""`histocoder predict`: code descriptions, or a file of them."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from histocoder import distributed
from histocoder.cli.model_flags import (
    BATCH_HELP,
    RAW_HELP,
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
from histocoder.errors import Interrupted, UserError
from histocoder.training.console import say

if TYPE_CHECKING:
    from histocoder.inference.coder import Coder
    from histocoder.inference.known import Known


def add(commands: argparse._SubParsersAction) -> None:
    """Add the command and its flags."""
    parser = add_command(commands, "predict", "code descriptions, or a file of them", epilog=languages.HELP)
    add_model_flags(parser)
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="descriptions")
    parser.add_argument("--input", metavar="FILE", help=f"{TABLE_HELP} of descriptions, instead; -: standard input")
    parser.add_argument(
        "--output",
        metavar="FILE",
        help=f"where to write it with its codes, in the form of the suffix: {TABLE_HELP}; -: standard output",
    )
    parser.add_argument("--sheet", metavar="NAME", help=f"--input: {SHEET_HELP}")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing --output")
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
    parser.add_argument("--batch-size", type=int, default=256, metavar="N", help=BATCH_HELP)
    add_precision_flag(parser)
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
    add_label_flags(parser, of="--known: ")
    parser.add_argument(
        "--join",
        metavar="FILE",
        help="table by code, such as of HISCLASS: its columns are added for each code (see docs/prediction.md)",
    )
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
    parser.add_argument("--raw", action="store_true", help=RAW_HELP)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Code the descriptions, print or write their codes."""
    if bool(args.texts) == bool(args.input) or bool(args.input) != bool(args.output):
        raise UserError('Give descriptions ("wine merchant" …), or a file with --input in.csv --output out.csv.')
    _check_known(args)
    if args.join and not args.input:
        raise UserError("--join adds columns to a file; give --input and --output.")
    device = distributed.start(device=args.device)

    from histocoder.checkpoints.hub import local_folder
    from histocoder.checkpoints.model_files import CONFIG_FILE, WEIGHTS_FILE
    from histocoder.files import sha256
    from histocoder.inference.coder import Coder
    from histocoder.inference.join import Join
    from histocoder.inference.predict_file import PredictConfig, predict_file

    folder = local_folder(args.model)
    known_file = _known_file(args, folder) if args.known else None
    coder = Coder.from_pretrained(
        folder, str(device), precision=args.precision, compile=args.compile, verify=not args.no_verify
    )
    known = _read_known(known_file, coder, args) if known_file else None
    join = Join(Path(args.join), system=coder.system, codes=coder.codes) if args.join else None
    if args.input:
        columns, decoding = ("input_col", "language", "language_col"), ("k", "threshold", "constrain", "min_confidence")
        fields = ("input", "output", *columns, *decoding, "batch_size", "columns", "excel", "raw", "sheet")
        model_id = f"{sha256(folder / WEIGHTS_FILE)} {sha256(folder / CONFIG_FILE)} {coder.precision}"
        with _standard_streams(args) as say:
            config = PredictConfig(**{name: getattr(args, name) for name in fields}, mode=args.mode or coder.mode)
            say(f"Coding in mode {config.mode}.")
            predict_file(coder, config, model_id=model_id, known=known, join=join, overwrite=args.overwrite, say=say)
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
    """Return the file of hand-coded descriptions."""
    from histocoder.data.prepare import TRAIN_FILE
    from histocoder.files import is_same_file

    path = run_of(folder) / TRAIN_FILE if args.known == "auto" else Path(args.known)
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
    files, has_languages = training_files(path, coder, args, rules)
    settings = {"any_language": not has_languages, "exact": args.known_exact}
    read = f"{files.input_col} {files.language_col} {rules} {settings}"
    known = Known(f"{fingerprint(path)} {read}", languages=coder.model.config.languages, **settings)
    for examples in files.chunks(say=say):
        known.add(coded(examples))
    if number := known.num_contradictory:
        say(
            f"{path}: {number:,} descriptions have several sets of codes; the most frequent counts, of equally "
            "frequent ones the first in the file."
        )
    return known


@contextmanager
def _standard_streams(args: argparse.Namespace) -> Iterator[Callable[[str], None]]:
    """Have files stand in for standard input and output, where `-` names them; give what tells the user of them."""
    if "-" not in (args.input, args.output):
        yield say
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
