#!/usr/bin/env python3
"""Fine-tune a model on your own CSV and classification.

Examples
--------
python finetune.py --dataset my.csv --target-cols hisco_1 --language en --save-path out
torchrun --nproc_per_node=4 finetune.py --distributed --dataset my.csv --target-cols hisco_1 --save-path out
"""

from __future__ import annotations

from collections.abc import Sequence

from histocoder.cli.arguments import parse
from histocoder.cli.script import run_script
from histocoder.config import FinetuneConfig
from histocoder.training.train import train


def main(argv: Sequence[str] | None = None) -> None:
    """Prepare the table that the flags name, and train on it."""
    config = parse(FinetuneConfig, argv)
    train(config)


if __name__ == "__main__":
    run_script(main)
