"""The program's logger: lines on standard output, above progress bars, and warnings on standard error."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm


class _Console(logging.Handler):
    """Prints records; an error of the stream ends the run."""

    def emit(self, record: logging.LogRecord) -> None:
        stream = sys.stderr if record.levelno >= logging.WARNING else sys.stdout
        tqdm.write(record.getMessage(), file=stream)
        stream.flush()


log = logging.getLogger("histocoder")
"""Disabled on ranks other than 0; see `distributed.start`."""
log.setLevel(logging.INFO)
log.propagate = False
log.addHandler(_Console())


@contextmanager
def quiet() -> Iterator[None]:
    """Drop all lines."""
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before
