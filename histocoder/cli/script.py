"""Streams of a program, and how it ends."""

from __future__ import annotations

import errno
import io
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TextIO, cast

import torch

from histocoder import distributed
from histocoder.errors import Interrupted, MachineError, Notice, UserError
from histocoder.training.out_of_memory import full_gpu_message

_NOBODY_READS = 128 + 13
"""Exit code of a shell for SIGPIPE, 128 + 13; Windows lacks the signal's name."""


def run_script(main: Callable[[], None]) -> None:
    """Run a program; a user's mistake ends all its processes with a sentence and exit code 2."""
    _open_streams()
    warnings.showwarning = partial(_show_warning, warnings.showwarning)
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:  # as after `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # where Python flushes at the end
        distributed.leave("Ended, since nobody reads its output any more.", _NOBODY_READS)
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # it may be what is full
        distributed.leave(f"error: The output can't be written ({error.strerror}). Make room, and start again.", 2)
    except UserError as error:
        distributed.leave(f"error: {error}", 2)
    except MachineError as error:
        distributed.leave(f"error: {error}", 1)
    except Interrupted as error:
        distributed.leave(str(error), 128 + error.signum)
    except KeyboardInterrupt:
        distributed.leave("Interrupted.", 130)
    except torch.OutOfMemoryError as error:
        distributed.leave(f"error: {full_gpu_message(error)}", 2)
    except RuntimeError as error:
        if not distributed.is_lost_contact(error):
            raise
        distributed.leave(
            f"error: another process has ended or can't be reached ({str(error).splitlines()[0]}). When "
            "started again, the run resumes from its last checkpoint.",
            1,
        )
    distributed.stop()


class _OrNowhere:
    """A stream that drops text it can't write, so that no message ends a run."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a text, unless the disk is full or nobody reads."""
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush, unless the disk is full or nobody reads."""
        with suppress(OSError):
            self._stream.flush()


def _open_streams() -> None:
    """Make standard output and error take every text: open closed ones, and escape characters that others lack."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # as after >&- in a shell
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
    if (stderr := sys.__stderr__) is not None and sys.stderr is stderr:  # not in tests, which have their own
        sys.stderr = cast(TextIO, _OrNowhere(stderr))


def _show_warning(
    others: Callable[..., None], message: Warning | str, category: type[Warning], *where: Any, **more: Any
) -> None:
    """Show a `Notice` as it is, and other warnings with their place in the code."""
    if issubclass(category, Notice):
        print(message, file=sys.stderr, flush=True)
    else:
        others(message, category, *where, **more)
