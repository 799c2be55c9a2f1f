"""Rows per second of training with a frozen encoder, run in each step or once before training;
prints one line of JSON.

The model has CANINE-s's sizes and random weights; the rows are those of `english_occupations.csv`
(or data/train.csv if that is missing), without augmentation. One `Trainer` takes steps with and
without kept outputs in turns; the figures are medians.

Usage: python benchmarks/frozen.py [--batch-size N] [--steps N] [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from train_step import Data, Ours, train_config

from histocoder.training.encoded_rows import frozen_outputs


def measure(folder: Path, device: torch.device, args: argparse.Namespace) -> dict[str, Any]:
    """Encode once, then measure both sides in turns."""
    data = Data(folder, tiny=args.tiny)
    data.noisy = data.plain
    ours = Ours(data, train_config(args.batch_size), device, folder, freeze_encoder=True)
    ours.steps(1)
    started = time.perf_counter()
    outputs = frozen_outputs(ours.trainer.model, data.plain)
    seconds = time.perf_counter() - started
    rates: dict[str, list[float]] = {"in each step": [], "once": []}
    for _ in range(args.rounds):
        ours.trainer.learner.outputs = None
        rates["in each step"].append(ours.steps(args.steps))
        ours.trainer.learner.outputs = outputs
        rates["once"].append(ours.steps(8 * args.steps))
    median = {side: statistics.median(values) for side, values in rates.items()}
    return {
        "rows_per_s": {side: round(rate, 1) for side, rate in median.items()},
        "ratio": round(median["once"] / median["in each step"], 1),
        "rows": len(data.plain),
        "seconds_to_encode": round(seconds, 1),
    }


def main() -> None:
    """Measure, and print the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch-size", type=int, default=64, help="rows per step (default: 64)")
    parser.add_argument(
        "--steps",
        type=int,
        default=4,
        help="steps per round, 8 times as many with kept outputs (default: 4)",
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds (default: 3)")
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny model on a hundred rows, to try the program"
    )
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as name:
        measured = measure(Path(name), device, args)
    machine = (
        f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, "
        f"{device.type}"
    )
    result = {"benchmark": "frozen", "batch_size": args.batch_size, **measured}
    print(json.dumps({**result, "machine": machine, "torch": torch.__version__}))


if __name__ == "__main__":
    main()
