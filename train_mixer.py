#!/usr/bin/env python3
"""Train the full model on prepared files.

Examples
--------
python train_mixer.py --train-data a.csv b.csv --val-data v.csv --save-dir out --formatter hisco
torchrun --nproc_per_node=8 train_mixer.py --distributed --train-data a.csv --val-data v.csv --save-dir out
"""

from __future__ import annotations

from histocoder.cli.script import run_script
from histocoder.cli.train_mixer import main

if __name__ == "__main__":
    run_script(main)
