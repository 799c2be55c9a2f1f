"""Runs a script of the project with a fault: python tests/faulty.py FAULT SCRIPT ARGS…

FAULT is `nan:RANK:FIRST-LAST`: the loss of one rank is NaN in these steps.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from histocoder import engine


def break_loss(rank: str, steps: str) -> None:
    """Make the loss NaN."""
    mixed_loss = engine.mixed_loss
    first, last = map(int, steps.split("-"))
    calls = 0

    def broken(*args, **kwargs):
        nonlocal calls
        calls += 1
        return mixed_loss(*args, **kwargs) * (float("nan") if first <= calls <= last else 1)

    if os.environ.get("RANK", "0") == rank:
        engine.mixed_loss = broken


if __name__ == "__main__":
    _, fault, *command = sys.argv
    kind, *details = fault.split(":")
    {"nan": break_loss}[kind](*details)
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")
