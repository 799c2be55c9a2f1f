"""Runs a script of the project with a fault: python tests/breaking.py FAULT SCRIPT ARGS…

FAULT is one of
nan:RANK:FIRST-LAST  the loss of one rank is NaN in these steps
wandb:CALL:HOW       W&B's `init`, `log` or `finish` raises, or hangs
worker:NUMBER:SIGNAL a loader worker sends itself a signal at its second batch
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
from importlib.machinery import ModuleSpec
from pathlib import Path

from torch.utils.data import get_worker_info

sys.path.insert(0, str(Path(__file__).parents[1]))
from histocoder import engine
from histocoder.data.dataset import OccupationDataset


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


class Service:
    """A stand-in for W&B, as a module and as a run."""

    __spec__ = ModuleSpec("wandb", None)

    def __init__(self, call: str, how: str) -> None:
        self._broken, self._how = call, how

    def init(self, **_settings: object) -> Service:
        return self._do("init")

    def log(self, *_: object, **__: object) -> None:
        self._do("log")

    def finish(self) -> None:
        self._do("finish")

    def _do(self, call: str) -> Service:
        if call == self._broken and self._how == "raises":
            raise ConnectionError("the service\nis ill")
        if call == self._broken:
            time.sleep(3600)
        return self


def break_wandb(call: str, how: str) -> None:
    """Put the stand-in in W&B's place."""
    sys.modules["wandb"] = Service(call, how)  # type: ignore[assignment]


def break_worker(number: str, name: str) -> None:
    """Have a loader worker killed or stopped."""
    make_batch = OccupationDataset.__getitem__
    calls = 0

    def broken(*args):
        nonlocal calls
        calls += 1
        info = get_worker_info()
        if info is not None and info.id == int(number) and calls == 2:
            os.kill(os.getpid(), signal.Signals[name])
        return make_batch(*args)

    OccupationDataset.__getitem__ = broken


if __name__ == "__main__":
    _, fault, *command = sys.argv
    kind, *details = fault.split(":")
    {"nan": break_loss, "wandb": break_wandb, "worker": break_worker}[kind](*details)
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")
