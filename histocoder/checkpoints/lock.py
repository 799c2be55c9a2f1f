"""One run at a time in a folder, or at a file."""

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
def holding(lock: Path, *, path: Path, instead: str) -> Iterator[None]:
    """Hold a lock file, shared by all ranks of a run; a second run that tries to take it ends at once.

    The operating system or the file server releases the lock when its process ends, however it ends, so the file of a
    killed run blocks nobody. Loader workers do not inherit it. On a file system without locks, nothing is held.
    The error says that `path` is in use, by which process on which host, and what to choose `instead`.
    """
    # in a file of its own: on Windows nobody else can read a locked file
    holder = lock.with_name(f"{lock.name}.json")

    def take() -> FileLock:
        """Take the lock, and record who holds it."""
        held = FileLock(lock, timeout=0.2, fallback_to_soft=False)  # a run that is just ending deletes its file
        try:
            held.acquire()
        except Timeout as error:
            raise UserError(
                f"{path} is in use by another run ({_named(holder)}). Wait until it ends, or choose {instead}."
            ) from error
        except OSError:
            pass  # the file system has no locks
        holder.write_text(json.dumps({"host": socket.gethostname(), "pid": os.getpid()}), encoding="utf-8")
        return held

    held = distributed.run_on_primary(take, doing="locking the folder")
    try:
        yield
    finally:
        if held is not None:
            for file in (holder, lock):  # while the lock is held, so that no other run's files are deleted
                with suppress(OSError):
                    file.unlink()
            held.release()


def _named(holder: Path) -> str:
    try:
        record = json.loads(holder.read_text(encoding="utf-8"))
        return f"process {record['pid']} on {record['host']}"
    except (OSError, ValueError, KeyError):
        return "which has just started"
