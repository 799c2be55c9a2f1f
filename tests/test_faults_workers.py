"""Loader workers that are killed or hang: the run ends with an error that names the worker, and leaves no process."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from conftest import run
from jobs import finetune, is_alive

EXTRA = ("--batch-size", 8, "--max-steps", 40, "--num-workers", 2, "--worker-timeout", 3)


def test_shared_memory_without_room_is_named(table: Path, tmp_path: Path):
    fault = "ENOSPC:_multiprocessing.SemLock:1"
    args = finetune(table, tmp_path / "out", *EXTRA)
    ended = run("tests/faulty.py", fault, "--", *args, check=False)
    assert ended.returncode == 1 and ended.stderr.startswith("error: There is no room in /dev/shm"), ended.stderr
    assert ended.stderr.count("\n") == 1, ended.stderr


@pytest.mark.parametrize(
    ("worker", "signal", "what"),
    [(1, "SIGKILL", "was killed, perhaps for want of memory"), (1, "SIGSTOP", "has given no batch for 3 s")],
)
@pytest.mark.parametrize("persistent", [pytest.param((), marks=pytest.mark.thorough), ("--persistent-workers",)])
def test_a_worker_that_fails_is_named(table: Path, tmp_path: Path, worker: int, signal: str, what: str, persistent):
    started = time.monotonic()
    fault = f"worker:{worker}:{signal}"
    result = run(
        "tests/faulty.py", fault, "--", *finetune(table, tmp_path / "out", *EXTRA, *persistent), check=False, fresh=True
    )
    assert result.returncode == 1 and time.monotonic() - started < 30
    found = re.search(rf"error: Loader worker {worker} \(process (\d+)\) {what}\. Started again, .*\n", result.stderr)
    assert found is not None, result.stderr
    assert not is_alive(int(found[1]))
