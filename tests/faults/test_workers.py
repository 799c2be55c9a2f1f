"""Loader workers that are killed or hang: the run ends with an error that names the worker, and
leaves no process.
"""

import multiprocessing
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import run, slow
from jobs import faulty, finetune, is_alive
from trainers import dataset

from histocoder.config import MachineConfig
from histocoder.data.dataset import OccupationDataset
from histocoder.data.loader import BatchLoader
from histocoder.data.samplers import BucketSampler
from histocoder.errors import MachineError

EXTRA = ("--batch-size", 8, "--max-steps", 40, "--num-workers", 2)


@pytest.mark.parametrize("call", ["_multiprocessing.SemLock", "torch.Tensor.share_memory_"])
def test_shared_memory_without_room_is_named(table: Path, tmp_path: Path, call: str):
    ended = run(*faulty(finetune(table, tmp_path / "out", *EXTRA), f"ENOSPC:{call}:1"), check=False)
    # a machine with one processor is warned of by torch before
    (said,) = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert (
        ended.returncode == 1
        and said.startswith("error: /dev/shm, which")
        and "--num-workers 0" in said
    )
    assert "Traceback" not in ended.stderr, ended.stderr


@pytest.mark.parametrize("sent", ["SIGKILL", slow("SIGSTOP")])
@pytest.mark.parametrize("persistent", [slow(()), ("--persistent-workers",)])
def test_a_worker_that_fails_is_named(table: Path, tmp_path: Path, sent: str, persistent):
    # on a busy machine, workers need seconds for their first batch: only a stopped one is late
    timeout = 3 if sent == "SIGSTOP" else 120
    args = finetune(table, tmp_path / "out", *EXTRA, "--worker-timeout", timeout, *persistent)
    result = run(*faulty(args, f"worker:1:{sent}"), check=False, fresh=True)
    what = {
        "SIGKILL": "was killed, perhaps because memory ran out",
        "SIGSTOP": "has returned no batch for 3 s",
    }[sent]
    found = re.search(
        rf"error: Loader worker 1 \(process (\d+)\) {what}\. Run the same", result.stderr
    )
    assert result.returncode == 1 and found is not None, result.stderr
    assert not is_alive(int(found[1]))


def test_a_worker_stopped_after_sending_is_named(table: Path, tmp_path: Path):
    """Its batch is announced, but lies in its memory: whoever fetches it from there would wait
    forever.
    """
    data = dataset(tmp_path, table)
    sampler = BucketSampler(
        data.lengths, data.num_target_blocks, batch_size=8, seed=0, rows=data.rows
    )
    loader = BatchLoader(data, sampler, MachineConfig(num_workers=1, worker_timeout=1.0))
    late = r"Loader worker 0 \(process \d+\) has returned no batch for 1 s"
    others = {*multiprocessing.active_children()}  # which earlier tests may have left
    with pytest.raises(MachineError, match=late), loader.naming_workers():
        batches = iter(loader)
        next(batches)
        time.sleep(0.5)  # the next batch is in the queue
        (worker,) = {*multiprocessing.active_children()} - others
        os.kill(worker.pid, signal.SIGSTOP)
        for _ in batches:  # one that has been fetched already may come first
            pass


def test_a_killed_worker_is_not_late(table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its end may be seen after its time is over, by a process that was busy."""
    data = dataset(tmp_path, table)
    calls = []

    def take(self: OccupationDataset, share: Any) -> Any:
        calls.append(share)
        if len(calls) == 2:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        return load(self, share)

    load = OccupationDataset.__getitem__
    monkeypatch.setattr(OccupationDataset, "__getitem__", take)
    sampler = BucketSampler(
        data.lengths, data.num_target_blocks, batch_size=8, seed=0, rows=data.rows
    )
    loader = BatchLoader(data, sampler, MachineConfig(num_workers=1, worker_timeout=1.0))
    killed = r"Loader worker 0 \(process \d+\) was killed"
    with pytest.raises(MachineError, match=killed), loader.naming_workers():
        for _ in loader:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # nobody is told of its end
