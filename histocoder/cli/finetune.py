"""`finetune.py`, which is `histocoder finetune` and `python -m histocoder.cli.finetune`, too."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from histocoder.cli.arguments import parse
from histocoder.cli.script import importing, run_script
from histocoder.config import FinetuneConfig
from histocoder.errors import UserError
from histocoder.files import finetune_command


def main(argv: Sequence[str] | None = None, *, prog: str | None = None) -> None:
    """Prepare the table that the flags name, and train on it."""
    config = parse(FinetuneConfig, argv, prog=prog)
    with importing():
        from histocoder.training.train import train  # importing torch takes seconds, which --help saves

    words = sys.argv[1:] if argv is None else argv
    try:
        train(config)
    except UserError as error:
        if not error.settings:
            raise
        raise UserError(f"{error}\nThis command works:\n{_with(words, error.settings)}") from error
    if config.prepare_only:
        from histocoder.log import log

        log.info(f"Train on it:\n{_with(words, {'prepare_only': False})}")


def _with(words: Sequence[str], settings: Mapping[str, Any]) -> str:
    """Return the command of some words with other settings."""
    flags = {f"--{name.replace('_', '-')}": value for name, value in settings.items()}
    kept, keep = [], True
    for word in words:
        keep = keep if not word.startswith("--") else word.partition("=")[0].replace("_", "-") not in flags
        kept += [word] if keep else []
    for flag, value in flags.items():
        kept += [] if value is False else [flag]
        kept += [] if isinstance(value, bool) else map(str, value) if isinstance(value, tuple) else [str(value)]
    return finetune_command(kept)


if __name__ == "__main__":
    run_script(main)
