"""The `histocoder` command."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from histocoder.cli import convert, doctor, evaluate, export, finetune, predict, review, serve, train_mixer
from histocoder.cli.arguments import Parser, add_flags, config_of
from histocoder.cli.script import run_script
from histocoder.data.languages import HELP

_SCRIPTS = {
    "finetune": (finetune, "fine-tune a model on your own table and classification, as finetune.py does"),
    "train-mixer": (train_mixer, "train the full model on prepared files, as train_mixer.py does"),
}
"""Modules with a parser of their own, which has `--config`."""
_COMMANDS = (predict, evaluate, review, serve, export, convert, doctor)
"""Modules with `Flags`, whose docstring describes the command, and `run`, which takes them."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run `histocoder` or `python -m histocoder`."""
    run_script(lambda: _main(argv))


def build_parser() -> Parser:
    """Return the commands and their flags."""
    parser = Parser("Use a model that histocoder trained.", prog="histocoder", config=False)
    parser.add_version()
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (_, text) in _SCRIPTS.items():
        commands.add_parser(name, help=text, description=text, config=False)
    for module in _COMMANDS:
        name, text = module.__name__.rpartition(".")[2], str(module.Flags.__doc__)
        short = text[0].lower() + text[1:].removesuffix(".")
        epilog = HELP if hasattr(module.Flags, "language") else None
        command = commands.add_parser(name, help=short, description=text, epilog=epilog, config=False)
        add_flags(command, module.Flags)
        command.set_defaults(command=module)
    return parser


def _main(argv: Sequence[str] | None) -> None:
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in _SCRIPTS:
        _SCRIPTS[words[0]][0].main(words[1:], prog=f"histocoder {words[0]}")
        return
    args = build_parser().parse(words)
    args.command.run(config_of(args.command.Flags, args))
