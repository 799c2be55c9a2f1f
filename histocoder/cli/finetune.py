"""`finetune.py`, which is `histocoder finetune` and `python -m histocoder.cli.finetune`, too."""

import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from histocoder.checkpoints.starter import BOX, STARTER_COLUMNS
from histocoder.cli.arguments import build_parser, config_of
from histocoder.cli.script import importing, run_script
from histocoder.config import FinetuneConfig
from histocoder.errors import UserError
from histocoder.files import finetune_command


def main(argv: Sequence[str] | None = None, *, prog: str | None = None) -> None:
    """Prepare the table that the flags name, and train on it."""
    args = build_parser(FinetuneConfig, prog=prog).parse(argv)
    if args.corrections and args.dataset is None:
        _train_on_corrections(args)
    config = config_of(FinetuneConfig, args)
    with importing():
        from histocoder.training.train import (
            train,
        )  # importing torch takes seconds, which --help saves

    words = sys.argv[1:] if argv is None else argv
    try:
        train(config)
    except UserError as error:
        if not error.settings:
            raise
        right_words = _with(words, error.settings)
        if "RANK" in os.environ:
            advice = f"With these flags it works:\n{shlex.join(right_words)}"
        else:
            advice = f"This command works:\n{finetune_command(right_words)}"
        raise UserError(f"{error}\n{advice}") from error
    if config.prepare_only:
        from histocoder.log import log

        log.info(f"Train on it:\n{finetune_command(_with(words, {'prepare_only': False}))}")


def _train_on_corrections(args: Namespace) -> None:
    """Set what follows where corrections are all that there is: they are the table, and the model
    in the box is the start.
    """
    args.dataset, *others = args.corrections
    args.corrections = others or None
    if args.initial_checkpoint is None:
        args.initial_checkpoint = BOX
    if args.target_cols is None:
        from histocoder.tables.table import open_table

        file = open_table(args.dataset, (), optional=STARTER_COLUMNS)
        args.target_cols = tuple(filter(file.has, STARTER_COLUMNS))


def _with(words: Sequence[str], settings: Mapping[str, Any]) -> list[str]:
    """Return the words of a command with other settings, and without what a launcher has added."""
    flags = {f"--{name.replace('_', '-')}": value for name, value in settings.items()} | {
        "--local-rank": False
    }
    kept, keep = [], True
    for word in words:
        keep = (
            keep
            if not word.startswith("--")
            else word.partition("=")[0].replace("_", "-") not in flags
        )
        kept += [word] if keep else []
    for flag, value in flags.items():
        kept += [] if value is False else [flag]
        kept += (
            []
            if isinstance(value, bool)
            else map(str, value)
            if isinstance(value, tuple)
            else [str(value)]
        )
    return kept


if __name__ == "__main__":
    run_script(main)
