"""The program's logger: lines on standard output, above progress bars, and warnings on standard
error.
"""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from tqdm import tqdm

from histocoder.errors import readable

_line_listener: ContextVar[Callable[[str], object] | None] = ContextVar(
    "line_listener", default=None
)


class _Console(logging.Handler):
    """Prints records, or sends a thread's lines to its listener; an error of the stream ends the
    run.
    """

    is_shown = True
    is_on_stderr = False  # whether lines are printed where warnings are

    def emit(self, record: logging.LogRecord) -> None:
        say = _line_listener.get()
        if say is not None and record.levelno < logging.WARNING:
            say(record.getMessage())
        elif self.is_shown:
            is_error = self.is_on_stderr or record.levelno >= logging.WARNING
            stream = sys.stderr if is_error else sys.stdout
            tqdm.write(readable(record.getMessage()), file=stream)
            stream.flush()


_console = _Console()
log = logging.getLogger("histocoder")
"""Prints on rank 0 alone; see `distributed.start`."""
log.setLevel(logging.INFO)
log.propagate = False
log.addHandler(_console)


def show_lines(is_shown: bool) -> None:
    """Set whether this process prints what it logs."""
    _console.is_shown = is_shown


@contextmanager
def sending_lines(say: Callable[[str], object]) -> Iterator[None]:
    """Send the lines that this thread logs, but for warnings, to a function within a block; they
    are not printed.
    """
    token = _line_listener.set(say)
    try:
        yield
    finally:
        _line_listener.reset(token)


@contextmanager
def printing_to_stderr() -> Iterator[None]:
    """Print all lines on standard error within a block, whose results go to standard output."""
    _console.is_on_stderr = True
    try:
        yield
    finally:
        _console.is_on_stderr = False
