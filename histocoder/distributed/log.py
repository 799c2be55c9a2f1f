"""What a run says: plain lines on standard output, warnings on standard error, of rank 0 alone."""

from __future__ import annotations

import logging
import sys

from tqdm import tqdm

from histocoder.distributed.process_group import is_primary


class _Console(logging.Handler):
    """Prints beside progress bars; what can't be printed is not passed over."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a line."""
        if is_primary():
            stream = sys.stderr if record.levelno >= logging.WARNING else sys.stdout
            tqdm.write(record.getMessage(), file=stream)
            stream.flush()


log = logging.getLogger("histocoder")
log.setLevel(logging.INFO)
log.propagate = False
log.addHandler(_Console())
