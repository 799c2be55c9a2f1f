"""The process group: a program calls `start` once, and `stop` at its end.

In between, the helpers of this package work with any number of processes; with one they need no process group. Known
launchers are torchrun, `python -m torch.distributed.launch`, `accelerate launch` and `srun`.
"""

import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from histocoder.config import RANK_TIMEOUT
from histocoder.distributed.launch import Launch, attempt_of, launcher, read_launch
from histocoder.distributed.rendezvous import connect, connect_stores, failure_of_nccl
from histocoder.distributed.watchdog import HEARING_SECONDS, Watchdog
from histocoder.errors import UserError

_POLL_SECONDS = 0.1
_GRACE_SECONDS = 8.0


@dataclass
class Group:
    """The processes of a run, and what they share."""

    store: dist.Store
    control: dist.ProcessGroup  # process group for collectives of CPU tensors, apart from the gradients'
    is_adopted: bool  # whether someone else, such as Ray Train, has initialized and will destroy the default group
    num_calls: int = 0  # of `run_on_primary` and `wait_for_all`, the same on every rank


_launch = Launch()
_group: Group | None = None
_watchdog: Watchdog | None = None


def start(
    *,
    device: str = "auto",
    required: bool = False,
    grouped: bool = False,
    local_rank: int | None = None,
    rank_timeout: float = RANK_TIMEOUT,
) -> torch.device:
    """Initialize the process group if a launcher started several processes, and choose this one's device.

    A process group that is initialized already, such as Ray Train's, is used; whoever started it watches its processes.
    `required` is `--distributed`, `local_rank` the flag of older launchers; a single process has a group if `grouped`,
    as FSDP needs. All processes end if one gives no heartbeat for `rank_timeout` seconds.
    """
    global _launch, _group, _watchdog
    _launch = read_launch(local_rank=local_rank)
    is_initialized = dist.is_initialized()
    if is_initialized:
        _launch = replace(_launch, rank=dist.get_rank(), world_size=dist.get_world_size(), launched=True)
    _check_launcher(required)
    chosen = _choose_device(device)
    if chosen.type == "cuda" and (grouped or _launch.world_size > 1):
        torch.cuda.set_device(chosen)
    if is_initialized and _group is not None:
        return chosen
    store: dist.Store | None = None
    watched: dist.Store | None = None
    if is_initialized:
        store = dist.distributed_c10d._get_default_store()
    elif _launch.world_size > 1:
        attempt = attempt_of(_launch)
        prefixes = (f"attempt/{attempt}", f"watch/{attempt}")
        store, watched = map(dist.PrefixStore, prefixes, connect_stores(_launch))
    elif grouped:
        store = dist.HashStore()
    if not is_initialized and (watched is not None or launcher() is not None):
        _watchdog = Watchdog(
            rank=rank(), world_size=world_size(), store=watched, launcher=launcher(), patience=rank_timeout
        )
        _watchdog.start()
    if store is not None:
        _group = Group(dist.PrefixStore("histocoder", store), connect(store, chosen, _launch), is_initialized)
    return chosen


def _check_launcher(required: bool) -> None:
    """Raise a UserError if a required launcher is missing, or accelerate has started fewer processes than asked for."""
    if required and not _launch.launched:
        raise UserError(
            "--distributed needs a launcher: torchrun --nproc_per_node=2 "
            f"{_program()} --distributed …, with the number of GPUs in place of 2."
        )
    by_accelerate = {"ACCELERATE_USE_CPU", "MASTER_PORT"} <= set(os.environ)
    if _launch.world_size == 1 and "RANK" not in os.environ and by_accelerate:
        raise UserError(
            "accelerate launch has started one process instead of several; without GPUs it starts several through "
            "mpirun only. Use torchrun --nproc_per_node=2, with the number of processes in place of 2."
        )


def _program() -> str:
    """Return this program as an argument of torchrun: a script, or the module of a command."""
    folder, name = os.path.split(sys.argv[0])
    stem, suffix = os.path.splitext(name)
    is_module = os.path.basename(folder) == "cli"
    if suffix == ".py" and not is_module and stem != "__main__":
        return name
    return f"-m histocoder.cli.{stem if is_module else sys.argv[1].replace('-', '_')}"


def _choose_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        name = "cpu" if name == "mps" and _launch.world_size > 1 else name
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch finds no GPU here. Omit --device, or check nvidia-smi.")
    if name == "mps" and (_launch.world_size > 1 or not torch.backends.mps.is_available()):
        raise UserError("--device mps is for one process on a Mac. Omit --device.")
    if name != "cuda":
        return torch.device(name)
    if torch.cuda.device_count() == 1 and "SLURM_STEP_ID" in os.environ and "LOCAL_WORLD_SIZE" not in os.environ:
        return torch.device("cuda", 0)  # srun gave each task a GPU of its own; torchrun's processes share a task's
    if _launch.local_world_size > torch.cuda.device_count():
        raise UserError(
            f"{_launch.local_world_size} processes were started here, but there are {torch.cuda.device_count()} GPUs. "
            f"Start one process per GPU (--nproc_per_node={torch.cuda.device_count()}), or add --device cpu."
        )
    return torch.device("cuda", _launch.local_rank)


def stop() -> None:
    """Leave the process group."""
    global _group, _watchdog
    if _watchdog is not None:
        with suppress(RuntimeError):  # rank 0 has ended, and the store with it
            _watchdog.stop()
    _watchdog = None
    if dist.is_initialized() and not (_group is not None and _group.is_adopted):
        dist.destroy_process_group()
    _group = None


def rank() -> int:
    return _launch.rank


def world_size() -> int:
    return _launch.world_size


def is_primary() -> bool:
    """Return whether this is rank 0, which writes, prints and logs."""
    return _launch.rank == 0


def is_local_primary() -> bool:
    """Return whether this is the first process of its node."""
    return _launch.local_rank == 0


def backend() -> str | None:
    """Return the backend for gradients, "nccl" or "gloo"; None without a process group."""
    return dist.get_backend() if _group is not None else None


def nccl_version() -> str | None:
    """Return the version of NCCL in this build of PyTorch, if any."""
    return ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else None


def shared_group() -> Group | None:
    return _group


def control_group() -> Any:
    """Return the process group for CPU tensors; None without one."""
    return None if _group is None else _group.control


def expect_end() -> None:
    if _watchdog is not None:
        _watchdog.expect_end()


def is_lost_contact(error: RuntimeError) -> bool:
    """Return whether an error means that another process has ended or can't be reached."""
    return (isinstance(error, dist.DistError) and failure_of_nccl(error) is None) or "gloo/transport" in str(error)


def leave(message: str, status: int) -> None:
    """End this process with a message that is printed once, however many processes end with it.

    Rank 0 prints it, and gives the others time to notice that all end. They wait until it has, since a launcher ends
    all processes with the first. If rank 0 prints nothing, only this process has failed, and prints the message itself.
    """
    launch = read_launch()
    if launch.rank > 0:
        message = f"rank {launch.rank}: {message}"
    if launch.rank == 0 or not _is_printed_by_primary(message, status):
        print(message, file=sys.stderr, flush=True)
        _announce("", status)
    if launch.world_size > 1 or _group is not None:
        sys.stdout.flush()
        os._exit(status)  # a clean-up could wait for processes that are gone
    sys.exit(status)


def _is_printed_by_primary(message: str, status: int) -> bool:
    """Ask rank 0 to print a message, and wait until it has printed that, or one of its own."""
    _announce(message, status)
    deadline = time.monotonic() + _GRACE_SECONDS
    while time.monotonic() < deadline:
        if _watchdog is not None and _watchdog.is_printed():
            return True
        time.sleep(_POLL_SECONDS)
    return False


def _announce(message: str, status: int) -> None:
    """End all processes that can be reached; the watchdogs of the others end them."""
    if _watchdog is not None:
        with suppress(RuntimeError):
            _watchdog.announce(message, status)
        with suppress(RuntimeError):
            _watchdog.stop()
        if not message and world_size() > 1:
            time.sleep(HEARING_SECONDS)
