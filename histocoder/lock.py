"""One run at a time in a folder."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from histocoder import distributed
from histocoder.errors import UserError
from histocoder.files import make_folder

LOCK_FILE = ".lock"


@contextmanager
def run_folder(folder: Path) -> Iterator[None]:
    """Make a run's folder and hold it, all processes together; a second run on it ends at once.

    The kernel, or the file server, gives a lock back when its process ends, however it ends: a file that a killed run
    has left holds nobody up. Loader processes do not inherit it.

    Raises
    ------
    UserError
        On every process, naming the host and the process that hold the folder, or where it can't be written to.
    """

    is_new = not folder.exists()

    def take() -> int:
        make_folder(folder)
        return _lock(folder / LOCK_FILE)

    handle = distributed.run_on_primary(take, doing="locking the run's folder")
    try:
        yield
    finally:
        if handle is not None:
            with suppress(OSError):
                (folder / LOCK_FILE).unlink()
                if is_new:
                    folder.rmdir()  # which it can be where nothing has come of the run
            os.close(handle)


def _lock(path: Path) -> int:
    """The open file; closing it gives the lock back."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise UserError(
                    f"Another run works in {path.parent}: {_holder(handle)}. Wait for its end, or choose another "
                    "folder."
                ) from error
            # the file system has no locks: go on without
        if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
            break
        os.close(handle)  # its holder has just ended and taken it away
    os.truncate(handle, 0)
    os.write(handle, json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode())
    return handle


def _holder(handle: int) -> str:
    try:
        record = json.loads(os.pread(handle, 1000, 0))
        return f"process {record['pid']} on {record['host']}"
    except (ValueError, KeyError):
        return "it has just begun"
