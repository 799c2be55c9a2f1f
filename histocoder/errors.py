"""The ways in which a run ends early on purpose, and what it says on its way."""

import sys
import warnings


class UserError(ValueError):
    """A mistake that the user can fix: ends the program with exit code 2 and this message, without a traceback."""


class DamagedError(UserError):
    """A file is not as it was written."""


class MachineError(Exception):
    """A fault of the machine, such as a process that was killed: ends the program with exit code 1 and this message."""


class Notice(UserWarning):
    """Something about the user's data or machine that changes what comes out; scripts say it without where it arose."""


def warn_user(notice: Notice) -> None:
    """Issue a notice as from the line outside the package that has led to it."""
    package, level = __name__.partition(".")[0], 1
    while sys._getframe(level).f_globals.get("__name__", "").partition(".")[0] == package:
        level += 1
    warnings.warn(notice, stacklevel=level + 1)


def shown(text: str) -> str:
    """Return a text from a user's file as messages show it: in quotation marks, on one line, not all of a long one."""
    return repr(text if len(text) <= 60 else text[:57] + "...")


def misfit(error: RuntimeError) -> str:
    """Return the first of what `load_state_dict` says of weights that do not fit, and not all of a long list."""
    first = (str(error).strip().splitlines()[1:2] or [str(error)])[0].strip()
    return first if len(first) <= 200 else f"{first[:200]} ..."


class Interrupted(Exception):
    """The run was asked to stop (Ctrl-C, SIGTERM, SIGUSR1) and has saved its state.

    Parameters
    ----------
    message : str
        What was saved, and how to resume.
    signum : int
        The signal that asked; the program exits with 128 + `signum`.
    """

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(message)
        self.signum = signum
