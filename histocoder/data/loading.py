"""Batches from worker processes; a worker that is killed or hangs ends the run with an error that names it."""

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess

import torch
from torch.utils.data import DataLoader, get_worker_info

from histocoder.config import MachineConfig
from histocoder.data.dataset import Batch, OccupationDataset
from histocoder.data.samplers import BucketSampler
from histocoder.errors import MachineError
from histocoder.signals import ignore_stop_signals, in_main_thread

_END_SECONDS = 0.3  # between the end of a process' pipes and its own
_GRACE_SECONDS = 1.0  # given to torch to notice by itself that a batch is late


class BatchLoader:
    """Loads the batches of a sampler, in its order, merged (see `Batch`); each iteration starts over."""

    def __init__(
        self, data: OccupationDataset, sampler: BucketSampler, config: MachineConfig, *, pin_memory: bool
    ) -> None:
        self._timeout = config.worker_timeout
        self._num_received = 0
        self._workers: list[BaseProcess] = []
        self._late: int | None = None
        self._loader = DataLoader(
            data,
            sampler=sampler,
            batch_size=None,
            collate_fn=_merged,  # type: ignore[arg-type]  # it gets a batch, not a list of rows
            num_workers=config.num_workers,
            prefetch_factor=config.prefetch_factor if config.num_workers else None,
            persistent_workers=config.persistent_workers and config.num_workers > 0,
            pin_memory=pin_memory,
            timeout=config.worker_timeout if config.num_workers else 0,
            worker_init_fn=ignore_stop_signals,
            generator=torch.Generator(),  # its own, so that loading leaves the run's random state alone
        )

    def __iter__(self) -> Iterator[Batch]:
        self._num_received = 0
        batches = iter(self._loader)
        self._workers = getattr(batches, "_workers", [])  # torch says nowhere else which processes are its
        while (batch := self._next(batches)) is not None:
            self._num_received += 1
            yield batch

    def _next(self, batches: Iterator[Batch]) -> Batch | None:
        """Return the next batch, or None; kill the worker that is to send it if it takes too long.

        torch's own timeout ends only the wait for a message; fetching its tensors from a stopped worker would hang.
        """
        if not self._workers:
            return next(batches, None)
        timer = threading.Timer(self._timeout + _GRACE_SECONDS, self._end_late_worker)
        timer.daemon = True
        timer.start()
        try:
            return next(batches, None)
        finally:
            timer.cancel()

    def _end_late_worker(self) -> None:
        self._late = self._num_received % len(self._workers)  # they take turns
        self._workers[self._late].kill()

    @contextmanager
    def naming_workers(self) -> Iterator[None]:
        """Turn the failure of a worker, which may come up at any point within, into a MachineError that names it.

        All workers are killed at the end: they ignore signals, and this process would wait for them.
        """
        try:
            yield
        except (RuntimeError, OSError, EOFError) as error:  # torch's own, or a broken pipe's
            _expect_ends()
            what = self._failure(str(error))
            if what is None and "No space left" in str(error):
                sys.unraisablehook = lambda _: None  # torch's own, when its half-made workers are deleted
                what = (
                    "/dev/shm, which loader workers pass batches through, is full; make it larger, in a container "
                    "with --shm-size 1g."
                )
            if what is None:
                raise
            raise MachineError(
                f"{what} Run the same command again to resume from the last checkpoint; --num-workers 0 loads data "
                "without such processes."
            ) from error
        finally:
            _expect_ends()
            for worker in self._workers:
                worker.kill()  # the only signal that ends a stopped process

    def _failure(self, error: str) -> str | None:
        """Return which worker failed and how; None if none did."""
        time.sleep(_END_SECONDS)
        if error.startswith("DataLoader timed out"):
            self._late = self._num_received % len(self._workers)
        if (i := self._late) is not None:
            return f"Loader worker {i} (process {self._workers[i].pid}) has returned no batch for {self._timeout:g} s."
        for i, worker in enumerate(self._workers):
            if worker.exitcode:  # the others are ended by torch, with 0
                return f"Loader worker {i} (process {worker.pid}) was killed, perhaps because memory ran out."
        return None


def _merged(batch: Batch) -> Batch:
    """Merge a batch, and in a worker move it to shared memory, since a failure is hidden if torch does so later."""
    merged = batch.merged()
    return merged if get_worker_info() is None else merged.share_memory()


def _expect_ends() -> None:
    """Ignore the ends of workers from now on, which torch takes as errors."""
    if hasattr(signal, "SIGCHLD") and in_main_thread():  # Windows lacks it
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
