"""Turns at the model: one call at a time, in the order of asking."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pandas as pd

from histocoder.inference.coder import Coder


class Busy(Exception):
    """Too many requests wait for the model already, or the wait took too long."""


class Turns:
    """A queue at the model, where `most_waiting` requests may wait for so many seconds; further ones are refused."""

    def __init__(self, *, most_waiting: int = 8, seconds: float = 60.0) -> None:
        self._most, self._seconds = most_waiting, seconds
        self._queue: deque[object] = deque()  # the first has the model
        self._changed = threading.Condition()

    @contextmanager
    def one(self, *, may_refuse: bool = True) -> Iterator[None]:
        """Hold the model for one call; see `enter`."""
        self.enter(may_refuse=may_refuse)
        try:
            yield
        finally:
            self.leave()

    def enter(self, *, may_refuse: bool = False) -> None:
        """Wait for a turn; raise `Busy` if the request may be refused and the queue is too long or too slow."""
        ticket = object()
        with self._changed:
            if may_refuse and len(self._queue) > self._most:
                raise Busy
            self._queue.append(ticket)
            timeout = self._seconds if may_refuse else None
            if not self._changed.wait_for(lambda: self._queue[0] is ticket, timeout):
                self._queue.remove(ticket)
                raise Busy

    def leave(self) -> None:
        """End the turn of the one that has the model."""
        with self._changed:
            self._queue.popleft()
            self._changed.notify_all()


class CoderInTurns(Coder):
    """A coder for long work: it takes a turn for each batch, so that requests are answered in between.

    After each batch it calls `check`, which may raise an error to end the work.
    """

    def __init__(self, coder: Coder, turns: Turns, check: Callable[[], object]) -> None:
        self.__dict__.update(coder.__dict__)
        self._turns, self._check = turns, check

    def code(self, *args: Any, progress: Any = None, **options: Any) -> pd.DataFrame:
        """Code descriptions; see `Coder.code`."""

        def after_batch(count: int) -> None:
            """Let others have a turn."""
            self._turns.leave()
            try:
                if callable(progress):
                    progress(count)
                self._check()
            finally:
                self._turns.enter()

        with self._turns.one(may_refuse=False):
            return super().code(*args, progress=after_batch, **options)
