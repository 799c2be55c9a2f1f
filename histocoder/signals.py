"""Signals that stop a run."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STOP_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name)
)
"""Windows has no SIGUSR1."""


def in_main_thread() -> bool:
    """Return whether this is the main thread, the only one that can handle signals; Ray Train uses
    another.
    """
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
    """Handler that records the first stop signal in `signum`."""

    def __init__(self) -> None:
        self.signum = 0

    def __call__(self, signum: int, _frame: object) -> None:
        self.signum = self.signum or signum


def ignore_stop_signals(_worker: int) -> None:
    """Ignore stop signals in a loader worker, which receives those to the whole process group as
    well.
    """
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    # a second SIGTERM is for this process alone
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))
