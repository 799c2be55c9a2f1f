"""The processes of a run: a program calls `start` once, and `stop` at its end.

Without a launcher (see `launcher`), each helper works on this process only.
"""

import json
import os
import shutil
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.rendezvous import rendezvous
from torch.futures import Future

from histocoder.config import RANK_TIMEOUT
from histocoder.errors import Interrupted, MachineError, Notice, UserError, warn_user
from histocoder.launcher import (
    Launch,
    choose_device,
    interface_towards,
    master_address,
    missing_gpu,
    read_launch,
    restarts,
)
from histocoder.log import show_lines

T = TypeVar("T")
_POLL_SECONDS = 0.1


@dataclass
class _Group:
    """Connections of the ranks beside the default process group, which exchanges gradients."""

    store: dist.Store
    control: dist.ProcessGroup  # gloo, for CPU tensors
    # whether a caller, such as Ray Train, has initialized the default group, and will destroy it
    is_adopted: bool
    num_calls: int = 0  # of `run_on_primary` and `barrier`, the same on every rank

    def for_tensor(self, values: Tensor) -> dist.ProcessGroup | None:
        """Return the group that exchanges tensors of a device; None is the default group."""
        return self.control if values.device.type == "cpu" else None


@dataclass(frozen=True)
class _Place:
    """Host and device of a rank."""

    host: str
    device_type: str
    uuid: str  # of its GPU; empty for other devices


_launch = Launch()
_store: dist.Store | None = None
"""Messages between ranks once they have met, which is before they have a group."""
_group: _Group | None = None


def rank() -> int:
    return _launch.rank


def world_size() -> int:
    return _launch.world_size


def is_primary() -> bool:
    """Return whether this is rank 0, which writes, prints and logs."""
    return _launch.rank == 0


def backend() -> str | None:
    """Return the backend for gradients, "nccl" or "gloo"; None without a process group."""
    return dist.get_backend() if _group is not None else None


def start(
    *,
    device: str = "auto",
    grouped: bool = False,
    local_rank: int | None = None,
    rank_timeout: float = RANK_TIMEOUT,
) -> torch.device:
    """Initialize the process group if a launcher started several processes, and choose this one's
    device.

    A process group that is initialized already, such as Ray Train's, is used. `local_rank` is the
    flag of older launchers; a single process has a group if `grouped`, as FSDP needs; collectives
    fail after `rank_timeout` seconds.
    """
    global _launch, _group
    _launch = read_launch(local_rank=local_rank)
    is_adopted = dist.is_initialized()
    if is_adopted:
        _launch = replace(
            _launch, rank=dist.get_rank(), world_size=dist.get_world_size(), launched=True
        )
    show_lines(is_primary())
    own_device = choose_device(device, _launch)
    is_on_cpu = own_device.type == "cpu"
    # a driver of NVIDIA's means that the user expects a GPU
    if device == "auto" and is_on_cpu and is_primary() and shutil.which("nvidia-smi"):
        warn_user(Notice(f"Notice: computing on the CPU, since {missing_gpu()}."))

    # The device has to be set before the group is initialized on it.
    if own_device.type == "cuda":
        torch.cuda.set_device(own_device)
    if _group is None and (is_adopted or grouped or _launch.world_size > 1):
        _group = _connect(own_device, timedelta(seconds=rank_timeout), is_adopted=is_adopted)
    return own_device


def stop() -> None:
    """Leave the process group."""
    global _group, _store
    if _group is not None and not _group.is_adopted:
        # rank 0 may hold the store, so that it has to be the last to leave
        with suppress(RuntimeError):  # another rank has ended
            dist.monitored_barrier(_group.control, timeout=timedelta(seconds=5))
        dist.destroy_process_group()
    _group = _store = None


def _connect(device: torch.device, timeout: timedelta, *, is_adopted: bool) -> _Group:
    """Initialize the default process group, unless it is, and one for CPU tensors."""
    global _store
    host, port = master_address()
    try:
        store = _meet(host, port, timeout, is_adopted=is_adopted)
        _store = dist.PrefixStore("histocoder", store)
        _check_places(device, _store)

        # By default gloo uses the address of the host's name, such as 127.0.1.1, which the other
        # nodes may not reach.
        if _launch.local_world_size < _launch.world_size:
            interface = interface_towards(host)
            if interface:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)

        if not is_adopted:
            is_gpu = device.type == "cuda"
            dist.init_process_group(
                "nccl" if is_gpu else "gloo",
                store=store,
                timeout=timeout,
                rank=rank(),
                world_size=world_size(),
                device_id=device if is_gpu else None,
            )
        control = dist.new_group(backend="gloo", timeout=timeout)
    except RuntimeError as error:
        if "Duplicate GPU" in str(error):
            raise UserError(
                "NCCL connects no processes that compute on parts (MIG) of one GPU. Start one "
                "process per GPU, or add --device cpu."
            ) from error
        reason = " ".join(str(error).split())[:400]
        raise UserError(
            f"The processes can't connect at {host}:{port} ({reason}). If another run uses that "
            "port, choose another (--master_port; for srun, export MASTER_PORT). If it is the "
            "wrong network, name the right interface on each node: export "
            "GLOO_SOCKET_IFNAME=eth0, for GPUs NCCL_SOCKET_IFNAME=eth0 too."
        ) from error
    return _Group(_store, control, is_adopted)


def _meet(host: str, port: int, timeout: timedelta, *, is_adopted: bool) -> dist.Store:
    """Return the store in which the ranks find each other, once all of them are there."""
    if is_adopted:
        return dist.distributed_c10d._get_default_store()
    if _launch.world_size == 1:
        return dist.HashStore()
    url = "env://" if "RANK" in os.environ else f"tcp://{host}:{port}"
    store = next(iter(rendezvous(url, rank(), world_size(), timeout=timeout)))[0]

    # torchrun keeps its store when it restarts processes, except in an elastic rendezvous of
    # several nodes; each attempt needs keys of its own.
    is_one_node = _launch.local_world_size == _launch.world_size
    is_static = os.environ.get("TORCHELASTIC_RUN_ID") == "none"
    attempt = restarts() if is_one_node or is_static else 0
    return dist.PrefixStore(f"attempt/{attempt}", store)


def _check_places(device: torch.device, store: dist.Store) -> None:
    """Raise a UserError, on every rank, if two ranks compute on one GPU, or only some of them on a
    GPU.

    NCCL refuses the former without their names, and waits in vain in the latter case. UUIDs of GPUs
    are unique, which names of hosts are not.
    """
    uuid = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    store.set(f"place/{rank()}", json.dumps([socket.gethostname(), device.type, uuid]))
    places = [_Place(*json.loads(store.get(f"place/{number}"))) for number in range(world_size())]

    rank_of_gpu: dict[str, int] = {}
    for number, place in enumerate(places):
        if place.device_type != places[0].device_type:
            raise UserError(
                f"Rank 0 on {places[0].host} computes on {places[0].device_type}, but rank "
                f"{number} on {place.host} on {place.device_type}. Run histocoder doctor there, "
                "or give all ranks the same --device."
            )
        if place.uuid and rank_of_gpu.setdefault(place.uuid, number) != number:
            num_gpus = len({peer.uuid for peer in places if peer.host == place.host})
            raise UserError(
                f"Ranks {rank_of_gpu[place.uuid]} and {number} compute on the same GPU of "
                f"{place.host}. Start one process per GPU (torchrun --nproc_per_node={num_gpus}; "
                "srun with --gpus-per-task=1), or add --device cpu."
            )


def averaged_in_bf16(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
    """Average gradients in bf16: a hook of DDP, which accepts torch's own function only with NCCL."""
    return bf16_compress_hook(state, bucket)


def all_reduce(values: Tensor, op: str = "sum") -> Tensor:
    """Return the sum or another reduction ("max") of all ranks' `values`, on each of them."""
    if _group is None:
        return values
    values = values.clone()
    dist.all_reduce(values, getattr(dist.ReduceOp, op.upper()), _group.for_tensor(values))
    return values


def gather(values: Tensor) -> list[Tensor]:
    """Return the tensors of all ranks, which may differ in their first dimension, in order of
    rank.
    """
    if _group is None:
        return [values]
    group = _group.for_tensor(values)
    sizes = torch.zeros(world_size(), dtype=torch.int64, device=values.device)
    sizes[rank()] = len(values)
    dist.all_reduce(sizes, group=group)

    # torch gathers only tensors of one size
    padded = values.new_zeros(int(sizes.max()), *values.shape[1:])
    padded[: len(values)] = values
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded, group=group)
    return [part[:size] for part, size in zip(gathered, sizes, strict=True)]


class DelayedMax:
    """The largest of a number of each rank, which is exchanged while they compute: no rank waits
    for another.

    Each call returns the result of the call before, on all ranks the same.
    """

    def __init__(self) -> None:
        self._value = torch.tensor(0)
        self._work: dist.Work | None = None

    def exchange(self, value: int) -> int:
        """Return the largest value of the last call, and send this one; without other ranks, return
        this one.
        """
        if _group is None:
            return value
        largest = self.last()
        self._value = torch.tensor(value)
        self._work = dist.all_reduce(self._value, dist.ReduceOp.MAX, _group.control, async_op=True)
        return largest

    def last(self) -> int:
        """Return the largest value of the last call, for which this rank waits; without other ranks,
        0.
        """
        if self._work is not None:
            self._work.wait()
        return int(self._value)


def gather_objects(value: T) -> list[T]:
    """Return the values of all ranks, in order of rank."""
    values = [value] * world_size()
    if _group is not None:
        dist.all_gather_object(values, value, group=_group.control)
    return values


def broadcast(value: T) -> T:
    """Return rank 0's value on every rank."""
    return gather_objects(value)[0]


def run_on_primary(work: Callable[[], T], *, doing: str) -> T | None:
    """Run `work` on rank 0 while the others wait, however long it takes; return the result on rank
    0, else None.

    They wait outside any collective, so that none times out. If `work` raises, every process
    raises: rank 0's UserError or Interrupted, or a UserError that says what rank 0 was `doing`.
    """
    if _group is None:
        return work()
    _group.num_calls += 1
    key = f"primary/{_group.num_calls}"
    if not is_primary():
        _wait_until(lambda store: store.check([key]))
        message, signum = json.loads(_group.store.get(key))
        if signum:
            raise Interrupted(message, signum)
        if message:
            raise UserError(message)
        return None

    # The other ranks wait for the key, so it is set however the work ends.
    message = ""
    signum = 0
    try:
        return work()
    except (UserError, Interrupted) as error:
        message = str(error)
        signum = getattr(error, "signum", 0)
        raise
    except BaseException as error:
        kind = type(error).__name__
        message = f"rank 0 failed while {doing} ({kind}); see its output for details."
        raise
    finally:
        _group.store.set(key, json.dumps([message, signum]))


def broadcast_from_primary(work: Callable[[], T], *, doing: str) -> T:
    """Run `work` on rank 0 as `run_on_primary` does; return the result, which is not None, on every
    process.
    """
    return cast(T, broadcast(run_on_primary(work, doing=doing)))


def barrier() -> None:
    """Wait until every process has called this, however long that takes."""
    if _group is not None:
        _group.num_calls += 1
        key = f"barrier/{_group.num_calls}"
        _group.store.add(key, 1)
        _wait_until(lambda store: store.add(key, 0) == world_size())


def _wait_until(condition: Callable[[dist.Store], bool]) -> None:
    """Wait for what other ranks put into the store; raise a MachineError if one has announced its
    end.
    """
    while _group is not None and not condition(_group.store):
        if announced_end():
            raise MachineError("another process has ended.")
        time.sleep(_POLL_SECONDS)


def announce_end(status: int) -> None:
    """Tell the other ranks that this one has printed why it ends, and with what status."""
    if _store is not None and world_size() > 1:
        with suppress(RuntimeError):  # the store is gone
            _store.set("end", str(status))
            # until other ranks have read it: rank 0 may hold the store
            time.sleep(10 * _POLL_SECONDS)


def announced_end() -> int | None:
    """Return the status of a rank that has announced its end; 0 if none has, None if rank 0 with
    the store is gone.
    """
    try:
        if _store is not None and _store.check(["end"]):
            return int(_store.get("end"))
    except RuntimeError:
        return None
    return 0


def is_lost_contact(error: Exception) -> bool:
    """Return whether an error means that another process has ended or can't be reached."""
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)
