"""A service that a run tells its numbers, and does not depend on."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from histocoder.checkpoints.run_folder import LOG_FILE
from histocoder.tracking import Tracker

PATIENCE_SECONDS = 30.0
"""How long a service may hold up a run's start, and its end."""


class InBackground:
    """A tracker in a thread of its own: where it hangs or fails, there is one warning, and training goes on without it.

    Parameters
    ----------
    name : str
        What the warning calls it.
    begin : callable
        Makes the tracker.
    patience : float
        Seconds to wait for it at the start, and at the end for what it has not taken in yet.
    patience_with_model : float, optional
        At the end, instead, where it has been given the model.
    room : int
        Lines that it may lag behind.
    """

    def __init__(
        self,
        name: str,
        begin: Callable[[], Tracker],
        *,
        patience: float = PATIENCE_SECONDS,
        patience_with_model: float | None = None,
        room: int = 10_000,
    ) -> None:
        self._name, self._patience = name, patience
        self._patience_with_model = patience if patience_with_model is None else patience_with_model
        self._lines: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(room)
        self._begun = threading.Event()
        self._given_up = False
        self._thread = threading.Thread(target=self._work, args=(begin,), daemon=True)
        self._thread.start()
        if not self._begun.wait(patience):
            self._give_up(f"has not answered within {patience:g} s")

    def log(self, step: int, values: dict[str, float]) -> None:
        """Hand numbers over."""
        self._put(lambda tracker: tracker.log(step, values))

    def keep_model(self, folder: Path) -> None:
        """Hand the final model over; it has to stay as it is until `close`."""
        self._patience = self._patience_with_model
        self._put(lambda tracker: tracker.keep_model(folder))

    def close(self) -> None:
        """Let the tracker finish."""
        self._put(None)
        if not self._given_up:
            self._thread.join(self._patience)
        if self._thread.is_alive():
            self._give_up(f"has not taken in all it was given within {self._patience:g} s")

    def _put(self, line: Callable[[Tracker], None] | None) -> None:
        try:
            if not self._given_up:
                self._lines.put_nowait(line)
        except queue.Full:
            self._give_up("takes in no more numbers")

    def _work(self, begin: Callable[[], Tracker]) -> None:
        try:
            tracker = begin()
            self._begun.set()
            if self._given_up:
                tracker.close()
                return
            while (line := self._lines.get()) is not None:
                line(tracker)
            tracker.close()
        except (Exception, SystemExit) as error:  # a service's client may raise anything
            self._give_up(f"failed ({' '.join(str(error).split()) or type(error).__name__})")
        finally:
            self._begun.set()

    def _give_up(self, why: str) -> None:
        if not self._given_up:
            self._given_up = True
            text = f"warning: {self._name} {why}; the run goes on, with all numbers in {LOG_FILE}."
            tqdm.write(text, file=sys.stderr)
