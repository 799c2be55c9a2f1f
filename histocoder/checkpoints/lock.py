"""One run at a time in a folder, or at a file."""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from histocoder import distributed
from histocoder.errors import UserError

LOCK_FILE = ".lock"

if sys.platform == "win32":
    import msvcrt

    _BEHIND_THE_RECORD = 1 << 20

    def _take(handle: int) -> None:
        """Raise an OSError where another process has taken it."""
        os.lseek(handle, _BEHIND_THE_RECORD, os.SEEK_SET)  # for nobody else can read what is locked
        try:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        finally:
            os.lseek(handle, 0, os.SEEK_SET)

else:
    import fcntl

    def _take(handle: int) -> None:
        """Raise an OSError where another process has taken it."""
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def holding(lock: Path, *, what: str, instead: str) -> Iterator[None]:
    """Hold a lock file, shared by all ranks of a run; a second run that tries to take it ends at once.

    The kernel, or the file server, gives a lock back when its process ends, however it ends: a file that a killed run
    has left holds nobody up. Loader processes do not inherit it.

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
    handle = distributed.run_on_primary(lambda: _lock(lock, what, instead), doing="taking its lock")
    try:
        yield
    finally:
        if handle is not None:
            _give_back(lock, handle)


def _lock(path: Path, what: str, instead: str) -> int:
    """Return the open file; closing it gives the lock back."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _take(handle)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise UserError(
                    f"Another run {what}: {_holder(handle)}. Wait for its end, or choose {instead}."
                ) from error
            # the file system has no locks: continue without
        if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
            break
        os.close(handle)  # its holder has just ended and deleted it
    os.truncate(handle, 0)
    os.write(handle, json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode())
    return handle


def _give_back(path: Path, handle: int) -> None:
    """Delete the file while the lock is held; on Windows, which deletes nothing that is open, behind that."""
    if sys.platform == "win32":
        os.close(handle)
    with suppress(OSError):
        path.unlink()
    if sys.platform != "win32":
        os.close(handle)


def _holder(handle: int) -> str:
    try:
        record = json.loads(os.read(handle, 1000))
        return f"process {record['pid']} on {record['host']}"
    except (ValueError, KeyError):
        return "it has just begun"
