"""Processes that train together.

A program calls `start` once and `stop` at its end; between them every helper works for one process as for many, and
is a no-op for one that has no process group. Launchers known: torchrun, `python -m torch.distributed.launch` (with or
without `--local_rank`), `accelerate launch`, and `srun`.
"""

from __future__ import annotations

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
from histocoder.distributed.rendezvous import connect, fault_of_nccl, meet
from histocoder.distributed.watchdog import HEARING_SECONDS, Watch
from histocoder.errors import UserError

_POLL_SECONDS = 0.1
_GRACE_SECONDS = 8.0


@dataclass
class Group:
    """What the processes of a run share."""

    store: dist.Store
    control: dist.ProcessGroup
    """CPU collectives beside the gradients' ones."""
    is_adopted: bool = False
    """Whether somebody else has started the process group, and will end it."""
    calls: int = 0
    """Of `run_on_primary`, counted alike on every rank."""


_launch = Launch()
_group: Group | None = None
_watch: Watch | None = None


def start(
    *,
    device: str = "auto",
    required: bool = False,
    grouped: bool = False,
    local_rank: int | None = None,
    rank_timeout: float = RANK_TIMEOUT,
) -> torch.device:
    """Join the other processes, where a launcher started several, and choose this one's device.

    A process group that is there already, such as Ray Train's, is used as it is; who started it watches its processes.

    Parameters
    ----------
    device : str
        "auto", "cpu", "cuda" or "mps".
    required : bool
        Whether there must be a launcher (`--distributed`).
    grouped : bool
        Whether one process, too, is to have a process group, as FSDP needs it.
    local_rank : int, optional
        See `read_launch`.
    rank_timeout : float
        Seconds without a sign of life after which a process is taken for hung; all end then.

    Raises
    ------
    UserError
        Where a launcher is required and there is none, or there are fewer GPUs than processes.
    """
    global _launch, _group, _watch
    _launch = read_launch(local_rank=local_rank)
    is_there = dist.is_initialized()
    if is_there:
        _launch = replace(_launch, rank=dist.get_rank(), world_size=dist.get_world_size(), launched=True)
    _check_launcher(required)
    chosen = _choose_device(device)
    if chosen.type == "cuda" and (grouped or _launch.world_size > 1):
        torch.cuda.set_device(chosen)
    if is_there:
        if _group is None:
            theirs = dist.PrefixStore("histocoder", dist.distributed_c10d._get_default_store())
            _group = Group(theirs, connect(theirs, chosen, _launch), is_adopted=True)
        return chosen
    store: dist.Store | None = None
    of_watch: dist.Store | None = None
    if _launch.world_size > 1:
        attempt = attempt_of(_launch)
        shared, of_watch = meet(_launch)
        store, of_watch = dist.PrefixStore(f"attempt/{attempt}", shared), dist.PrefixStore(f"watch/{attempt}", of_watch)
    elif grouped:
        store = dist.HashStore()
    if of_watch is not None or launcher() is not None:
        _watch = Watch(rank=rank(), world_size=world_size(), store=of_watch, launcher=launcher(), patience=rank_timeout)
        _watch.start()
    if store is not None:
        _group = Group(dist.PrefixStore("histocoder", store), connect(store, chosen, _launch))
    return chosen


def _check_launcher(required: bool) -> None:
    """Raise a UserError where there is no launcher though there must be one, or accelerate started too few."""
    if required and not _launch.launched:
        raise UserError(
            "--distributed needs a launcher: torchrun --nproc_per_node=2 "
            f"{_program()} --distributed …, with the number of GPUs in place of 2."
        )
    if (
        _launch.world_size == 1
        and "RANK" not in os.environ
        and {"ACCELERATE_USE_CPU", "MASTER_PORT"} <= set(os.environ)
    ):
        raise UserError(
            "accelerate launch has started one process though it was asked for several: without GPUs it starts more "
            "through mpirun only. Use torchrun --nproc_per_node=2, with the number of processes in place of 2."
        )


def _program() -> str:
    """Return what a launcher is given to run this program: a script, or the module of a command."""
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
        return torch.device("cuda", 0)  # each task was given a GPU of its own; torchrun's processes share a task's
    if _launch.local_world_size > torch.cuda.device_count():
        raise UserError(
            f"{_launch.local_world_size} processes were started here, but there are {torch.cuda.device_count()} GPUs. "
            f"Start one process a GPU (--nproc_per_node={torch.cuda.device_count()}), or add --device cpu."
        )
    return torch.device("cuda", _launch.local_rank)


def stop() -> None:
    """Leave the other processes."""
    global _group, _watch
    if _watch is not None:
        with suppress(RuntimeError):  # rank 0 has ended, and with it what was shared
            _watch.stop()
    _watch = None
    if dist.is_initialized() and not (_group is not None and _group.is_adopted):
        dist.destroy_process_group()
    _group = None


def rank() -> int:
    """Which process this is, from 0."""
    return _launch.rank


def world_size() -> int:
    """Return how many processes there are."""
    return _launch.world_size


def backend() -> str | None:
    """Return what gradients are exchanged over: "nccl" or "gloo"; None where there is no process group."""
    return dist.get_backend() if _group is not None else None


def nccl_version() -> str | None:
    """Return the version of the NCCL that torch is built with; None if it is built without."""
    return ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else None


def is_primary() -> bool:
    """Return whether this is the process that writes, prints and logs."""
    return _launch.is_primary


def is_first_here() -> bool:
    """Return whether this is the first process of its node."""
    return _launch.local_rank == 0


def shared_group() -> Group | None:
    """Return what the processes share; None where there is no process group."""
    return _group


def control_group() -> Any:
    """Return the processes, for collectives of what is in their CPUs' memory; None where there is no process group."""
    return None if _group is None else _group.control


def expect_end() -> None:
    """Note that the processes were asked to stop, so that a silent one counts as ended."""
    if _watch is not None:
        _watch.expect_end()


def is_lost_contact(error: RuntimeError) -> bool:
    """Return whether an error means that another process has ended or can't be reached."""
    return (isinstance(error, dist.DistError) and fault_of_nccl(error) is None) or "gloo/transport" in str(error)


def leave(message: str, status: int) -> None:
    """End this process with a message that is seen once, however many processes end with it.

    Rank 0 prints it, and gives the others the time to hear that all end. They wait for it to, since a launcher ends all
    processes with the first; where it does not, one was alone in failing, and prints the message itself.
    """
    launch = read_launch()
    if launch.is_primary or not _is_said_within(_GRACE_SECONDS, f"rank {launch.rank}: {message}", status):
        print(message if launch.is_primary else f"rank {launch.rank}: {message}", file=sys.stderr, flush=True)
        _announce("", status)
    if launch.world_size > 1 or _group is not None:
        sys.stdout.flush()
        os._exit(status)  # no clean-up may wait here for processes that are gone
    sys.exit(status)


def _is_said_within(seconds: float, message: str, status: int) -> bool:
    """Have rank 0 say a message, and wait until it has said it, or one of its own."""
    _announce(message, status)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if _watch is not None and _watch.is_said():
            return True
        time.sleep(_POLL_SECONDS)
    return False


def _announce(message: str, status: int) -> None:
    """End all processes; those that can't be reached any more notice by themselves."""
    if _watch is not None:
        with suppress(RuntimeError):
            _watch.announce(message, status)
        with suppress(RuntimeError):
            _watch.stop()
        if not message and world_size() > 1:
            time.sleep(HEARING_SECONDS)
