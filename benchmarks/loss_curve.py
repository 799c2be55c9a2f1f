"""Losses of training in bf16 on trimmed batches, and in fp32 on padded ones; prints one line of
JSON.

The model of train_step.py is trained twice from the same weights on the same batches: as
`finetune.py` trains by default, and in fp32 with torch's operators and all inputs padded to 128
positions. Dropout is off, since its random numbers would differ. The output has the mean loss over
each twentieth of the steps, and the largest relative difference.

Usage: python benchmarks/loss_curve.py [--steps N] [--batch-size N] [--learning-rate LR]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from train_step import Data, Ours, train_config

from histocoder.ops import kernels

MAX_LEN = 128


def losses(side: Ours, steps: int, *, pad: bool) -> np.ndarray:
    """Return the loss of each step."""
    side.trainer.model.eval()
    found = []
    for _ in range(steps):
        batch = next(side.epochs)
        if pad:
            batch.input_ids = F.pad(batch.input_ids, (0, MAX_LEN - batch.input_ids.shape[1]))
        found.append(float(side.trainer.learner.train_step([batch])[0]))
    return np.array(found)


def main() -> None:
    """Train twice, and compare the losses."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200, help="number of steps (default: 200)")
    parser.add_argument("--batch-size", type=int, default=16, help="rows per step (default: 16)")
    parser.add_argument(
        "--learning-rate", type=float, default=1e-4, help="peak learning rate (default: 1e-4)"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny model on a hundred rows, to try the program"
    )
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    curves = {}
    with tempfile.TemporaryDirectory() as name:
        data = Data(Path(name), tiny=args.tiny)
        for side, precision, pad in (("ours", "bf16", False), ("padded", "fp32", True)):
            config = train_config(
                args.batch_size,
                learning_rate=args.learning_rate,
                precision=precision,
                max_steps=args.steps,
            )
            if pad:
                kernels.library = lambda: None
            curve = losses(Ours(data, config, device, Path(name)), args.steps, pad=pad)
            curves[side] = np.array(
                [part.mean() for part in np.array_split(curve, min(20, args.steps))]
            )
    difference = np.abs(curves["ours"] / curves["padded"] - 1)
    result = {
        "benchmark": "loss_curve",
        "steps": args.steps,
        "batch_size": args.batch_size,
        **{side: curve.round(5).tolist() for side, curve in curves.items()},
        "largest_difference": round(float(difference.max()), 5),
        "torch": torch.__version__,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
