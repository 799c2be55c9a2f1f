"""Runs a script by path with something going wrong in it: `python tests/faulty.py FAULT … -- SCRIPT ARG …`.

Faults, each at the n-th call, counted from 1, of a function that is named by its module and its name:

- `kill:os.replace:3`: SIGKILL instead of the call
- `cut:torch.save:1`: SIGKILL behind the call, with the file it has written cut in half
- `sleep:os.replace:1:5`: five seconds before the call
- `EROFS:os.replace:2`: an OSError of that kind, in this call and all later ones
- `room:100000`: no file may grow beyond so many bytes
- `timeout:3`: seconds that collectives may take
"""

from __future__ import annotations

import errno
import importlib
import os
import resource
import runpy
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any


def wrap(name: str, behave: Callable[..., Any]) -> None:
    """Have `behave(function, number_of_call, *args, **kwargs)` called instead of a function."""
    module_name, _, attribute = name.rpartition(".")
    module = importlib.import_module(module_name)
    function, calls = getattr(module, attribute), 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return behave(function, calls, *args, **kwargs)

    setattr(module, attribute, wrapped)


def die() -> None:
    """End as the kernel ends a process, without any clean-up."""
    os.kill(os.getpid(), signal.SIGKILL)


def install(fault: str) -> None:
    """Have a fault happen later on."""
    kind, *rest = fault.split(":")
    if kind == "room":
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(rest[0]), resource.RLIM_INFINITY))
        return
    if kind == "timeout":
        limit = timedelta(seconds=float(rest[0]))
        for name in ("init_process_group", "new_group"):
            wrap(f"torch.distributed.{name}", lambda f, _, *args, **kw: f(*args, **{**kw, "timeout": limit}))
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
