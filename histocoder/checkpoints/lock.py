"""One run at a time in a folder, or at a file."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from histocoder import distributed
from histocoder.errors import UserError

LOCK_FILE = ".lock"


@contextmanager
def holding(lock: Path, *, what: str, instead: str) -> Iterator[None]:
    """Hold a lock file, shared by all ranks of a run; a second run that tries to take it ends at once.

    The kernel, or the file server, gives a lock back when its process ends, however it ends: a file that a killed run
    has left holds nobody up. Loader processes do not inherit it. Where the file system has no locks, nothing is held.

    Parameters
    ----------
    lock : Path
    what, instead : str
        What the run that holds it does, and what another is to choose.

    Raises
    ------
    UserError
        On every process, naming the host and the process that hold it.
    """
    held = distributed.run_on_primary(lambda: _take(lock, what, instead), doing="taking its lock")
    try:
        yield
    finally:
        if held is not None:
            for path in (_holder_file(lock), lock):  # while it is held, so that nobody else's is deleted
                with suppress(OSError):
                    path.unlink()
            held.release()


def _take(path: Path, what: str, instead: str) -> FileLock:
    held = FileLock(path, timeout=0.2, fallback_to_soft=False)  # one that has just ended deletes its file
    try:
        held.acquire()
    except Timeout as error:
        raise UserError(f"Another run {what}: {_holder(path)}. Wait for its end, or choose {instead}.") from error
    except OSError:
        pass  # the file system has no locks
    _holder_file(path).write_text(json.dumps({"host": socket.gethostname(), "pid": os.getpid()}), encoding="utf-8")
    return held


def _holder_file(lock: Path) -> Path:
    """Return the file that says who holds a lock; on Windows nobody else can read what is locked."""
    return lock.with_name(f"{lock.name}.json")


def _holder(lock: Path) -> str:
    try:
        record = json.loads(_holder_file(lock).read_text(encoding="utf-8"))
        return f"process {record['pid']} on {record['host']}"
    except (OSError, ValueError, KeyError):
        return "it has just begun"
