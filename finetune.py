#!/usr/bin/env python3
"""Fine-tune a model on your own CSV and classification.

Examples
--------
python finetune.py --dataset my.csv --target-cols hisco_1 --language en --save-path out
torchrun --nproc_per_node=4 finetune.py --distributed --dataset my.csv --target-cols hisco_1 --save-path out
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from histocoder import distributed
from histocoder.checkpoints.resume import marking_interruptions
from histocoder.checkpoints.run_folder import refuse_others_files, run_folder
from histocoder.cli import arguments
from histocoder.cli.parser import Parser
from histocoder.cli.script import run_script
from histocoder.config import PrepareConfig, config_of
from histocoder.data.examples import ExampleFiles
from histocoder.data.key import Key, read_key
from histocoder.data.languages import HELP
from histocoder.data.prepare import KEY_FILE, PREPARED_RULES, TRAIN_FILE, VAL_FILE, formatter_of, prepare
from histocoder.errors import UserError
from histocoder.training.building import initial_key
from histocoder.training.train import start, train

if TYPE_CHECKING:
    import torch


MAIN_FLAGS = (
    *("--dataset", "--target-cols", "--input-col", "--language", "--language-col", "--save-path", "--key"),
    *("--encoder", "--initial-checkpoint", "--corrections", "--num-epochs", "--batch-size", "--config", "--help-all"),
)


def build_parser() -> Parser:
    """The flags."""
    parser = Parser(
        "Fine-tune a model that codes occupational descriptions, on your own table.", main=MAIN_FLAGS, epilog=HELP
    )
    group = parser.add_argument_group("table")
    group.add_argument("--dataset", metavar="FILE", help="CSV or Parquet with descriptions and codes (required)")
    group.add_argument(
        "--target-cols", nargs="+", metavar="COL", help="columns of codes, the first code's first (required)"
    )
    group.add_argument(
        "--save-path", default="./Finetuned/", metavar="DIR", help="the run's folder (default: ./Finetuned/)"
    )
    group.add_argument(
        "--language",
        default="unk",
        metavar="LANG",
        help="of all rows, a code or a name: see below (default: unk, unknown)",
    )
    group.add_argument("--language-col", metavar="COL", help="column of each row's language, instead of --language")
    group.add_argument(
        "--block-size", type=int, default=5, metavar="N", help="characters of the longest code (default: 5)"
    )
    group.add_argument(
        "--use-within-block-sep",
        action="store_true",
        help="',' separates the tokens within a code, as in PSTI's 1,10,2",
    )
    group.add_argument("--share-val", type=float, default=0.1, metavar="P", help="share to validate on (default: 0.1)")
    group.add_argument(
        "--split-by", choices=("text", "row"), default="text", help="set aside descriptions or rows (default: text)"
    )
    group.add_argument(
        "--key", metavar="CSV", help="the codes there may be: system_code,code (default: those in the data)"
    )
    group.add_argument(
        "--corrections",
        nargs="+",
        metavar="FILE",
        help="checked rows of histocoder review, the last word on their descriptions; they are trained on, with "
        "--initial-checkpoint from the model that they correct",
    )
    group.add_argument("--prepare-only", action="store_true", help="check and split the table, and stop")
    arguments.add_data_arguments(parser)
    arguments.add_model_arguments(parser)
    arguments.add_training_arguments(parser, num_epochs=5, batch_size=128, seq2seq_weight=0.1)
    arguments.add_run_arguments(parser, save_interval=1000)
    return parser


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    args = build_parser().parse()
    if args.dataset is None or args.target_cols is None:
        raise UserError("Name your table and its columns of codes: --dataset my.csv --target-cols hisco_1.")
    return args


def main() -> None:
    """Check the arguments, and hold the run's folder while working in it."""
    args = parse_args()
    device = start(args)
    config = config_of(
        PrepareConfig,
        args,
        target_cols=tuple(args.target_cols),
        allow_short_codes=args.allow_codes_shorter_than_block_size,
        corrections=tuple(args.corrections or ()),
    )
    folder = Path(args.save_path)
    with run_folder(folder), marking_interruptions(folder):
        refuse_others_files(folder)
        fit(args, config, folder, device)


def fit(args: argparse.Namespace, config: PrepareConfig, folder: Path, device: torch.device) -> None:
    """Prepare the table, train on it."""

    def prepared() -> Key:
        prepare(config, folder, known=initial_key(args) if args.corrections else None, overwrite=args.overwrite)
        return read_key(folder / KEY_FILE)

    key = distributed.from_primary(distributed.run_on_primary(prepared, doing="preparing the data"))
    if args.prepare_only:
        return
    formatter = formatter_of(config)
    train_files, val_files = (
        ExampleFiles((folder / name,), config.target_cols, formatter, key=key, rules=PREPARED_RULES)
        for name in (TRAIN_FILE, VAL_FILE)
    )
    train(args, train_files, val_files, folder=folder, device=device)


if __name__ == "__main__":
    run_script(main)
