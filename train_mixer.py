#!/usr/bin/env python3
"""Train the full model on prepared files.

Examples
--------
python train_mixer.py --train-data a.csv b.csv --val-data v.csv --save-dir out --formatter hisco
torchrun --nproc_per_node=8 train_mixer.py --distributed --train-data a.csv --val-data v.csv --save-dir out
"""

from __future__ import annotations

import argparse
from pathlib import Path

from histocoder.checkpoints.resume import marking_interruptions
from histocoder.checkpoints.run_folder import refuse_others_files, run_folder
from histocoder.cli import arguments
from histocoder.cli.parser import Parser
from histocoder.cli.script import run_script
from histocoder.config import check_target_len
from histocoder.data.examples import MAX_CODES, ExampleFiles
from histocoder.data.key import read_key
from histocoder.data.labels import LabelRules
from histocoder.data.languages import HELP
from histocoder.errors import UserError
from histocoder.formatters import build_formatter
from histocoder.training.train import start, train

NUM_BLOCKS = {"hisco": MAX_CODES, "occ1950": 2}


MAIN_FLAGS = (
    *("--train-data", "--val-data", "--save-dir", "--language-col", "--formatter", "--target-cols", "--key"),
    *("--encoder", "--initial-checkpoint", "--num-epochs", "--batch-size", "--config", "--help-all"),
)


def build_parser() -> Parser:
    """The flags."""
    parser = Parser(
        "Train a model that codes occupational descriptions, on prepared files.", main=MAIN_FLAGS, epilog=HELP
    )
    group = parser.add_argument_group("files")
    group.add_argument("--train-data", nargs="+", metavar="FILE", help="CSV or Parquet files to train on (required)")
    group.add_argument("--val-data", nargs="+", metavar="FILE", help="CSV or Parquet files to validate on (required)")
    group.add_argument("--save-dir", metavar="DIR", help="the run's folder (required)")
    group.add_argument("--language-col", default="lang", metavar="COL", help="column of languages (default: lang)")
    group.add_argument(
        "--formatter",
        choices=("hisco", "occ1950", "general", "gpf"),
        default="hisco",
        help="kind of code (default: hisco)",
    )
    group.add_argument(
        "--target-col-naming",
        choices=tuple(NUM_BLOCKS),
        help="codes are in NAME_1, NAME_2, … (default: the formatter's)",
    )
    group.add_argument("--target-cols", nargs="+", metavar="COL", help="columns of codes, instead")
    group.add_argument(
        "--block-size", type=int, default=5, metavar="N", help="with general: characters of the longest code"
    )
    group.add_argument(
        "--use-within-block-sep", action="store_true", help="with general: ',' separates a code's tokens"
    )
    group.add_argument(
        "--key", metavar="CSV", help="the codes there may be: system_code,code (default: those in the data)"
    )
    arguments.add_data_arguments(parser)
    arguments.add_model_arguments(parser)
    arguments.add_training_arguments(parser, num_epochs=50, batch_size=512, seq2seq_weight=0.5)
    arguments.add_run_arguments(parser, save_interval=5000)
    return parser


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    args = build_parser().parse()
    if args.train_data is None or args.val_data is None or args.save_dir is None:
        raise UserError("Name your files and a folder: --train-data a.csv --val-data v.csv --save-dir out.")
    if args.formatter in ("general", "gpf") and not (args.target_cols or args.target_col_naming):
        raise UserError(f"--formatter {args.formatter} needs the columns of codes: --target-cols COL [COL ...].")
    return args


def target_cols_of(args: argparse.Namespace) -> list[str]:
    """The columns of codes that a file may have."""
    naming = args.target_col_naming or args.formatter
    return args.target_cols or [f"{naming}_{i + 1}" for i in range(NUM_BLOCKS[naming])]


def main() -> None:
    """Read the files, build the model, fit it."""
    args = parse_args()
    device = start(args)
    folder, target_cols = Path(args.save_dir), target_cols_of(args)
    formatter = build_formatter(
        args.formatter,
        num_blocks=NUM_BLOCKS.get(args.formatter, len(target_cols)),
        block_size=args.block_size,
        use_within_block_sep=args.use_within_block_sep,
    )
    check_target_len(formatter.num_blocks, formatter.block_size)
    if len(target_cols) > formatter.num_blocks:
        raise UserError(f"--formatter {args.formatter} takes {formatter.num_blocks} columns of codes at most.")
    if args.blank_means_no_occupation and formatter.system.missing_block is None:
        raise UserError(
            f"--formatter {args.formatter} has no mark for a row without any code; give such rows a code of their own "
            "(in HISCO -1) instead of --blank-means-no-occupation."
        )
    rules = LabelRules(
        args.zero_pad_codes,
        args.allow_codes_shorter_than_block_size,
        args.drop_bad_labels,
        args.blank_means_no_occupation,
    )
    key = read_key(args.key) if args.key else None
    train_files, val_files = (
        ExampleFiles(
            tuple(map(Path, paths)),
            tuple(target_cols),
            formatter,
            input_col=args.input_col,
            language_col=args.language_col,
            key=key,
            rules=rules,
        )
        for paths in (args.train_data, args.val_data)
    )
    with run_folder(folder), marking_interruptions(folder):
        refuse_others_files(folder)
        train(args, train_files, val_files, folder=folder, device=device)


if __name__ == "__main__":
    run_script(main)
