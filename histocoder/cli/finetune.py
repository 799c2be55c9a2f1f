"""`finetune.py`, which is `histocoder finetune` and `python -m histocoder.cli.finetune`, too."""

from collections.abc import Sequence

from histocoder.cli.arguments import parse
from histocoder.cli.script import run_script
from histocoder.config import FinetuneConfig


def main(argv: Sequence[str] | None = None, *, prog: str | None = None) -> None:
    """Prepare the table that the flags name, and train on it."""
    config = parse(FinetuneConfig, argv, prog=prog)
    from histocoder.training.train import train  # importing torch takes seconds, which --help saves

    train(config)


if __name__ == "__main__":
    run_script(main)
