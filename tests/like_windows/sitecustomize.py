"""Has histocoder, in every Python that finds this file, see what it would on Windows; other
libraries see Linux.
"""

import builtins
import ctypes
import errno
import fcntl
import multiprocessing
import os
import stat
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

GONE = {
    "os": "fork getuid killpg pread pwrite statvfs sysconf uname".split(),
    "signal": "SIGALRM SIGCHLD SIGHUP SIGKILL SIGPIPE SIGQUIT SIGSTOP SIGUSR1 SIGUSR2".split(),
}
NO_MODULES = ("fcntl", "grp", "pwd", "resource", "termios")


def _open(path: Any, flags: int, mode: int = 0o777) -> int:
    if os.path.isdir(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))
    return os.open(path, flags, mode)


def _fsync(handle: int) -> None:
    if fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(errno.EBADF, "Bad file descriptor")
    os.fsync(handle)


def _locking(handle: int, mode: int, count: int) -> None:
    """Of `msvcrt`: of so many bytes from the place in the file on, which nobody else can read
    then.
    """
    assert os.lseek(handle, 0, os.SEEK_CUR) >= os.fstat(handle).st_size and stat.S_ISREG(
        os.fstat(handle).st_mode
    )
    fcntl.lockf(handle, mode, count, 0, os.SEEK_CUR)


def _library(name: str | None) -> ctypes.CDLL:
    if name is None:
        raise TypeError("argument of type 'NoneType' is not iterable")
    return ctypes.CDLL(name)


OTHERS = {
    "os": {"open": _open, "fsync": _fsync},
    "sys": {"platform": "win32"},
    "ctypes": {"CDLL": _library},
}


class _Seen(ModuleType):
    """A module as Windows has it."""

    def __getattr__(self, name: str) -> Any:
        if name in GONE.get(self.__name__, ()):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return OTHERS.get(self.__name__, {}).get(name, getattr(sys.modules[self.__name__], name))


_SEEN: dict[str, Any] = {name: _Seen(name) for name in (*GONE, "sys", "ctypes")}
_SEEN["msvcrt"] = SimpleNamespace(LK_NBLCK=fcntl.LOCK_EX | fcntl.LOCK_NB, locking=_locking)
_import = builtins.__import__


def _import_as_on_windows(name: str, globals: Any = None, *args: Any, **more: Any) -> Any:
    if str((globals or {}).get("__name__")).startswith("histocoder"):
        if name in NO_MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        if name in _SEEN:
            return _SEEN[name]
    return _import(name, globals, *args, **more)


builtins.__import__ = _import_as_on_windows
multiprocessing.set_start_method("spawn")
