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
"""Windows lacks the last."""
_AGAIN_SECONDS = 1.0
"""A launcher passes on the Ctrl-C that the terminal has sent already."""


def hears_signals() -> bool:
    """Return whether this is the main thread, which alone may handle signals; Ray Train trains in another."""
    return threading.current_thread() is threading.main_thread()


class StopSignals:
    """Within `with`, notes SIGINT, SIGTERM and SIGUSR1 instead of dying of them; a second Ctrl-C ends at once.

    Parameters
    ----------
    on_stop : callable
        Called when the first is noted.

    Attributes
    ----------
    signum : int
        The signal noted; 0 for none.
    """

    def __init__(self, on_stop: Callable[[], None]) -> None:
        self.signum = 0
        self._on_stop = on_stop
        self._noted = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        for signum in STOP_SIGNALS if hears_signals() else ():
            self._before[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _note(self, signum: int, _frame: object) -> None:
        now = time.monotonic()
        if not self.signum:
            self.signum, self._noted = signum, now
            self._on_stop()
        elif signum == signal.SIGINT and now - self._noted > _AGAIN_SECONDS:
            with suppress(OSError):
                os.write(2, b"Interrupted again: ended at once, without saving.\n")
            os._exit(128 + signum)


def leave_signals_to_the_parent(_worker: int) -> None:
    """Ignore stop signals in a loader process, which a signal to the whole run may reach as well."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    # the second one is for this process alone
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))
