"""Signals that ask a run to stop."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

STOP_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))
"""Windows has no SIGUSR1."""
_AGAIN_SECONDS = 1.0  # time within which a second Ctrl-C is the first one, forwarded by a launcher


def in_main_thread() -> bool:
    """Return whether this is the main thread, the only one that can handle signals; Ray Train uses another."""
    return threading.current_thread() is threading.main_thread()


@contextmanager
def handling_stop_signals(handler: Callable[[int, object], None]) -> Iterator[None]:
    """Handle stop signals as `signal.signal` does, within a block of the main thread."""
    before = {signum: signal.signal(signum, handler) for signum in STOP_SIGNALS if in_main_thread()}
    try:
        yield
    finally:
        for signum, earlier in before.items():
            signal.signal(signum, earlier)


class StopRequest:
    """Handler that records the first stop signal in `signum`; a second Ctrl-C ends the process at once."""

    def __init__(self) -> None:
        self.signum = 0
        self._recorded_at = 0.0

    def __call__(self, signum: int, _frame: object) -> None:
        now = time.monotonic()
        if not self.signum:
            self.signum, self._recorded_at = signum, now
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
