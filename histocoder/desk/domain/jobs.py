"""Work in the background, one job after the other, each with a record that outlives the server."""

import threading
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from histocoder.errors import Cancelled, UserError
from histocoder.files import write_text
from histocoder.log import log

_FAILED = "The program failed; the output of histocoder serve says why."


class Job(BaseModel):
    """A record of a job; its subclasses say which states there are besides those of the queue."""

    id: str
    state: str
    message: str = ""  # why it has failed

    @property
    def is_unfinished(self) -> bool:
        """Whether the job waits or is being done."""
        return self.state in ("queued", "running")


AnyJob = TypeVar("AnyJob", bound=Job)


def read_records(kind: type[AnyJob], paths: Iterable[Path]) -> list[AnyJob]:
    """Return the records in some files."""
    return [kind.model_validate_json(path.read_bytes()) for path in paths]


class Jobs(Generic[AnyJob]):
    """Jobs by id, in the order of their age, and the thread that does those that are queued.

    Parameters
    ----------
    records : iterable of Job
        The jobs that are on disk, the oldest first.
    path : callable
        Returns the JSON file of a job's record; None for a job that is not saved.
    work : callable
        Does a job, and ends it with `end`. What it raises ends the job, too: Cancelled puts it back
        into the queue of the next server, and any other error makes it fail.
    delete : callable
        Deletes what a job has on disk.
    as_sent : callable, optional
        Returns a message as people may read it.
    """

    def __init__(
        self,
        records: Iterable[AnyJob],
        *,
        path: Callable[[AnyJob], Path | None],
        work: Callable[[AnyJob], None],
        delete: Callable[[AnyJob], None],
        as_sent: Callable[[str], str] = str,
    ) -> None:
        self.lock = threading.RLock()
        self.is_stopping = False
        self._jobs = {job.id: job for job in records}
        self._path = path
        self._do = work
        self._delete = delete
        self._as_sent = as_sent
        self._worker = ThreadPoolExecutor(1)

    def start(self) -> None:
        """Resume what an earlier server has not finished."""
        for job in self._jobs.values():
            if job.is_unfinished:
                self.queue(job)

    def stop(self) -> None:
        """Interrupt the work; the next server resumes it."""
        self.is_stopping = True
        self._worker.shutdown(cancel_futures=True)

    def __getitem__(self, job_id: str) -> AnyJob:
        return self._jobs[job_id]

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._jobs

    def all(self) -> list[AnyJob]:
        """List the jobs, the last one first."""
        return list(reversed(self._jobs.values()))

    def add(self, job: AnyJob) -> None:
        """Add a job, and save its record; it is not queued yet."""
        self._jobs[job.id] = job
        try:
            self.save(job)
        except UserError:
            del self._jobs[job.id]
            raise

    def add_oldest(self, job: AnyJob) -> None:
        """Add a job before all others."""
        self._jobs = {job.id: job, **self._jobs}

    def save(self, job: AnyJob, **changes: Any) -> None:
        """Change a record once that is saved: what the page shows is what the next server finds."""
        with self.lock:  # while another thread may write the same file
            path = self._path(job)
            if path is not None and not self._is_deleted(job):
                write_text(path, job.model_copy(update=changes).model_dump_json())
            for name, value in changes.items():
                setattr(job, name, value)

    def queue(self, job: AnyJob, **changes: Any) -> None:
        """Do a job after those that wait already."""
        self.save(job, state="queued", message="", **changes)
        self._worker.submit(self._work, job)

    def remove(self, job_id: str) -> None:
        """Delete a job; if it is being done, what it has on disk is deleted when it ends."""
        with self.lock:
            job = self._jobs.pop(job_id)
            if job.state != "running":
                self._delete(job)

    def is_interrupted(self, job: AnyJob) -> bool:
        """Whether a job that is being done should end: the server stops, or somebody has stopped or
        deleted it.
        """
        return self.is_stopping or job.state != "running" or self._is_deleted(job)

    def end(self, job: AnyJob, **changes: Any) -> None:
        """Record how a job has ended, unless somebody has stopped it before it was done, or deleted
        it.
        """
        with self.lock:
            # that somebody has stopped it is recorded
            if job.state != "running" and changes["state"] != "done":
                return

            # somebody has deleted it, and left its files to this thread
            if self._is_deleted(job):
                self._delete(job)
                return
            try:
                self.save(job, **changes)
            except UserError as error:  # as on a full disk; the next server does the job again
                job.state = "failed"
                job.message = self._as_sent(str(error))

    def _is_deleted(self, job: AnyJob) -> bool:
        return self._jobs.get(job.id) is not job  # a later job may have its id

    def _work(self, job: AnyJob) -> None:
        """Do a job, unless it was stopped or deleted in the queue."""
        # from the lock on nobody deletes its files
        with self.lock:
            if self.is_stopping or job.state != "queued" or self._is_deleted(job):
                return
            job.state = "running"

        # whatever happens to one job, the next ones are done
        try:
            self._do(job)
        except Cancelled:
            self.end(job, state="queued")
        except UserError as error:
            self.end(job, state="failed", message=self._as_sent(str(error)))
        except Exception:
            log.error(traceback.format_exc())
            self.end(job, state="failed", message=_FAILED)
