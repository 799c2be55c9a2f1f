"""Processes that train together.

A program calls `start` once and `stop` at its end; between them every helper works for one process as for many, and
is a no-op for one that has no process group. Launchers known: torchrun, `python -m torch.distributed.launch` (with or
without `--local_rank`), `accelerate launch`, and `srun`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from histocoder.config import RANK_TIMEOUT
from histocoder.distributed.launch import Launch, attempt_of, launcher, read_launch
from histocoder.distributed.rendezvous import connect, fault_of_nccl, meet
from histocoder.distributed.watchdog import HEARING_SECONDS, Watch
from histocoder.errors import Interrupted, UserError

T = TypeVar("T")
_POLL_SECONDS = 0.1
_NOTICE_SECONDS = 30.0
_GRACE_SECONDS = 8.0


@dataclass
class _Group:
    store: dist.Store
    control: dist.ProcessGroup
    """CPU collectives beside the gradients' ones."""
    is_adopted: bool = False
    """Whether somebody else has started the process group, and will end it."""
    calls: int = 0
    """Of `run_on_primary`, counted alike on every rank."""


_launch = Launch()
_group: _Group | None = None
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
            _group = _Group(theirs, connect(theirs, chosen, _launch), is_adopted=True)
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
        _group = _Group(dist.PrefixStore("histocoder", store), connect(store, chosen, _launch))
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


def local_world_size() -> int:
    """Return how many processes there are on this machine."""
    return _launch.local_world_size


def is_primary() -> bool:
    """Return whether this is the process that writes, prints and logs."""
    return _launch.is_primary


def is_first_here() -> bool:
    """Return whether this is the first process of its node."""
    return _launch.local_rank == 0


def control_group() -> Any:
    """Return the processes, for collectives of what is in their CPUs' memory; None where there is no process group."""
    return None if _group is None else _group.control


def reduce_sum(values: Tensor) -> Tensor:
    """Return the sum of `values` over all processes, on each of them."""
    if _group is not None:
        values = values.clone()
        dist.all_reduce(values, group=_group.control if values.device.type == "cpu" else None)
    return values


def gather(values: Tensor) -> list[Tensor]:
    """Every process's CPU `values`, which all have one shape, in order of rank."""
    if _group is None:
        return [values]
    gathered = [torch.empty_like(values) for _ in range(world_size())]
    dist.all_gather(gathered, values, group=_group.control)
    return gathered


def mean_of_rows(gradient: Tensor) -> Tensor:
    """Average sparse tensors, each with its own rows, over all ranks; a collective call."""
    if _group is None:
        return gradient
    gradient = gradient.coalesce()
    rows, values = gradient.indices()[0], gradient.values() / world_size()
    counts = [torch.zeros_like(rows[:1]) for _ in range(world_size())]
    dist.all_gather(counts, torch.full_like(counts[0], len(rows)))
    sizes = torch.cat(counts).tolist()
    parts = []
    for part in (rows, values):
        padded = part.new_zeros(max(sizes), *part.shape[1:])
        padded[: len(part)] = part
        found = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(found, padded)
        parts.append(torch.cat([x[:size] for x, size in zip(found, sizes, strict=True)]))
    return torch.sparse_coo_tensor(parts[0][None], parts[1], gradient.shape, check_invariants=False).coalesce()


def gather_texts(text: str) -> list[str]:
    """Every process's `text`, in order of rank."""
    texts = [text]
    if _group is not None:
        texts *= world_size()
        dist.all_gather_object(texts, text, group=_group.control)
    return texts


def wait_for_all(*, doing: str) -> None:
    """Wait until every process has come here, outside any collective and without a deadline."""
    if _group is None:
        return
    _group.calls += 1
    key = f"all/{_group.calls}"
    if _group.store.add(f"{key}/count", 1) == world_size():
        _group.store.set(key, "done")
    _wait_for(key, doing)
    _acknowledge(key)


class Ballot:
    """Asks in every step whether any process wants to stop, without waiting for the answer in that step.

    Each call hands in this process's vote and returns the outcome of the votes before, which is the same on all. The
    outcome of the last ones comes of `close`.
    """

    def __init__(self) -> None:
        self._votes: Tensor | None = None
        self._work: Any = None

    def cast(self, vote: int) -> int:
        """Hand in `vote` (0: go on); return the largest vote of the step before."""
        if _group is None:
            return vote
        outcome = self.close()
        self._votes = torch.tensor(vote)
        self._work = dist.all_reduce(self._votes, op=dist.ReduceOp.MAX, group=_group.control, async_op=True)
        return outcome

    def close(self) -> int:
        """Return the largest of the last votes, if any is out; no collective is left open."""
        if self._votes is None:
            return 0
        self._work.wait()
        outcome, self._votes = int(self._votes), None
        return outcome


def run_on_primary(work: Callable[[], T], *, doing: str) -> T | None:
    """Let rank 0 work while the others wait for it, outside any collective and without a deadline.

    Parameters
    ----------
    work : callable
    doing : str
        What the waiting processes wait for.

    Returns
    -------
    The result on rank 0; None on the others.

    Raises
    ------
    UserError
        On every process, with rank 0's message, where rank 0 failed.
    Interrupted
        On every process, where rank 0 was asked to stop.
    """
    if _group is None:
        return work()
    _group.calls += 1
    key = f"primary/{_group.calls}"
    if is_primary():
        try:
            result = work()
        except UserError as error:
            _answer(key, f"!{error}")
            raise
        except Interrupted as error:
            _answer(key, f"~{error.signum} {error}")
            raise
        except BaseException as error:
            _answer(key, f"!rank 0 failed while {doing} ({type(error).__name__}); its own output says more.")
            raise
        _answer(key, "done")
        return result
    answer = _wait_for(key, doing)
    _acknowledge(key)
    if answer.startswith("!"):
        raise UserError(answer[1:])
    if answer.startswith("~"):
        signum, message = answer[1:].split(" ", 1)
        raise Interrupted(message, int(signum))
    return None


def expect_end() -> None:
    """Note that the processes were asked to stop, so that a silent one counts as ended."""
    if _watch is not None:
        _watch.expect_end()


def is_lost_contact(error: RuntimeError) -> bool:
    """Return whether an error means that another process has ended or can't be reached."""
    return (isinstance(error, dist.DistError) and fault_of_nccl(error) is None) or "gloo/transport" in str(error)


def from_primary(work: Callable[[], T], *, doing: str) -> T:
    """Let rank 0 work as in `run_on_primary`; return the result, which is not None, on every process."""
    values = [run_on_primary(work, doing=doing)]
    if _group is not None:
        dist.broadcast_object_list(values, group=_group.control)
    assert values[0] is not None
    return values[0]


def broadcaster(ranks: Sequence[int]) -> Callable[[Tensor], None]:
    """Return what fills a CPU tensor with rank 0's, on some ranks, 0 among them; made and called on those alone."""
    # without it the other ranks, under NCCL, would split its communicator, which waits for these (pytorch#145376)
    group = dist.new_group(list(ranks), backend="gloo", use_local_synchronization=True)
    return lambda values: dist.broadcast(values, src=0, group=group)


def _answer(key: str, answer: str) -> None:
    """Say how it went, and give the others time to hear it: rank 0 may hold the store, and end right after this."""
    assert _group is not None
    _group.store.set(key, answer)
    _acknowledge(key)


def _acknowledge(key: str) -> None:
    """Rank 0 waits, for some seconds at most, until all others have called this too."""
    assert _group is not None
    heard = _group.store.add(f"{key}/heard", 1)
    deadline = time.monotonic() + _GRACE_SECONDS
    while is_primary() and heard < world_size() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS / 10)
        heard = _group.store.add(f"{key}/heard", 0)


def _wait_for(key: str, doing: str) -> str:
    assert _group is not None
    started = noticed = time.monotonic()
    while not _group.store.check([key]):
        time.sleep(_POLL_SECONDS)
        now = time.monotonic()
        if now - noticed > _NOTICE_SECONDS:
            noticed = now
            print(f"rank {rank()} waits for rank 0 ({doing}), {now - started:.0f} s", file=sys.stderr, flush=True)
    return _group.store.get(key).decode()


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
