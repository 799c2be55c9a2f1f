"""`finetune.py`, which is `histocoder finetune` and `python -m histocoder.cli.finetune`, too."""

import sys
from collections.abc import Sequence

from histocoder.cli.arguments import parse
from histocoder.cli.script import run_script
from histocoder.config import FinetuneConfig
from histocoder.files import finetune_command


def main(argv: Sequence[str] | None = None, *, prog: str | None = None) -> None:
    """Prepare the table that the flags name, and train on it."""
    config = parse(FinetuneConfig, argv, prog=prog)
    from histocoder.training.train import train  # importing torch takes seconds, which --help saves

    words = sys.argv[1:] if argv is None else argv
    train(config)
    if config.prepare_only:
        from histocoder.log import log

        kept = [word for word in words if word.replace("_", "-") != "--prepare-only"]
        log.info(f"Train on it:\n{finetune_command(kept)}")


if __name__ == "__main__":
    run_script(main)
