"""Share the model: each call waits for its turn, in the order of asking."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pandas as pd

from histocoder.inference.coder import Coder


class Busy(Exception):
    """Too many requests wait for the model, or the wait took too long."""


class Turns:
    """A queue for the model: at most `most_waiting` requests wait, and for at most `seconds`; others are refused."""

    def __init__(self, *, most_waiting: int = 8, seconds: float = 60.0) -> None:
        self._most, self._seconds = most_waiting, seconds
        self._queue: deque[object] = deque()
        self._changed = threading.Condition()

    @contextmanager
    def one(self, *, may_refuse: bool = True) -> Iterator[None]:
        """Hold the model for one request; raise `Busy` where too many wait."""
        ticket = self.enter(may_refuse=may_refuse)
        try:
            yield
        finally:
            self.leave(ticket)

    def enter(self, *, may_refuse: bool = False) -> object:
        """Wait for a turn; return the ticket that `leave` takes."""
        ticket = object()
        with self._changed:
            if may_refuse and len(self._queue) > self._most:
                raise Busy
            self._queue.append(ticket)
            if not self._changed.wait_for(
                lambda: self._queue[0] is ticket, timeout=self._seconds if may_refuse else None
            ):
                self._queue.remove(ticket)
                raise Busy
        return ticket

    def leave(self, ticket: object) -> None:
        """End a turn."""
        with self._changed:
            self._queue.remove(ticket)
            self._changed.notify_all()


class CoderInTurns(Coder):
    """A coder for long work: it takes a turn for each batch, so that requests are answered in between.

    `check` is called after each batch, and may raise an exception to end the work.
    """

    def __init__(self, coder: Coder, turns: Turns, check: Callable[[], object]) -> None:
        self.__dict__.update(coder.__dict__)
        self._turns, self._check = turns, check

    def code(self, *args: Any, progress: Any = None, **options: Any) -> pd.DataFrame:
        """Code descriptions; see `Coder.code`."""
        ticket = self._turns.enter()

        def after_batch(count: int) -> None:
            """Let others have the model between two batches."""
            nonlocal ticket
            self._turns.leave(ticket)
            try:
                if callable(progress):
                    progress(count)
                self._check()
            finally:
                ticket = self._turns.enter()

        try:
            return super().code(*args, progress=after_batch, **options)
        finally:
            self._turns.leave(ticket)
