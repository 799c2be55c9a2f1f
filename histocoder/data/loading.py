"""Batches from worker processes; one that is killed or hangs ends the run with an error that names it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils.data import DataLoader

from histocoder.config import LoaderConfig
from histocoder.data.dataset import Batch, OccupationDataset
from histocoder.data.samplers import BucketSampler
from histocoder.errors import MachineError
from histocoder.signals import leave_signals_to_the_parent

_END_SECONDS = 0.3  # from the end of a process' pipes to its own


class BatchLoader:
    """The batches that a sampler names, in its order; anew whenever it is iterated over.

    Parameters
    ----------
    data : OccupationDataset
    sampler : BucketSampler
    config : LoaderConfig
    pin_memory : bool
        Whether batches are put into page-locked memory.
    """

    def __init__(
        self, data: OccupationDataset, sampler: BucketSampler, config: LoaderConfig, *, pin_memory: bool
    ) -> None:
        self._timeout = config.worker_timeout
        self._num_received = 0
        self._processes = torch.zeros(config.num_workers, dtype=torch.int64).share_memory_()
        self._loader = DataLoader(
            data,
            sampler=sampler,
            batch_size=None,
            num_workers=config.num_workers,
            prefetch_factor=config.prefetch_factor if config.num_workers else None,
            persistent_workers=config.persistent_workers and config.num_workers > 0,
            pin_memory=pin_memory,
            timeout=config.worker_timeout if config.num_workers else 0,
            worker_init_fn=self._begin_worker,
            generator=torch.Generator(),  # its own, so that loading leaves the run's random state alone
        )

    def __iter__(self) -> Iterator[Batch]:
        self._num_received = 0
        for batch in self._loader:
            self._num_received += 1
            yield batch

    @contextmanager
    def naming_workers(self) -> Iterator[None]:
        """Turn the failure of a worker, which may come up at any point within, into a MachineError that names it."""
        try:
            yield
        except (RuntimeError, OSError, EOFError) as error:  # torch's own, or of a pipe that has no other end
            what = self._failure(str(error))
            if what is None:
                raise
            raise MachineError(
                f"{what} Started again, the run goes on from its last checkpoint; with --num-workers 0 it needs no "
                "such processes."
            ) from error

    def _failure(self, error: str) -> str | None:
        """What has happened to which worker, if anything; all are ended."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # workers that end from now on are no errors of their own
        time.sleep(_END_SECONDS)
        children = multiprocessing.active_children()
        for process in children:  # this one would wait for their end, and a stopped one heeds nothing else
            process.kill()
        alive = {process.pid for process in children}
        for worker, pid in enumerate(self._processes.tolist()):
            if pid not in alive:
                return f"Loader worker {worker} (process {pid}) was killed, perhaps for want of memory."
        if not error.startswith("DataLoader timed out"):
            return None
        worker = self._num_received % len(self._processes)  # they take turns
        pid = int(self._processes[worker])
        return f"Loader worker {worker} (process {pid}) has given no batch for {self._timeout:g} s."

    def _begin_worker(self, worker: int) -> None:
        """Note its process, in which this runs."""
        self._processes[worker] = os.getpid()
        leave_signals_to_the_parent()
