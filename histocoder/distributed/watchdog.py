"""A thread that ends its process if the launcher has ended, or another rank hangs or has failed."""

import json
import os
import sys
import threading
import time
from typing import Any

_BEAT_SECONDS = 1.0
_GRACE_SECONDS = 4.0  # time for the main thread to end by itself, with a message of its own
HEARING_SECONDS = 1.5  # time for the others to notice that all end, before rank 0 ends and the store with it
_STANDSTILL_SECONDS = 4.0  # time between two checks that means that this process itself was suspended
_LAST_SECONDS = 10.0  # patience once the processes were asked to stop


class Watchdog(threading.Thread):
    """Sends a heartbeat every second, and checks the launcher, the next rank's heartbeat and the others' failures.

    It ends the process itself, since a main thread that waits in a collective can't be woken. `store` is a connection
    to the ranks' store that nothing else uses, `launcher` the process id of the parent, which the process must not
    outlive. A rank without a heartbeat for `patience` seconds is considered hung.
    """

    def __init__(self, *, rank: int, world_size: int, store: Any, launcher: int | None, patience: float) -> None:
        super().__init__(daemon=True)
        self._rank, self._next = rank, (rank + 1) % world_size
        self._store, self._launcher, self._patience = store, launcher, patience
        self._stopped = threading.Event()
        self._num_beats = 0
        self._heard, self._heard_at = b"", time.monotonic()
        self._checked_at = self._heard_at

    def run(self) -> None:
        """Check every second until `stop`."""
        try:
            if self._store is not None:
                self._beat("0")
            while not self._stopped.wait(_BEAT_SECONDS):
                self._check()
        except RuntimeError:  # the store is gone, with the process that held it
            if not self._stopped.wait(_GRACE_SECONDS):
                self._end("it has lost the connection to the launcher or to rank 0")

    def stop(self) -> None:
        """Stop checking, since the process ends by itself."""
        self._stopped.set()
        if self._store is not None:
            self._beat("done")

    def expect_end(self) -> None:
        """Note that the processes were asked to stop: a silent one is given less time."""
        self._patience = min(self._patience, _LAST_SECONDS)

    def announce(self, message: str, status: int) -> None:
        """End all other processes; rank 0 prints the message first. An empty message means that it is printed."""
        if self._store is not None and (not message or not self._store.check(["failure"])):
            self._store.set("failure", json.dumps([message, status]))

    def is_printed(self) -> bool:
        """Return whether the processes end, and one of them has printed why."""
        try:
            return self._store is not None and self._store.check(["failure"]) and not self._failure()[0]
        except RuntimeError:
            return False

    def _check(self) -> None:
        if self._launcher is not None and os.getppid() != self._launcher:
            self._end("its launcher has ended")
        if self._store is None:
            return
        self._num_beats += 1
        self._beat(str(self._num_beats))
        if self._store.check(["failure"]):
            message, status = self._failure()
            if not self._stopped.wait(_GRACE_SECONDS if message else 0):
                if self._rank == 0 and message:
                    print(message, file=sys.stderr, flush=True)
                    self.announce("", status)
                    time.sleep(HEARING_SECONDS)
                os._exit(status)
        self._listen()

    def _failure(self) -> tuple[str, int]:
        message, status = json.loads(self._store.get("failure"))
        return message, status

    def _beat(self, sign: str) -> None:
        self._store.set(f"beat/{self._rank}", sign)

    def _listen(self) -> None:
        """End all processes if the next rank, which checks the one after it, has sent no heartbeat for too long."""
        key, now = f"beat/{self._next}", time.monotonic()
        if now - self._checked_at > _STANDSTILL_SECONDS:  # this process was suspended, perhaps the others too
            self._heard_at = now
        self._checked_at = now
        sign = self._store.get(key) if self._store.check([key]) else b""
        if sign != self._heard or sign in (b"", b"done"):  # not started yet, or ended well
            self._heard, self._heard_at = sign, now
        elif now - self._heard_at > self._patience:
            self.announce("", 1)
            silence = f"has sent no heartbeat for {now - self._heard_at:.0f} s"
            self._end(f"rank {self._next} {silence}; it hangs or has ended")

    def _end(self, reason: str) -> None:
        again = "Run the same command again to resume from the last checkpoint."
        print(f"error: rank {self._rank} stops: {reason}. {again}", file=sys.stderr, flush=True)
        os._exit(1)
