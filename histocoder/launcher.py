"""The launcher of a run: rank and number of processes, address of the rendezvous, and devices.

Launchers are torchrun, `python -m torch.distributed.launch`, `accelerate launch` and `srun`.
"""

import os
import re
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from histocoder.errors import UserError


@dataclass(frozen=True)
class Launch:
    """Place of this process among those that were launched with it."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    # whether there is a launcher, which may have started only one process
    launched: bool = False


def read_launch(env: Mapping[str, str] = os.environ, *, local_rank: int | None = None) -> Launch:
    """Read `RANK` and other variables of torchrun and similar launchers, or those of a SLURM job
    step.

    `local_rank`, from the `--local_rank` flag of older launchers, is used if the environment has
    none.
    """
    if "RANK" in env and "WORLD_SIZE" in env:
        return Launch(
            rank=int(env["RANK"]),
            world_size=int(env["WORLD_SIZE"]),
            local_rank=int(env.get("LOCAL_RANK", local_rank or 0)),
            local_world_size=int(env.get("LOCAL_WORLD_SIZE", 1)),
            launched=True,
        )

    # srun sets its variables of a step even for one task
    if "SLURM_STEP_NUM_TASKS" in env:
        num_tasks = int(env["SLURM_STEP_NUM_TASKS"])
        num_nodes = int(env.get("SLURM_STEP_NUM_NODES", 1))
        return Launch(
            rank=int(env["SLURM_PROCID"]),
            world_size=num_tasks,
            local_rank=int(env["SLURM_LOCALID"]),
            local_world_size=-(-num_tasks // num_nodes),
            launched=True,
        )
    return Launch()


def restarts() -> int:
    """Return how often the launcher has restarted the processes (torchrun --max-restarts)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def requeues() -> int:
    """Return how often SLURM has put the job into its queue again."""
    return int(os.environ.get("SLURM_RESTART_COUNT", "0"))


def launch_id() -> str:
    """Return what restarts and requeues of one launch have in common."""
    return " ".join(os.environ.get(name, "") for name in ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"))


def choose_device(name: str, launch: Launch) -> torch.device:
    """Return the device of a process, for `--device`; raise a UserError if there is none."""
    is_available = {
        "cuda": torch.cuda.is_available(),
        "mps": launch.world_size == 1 and torch.backends.mps.is_available(),
        "cpu": True,
    }
    if name == "auto":
        name = next(kind for kind in is_available if is_available[kind])
    if not is_available[name]:
        reason = missing_gpu() if name == "cuda" else "torch finds no GPU of a Mac for this process"
        raise UserError(f"--device {name}: {reason}. Omit --device, or install what is missing.")
    if name != "cuda":
        return torch.device(name)

    # A single visible GPU belongs to this process, as srun assigns one to each task; if two
    # processes share it, the check at the rendezvous raises.
    num_gpus = torch.cuda.device_count()
    if num_gpus == 1:
        return torch.device("cuda", 0)
    num_processes = max(launch.local_world_size, launch.local_rank + 1)
    if num_processes > num_gpus:
        raise UserError(
            f"{num_processes} processes were started here, but there are {num_gpus} GPUs. Start "
            f"one process per GPU (--nproc_per_node={num_gpus}), or add --device cpu."
        )
    return torch.device("cuda", launch.local_rank)


def missing_gpu() -> str:
    """Return why torch has no GPU by CUDA here, as a part of a sentence."""
    if not torch.backends.cuda.is_built():
        return f"this torch ({torch.__version__}) is built without CUDA"
    reason = "torch finds no GPU"
    try:
        torch.cuda.init()
    except RuntimeError as error:
        # what follows in PyTorch's message is advice with addresses
        reason += f" ({str(error).partition('. ')[0][:200].rstrip('.')})"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        reason += f"; CUDA_VISIBLE_DEVICES is {visible!r}"
    return reason


def master_address(env: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Return where ranks meet; by default the first host of a SLURM step, and a port that is the
    same on all its hosts.

    Examples
    --------
    >>> master_address({"SLURM_STEP_NODELIST": "gpu[07-09,12],fat1", "SLURM_JOB_ID": "41"})
    ('gpu07', 20041)
    """
    first = re.match(r"([^\[,]|\[[^\]]*\])+", env.get("SLURM_STEP_NODELIST", "127.0.0.1"))
    host = re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0] if first else "")
    port = 20_000 + int(env.get("SLURM_JOB_ID", 0)) % 20_000
    return env.get("MASTER_ADDR", host), int(env.get("MASTER_PORT", port))


def interface_towards(host: str) -> str | None:
    """Return the network interface on the route to a host, for a loopback address the default
    route's; Linux only.
    """
    try:
        packed = socket.inet_aton(socket.gethostbyname(host))
        lines = Path("/proc/net/route").read_text(encoding="ascii").splitlines()
    except OSError:
        return None

    # The table has addresses as numbers in the machine's byte order; the route whose mask has most
    # bits is the most specific one. The first line has the names of the columns.
    (address,) = struct.unpack("=I", packed)
    interface = None
    most_bits = -1
    for line in lines[1:]:
        columns = line.split()
        destination = int(columns[1], 16)
        mask = int(columns[7], 16)
        if address & mask == destination and mask.bit_count() > most_bits:
            interface = columns[0]
            most_bits = mask.bit_count()
    return interface
