"""The program's logger: lines on standard output, above progress bars, and warnings on standard error."""

import logging
import sys
import threading
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
def gathering() -> Iterator[list[str]]:
    """Give a list of what this thread logs within the block, which is not printed."""
    said, thread = list[str](), threading.get_ident()

    def keep(record: logging.LogRecord) -> bool:
        if record.thread == thread:
            said.append(record.getMessage())
        return record.thread != thread

    log.addFilter(keep)
    try:
        yield said
    finally:
        log.removeFilter(keep)
