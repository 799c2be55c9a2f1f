"""Programs that start others, as engines do, and a process among them that is killed."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from conftest import ROOT, environment
from jobs import children_of

_SECONDS = 900.0


class Ended(NamedTuple):
    """How a program ended."""

    status: int
    output: str
    """Standard output and error."""
    seconds: float
    was_killed: bool
    """Whether a process was found to kill."""


def watch(args: Sequence[object], *, victim: Callable[[int], bool] | None = None, **env: str) -> Ended:
    """Run a Python with these arguments to its end; kill the first process that it started for which `victim` holds."""
    started, was_killed = time.monotonic(), False
    with tempfile.TemporaryFile("w+") as output:
        program = subprocess.Popen(
            [sys.executable, *map(str, args)],
            cwd=ROOT,
            env=environment(PYTHONPATH=str(ROOT), PYSPARK_PYTHON=sys.executable, RAY_USAGE_STATS_ENABLED="0", **env),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            while program.poll() is None and time.monotonic() - started < _SECONDS:
                found = [pid for pid in _family(program.pid) if victim is not None and victim(pid)]
                if found and not was_killed:
                    os.kill(found[0], signal.SIGKILL)
                    was_killed = True
                time.sleep(0.2)
        finally:
            family = _family(program.pid)
            for pid in family if program.poll() is None else ():
                os.kill(pid, signal.SIGKILL)
        seconds = time.monotonic() - started
        output.seek(0)
        return Ended(program.wait(), output.read(), seconds, was_killed)


def runs(pid: int, *words: str) -> bool:
    """Return whether the command of a process contains all these words."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return False
    return all(word in command for word in words)


def has_torch(pid: int) -> bool:
    """Return whether a process has loaded torch."""
    try:
        return "libtorch_cpu" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False


def _family(pid: int) -> list[int]:
    """A process and all that it has started, and these."""
    return [pid, *(other for child in children_of(pid) for other in _family(child))]
