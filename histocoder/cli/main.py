"""The `histocoder` command."""

from __future__ import annotations

from collections.abc import Sequence

from histocoder.cli import convert, doctor, evaluate, predict, review, serve
from histocoder.cli.parser import Parser
from histocoder.cli.script import run_script

# What computes is imported where commands call for it, so that --help comes at once.


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `histocoder` and `python -m histocoder`."""
    run_script(lambda: _main(argv))


def build_parser() -> Parser:
    """Return the commands and their flags."""
    parser = Parser("Use a model that histocoder trained.", prog="histocoder", config=False)
    parser.add_version()
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (predict, evaluate, review, serve, convert, doctor):
        command.add(commands)
    return parser


def _main(argv: Sequence[str] | None) -> None:
    args = build_parser().parse(argv)
    args.run(args)
