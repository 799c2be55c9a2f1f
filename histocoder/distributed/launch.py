"""What a launcher says of the process it has started, in the environment."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """What the launcher says of this process."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    launched: bool = False
    """Whether there is a launcher at all; it may have started one process only."""

    @property
    def is_primary(self) -> bool:
        """Whether this is the process that writes, prints and logs."""
        return self.rank == 0


def read_launch(environ: Mapping[str, str] | None = None, *, local_rank: int | None = None) -> Launch:
    """Read the launcher's environment.

    Parameters
    ----------
    environ : mapping, optional
        By default this process's. `RANK`, `WORLD_SIZE`, `LOCAL_RANK` and `LOCAL_WORLD_SIZE` as torchrun and others
        set them, else those of a SLURM job step.
    local_rank : int, optional
        Of the `--local_rank` flag, as older launchers pass it; used where the environment has none.
    """
    env = os.environ if environ is None else environ
    if "RANK" in env and "WORLD_SIZE" in env:
        default = 0 if local_rank is None else local_rank
        return Launch(
            rank=int(env["RANK"]),
            world_size=int(env["WORLD_SIZE"]),
            local_rank=int(env.get("LOCAL_RANK", default)),
            local_world_size=int(env.get("LOCAL_WORLD_SIZE", 1)),
            launched=True,
        )
    if "SLURM_STEP_NUM_TASKS" in env:  # which srun sets, also where it has started one task
        return Launch(
            rank=int(env["SLURM_PROCID"]),
            world_size=int(env["SLURM_STEP_NUM_TASKS"]),
            local_rank=int(env["SLURM_LOCALID"]),
            local_world_size=_slurm_tasks_here(env),
            launched=True,
        )
    return Launch()


def launcher() -> int | None:
    """Return the process id of the torchrun that has started this process, if there is one."""
    return os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None


def restarts() -> int:
    """Return how often the launcher has started the processes again (torchrun --max-restarts)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def attempt_of(launch: Launch) -> int:
    """Return what tells keys in the store from those that the processes of an earlier attempt have left there.

    Each node counts its restarts. The counts agree, but in an elastic rendezvous of several nodes (torchrun --rdzv-id
    …), which gives each attempt a store of its own.
    """
    one_store = launch.local_world_size == launch.world_size or os.environ.get("TORCHELASTIC_RUN_ID") == "none"
    return restarts() if one_store else 0


def node_name(environ: Mapping[str, str] | None = None) -> str:
    """Return this node's identity: its number according to torchrun or SLURM, else its host's name."""
    env = os.environ if environ is None else environ
    return env.get("GROUP_RANK") or env.get("SLURM_NODEID") or socket.gethostname()


def _slurm_tasks_here(env: Mapping[str, str]) -> int:
    """Tasks on this node, from lists such as "2(x3),1" (SLURM_STEP_TASKS_PER_NODE)."""
    counts: list[int] = []
    for part in env.get("SLURM_STEP_TASKS_PER_NODE", env["SLURM_STEP_NUM_TASKS"]).split(","):
        count, _, times = part.partition("(x")
        counts += [int(count)] * int(times.rstrip(")") or 1)
    return counts[min(int(env.get("SLURM_NODEID", 0)), len(counts) - 1)]


def slurm_address(env: Mapping[str, str]) -> tuple[str, int]:
    """Return the host of rank 0, and a port that all tasks of the job step derive alike.

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
