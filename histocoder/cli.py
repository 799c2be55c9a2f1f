"""The parser of all commands."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from histocoder.config_file import read_config
from histocoder.data.normalize import DEFAULT_NORMALIZATION
from histocoder.errors import UserError
from histocoder.model import PRESETS

FINETUNE_LEARNING_RATE, SCRATCH_LEARNING_RATE = 2e-5, 1e-3
SCRATCH_EPOCHS = 15


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are the user's in one sentence, and that reads `--config`."""

    def __init__(self, description: str, *, config: bool = True, **kwargs: Any) -> None:
        super().__init__(
            description=description,
            allow_abbrev=False,
            formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=118),
            **kwargs,
        )
        if config:
            self.add_argument(
                "--config", metavar="YAML", help="flags from a file, such as a run's args.yaml; those given here win"
            )

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message[0].upper()}{message[1:]}. See {self.prog} --help.")

    def parse(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """Parse flags, on top of those of `--config`."""
        first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        first.add_argument("--config")
        path = first.parse_known_args(argv)[0].config
        if path is not None:
            self.set_defaults(**read_config(path, self))
        return _resolve_defaults(self.parse_args(argv))


def _resolve_defaults(args: argparse.Namespace) -> argparse.Namespace:
    """Fill in the defaults that depend on the model that is trained."""
    if hasattr(args, "encoder"):
        from_scratch = args.encoder in PRESETS and args.initial_checkpoint is None
        if args.learning_rate is None:
            args.learning_rate = SCRATCH_LEARNING_RATE if from_scratch else FINETUNE_LEARNING_RATE
        if args.num_epochs is None:
            args.num_epochs = max(args.default_num_epochs, SCRATCH_EPOCHS if from_scratch else 0)
        if args.text_normalization is None:
            args.text_normalization = DEFAULT_NORMALIZATION
        del args.default_num_epochs
    return args
