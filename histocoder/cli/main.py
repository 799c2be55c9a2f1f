"""The `histocoder` command."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from histocoder.cli.arguments import Parser, add_flags, config_of
from histocoder.cli.flags import (
    ConvertFlags,
    DoctorFlags,
    EvaluateFlags,
    ExportFlags,
    PredictFlags,
    ReviewFlags,
    ServeFlags,
)
from histocoder.cli.script import run_script
from histocoder.config import Settings
from histocoder.data.languages import HELP

_SCRIPTS = {
    "finetune": "fine-tune a model on your own table and classification, as finetune.py does",
    "train-mixer": "train the full model on prepared files, as train_mixer.py does",
}
"""Commands whose modules have a parser of their own, which has `--config`."""
_COMMANDS: dict[str, type[Settings]] = {
    "predict": PredictFlags,
    "evaluate": EvaluateFlags,
    "review": ReviewFlags,
    "serve": ServeFlags,
    "export": ExportFlags,
    "convert": ConvertFlags,
    "doctor": DoctorFlags,
}
"""Flags of the commands whose modules have `run`, which takes them; modules are imported when they are needed."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run `histocoder` or `python -m histocoder`."""
    run_script(lambda: _main(argv))


def build_parser() -> Parser:
    """Return the commands and their flags."""
    parser = Parser("Use a model that histocoder trained.", prog="histocoder", config=False)
    parser.add_version()
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, text in _SCRIPTS.items():
        commands.add_parser(name, help=text, description=text, config=False)
    for name, kind in _COMMANDS.items():
        text = str(kind.__doc__)
        short = text[0].lower() + text[1:].removesuffix(".")
        epilog = HELP if hasattr(kind, "language") else None
        add_flags(commands.add_parser(name, help=short, description=text, epilog=epilog, config=False), kind)
    return parser


def _main(argv: Sequence[str] | None) -> None:
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in _SCRIPTS:
        _module(words[0]).main(words[1:], prog=f"histocoder {words[0]}")
        return
    args = build_parser().parse(words)
    _module(args.command).run(config_of(_COMMANDS[args.command], args))


def _module(command: str) -> Any:
    return import_module(f"histocoder.cli.{command.replace('-', '_')}")
