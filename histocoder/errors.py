"""Errors and notices for users, and signals that stop a run; all other exceptions keep their
traceback.
"""

import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

STOP_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name)
)
"""Windows has no SIGUSR1."""


class UserError(ValueError):
    """Mistake that the user can fix; ends the program with exit code 2 and this message, without a
    traceback.

    `settings` that would fix it are given by name: a new value, or a mapping of a wrong name of a
    column to the right one.
    """

    def __init__(self, message: str, **settings: Any) -> None:
        super().__init__(message)
        self.settings = settings


class DamagedError(UserError):
    """File that is not as it was written."""


class MachineError(Exception):
    """Failure of the machine, such as a killed process; ends the program with exit code 1 and this
    message.
    """


class Notice(UserWarning):
    """Warning about the user's data or machine that affects results; programs print it without a
    file and line.
    """


_notice_listener: ContextVar[Callable[[str], None] | None] = ContextVar(
    "notice_listener", default=None
)


@contextmanager
def sending_notices(say: Callable[[str], None]) -> Iterator[None]:
    """Send this thread's notices to a function within a block; those of other threads go their own
    way.
    """
    token = _notice_listener.set(say)
    try:
        yield
    finally:
        _notice_listener.reset(token)


def warn_user(notice: Notice) -> None:
    """Issue a notice: to the function that this thread's are sent to, else as a warning of
    Python's.
    """
    say = _notice_listener.get()
    if say is None:
        warnings.warn(notice, stacklevel=3)
    else:
        say(str(notice))


def shown(text: str) -> str:
    """Return a text from a user's file as messages show it: quoted, on one line, shortened to 60
    characters.
    """
    return repr(text if len(text) <= 60 else text[:57] + "...")


def readable(text: str) -> str:
    """Return a text that may name files, with U+FFFD for each byte that is not in the encoding of
    names.

    Examples
    --------
    >>> readable("caf\\udce9.csv")
    'caf�.csv'
    """
    return "".join(
        "\ufffd" if "\udc80" <= character <= "\udcff" else character for character in text
    )


def counted(number: int, one: str, many: str) -> str:
    """Return a number and what is counted, in the singular or the plural.

    Examples
    --------
    >>> counted(1, "code is", "codes are"), counted(1200, "code is", "codes are")
    ('1 code is', '1,200 codes are')
    """
    return f"{number:,} {one if number == 1 else many}"


def misfit(error: RuntimeError) -> str:
    """Return the first reason, shortened, for which `load_state_dict` has refused weights."""
    first = (str(error).strip().splitlines()[1:2] or [str(error)])[0].strip()
    return first if len(first) <= 200 else f"{first[:200]} ..."


class Interrupted(Exception):
    """End of a run that was asked to stop (Ctrl-C, SIGTERM, SIGUSR1); the program exits with 128 +
    `signum`.
    """

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(message)
        self.signum = signum


class Cancelled(Exception):
    """End of work that its caller has asked to stop."""


def in_main_thread() -> bool:
    """Return whether this is the main thread, the only one that can handle signals; Ray Train uses
    another.
    """
    return threading.current_thread() is threading.main_thread()


@contextmanager
def handling_stop_signals(handler: Callable[[int, object], None]) -> Iterator[None]:
    """Handle stop signals as `signal.signal` does, within a block of the main thread."""
    before = {signum: signal.signal(signum, handler) for signum in STOP_SIGNALS if in_main_thread()}
    try:
        yield
    finally:
        for signum, earlier in before.items():
            signal.signal(signum, earlier)


class StopRequest:
    """Handler that records the first stop signal in `signum`."""

    def __init__(self) -> None:
        self.signum = 0

    def __call__(self, signum: int, _frame: object) -> None:
        self.signum = self.signum or signum


def ignore_stop_signals(_worker: int) -> None:
    """Ignore stop signals in a loader worker, which receives those to the whole process group as
    well.
    """
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    # a second SIGTERM is for this process alone
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))
