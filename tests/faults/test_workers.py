"""Loader workers that are killed or hang: the run ends with an error that says so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import run
from jobs import faulty, finetune

EXTRA = ("--batch-size", 8, "--max-steps", 40, "--num-workers", 2, "--worker-timeout", 3)


@pytest.mark.parametrize("call", ["_multiprocessing.SemLock", "torch.UntypedStorage._share_fd_cpu_"])
def test_shared_memory_without_room_is_named(table: Path, tmp_path: Path, call: str):
    args = finetune(table, tmp_path / "out", *EXTRA)
    ended = run(*faulty(args, f"ENOSPC:{call}:1"), check=False)
    # a machine with one processor is warned of by torch before
    (said,) = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert ended.returncode == 1 and said.startswith("error: /dev/shm, which") and "--num-workers 0" in said
    assert "Traceback" not in ended.stderr, ended.stderr


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        ("SIGKILL", r"Loader worker 1 \(process \d+\) was killed, perhaps because memory ran out"),
        pytest.param("SIGSTOP", "The loader workers have returned no batch for 3 s", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("persistent", [pytest.param((), marks=pytest.mark.slow), ("--persistent-workers",)])
def test_a_worker_that_fails_is_named(table: Path, tmp_path: Path, sent: str, said: str, persistent):
    args = finetune(table, tmp_path / "out", *EXTRA, *persistent)
    result = run(*faulty(args, f"worker:1:{sent}"), check=False, fresh=True)
    assert result.returncode == 1 and re.search(rf"error: {said}\. Run the same", result.stderr), result.stderr
