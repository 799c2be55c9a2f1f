"""Signals that ask a run to stop."""

from __future__ import annotations

import signal
import time
from typing import Any


class StopSignals:
    """Within `with`, notes SIGINT and SIGTERM instead of dying of them; a second Ctrl-C ends at once.

    Attributes
    ----------
    signum : int
        The signal noted; 0 for none.
    """

    _AGAIN_SECONDS = 1.0  # a launcher passes on the Ctrl-C that the terminal has sent already

    def __init__(self) -> None:
        self.signum = 0
        self._noted = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        for signum in (signal.SIGINT, signal.SIGTERM):
            self._before[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _note(self, signum: int, _frame: object) -> None:
        now = time.monotonic()
        if self.signum and signum == signal.SIGINT and now - self._noted > self._AGAIN_SECONDS:
            raise KeyboardInterrupt
        if not self.signum:
            self.signum, self._noted = signum, now
