"""Rank and world size of this process, from the environment that its launcher has set."""

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """Place of this process among those that were launched with it."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    launched: bool = False  # whether there is a launcher; it may have started only one process


def read_launch(env: Mapping[str, str] = os.environ, *, local_rank: int | None = None) -> Launch:
    """Read `RANK` and other variables of torchrun and similar launchers, or those of a SLURM job step.

    `local_rank`, from the `--local_rank` flag of older launchers, is used if the environment has none.
    """
    if "RANK" in env and "WORLD_SIZE" in env:
        return Launch(
            rank=int(env["RANK"]),
            world_size=int(env["WORLD_SIZE"]),
            local_rank=int(env.get("LOCAL_RANK", local_rank or 0)),
            local_world_size=int(env.get("LOCAL_WORLD_SIZE", 1)),
            launched=True,
        )
    if "SLURM_STEP_NUM_TASKS" in env:  # set by srun, even for one task
        return Launch(
            rank=int(env["SLURM_PROCID"]),
            world_size=int(env["SLURM_STEP_NUM_TASKS"]),
            local_rank=int(env["SLURM_LOCALID"]),
            local_world_size=_slurm_tasks_here(env),
            launched=True,
        )
    return Launch()


def launcher() -> int | None:
    """Return the process id of the torchrun that has started this process, if any."""
    return os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None


def restarts() -> int:
    """Return how often the launcher has restarted the processes (torchrun --max-restarts)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def attempt_of(launch: Launch) -> int:
    """Return a number that separates this attempt's keys in the store from those of attempts before a restart.

    Each node counts its restarts. The counts differ only in an elastic rendezvous of several nodes (torchrun --rdzv-id
    …), where each attempt has a store of its own.
    """
    one_store = launch.local_world_size == launch.world_size or os.environ.get("TORCHELASTIC_RUN_ID") == "none"
    return restarts() if one_store else 0


def node_name(env: Mapping[str, str] = os.environ) -> str:
    """Return this node's number from torchrun or SLURM, else its host name."""
    return env.get("GROUP_RANK") or env.get("SLURM_NODEID") or socket.gethostname()


def _slurm_tasks_here(env: Mapping[str, str]) -> int:
    """Return the number of tasks on this node, from a list such as "2(x3),1" (SLURM_STEP_TASKS_PER_NODE)."""
    counts: list[int] = []
    for part in env.get("SLURM_STEP_TASKS_PER_NODE", env["SLURM_STEP_NUM_TASKS"]).split(","):
        count, _, times = part.partition("(x")
        counts += [int(count)] * int(times.rstrip(")") or 1)
    return counts[min(int(env.get("SLURM_NODEID", 0)), len(counts) - 1)]


def slurm_address(env: Mapping[str, str]) -> tuple[str, int]:
    """Return the host of rank 0, and a port that is the same for all tasks of the job.

    Examples
    --------
    >>> slurm_address({"SLURM_STEP_NODELIST": "gpu[07-09,12],fat1", "SLURM_JOB_ID": "41"})
    ('gpu07', 20041)
    >>> slurm_address({"SLURM_STEP_NODELIST": "r[2,4]-n[1-3]-ib", "SLURM_JOB_ID": "41"})
    ('r2-n1-ib', 20041)
    """
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "127.0.0.1")
    first = re.match(r"([^\[,]|\[[^\]]*\])+", nodes)
    assert first is not None
    host = re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0])
    return host, 20_000 + int(env.get("SLURM_JOB_ID", 0)) % 20_000
