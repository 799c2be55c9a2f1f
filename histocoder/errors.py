"""Errors and notices for users; all other exceptions keep their traceback."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any


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


def counted(number: int, singular: str, plural: str) -> str:
    """Return a number and what is counted, in the singular or the plural.

    Examples
    --------
    >>> counted(1, "code is", "codes are"), counted(1200, "code is", "codes are")
    ('1 code is', '1,200 codes are')
    """
    if number == 1:
        return f"{number:,} {singular}"
    return f"{number:,} {plural}"


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
