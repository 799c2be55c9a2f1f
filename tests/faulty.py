"""Runs a script by path with something going wrong in it: `python tests/faulty.py FAULT … -- SCRIPT ARG …`.

Faults, each at the n-th call, counted from 1, of a function that is named by its module and its name:

- `kill:os.replace:3`: SIGKILL instead of the call
- `change:best:3`: SIGKILL instead of the third change of a file or a folder whose path contains `best`
- `cut:torch.save:1`: SIGKILL behind the call, with the file it has written cut in half
- `sleep:os.replace:1:5`: five seconds before the call
- `EROFS:os.replace:2`: an OSError of that kind, in this call and all later ones
- `room:100000`: no file may grow beyond so many bytes
- `nan:1:3-4`: the loss of rank 1 is NaN in steps 3 to 4
- `memory:1:3`: rank 1 asks for more memory than there is in step 3
- `worker:1:SIGKILL`: loader worker 1 sends itself that signal at its second batch
- `wandb:init:hangs`: W&B's `init`, `log`, `log_artifact` or `finish` hangs, or `raises`
"""

from __future__ import annotations

import errno
import os
import pkgutil
import resource
import runpy
import signal
import sys
import time
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "os.utime", "shutil.rmtree"}


def wrap(name: str, behave: Callable[..., Any]) -> None:
    """Have `behave(function, number_of_call, *args, **kwargs)` called instead of a function."""
    owner_name, _, attribute = name.rpartition(".")
    owner = pkgutil.resolve_name(owner_name)
    function, calls = getattr(owner, attribute), 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return behave(function, calls, *args, **kwargs)

    setattr(owner, attribute, wrapped)


def die() -> None:
    """End as the kernel ends a process, without any clean-up."""
    os.kill(os.getpid(), signal.SIGKILL)


def break_change(part: str, number: str) -> None:
    """Die instead of a change on disk: of writing, renaming, deleting, or making a folder."""
    left = int(number)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal left
        is_change = event in CHANGES or (event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        if is_change and any(
            part in os.fsdecode(arg) for arg in args[:2] if isinstance(arg, str | bytes | os.PathLike)
        ):
            left -= 1
            if not left:
                die()

    sys.addaudithook(hook)


def break_loss(rank: str, steps: str) -> None:
    """Make a rank's loss NaN."""
    first, last = map(int, steps.split("-"))
    if os.environ.get("RANK", "0") == rank:
        wrap(
            "histocoder.training.learner.mixed_loss",
            lambda f, number, *args: f(*args) * (float("nan") if first <= number <= last else 1),
        )


def break_memory(rank: str, step: str) -> None:
    """Have a rank ask for a petabyte."""
    import torch

    if os.environ.get("RANK", "0") == rank:
        wrap(
            "histocoder.training.learner.mixed_loss",
            lambda f, number, *args: (
                f(*args) + (torch.empty(10**15, dtype=torch.uint8)[0] if number == int(step) else 0)
            ),
        )


def break_worker(number: str, signal_name: str) -> None:
    """Have a loader worker killed or stopped."""
    from torch.utils.data import get_worker_info

    def behave(function: Callable[..., Any], calls: int, *args: Any) -> Any:
        info = get_worker_info()
        if info is not None and info.id == int(number) and calls == 2:
            os.kill(os.getpid(), signal.Signals[signal_name])
        return function(*args)

    wrap("histocoder.data.dataset.OccupationDataset.__getitem__", behave)


class Service:
    """A stand-in for W&B, as a module and as a run."""

    __spec__ = ModuleSpec("wandb", None)

    def __init__(self, call: str, how: str) -> None:
        self._broken, self._how = call, how

    def init(self, **_settings: object) -> Service:
        return self._do("init")

    def log(self, *_: object, **__: object) -> None:
        self._do("log")

    def Artifact(self, *_: object, **__: object) -> Service:
        return self

    def add_file(self, *_: object, **__: object) -> None:
        pass

    def log_artifact(self, *_: object) -> None:
        self._do("log_artifact")

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


def install(fault: str) -> None:
    """Have a fault happen later on."""
    kind, *rest = fault.split(":")
    if kind == "room":
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(rest[0]), resource.RLIM_INFINITY))
        return
    breaks = {"nan": break_loss, "memory": break_memory, "worker": break_worker, "wandb": break_wandb}
    breaks["change"] = break_change
    if kind in breaks:
        breaks[kind](*rest)
        return
    name, at = rest[0], int(rest[1])

    def behave(function: Callable[..., Any], number: int, *args: Any, **kwargs: Any) -> Any:
        if kind == "kill" and number == at:
            die()
        if kind == "sleep" and number == at:
            time.sleep(float(rest[2]))
        if kind.startswith("E") and number >= at:
            raise OSError(getattr(errno, kind), os.strerror(getattr(errno, kind)))
        result = function(*args, **kwargs)
        if kind == "cut" and number == at:
            written = Path(args[1])
            os.truncate(written, written.stat().st_size // 2)
            die()
        return result

    wrap(name, behave)


if __name__ == "__main__":
    end = sys.argv.index("--")
    for argument in sys.argv[1:end]:
        install(argument)
    sys.argv = sys.argv[end + 1 :]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
