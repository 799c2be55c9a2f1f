"""Streams of a program, and how it ends."""

import errno
import io
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, NoReturn

from histocoder.errors import Interrupted, MachineError, Notice, UserError

_NOBODY_READS = 128 + 13
"""Exit code of a shell for SIGPIPE, 128 + 13; Windows lacks the signal's name."""
_GRACE_SECONDS = 5.0


def run_script(main: Callable[[], None]) -> None:
    """Run a program; a user's mistake ends all its processes with a sentence and exit code 2."""
    _open_streams()
    warnings.showwarning = partial(_show_warning, warnings.showwarning)
    try:
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


def _distributed() -> ModuleType | None:
    """Return the module `distributed` if the program has imported it: without it there is no process group."""
    return sys.modules.get("histocoder.distributed")


def _ending(error: BaseException) -> tuple[str, int] | None:
    """Return the message and the exit code with which an error ends the program; None for a fault of its own."""
    if isinstance(error, BrokenPipeError) or _is_full(error):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # where Python flushes at the end
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
        case OSError() if _is_full(error):
            end = f"error: The output can't be written ({error.strerror}). Make room, and run the command again.", 2
        case RuntimeError() | MemoryError():
            from histocoder import distributed
            from histocoder.model.devices import OUT_OF_MEMORY, is_out_of_memory

            reason = (str(error).splitlines() or [type(error).__name__])[0]
            if is_out_of_memory(error):
                end = f"error: Out of memory ({reason[:200]}). {OUT_OF_MEMORY}", 2
            elif isinstance(error, RuntimeError) and distributed.is_lost_contact(error):
                again = "Run the same command again to resume from the last checkpoint."
                end = f"error: another process has ended or can't be reached ({reason}). {again}", 1
    return end


def _leave(message: str, status: int) -> NoReturn:
    """End this process with a message that is printed once if all ranks end for one reason.

    Rank 0 prints its message at once. The others give it some seconds to do so, since a launcher ends all processes
    with the first; a rank that fails alone prints its own. The status is that of the rank that printed.
    """
    distributed = _distributed()
    rank = int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0)
    deadline = time.monotonic() + (_GRACE_SECONDS if rank else 0)
    while not (announced := distributed.announced_end() if distributed else 0) and time.monotonic() < deadline:
        time.sleep(0.1)
    if not announced:
        print(f"rank {rank}: {message}" if rank else message, file=sys.stderr, flush=True)
        if distributed:
            distributed.announce_end(status)
    if distributed is None or distributed.world_size() == 1:
        sys.exit(status)
    sys.stdout.flush()
    os._exit(announced or status)  # a clean-up could wait for processes that are gone


def _is_full(error: BaseException) -> bool:
    """Return whether an error says that standard output is on a full disk."""
    return isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None


def _open_streams() -> None:
    """Make standard output and error take every text: open closed ones, and escape characters that others lack."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # as after >&- in a shell
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _show_warning(
    others: Callable[..., None], message: Warning | str, category: type[Warning], *where: Any, **more: Any
) -> None:
    """Show a `Notice` as it is, and other warnings with their place in the code."""
    if issubclass(category, Notice):
        print(message, file=sys.stderr, flush=True)
    else:
        others(message, category, *where, **more)
