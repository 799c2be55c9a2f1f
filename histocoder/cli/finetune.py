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
from histocoder.formatters.classifications import LEXICON


def main(argv: Sequence[str] | None = None, *, prog: str | None = None) -> None:
    """Prepare the table that the flags name, and train on it."""
    args = build_parser(FinetuneConfig, prog=prog).parse(argv)
    if args.corrections and args.dataset is None:
        _train_on_corrections(args)
    learns_as_box = args.initial_checkpoint == BOX and not args.only_encoder
    if learns_as_box and args.titles == "auto":
        args.titles = str(LEXICON)  # which the box has learned as well
    config = config_of(FinetuneConfig, args)
    with importing():
        # importing torch takes seconds, which --help saves
        from histocoder.training.train import train

    words = sys.argv[1:] if argv is None else argv
    try:
        train(config)
    except UserError as error:
        if not error.settings:
            raise
        right_words = _with_settings(words, error.settings)
        if "RANK" in os.environ:
            advice = f"With these flags it works:\n{shlex.join(right_words)}"
        else:
            advice = f"This command works:\n{finetune_command(right_words)}"
        raise UserError(f"{error}\n{advice}") from error
    if config.prepare_only:
        from histocoder.log import log

        if any(word.replace("_", "-") == "--prepare-only" for word in words):
            command = finetune_command(_with_settings(words, {"prepare_only": False}))
            log.info(f"Train on it:\n{command}")
        else:
            log.info(
                "Train on it: remove prepare_only from the file of --config, and run it again."
            )


def _train_on_corrections(args: Namespace) -> None:
    """Set what follows where corrections are all that there is: they are the table, and the model
    in the box is the start.
    """
    args.dataset = args.corrections[0]
    args.corrections = args.corrections[1:] or None
    if args.initial_checkpoint is None:
        args.initial_checkpoint = BOX
    if args.target_cols is None:
        from histocoder.tables.table import open_table

        file = open_table(args.dataset, (), optional=STARTER_COLUMNS)
        args.target_cols = tuple(filter(file.has, STARTER_COLUMNS))


def _with_settings(words: Sequence[str], settings: Mapping[str, Any]) -> list[str]:
    """Return the words of a command with other settings, and without what a launcher has added."""
    values: dict[str, Any] = {}
    for name, value in settings.items():
        values[f"--{name.replace('_', '-')}"] = value
    values["--local-rank"] = False

    # a flag that is replaced goes with its values
    new_words: list[str] = []
    is_replaced = False
    for word in words:
        if word.startswith("--"):
            is_replaced = word.partition("=")[0].replace("_", "-") in values
        if not is_replaced:
            new_words.append(word)

    for flag, value in values.items():
        if value is False:
            continue
        new_words.append(flag)
        if isinstance(value, tuple):
            new_words.extend(map(str, value))
        elif value is not True:
            new_words.append(str(value))
    return new_words


if __name__ == "__main__":
    run_script(main)
