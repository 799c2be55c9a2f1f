"""Streams of a program, and how it ends."""

import errno
import gc
import io
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import NamedTuple, NoReturn

from histocoder.errors import Interrupted, MachineError, UserError, readable, sending_notices

BROKEN_PIPE = 128 + 13  # exit code of a shell for SIGPIPE, whose name Windows lacks
_GRACE_SECONDS = 5.0


class Ending(NamedTuple):
    """End of a program."""

    message: str
    status: int  # exit code


def run_script(main: Callable[[], None]) -> None:
    """Run a program; a user's mistake ends all its processes with a sentence and exit code 2."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # as after >&- in a shell
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            # for characters that the stream can't write
            stream.reconfigure(errors="backslashreplace")

    # torch, which main imports, prints C++ frames around warnings of lost connections, which
    # `_ending` describes
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    notices = set[str]()

    def show(notice: str) -> None:
        if notice not in notices:
            notices.add(notice)
            print(notice, file=sys.stderr, flush=True)

    try:
        with sending_notices(show):
            main()
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        end = _ending(error)
        if end is None:
            # of a fault, Python prints the traceback, unless other ranks must learn of it
            distributed = _distributed()
            if distributed is None or distributed.world_size() == 1:
                raise
            end = Ending(traceback.format_exc().strip(), 1)
        _leave(end.message, end.status)
    if distributed := _distributed():
        distributed.stop()


@contextmanager
def importing() -> Iterator[None]:
    """Let the garbage collector skip what a block imports, then and at the end; PyTorch is 200,000
    objects.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _distributed() -> ModuleType | None:
    """Return the module `distributed` if the program has imported it: without it there is no
    process group.
    """
    return sys.modules.get("histocoder.distributed")


def _ending(error: BaseException) -> Ending | None:
    """Return how an error ends the program; None for a fault of its own."""
    end: Ending | None = None

    # the status that shells expect: 2 for the user's mistake, 128 and the signal's number for a stop
    match error:
        case UserError():
            end = Ending(f"error: {error}", 2)
        case MachineError():
            end = Ending(f"error: {error}", 1)
        case Interrupted():
            end = Ending(str(error), 128 + error.signum)
        case KeyboardInterrupt():
            end = Ending("Interrupted.", 130)
        case BrokenPipeError():  # as after `| head`
            discard_output()
            message = "Stopped, because the program that read the output has ended."
            end = Ending(message, BROKEN_PIPE)
        case OSError(errno=errno.ENOSPC, filename=None):
            discard_output()
            end = Ending(
                f"error: The output can't be written ({error.strerror}). Make room, and run the "
                "command again.",
                2,
            )
        case UnicodeEncodeError():  # as of an argument that is not in the terminal's encoding
            end = Ending(_unreadable(error.object), 2)
        case RuntimeError() | MemoryError():
            end = _ending_of_runtime_error(error)

    return end


def _ending_of_runtime_error(error: RuntimeError | MemoryError) -> Ending | None:
    """Return how an error of torch's ends the program; None for a fault."""
    from histocoder import distributed
    from histocoder.model.devices import OUT_OF_MEMORY, is_out_of_memory

    reason = (str(error).splitlines() or [type(error).__name__])[0]
    if is_out_of_memory(error):
        return Ending(f"error: Out of memory ({reason[:200]}). {OUT_OF_MEMORY}", 2)
    if isinstance(error, RuntimeError) and distributed.is_lost_contact(error):
        return Ending(
            f"error: another process has ended or can't be reached ({reason}). Run the same "
            "command again to resume from what was saved last.",
            1,
        )
    return None


def discard_output() -> None:
    """Let standard output, which can't be written, lead nowhere: Python flushes it at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _unreadable(name: str) -> str:
    """Return the error for an argument that can't be encoded, such as a path whose bytes are in
    another encoding.
    """
    advice = "Set PYTHONUTF8=1, or a locale in UTF-8"
    if sys.getfilesystemencoding() == "utf-8" and readable(name) != name:
        advice = "Rename the file or folder so that its name is in UTF-8"
    return f"error: The name {readable(name)} can't be read as text. {advice}."


def _leave(message: str, status: int) -> NoReturn:
    """End this process with a message that is printed once if all ranks end for one reason.

    Rank 0 prints its message at once. The others give it some seconds to do so, since a launcher
    ends all processes with the first; a rank that fails alone prints its own. The status is that of
    the rank that printed.

    torchrun prints a traceback of its own when a rank fails, and at its end what that rank has left for it; there a
    user's mistake stands, instead of above.
    """
    distributed = _distributed()
    rank = int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0)
    if rank:
        message = f"rank {rank}: {message}"

    # wait for another rank that ends for the same reason
    deadline = time.monotonic()
    if rank:
        deadline += _GRACE_SECONDS
    announced = distributed.announced_end() if distributed else 0
    while announced == 0 and time.monotonic() < deadline:
        time.sleep(0.1)
        announced = distributed.announced_end() if distributed else 0
    if not announced:
        text = readable(message)
        if status != 2 or not _left_for_torchrun(text, status):
            print(text, file=sys.stderr, flush=True)
        if distributed:
            distributed.announce_end(status)
    if distributed is None or distributed.world_size() == 1:
        sys.exit(status)
    sys.stdout.flush()
    os._exit(announced or status)  # a clean-up could wait for processes that are gone


def _left_for_torchrun(message: str, status: int) -> bool:
    """Leave a message for torchrun to print, in the file that it reads; return whether there is
    one.

    The form is that of torch's `ErrorHandler`.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return False
    # torchrun shows the earliest failure, in whole seconds; other ranks end with this one
    earliest = str(int(time.time()) - 1)
    content = {
        "message": {"message": message, "errorCode": status, "extraInfo": {"timestamp": earliest}}
    }
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(content, file)
    except OSError:
        return False
    return True
