import socket
from pathlib import Path

import pytest
import torch
from jobs import assert_same_weights, training, two_ranks

from histocoder.distributed import process_group
from histocoder.distributed.launch import Launch, node_name, read_launch, slurm_address
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
            {
                "SLURM_STEP_NUM_TASKS": "6",
                "SLURM_PROCID": "4",
                "SLURM_LOCALID": "1",
                "SLURM_NODEID": "2",
                "SLURM_STEP_TASKS_PER_NODE": "1,3(x1),2",
            },
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
        ("a[01-03,07],b2", "a01"),
        ("a-[1-2]-[3-4]", "a-1-3"),
        ("n[12]-ib.cluster,m[1-2]", "n12-ib.cluster"),
    ],
)
def test_master_of_a_slurm_step(nodes: str, host: str):
    assert slurm_address({"SLURM_STEP_NODELIST": nodes, "SLURM_JOB_ID": "40123"}) == (host, 20123)


def test_what_tells_nodes_apart():
    assert node_name({"GROUP_RANK": "1", "SLURM_NODEID": "0"}) == "1"  # torchrun's, within an allocation
    assert node_name({"SLURM_NODEID": "3"}) == "3"
    assert node_name({}) == socket.gethostname()


def test_more_processes_than_gpus_are_named_in_a_slurm_step_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(process_group, "_launch", Launch(rank=1, world_size=2, local_rank=1, local_world_size=2))
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    assert process_group._choose_device("auto") == torch.device("cuda", 0)  # srun's own tasks, with a GPU each
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # torchrun's
    with pytest.raises(UserError, match="2 processes were started here, but there are 1 GPUs"):
        process_group._choose_device("auto")


def test_a_group_that_is_there_is_adopted(together: Path, tmp_path: Path):
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
