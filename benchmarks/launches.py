"""Operators that the host launches on a GPU in a training step and for a batch to code, and how
often it waits.

They are counted on the pretended GPU of the tests, and no GPU is needed. "canine-s" has CANINE-s's
layers, in small: what a step launches depends on the number of layers alone. Prints a line of JSON
for each step and each mode.

Usage: python benchmarks/launches.py
"""

import json
import sys
import tempfile
from pathlib import Path

# ruff: noqa: E402
TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "training")]

from conftest import write_table
from models import tiny_model
from pretended_gpu import Log, pretended_gpu
from test_steps import GPU, losses

from histocoder import Coder
from histocoder.config.prediction import MODES

ENCODERS, PRECISIONS = ("canine-s", "tiny", "ngram", "bert"), ("fp32", "bf16", "fp16")


def show(log: Log, **case: object) -> None:
    print(
        json.dumps({**case, "launches": log.launches.total(), "waits": log.waits.total()}),
        flush=True,
    )


def count_steps() -> None:
    for encoder in ENCODERS:
        for precision in PRECISIONS:
            with tempfile.TemporaryDirectory() as folder, pretended_gpu() as log:
                table = write_table(Path(folder) / "table.csv")
                losses(Path(folder), table, encoder, GPU, log, precision=precision)
                show(log, step=encoder, precision=precision)


def count_batches() -> None:
    texts = [f"farmer and {word}" for word in ("baker", "miner", "smith", "tailor")]
    for num_codes in (1, 2):
        for mode in MODES:
            with pretended_gpu() as log:
                coder = Coder(tiny_model(num_codes), "cuda")
                coder.predict(texts, "en", mode=mode)  # tables of codes are made once
                log.clear()
                coder.predict(texts, "en", mode=mode)
                show(log, mode=mode, most_codes=num_codes)


if __name__ == "__main__":
    count_steps()
    count_batches()
