"""How processes that were started together find and join one another; a part of `distributed`."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from histocoder.errors import UserError
from histocoder.launch import Launch
from histocoder.network import interface_towards


def meet() -> dist.Store:
    """What the processes share, at the address that the environment names.

    Raises
    ------
    UserError
        Where it can't be reached, or another program has its port.
    """
    try:
        return next(iter(rendezvous("env://")))[0]
    except dist.DistError as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        is_srun = "SLURM_PROCID" in os.environ and "LOCAL_RANK" not in os.environ
        other = "export another MASTER_PORT" if is_srun else "choose another --master_port, or torchrun --standalone"
        raise UserError(
            f"The processes can't meet at {address} ({str(error).splitlines()[0]}). If another run has that port, "
            f"{other}."
        ) from error


def connect(store: dist.Store, device: torch.device, launch: Launch) -> dist.ProcessGroup:
    """Join the processes that have met, or a single one.

    Gradients go over NCCL between GPUs, all else over the group that is returned.

    Raises
    ------
    UserError
        Where they can't reach one another.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    if launch.local_world_size < launch.world_size:
        # by itself gloo takes the address of the host's name, which others may not reach, such as 127.0.1.1
        interface = interface_towards(os.environ["MASTER_ADDR"])
        if interface is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    try:
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
        names = ["GLOO"] if backend == "gloo" else ["NCCL", "GLOO"]
        exports = " ".join(f"{name}_SOCKET_IFNAME=eth0" for name in names)
        raise UserError(
            f"The processes have met at {os.environ['MASTER_ADDR']}, but can't connect to one another "
            f"({str(error).splitlines()[0]}). Either one has ended, or they try the wrong network: name it on each "
            f"node, as in export {exports}."
        ) from error
