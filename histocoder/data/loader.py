"""Batches from worker processes; one that is killed or hangs ends the run with its name."""

import itertools
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.process import BaseProcess

import torch
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from histocoder.config import MachineConfig
from histocoder.data.dataset import Batch, OccupationDataset
from histocoder.data.samplers import BucketSampler
from histocoder.errors import MachineError
from histocoder.model.ngram import Lookup, NgramConfig
from histocoder.signals import ignore_stop_signals, in_main_thread

_GPU_WORKERS = 2
"""Processes that load data for a GPU, which one process with noise does not keep busy."""
_END_SECONDS = 0.3  # between the end of a process' pipes and its own
_NO_SHARED_MEMORY = (
    "/dev/shm, which workers pass batches through, is full; make it larger, in a container by "
    "--shm-size 1g."
)


class BatchLoader:
    """Loads the batches of a sampler, in its order, merged (see `Batch`); each iteration starts
    over.

    Batches are for a GPU if `on_gpu`, which sets the defaults of workers and of pinned memory.
    `ngrams` are the sizes of an n-gram encoder whose lookups are to be prepared.
    """

    def __init__(
        self,
        data: OccupationDataset,
        sampler: BucketSampler,
        config: MachineConfig,
        *,
        on_gpu: bool = False,
        ngrams: NgramConfig | None = None,
    ) -> None:
        default = _GPU_WORKERS if on_gpu else 0
        self.num_workers = default if config.num_workers is None else config.num_workers
        self._num_parts = sampler.num_parts
        self._timeout = config.worker_timeout
        self._workers: list[BaseProcess] = []
        self._late: int | None = None
        self._loader = DataLoader(
            data,
            sampler=sampler,
            batch_size=None,
            collate_fn=partial(_collated, ngrams=ngrams),  # it gets a batch, not a list of rows
            num_workers=self.num_workers,
            prefetch_factor=config.prefetch_factor if self.num_workers else None,
            persistent_workers=config.persistent_workers and self.num_workers > 0,
            pin_memory=on_gpu if config.pin_memory is None else config.pin_memory,
            worker_init_fn=ignore_stop_signals,
            # its own, so that loading leaves the run's random state alone
            generator=torch.Generator(),
        )

    def __iter__(self) -> Iterator[Batch]:
        batches = iter(self._loader)

        # torch says nowhere else which processes are its workers
        self._workers = getattr(batches, "_workers", [])
        if not self._workers:
            yield from batches
            return

        # workers take turns; torch's timeout would not end reading from a stopped one
        for i in itertools.cycle(range(len(self._workers))):
            timer = threading.Timer(self._timeout, self._end_late_worker, [i])
            timer.start()
            try:
                batch = next(batches, None)
            finally:
                timer.cancel()
            if batch is None:
                return
            yield batch

    def steps(self) -> Iterator[tuple[Batch, ...]]:
        """Yield the batches of each step, which are as many as the sampler has parts."""
        batches = iter(self)
        while parts := tuple(itertools.islice(batches, self._num_parts)):
            yield parts

    def _end_late_worker(self, i: int) -> None:
        # a worker that was killed is not late: torch finds it, and its end is the reason to name
        if self._workers[i].exitcode is None:
            self._late = i
            self._workers[i].kill()

    @contextmanager
    def naming_workers(self) -> Iterator[None]:
        """Turn the failure of a worker, which may come up at any point within, into a MachineError
        that names it.

        All workers are killed at the end: they ignore signals, and this process would wait for
        them.
        """
        try:
            yield
        except (RuntimeError, OSError, EOFError) as error:  # torch's own, or a broken pipe's
            _expect_ends()
            failure = self._worker_failure()
            if failure is None and "No space left" in str(error):
                _ignore_errors_of_deletion()
                failure = _NO_SHARED_MEMORY
            if failure is None:
                raise
            raise MachineError(
                f"{failure} Run the same command again to resume from the last checkpoint; "
                "--num-workers 0 loads data without such processes."
            ) from error
        finally:
            _expect_ends()
            for worker in self._workers:
                worker.kill()  # the only signal that ends a stopped process

    def _worker_failure(self) -> str | None:
        """Return which worker failed and how; None if none did."""
        time.sleep(_END_SECONDS)
        if self._late is not None:
            pid = self._workers[self._late].pid
            return (
                f"Loader worker {self._late} (process {pid}) has returned no batch for "
                f"{self._timeout:g} s."
            )
        for i, worker in enumerate(self._workers):
            if worker.exitcode:  # the others are ended by torch, with 0
                return (
                    f"Loader worker {i} (process {worker.pid}) was killed, perhaps because "
                    "memory ran out."
                )
        return None


def _collated(batch: Batch, *, ngrams: NgramConfig | None) -> Batch:
    """Merge a batch, and in a worker move it to shared memory, since a failure is hidden if torch
    does so later.
    """
    merged = batch.merged()
    if ngrams is not None:
        merged = replace(merged, lookup=Lookup.of(merged.input_ids, ngrams))
    if get_worker_info() is None:
        return merged
    return merged.mapped(Tensor.share_memory_)


def _expect_ends() -> None:
    """Ignore the ends of workers from now on, which torch takes as errors."""
    if hasattr(signal, "SIGCHLD") and in_main_thread():  # Windows lacks it
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _ignore_errors_of_deletion() -> None:
    """Ignore torch's errors from now on, which it prints where its half-made workers are deleted."""
    sys.unraisablehook = lambda _: None
