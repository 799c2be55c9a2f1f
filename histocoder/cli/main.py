"""The `histocoder` command."""

import sys
from collections.abc import Sequence
from importlib import import_module

from histocoder.cli import flags
from histocoder.cli.arguments import Parser, add_flags, config_of
from histocoder.cli.script import importing, run_script
from histocoder.config import Settings
from histocoder.text.languages import HELP

# commands whose modules have a parser of their own, which has `--config`
_SCRIPTS = {
    "finetune": "fine-tune a model on your own table and classification, as finetune.py does",
    "train-mixer": "train the full model on prepared files, as train_mixer.py does",
}
# modules of the other commands, which are imported when they are needed, and flags of their
# functions `run_…`
_COMMANDS: dict[str, tuple[str, type[Settings]]] = {
    "predict": ("predict", flags.PredictFlags),
    "evaluate": ("evaluate", flags.EvaluateFlags),
    "compare": ("evaluate", flags.CompareFlags),
    "review": ("evaluate", flags.ReviewFlags),
    "audit": ("audit", flags.AuditFlags),
    "agreement": ("audit", flags.AgreementFlags),
    "classes": ("classes", flags.ClassesFlags),
    "serve": ("serve", flags.ServeFlags),
    "export": ("convert", flags.ExportFlags),
    "convert": ("convert", flags.ConvertFlags),
    "about": ("about", flags.AboutFlags),
    "doctor": ("doctor", flags.DoctorFlags),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run `histocoder` or `python -m histocoder`."""
    run_script(lambda: _main(list(sys.argv[1:] if argv is None else argv)))


def build_parser() -> Parser:
    """Return the commands and their flags."""
    parser = Parser(
        "Train models of occupational codes, code files with them, and check the codes.",
        prog="histocoder",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, text in _SCRIPTS.items():
        commands.add_parser(name, help=text, description=text)
    for name, (_, kind) in _COMMANDS.items():
        text = str(kind.__doc__)
        short = text[0].lower() + text[1:].removesuffix(".")
        of_languages = HELP if hasattr(kind, "language") else None
        add_flags(
            commands.add_parser(name, help=short, description=text, epilog=of_languages), kind
        )
    return parser


def _main(words: list[str]) -> None:
    if words and words[0] in _SCRIPTS:
        script = import_module(f"histocoder.cli.{words[0].replace('-', '_')}")
        script.main(words[1:], prog=f"histocoder {words[0]}")
        return
    if not words:
        build_parser().print_help()
        return
    args = build_parser().parse(words)
    module, kind = _COMMANDS[args.command]
    with importing():
        run = getattr(import_module(f"histocoder.cli.{module}"), f"run_{args.command}")
    run(config_of(kind, args))
