"""The launcher's environment, the device, the collectives, and how ranks end together."""

from pathlib import Path

import pytest
import torch
from jobs import assert_same_weights, training, two_ranks

from histocoder.distributed import Launch, choose_device, master_address, read_launch
from histocoder.errors import UserError


@pytest.mark.parametrize(
    ("environ", "local_rank", "launch"),
    [
        ({}, None, Launch()),
        (
            {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"},
            None,
            Launch(rank=5, world_size=8, local_rank=1, local_world_size=4, launched=True),
        ),
        # an older launcher says the local rank by flag alone
        ({"RANK": "1", "WORLD_SIZE": "2"}, 1, Launch(rank=1, world_size=2, local_rank=1, launched=True)),
        (
            {"SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_NUM_NODES": "3", "SLURM_PROCID": "4", "SLURM_LOCALID": "1"},
            None,
            Launch(rank=4, world_size=6, local_rank=1, local_world_size=2, launched=True),
        ),
        # srun with one task
        (
            {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1"},
            None,
            Launch(launched=True),
        ),
        # plain python in an allocation of several tasks, without srun
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_JOB_ID": "1"}, None, Launch()),
    ],
)
def test_launchers(environ: dict[str, str], local_rank: int | None, launch: Launch):
    assert read_launch(environ, local_rank=local_rank) == launch


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node1", "node1"),
        ("node[3-5,9]", "node3"),
        ("a01,a02", "a01"),
        ("gpu-[007,009],fat", "gpu-007"),
        ("a-[1-2]-[3-4]", "a-1-3"),
        ("n[12]-ib.cluster,m[1-2]", "n12-ib.cluster"),
    ],
)
def test_master_of_a_slurm_step(nodes: str, host: str):
    step = {"SLURM_STEP_NODELIST": nodes, "SLURM_JOB_ID": "40123"}
    assert master_address(step) == (host, 20123)
    assert master_address({**step, "MASTER_ADDR": "other", "MASTER_PORT": "7"}) == ("other", 7)


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    second = Launch(rank=1, world_size=2, local_rank=1, local_world_size=2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for slurm in (False, True):  # torchrun in a step of SLURM too
        if slurm:
            monkeypatch.setenv("SLURM_STEP_ID", "0")
        with pytest.raises(UserError, match=r"2 processes .* 1 GPUs.*--nproc_per_node=1"):
            choose_device("auto", second)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert choose_device("auto", second) == torch.device("cuda", 0)  # tasks of srun have a GPU each
    with pytest.raises(UserError, match="--device mps: torch finds no GPU"):
        choose_device("mps", second)


COLLECTIVES = """
import torch
from histocoder import distributed as d
d.start(device="cpu")
own = torch.arange(d.rank() + 1.0)
print([x.tolist() for x in d.gather(own)], d.all_reduce(own[:1] + 1).item(), d.all_reduce(own[-1:], "max").item())
print(d.gather_objects(d.rank()), d.broadcast(d.rank()), d.broadcast_from_primary(lambda: [d.rank()], doing="it"))
d.stop()
"""


def test_collectives_of_two_ranks():
    for ended in two_ranks(["-c", COLLECTIVES]):
        assert ended.stdout.splitlines() == ["[[0.0], [0.0, 1.0]] 2.0 1.0", "[0, 1] 0 [0]"]


ENDING = """
import sys
from histocoder import distributed
from histocoder.cli.script import run_script
from histocoder.errors import Interrupted, UserError

def main():
    distributed.start(device="cpu")
    if distributed.rank() == int(sys.argv[1]):
        errors = {"user": UserError("mistake"), "signal": Interrupted("stopped", 10), "fault": KeyError("fault")}
        raise errors[sys.argv[2]]
    distributed.barrier()

run_script(main)
"""


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize(
    ("error", "status", "said"), [("user", 2, "mistake"), ("signal", 138, "stopped"), ("fault", 1, "KeyError")]
)
def test_a_failing_rank_ends_waiting_ones(rank: str, error: str, status: int, said: str):
    ended = two_ranks(["-c", ENDING, rank, error], check=False)
    assert [one.returncode for one in ended] == [status] * 2
    assert (ended[0].stderr + ended[1].stderr).count(said) == 1


def test_an_existing_group_is_adopted(together: Path, tmp_path: Path):
    script = """
import sys, threading, torch.distributed as dist
from histocoder import FinetuneConfig, train
from histocoder.cli.arguments import parse
dist.init_process_group("gloo")
thread = threading.Thread(target=train, args=(parse(FinetuneConfig, sys.argv[1:]),))  # as Ray Train does
thread.start()
thread.join()
dist.barrier()
dist.destroy_process_group()
"""
    two_ranks(["-c", script, *training(tmp_path / "out")[1:]])
    assert_same_weights(tmp_path / "out", together)
