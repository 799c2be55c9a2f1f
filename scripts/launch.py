"""torchrun, with its own flags, that ends as the processes that it starts: their message last, and
their exit code.
"""

import logging
import sys
from typing import NoReturn

from torch.distributed import run
from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main() -> None:
    """Start processes as torchrun does, and end with the exit code of the first that fails."""
    logging.getLogger(api.__name__).setLevel(
        logging.CRITICAL
    )  # the processes say themselves why they end
    try:
        run.run(run.parse_args(sys.argv[1:]))
    except ChildFailedError as error:
        leave(error)
    except api.SignalException as error:
        sys.exit(128 + error.sigval)


def leave(error: ChildFailedError) -> NoReturn:
    """Print what the first process that failed has left for its launcher, and end with its exit
    code.
    """
    rank, failure = error.get_first_failure()
    message, code = failure.message, failure.exitcode
    if isinstance(message, dict):
        print(message["message"], file=sys.stderr)
        code = int(
            message.get("errorCode", code)
        )  # rank 0 may have been ended while it waited for the others
    elif code < 0:
        print(f"rank {rank}: {message}", file=sys.stderr)
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
