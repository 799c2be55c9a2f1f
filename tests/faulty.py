"""Runs a program with something going wrong in it: `python tests/faulty.py FAULT … -- SCRIPT ARG
…`, also -m and -c.

Faults, each at the n-th call, counted from 1, of a function that is named by its module and its
name:

- `kill:os.replace:3`: SIGKILL instead of the call
- `change:best:3`: SIGKILL instead of the third change of a file or a folder whose path contains
  `best`
- `stop:os.replace:2`: SIGTERM to itself before the call
- `sleep:os.replace:1:5`: five seconds before the call
- `EROFS:os.replace:2`: an OSError of that kind, in this call and all later ones
- `room:100000`: no file may grow beyond so many bytes
- `nan:1:3-4`: the loss of rank 1 is NaN in steps 3 to 4; likewise `inf`
- `memory:1:3`: rank 1 asks for more memory than there is in step 3
- `worker:1:SIGKILL`: loader worker 1 sends itself that signal at its second batch
- `wandb:init`: W&B's `init`, `log` or `finish` raises an error
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
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

CHANGES = {
    "os.rename",
    "os.remove",
    "os.mkdir",
    "os.rmdir",
    "os.chmod",
    "os.utime",
    "shutil.rmtree",
}


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
        is_change = event in CHANGES or (
            event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        )
        paths = [os.fsdecode(arg) for arg in args[:2] if isinstance(arg, str | bytes | os.PathLike)]
        if is_change and any(part in path for path in paths):
            left -= 1
            if not left:
                die()

    sys.addaudithook(hook)


def break_loss(kind: str, rank: str, steps: str) -> None:
    """Multiply a rank's loss by NaN, add infinity to it, which leaves its gradients finite, or ask
    for a petabyte.
    """
    import torch

    broken = {
        "nan": lambda loss: loss * float("nan"),
        "inf": lambda loss: loss + float("inf"),
        "memory": lambda loss: loss + torch.empty(10**15, dtype=torch.uint8)[0],
    }[kind]
    first, _, last = steps.partition("-")
    wrong = range(int(first), int(last or first) + 1)
    if os.environ.get("RANK", "0") == rank:
        mixed_loss = "histocoder.training.learner.mixed_loss"
        wrap(mixed_loss, lambda f, number, *args: broken(f(*args)) if number in wrong else f(*args))


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
    """A stand-in for W&B, as a module and a run: every call gives itself, but for one that
    fails.
    """

    __spec__ = ModuleSpec("wandb", None)

    def __init__(self, broken: str) -> None:
        self.broken = broken

    def __getattr__(self, call: str) -> Callable[..., Service]:
        if call.startswith("__"):
            raise AttributeError(call)
        return lambda *_, **__: self.answer(call)

    def answer(self, call: str) -> Service:
        if call == self.broken:
            raise ConnectionError("the service\nis ill")
        return self


BREAKS: dict[str, Callable[..., object]] = {
    "room": lambda size: resource.setrlimit(
        resource.RLIMIT_FSIZE, (int(size), resource.RLIM_INFINITY)
    ),
    "wandb": lambda call: sys.modules.update(wandb=Service(call)),
    **{kind: partial(break_loss, kind) for kind in ("nan", "inf", "memory")},
    **{"change": break_change, "worker": break_worker},
}


def install(fault: str) -> None:
    """Have a fault happen later on."""
    kind, *rest = fault.split(":")
    if kind in BREAKS:
        BREAKS[kind](*rest)
        return
    name, at = rest[0], int(rest[1])

    def behave(function: Callable[..., Any], number: int, *args: Any, **kwargs: Any) -> Any:
        if kind == "kill" and number == at:
            die()
        if kind == "stop" and number == at:
            os.kill(os.getpid(), signal.SIGTERM)
        if kind == "sleep" and number == at:
            time.sleep(float(rest[2]))
        if kind.startswith("E") and number >= at:
            raise OSError(getattr(errno, kind), os.strerror(getattr(errno, kind)))
        return function(*args, **kwargs)

    wrap(name, behave)


def run_program(args: list[str]) -> None:
    """Run what `python ARG …` would: a script, or with -m a module, or with -c a text."""
    if args[0] == "-m":
        sys.argv = args[1:]
        runpy.run_module(args[1], run_name="__main__", alter_sys=True)
    elif args[0] == "-c":
        sys.argv = ["-c", *args[2:]]
        exec(args[1], {"__name__": "__main__"})
    else:
        sys.argv = args
        sys.path.insert(0, str(Path(args[0]).resolve().parent))
        runpy.run_path(args[0], run_name="__main__")


if __name__ == "__main__":
    end = sys.argv.index("--")
    for argument in sys.argv[1:end]:
        install(argument)
    run_program(sys.argv[end + 1 :])
