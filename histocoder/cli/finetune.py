"""`finetune.py`, which is `histocoder finetune` and `python -m histocoder.cli.finetune`, too."""

from __future__ import annotations

from collections.abc import Sequence

from histocoder.cli.arguments import parse
from histocoder.cli.script import run_script
from histocoder.config import FinetuneConfig
from histocoder.training.train import train


def main(argv: Sequence[str] | None = None, *, prog: str | None = None) -> None:
    """Prepare the table that the flags name, and train on it."""
    train(parse(FinetuneConfig, argv, prog=prog))


if __name__ == "__main__":
    run_script(main)
