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
from typing import NoReturn

from histocoder.errors import Interrupted, MachineError, UserError, readable, sending_notices

_NOBODY_READS = 128 + 13  # exit code of a shell for SIGPIPE, whose name Windows lacks
_GRACE_SECONDS = 5.0


def run_script(main: Callable[[], None]) -> None:
    """Run a program; a user's mistake ends all its processes with a sentence and exit code 2."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # as after >&- in a shell
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(
                errors="backslashreplace"
            )  # for characters that the stream can't write
    # torch, which main imports, prints C++ frames around warnings of lost connections, which users
    # are told of below
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
        if (end := _ending(error)) is None:
            if not (distributed := _distributed()) or distributed.world_size() == 1:
                raise
            end = traceback.format_exc().strip(), 1
        _leave(*end)
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


def _ending(error: BaseException) -> tuple[str, int] | None:
    """Return the message and the exit code with which an error ends the program; None for a fault
    of its own.
    """
    end: tuple[str, int] | None = None
    match error:
        case UserError():
            end = f"error: {error}", 2
        case MachineError():
            end = f"error: {error}", 1
        case Interrupted():
            end = str(error), 128 + error.signum
        case KeyboardInterrupt():
            end = "Interrupted.", 130
        case BrokenPipeError():  # as after `| head`
            end = "Stopped, because the program that read the output has ended.", _NOBODY_READS
        case OSError(errno=errno.ENOSPC, filename=None):
            end = (
                (
                    f"error: The output can't be written ({error.strerror}). Make room, and "
                    "run the command again."
                ),
                2,
            )
        case UnicodeEncodeError():  # as of an argument that is not in the terminal's encoding
            end = _unreadable(error.object), 2
        case RuntimeError() | MemoryError():
            from histocoder import distributed
            from histocoder.model.devices import OUT_OF_MEMORY, is_out_of_memory

            reason = (str(error).splitlines() or [type(error).__name__])[0]
            if is_out_of_memory(error):
                end = f"error: Out of memory ({reason[:200]}). {OUT_OF_MEMORY}", 2
            elif isinstance(error, RuntimeError) and distributed.is_lost_contact(error):
                again = "Run the same command again to resume from what was saved last."
                end = f"error: another process has ended or can't be reached ({reason}). {again}", 1
    if end and isinstance(error, OSError):
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # where Python flushes at the end
    return end


def _unreadable(name: str) -> str:
    """Return the error for an argument that can't be encoded, such as a path whose bytes are in
    another encoding.
    """
    way = "Set PYTHONUTF8=1, or a locale in UTF-8"
    if sys.getfilesystemencoding() == "utf-8" and readable(name) != name:
        way = "Rename the file or folder so that its name is in UTF-8"
    return f"error: The name {readable(name)} can't be read as text. {way}."


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
    deadline = time.monotonic() + (_GRACE_SECONDS if rank else 0)
    announced = distributed.announced_end() if distributed else 0
    while announced == 0 and time.monotonic() < deadline:
        time.sleep(0.1)
        announced = distributed.announced_end() if distributed else 0
    if not announced:
        text = readable(f"rank {rank}: {message}" if rank else message)
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
