"""Signals that ask a run to stop."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

STOP_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))
"""Windows has no SIGUSR1."""
_AGAIN_SECONDS = 1.0  # time within which a second Ctrl-C is the first one, forwarded by a launcher


def in_main_thread() -> bool:
    """Return whether this is the main thread, the only one that can handle signals; Ray Train uses another."""
    return threading.current_thread() is threading.main_thread()


class StopSignals:
    """Context manager that records a stop signal in `signum`; a second Ctrl-C ends the process at once.

    Parameters
    ----------
    on_stop : callable
        Called at the first signal.
    """

    def __init__(self, on_stop: Callable[[], None]) -> None:
        self.signum = 0
        self._on_stop = on_stop
        self._recorded_at = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        for signum in STOP_SIGNALS if in_main_thread() else ():
            self._before[signum] = signal.signal(signum, self._record)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _record(self, signum: int, _frame: object) -> None:
        now = time.monotonic()
        if not self.signum:
            self.signum, self._recorded_at = signum, now
            self._on_stop()
        elif signum == signal.SIGINT and now - self._recorded_at > _AGAIN_SECONDS:
            with suppress(OSError):
                os.write(2, b"Interrupted again: ended at once, without saving.\n")
            os._exit(128 + signum)


def ignore_stop_signals(_worker: int) -> None:
    """Ignore stop signals in a loader worker, which receives those to the whole process group as well."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    # a second SIGTERM is for this process alone
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))
