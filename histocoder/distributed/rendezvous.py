"""Connections between the processes that a launcher has started."""

import os
import socket
import struct

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from histocoder.distributed.launch import Launch, slurm_address
from histocoder.errors import MachineError, UserError


def connect_stores(launch: Launch) -> tuple[dist.Store, dist.Store]:
    """Return two connections to the store that the processes share, at MASTER_ADDR and MASTER_PORT."""
    if "RANK" not in os.environ:  # srun does not set PyTorch's variables
        host, port = slurm_address(os.environ)
        os.environ.setdefault("MASTER_ADDR", host)
        os.environ.setdefault("MASTER_PORT", str(port))
        os.environ.update(RANK=str(launch.rank), WORLD_SIZE=str(launch.world_size))
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        store = next(iter(rendezvous("env://")))[0]
    except dist.DistError as error:
        is_srun = "SLURM_PROCID" in os.environ and "LOCAL_RANK" not in os.environ
        other = "export another MASTER_PORT" if is_srun else "choose another --master_port, or torchrun --standalone"
        raise UserError(
            f"The processes can't connect at {address} ({str(error).splitlines()[0]}). If another run uses that port, "
            f"{other}."
        ) from error
    return store, dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


def connect(store: dist.Store, device: torch.device, launch: Launch) -> dist.ProcessGroup:
    """Initialize the default process group, for gradients, unless it is; return a gloo group for everything else."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    if launch.local_world_size < launch.world_size and (interface := interface_towards(os.environ["MASTER_ADDR"])):
        # by default gloo uses the address of the host's name, such as 127.0.1.1, which others may not reach
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    try:
        if not dist.is_initialized():
            dist.init_process_group(
                backend,
                store=dist.PrefixStore("group", store),
                rank=launch.rank,
                world_size=launch.world_size,
                device_id=device if device.type == "cuda" else None,
            )
        return dist.new_group(backend="gloo")
    except RuntimeError as error:
        if launch.world_size == 1:
            raise
        if (cause := failure_of_nccl(error)) is not None:
            raise MachineError(f"The processes are connected, but NCCL can't start: {cause}") from error
        names = ["GLOO"] if backend == "gloo" else ["NCCL", "GLOO"]
        exports = " ".join(f"{name}_SOCKET_IFNAME=eth0" for name in names)
        raise UserError(
            f"The processes have reached {os.environ['MASTER_ADDR']}, but can't connect to one another "
            f"({str(error).splitlines()[0]}). Either one has ended, or they use the wrong network interface: name the "
            f"right one on each node, as in export {exports}."
        ) from error


_NOT_NETWORK = ("ncclUnhandledCudaError", "ncclInvalidUsage", "ncclInvalidArgument", "ncclInternalError")
_ADVICE = {
    "Duplicate GPU": "Start one process per GPU (--nproc_per_node), and name each GPU once in CUDA_VISIBLE_DEVICES.",
    "/dev/shm": "Give the container more shared memory, as with docker run --shm-size=2g.",
}


def failure_of_nccl(error: RuntimeError) -> str | None:
    """Return what has failed in NCCL, and what to do; None for network failures and errors of other origin."""
    text = str(error)
    advice = next((advice for sign, advice in _ADVICE.items() if sign in text), None)
    if advice is None and ("socket interface" in text or not any(name in text for name in _NOT_NETWORK)):
        return None
    said = text.strip().splitlines()[-1].strip().rstrip(".")
    return f"{said}. {advice or 'Set NCCL_DEBUG=INFO for details.'}"


_SIOCGIFADDR = 0x8915  # request to Linux for the IPv4 address of an interface
_FAR_AWAY = "198.51.100.1"  # address that is reserved for documentation, so that the default route leads there


def interface_towards(host: str) -> str | None:
    """Return the network interface that reaches a host, or that has the host's address; None if unknown.

    A host name that resolves to a loopback address, as a machine's own does in Debian's /etc/hosts, resolves to another
    address on other machines; the interface of the default route is returned for it.

    Examples
    --------
    >>> interface_towards("127.0.0.1")
    'lo'
    """
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return None
    if address.startswith("127.") and host not in (address, "localhost"):
        address = _FAR_AWAY
    return _interface_to(address)


def _interface_to(address: str) -> str | None:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing
            own = probe.getsockname()[0]
    except OSError:
        return None
    return next((name for _, name in socket.if_nameindex() if _address_of(name) == own), None)


def _address_of(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            import fcntl  # which Windows lacks

            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except (OSError, ImportError):  # without an address, or not on Linux
            return None
    return socket.inet_ntoa(answer[20:24])
