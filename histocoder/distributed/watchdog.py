"""A thread that ends its process where the others are lost: no launcher, a rank that hangs, one that has failed."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

_BEAT_SECONDS = 1.0
_GRACE_SECONDS = 4.0
"""For the main thread to end by itself, with a message of its own."""
HEARING_SECONDS = 1.5
"""For the others to hear that all end, before what is shared ends with rank 0."""
_STANDSTILL_SECONDS = 4.0
"""Between two looks: so long only where the process itself was stopped."""
_LAST_SECONDS = 10.0
"""Patience once the end is near."""


class Watch(threading.Thread):
    """Gives a sign of life every second, and looks for the launcher's, the next rank's, and for failures.

    Works beside whatever the main thread does or waits for. What it finds ends the process, since a main thread that
    waits in a collective can't be woken.

    Parameters
    ----------
    rank, world_size : int
    store : Store, optional
        Shared with the other ranks, over a connection that nothing else uses.
    launcher : int, optional
        The parent's process id, where the process shall not outlive it.
    patience : float
        Seconds without a sign of life after which a rank is taken for hung.
    """

    def __init__(self, *, rank: int, world_size: int, store: Any, launcher: int | None, patience: float) -> None:
        super().__init__(daemon=True)
        self._rank, self._next = rank, (rank + 1) % world_size
        self._store, self._launcher, self._patience = store, launcher, patience
        self._stopped = threading.Event()
        self._beats = 0
        self._heard, self._heard_at = b"", time.monotonic()
        self._looked_at = self._heard_at

    def run(self) -> None:
        """Until `stop`."""
        try:
            if self._store is not None:
                self._beat("0")
            while not self._stopped.wait(_BEAT_SECONDS):
                self._look()
        except RuntimeError:  # the store is gone, and whoever held it
            if not self._stopped.wait(_GRACE_SECONDS):
                self._end("the launcher, or rank 0, can't be reached any more")

    def stop(self) -> None:
        """From now on the process ends by itself."""
        self._stopped.set()
        if self._store is not None:
            self._beat("done")

    def expect_end(self) -> None:
        """Note that the processes were asked to stop, so that a silent one counts as ended."""
        self._patience = min(self._patience, _LAST_SECONDS)

    def announce(self, message: str, status: int) -> None:
        """Have all other processes end, too; rank 0 prints the message, if any, unless it ends with its own."""
        if self._store is not None and (not message or not self._store.check(["failure"])):
            self._store.set("failure", json.dumps([message, status]))

    def is_said(self) -> bool:
        """Return whether the processes end, and one of them has said why."""
        try:
            return self._store is not None and self._store.check(["failure"]) and not self._failure()[0]
        except RuntimeError:
            return False

    def _look(self) -> None:
        if self._launcher is not None and os.getppid() != self._launcher:
            self._end("its launcher is gone")
        if self._store is None:
            return
        self._beats += 1
        self._beat(str(self._beats))
        if self._store.check(["failure"]):
            message, status = self._failure()
            if not self._stopped.wait(_GRACE_SECONDS if message else 0):
                self._follow(message, status)
        self._listen()

    def _follow(self, message: str, status: int) -> None:
        """End as another process does; rank 0 says why, and that it has been said."""
        if self._rank == 0 and message:
            print(message, file=sys.stderr, flush=True)
            self.announce("", status)
            time.sleep(HEARING_SECONDS)
        os._exit(status)

    def _failure(self) -> tuple[str, int]:
        message, status = json.loads(self._store.get("failure"))
        return message, status

    def _beat(self, sign: str) -> None:
        self._store.set(f"beat/{self._rank}", sign)

    def _listen(self) -> None:
        """Hear the next rank, which hears the one after it, and so on round."""
        key, now = f"beat/{self._next}", time.monotonic()
        if now - self._looked_at > _STANDSTILL_SECONDS:  # this process was stopped, the others perhaps as well
            self._heard_at = now
        self._looked_at = now
        sign = self._store.get(key) if self._store.check([key]) else b""
        if sign != self._heard or sign in (b"", b"done"):  # it has not come yet, or has ended well
            self._heard, self._heard_at = sign, now
        elif now - self._heard_at > self._patience:
            self.announce("", 1)
            silence = f"has given no sign of life for {now - self._heard_at:.0f} s"
            self._end(f"rank {self._next} {silence}; it hangs or has ended")

    def _end(self, reason: str) -> None:
        again = "When started again, the run resumes from its last checkpoint."
        print(f"error: rank {self._rank} ends: {reason}. {again}", file=sys.stderr, flush=True)
        os._exit(1)
