"""Work of the desk in the background."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from jobs import wait_until

pytest.importorskip("fastapi")

from histocoder.desk.domain.jobs import Job, Jobs, read_records
from histocoder.errors import Cancelled, UserError


def make_jobs(folder: Path, work: Callable[[Jobs[Job], Job], None]) -> Jobs[Job]:
    """Jobs whose records are in a folder."""
    jobs: Jobs[Job] = Jobs(
        read_records(Job, sorted(folder.glob("*.json"))),
        path=lambda job: folder / f"{job.id}.json",
        work=lambda job: work(jobs, job),
        delete=lambda job: (folder / f"{job.id}.json").unlink(missing_ok=True),
    )
    return jobs


def queued(jobs: Jobs[Job], name: str) -> Job:
    job = Job(id=name, state="new")
    jobs.add(job)
    jobs.queue(job)
    return job


def finish(jobs: Jobs[Job], job: Job) -> None:
    jobs.end(job, state="done")


def test_jobs_resume_with_the_next_server(tmp_path: Path):
    def interrupt(jobs: Jobs[Job], job: Job) -> None:
        raise Cancelled

    earlier = make_jobs(tmp_path, interrupt)
    job = queued(earlier, "a")
    wait_until(lambda: job.state == "queued")
    earlier.stop()
    later = make_jobs(tmp_path, finish)
    later.start()
    wait_until(lambda: later["a"].state == "done")
    later.stop()
    assert read_records(Job, [tmp_path / "a.json"])[0].state == "done"


def test_a_failing_job_does_not_stop_the_next(tmp_path: Path):
    def fail(jobs: Jobs[Job], job: Job) -> None:
        if job.id == "a":
            raise UserError("a has no column occ1.")
        finish(jobs, job)

    jobs = make_jobs(tmp_path, fail)
    first = queued(jobs, "a")
    second = queued(jobs, "b")
    wait_until(lambda: second.state == "done")
    jobs.stop()
    assert (first.state, first.message) == ("failed", "a has no column occ1.")


class Held:
    """Work that goes on until it is let go."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self.may_end = threading.Event()

    def __call__(self, jobs: Jobs[Job], job: Job) -> None:
        self.has_begun.set()
        assert self.may_end.wait(60)
        finish(jobs, job)


@pytest.mark.parametrize(("is_done", "state"), [(False, "stopped"), (True, "done")])
def test_a_job_that_was_stopped_stays_so_unless_it_is_done(
    tmp_path: Path, is_done: bool, state: str
):
    held = Held()

    def work(jobs: Jobs[Job], job: Job) -> None:
        if not is_done:
            assert held.may_end.wait(60)
            raise Cancelled
        held(jobs, job)

    jobs = make_jobs(tmp_path, work)
    job = queued(jobs, "a")
    wait_until(lambda: job.state == "running")
    jobs.save(job, state="stopped")
    assert jobs.is_interrupted(job)
    held.may_end.set()
    jobs.stop()
    assert job.state == state


def test_a_deleted_job_leaves_nothing(tmp_path: Path):
    work = Held()
    jobs = make_jobs(tmp_path, work)
    job = queued(jobs, "a")
    assert work.has_begun.wait(60)
    jobs.remove("a")
    jobs.save(job, message="half done")
    work.may_end.set()
    jobs.stop()
    assert list(tmp_path.iterdir()) == []
