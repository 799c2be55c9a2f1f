"""The logger of a run: lines of rank 0 on standard output, its warnings on standard error."""

import logging
import sys

from tqdm import tqdm

from histocoder.distributed.process_group import is_primary


class _Console(logging.Handler):
    """Prints records on rank 0, above progress bars; an error of the stream ends the run."""

    def emit(self, record: logging.LogRecord) -> None:
        if is_primary():
            stream = sys.stderr if record.levelno >= logging.WARNING else sys.stdout
            tqdm.write(record.getMessage(), file=stream)
            stream.flush()


log = logging.getLogger("histocoder")
log.setLevel(logging.INFO)
log.propagate = False
log.addHandler(_Console())
