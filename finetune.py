#!/usr/bin/env python3
"""Fine-tune a model on your own CSV and classification.

Examples
--------
python finetune.py --dataset my.csv --target-cols hisco_1 --language en --save-path out
torchrun --nproc_per_node=4 finetune.py --distributed --dataset my.csv --target-cols hisco_1 --save-path out
"""

from __future__ import annotations

from histocoder.cli.finetune import main
from histocoder.cli.script import run_script

if __name__ == "__main__":
    run_script(main)
