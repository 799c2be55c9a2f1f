"""Several nodes: network namespaces with an agent of torchrun each; and folders that not all processes see."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from conftest import DEADLINE, ROOT, environment, write_table
from jobs import assert_same_end, end_of, ranks, training
from models import save_tiny_model
from torch.distributed import DistBackendError, HashStore

from histocoder import distributed
from histocoder.distributed import rendezvous
from histocoder.distributed.launch import Launch
from histocoder.distributed.rendezvous import connect
from histocoder.errors import MachineError, UserError

STATIC = ("--master_addr=192.168.98.1", "--master_port=29500")
NAMED = ("--master_addr=node0", "--master_port=29500")
DYNAMIC = ("--rdzv-backend=c10d", "--rdzv-endpoint=192.168.98.1:29500", "--rdzv-id=7")


@pytest.fixture
def nodes() -> Iterator[list[str]]:
    """Two network namespaces of this machine, joined by a cable: each has a loopback and one address.

    The name of the first stands for that, but on itself for its loopback, as under Debian. Gloo connects from the
    larger address to the smaller, so that 127.0.0.1 must be the smaller one for it to matter.
    """
    names = [f"histocoder-{os.getpid()}-{i}" for i in range(2)]
    try:
        for name in names:
            ip("netns", "add", name)
            ip("netns", "exec", name, "true")
        ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for i, name in enumerate(names):
            ip("-n", name, "address", "add", f"192.168.98.{i + 1}/24", "dev", "eth0")
            for interface in ("lo", "eth0"):
                ip("-n", name, "link", "set", interface, "up")
            ip("-n", name, "route", "add", "default", "via", f"192.168.98.{2 - i}")
            hosts = Path("/etc/netns", name, "hosts")  # which stands in for /etc/hosts there
            hosts.parent.mkdir(parents=True)
            hosts.write_text(f"127.0.0.1 localhost\n{('127.0.1.1', '192.168.98.1')[i]} node0\n")
            hosts.with_name("resolv.conf").write_text("nameserver 127.0.0.1\n")  # where nothing is, so that none waits
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
            shutil.rmtree(Path("/etc/netns", name), ignore_errors=True)


def ip(*args: str) -> None:
    """Have the kernel do it, or skip the test."""
    if shutil.which("ip") is None:
        pytest.skip("needs the program ip (iproute2)")
    done = subprocess.run(["ip", *args], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"network namespaces can't be had here (ip {' '.join(args)}: {done.stderr.strip()})")


def on_two_nodes(nodes: list[str], outs: list[Path], rendezvous: tuple[str, ...]) -> list[str]:
    """Train with a process on each, under torchrun; what each printed."""
    agents = []
    for i, (node, out) in enumerate(zip(nodes, outs, strict=True)):
        if rendezvous == DYNAMIC:  # which can't tell whose address it is where names are not known
            options = [*DYNAMIC, f"--rdzv-conf=is_host={1 - i}", f"--local-addr=192.168.98.{i + 1}"]
        else:
            options = [*rendezvous, f"--node_rank={i}"]
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1", *options]
        agents.append(
            subprocess.Popen(
                ["ip", "netns", "exec", node, *launcher, *training(out, steps=8)], cwd=ROOT, env=environment(),
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
        )  # fmt: skip
    try:
        printed = [agent.communicate(timeout=DEADLINE)[0] for agent in agents]
        assert [agent.returncode for agent in agents] == [0, 0], printed
        return printed
    finally:
        for agent in agents:
            agent.kill()


@pytest.fixture(scope="session")
def one_node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of two processes of one node."""
    out = tmp_path_factory.mktemp("one_node") / "out"
    end_together([out, out], steps=8, each_a_node=False)
    return out


def end_together(outs: list[Path], *extra: object, steps: int, each_a_node: bool = True) -> list[str]:
    """Train with two forked processes, each with a folder; what each printed."""
    with ranks(*(training(out, *extra, steps=steps) for out in outs), each_a_node=each_a_node) as started:
        ended = [end_of(process) for process in started]
    assert [one.returncode for one in ended] == [0, 0], [one.stderr for one in ended]
    return [one.stdout for one in ended]


@pytest.mark.slow
@pytest.mark.parametrize("rendezvous", [STATIC, NAMED])
def test_two_nodes_that_share_a_folder_do_what_one_node_does(
    nodes: list[str], one_node: Path, tmp_path: Path, rendezvous: tuple[str, ...]
):
    out = tmp_path / "out"
    printed = on_two_nodes(nodes, [out, out], rendezvous)
    assert_same_end(one_node, out)
    assert "step 8/8" in printed[0] and "step" not in printed[1]
    assert files_of(out) == files_of(one_node) | {".launcher"}


@pytest.mark.slow
def test_two_nodes_with_a_folder_each_do_what_one_node_does(nodes: list[str], one_node: Path, tmp_path: Path):
    outs = [tmp_path / "a" / "out", tmp_path / "b" / "out"]
    for out in outs:
        out.parent.mkdir()
    printed = on_two_nodes(nodes, outs, DYNAMIC)
    assert_same_end(one_node, outs[0])
    assert "step 8/8" in printed[0] and "step" not in printed[1]
    assert files_of(outs[0]) == files_of(one_node) | {".launcher"}
    cache = {name for name in files_of(one_node) if name.startswith("cache/")}
    assert files_of(outs[1]) == cache  # a copy of the arrays, and nothing of the run


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


# Processes whose folders are on disks of their own, without a network between


@pytest.fixture
def apart(tmp_path: Path) -> list[Path]:
    outs = [tmp_path / name / "out" for name in "ab"]
    for out in outs:
        out.parent.mkdir()
    return outs


@pytest.mark.slow
def test_a_run_goes_on_from_checkpoints_that_are_on_rank_0s_node_alone(apart: list[Path], together: Path):
    end_together(apart, steps=24)
    shutil.rmtree(apart[0] / "checkpoints" / "step-0000024")  # as if it had been killed before
    assert "Resuming from step 20" in end_together(apart, steps=24)[0]
    assert_same_end(together, apart[0])
    assert {path.name for path in apart[1].iterdir()} == {"cache"}


def test_outputs_of_a_frozen_encoder_are_sent_as_well(apart: list[Path]):
    end_together(apart, "--freeze-encoder", "--augmentation-prob", 0, "--unk-lang-prob", 0, steps=4)
    encodings = [path for path in files_of(apart[1]) if "/encodings-" in path]
    assert len(encodings) == 10  # of training and validation data
    assert all((apart[0] / path).read_bytes() == (apart[1] / path).read_bytes() for path in encodings)


def test_a_nodes_copy_that_is_damaged_is_sent_again(apart: list[Path]):
    end_together(apart, steps=1)
    damaged = list(apart[1].glob("cache/*/characters"))
    for path in damaged:
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    end_together(apart, steps=2)
    assert len(damaged) == 2
    for path in damaged:
        assert path.read_bytes() == (apart[0] / path.relative_to(apart[1])).read_bytes()


def test_processes_with_other_flags_or_files_are_named(apart: list[Path]):
    others = ("--learning-rate", "2e-3", "--eval-interval", 9, "--gradient-checkpointing")
    commands = [training(apart[0]), training(apart[1], *others)]
    with ranks(*commands, each_a_node=True) as started:
        ended = [end_of(process) for process in started]
    assert [one.returncode for one in ended] == [2, 2]
    (named,) = re.findall(r"Rank 1 was launched with settings that differ from rank 0's: (.*?)\. ", ended[0].stderr)
    assert set(named.split(", ")) == {"--learning-rate", "--eval-interval", "--gradient-checkpointing"}
    assert not (apart[0] / "args.yaml").exists()


def test_processes_that_cannot_connect_say_which_network_to_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    with ranks(training(tmp_path / "out"), training(tmp_path / "out"), each_a_node=True) as started:
        ended = [end_of(process) for process in started]
    assert [one.returncode for one in ended] == [2, 2]
    assert "export GLOO_SOCKET_IFNAME=eth0" in ended[0].stderr and "Traceback" not in ended[0].stderr


def test_on_gpus_both_networks_are_named(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no way")

    monkeypatch.setenv("MASTER_ADDR", "node0")
    monkeypatch.setattr("torch.distributed.init_process_group", fail)
    launch = Launch(world_size=2, local_world_size=2, launched=True)
    with pytest.raises(UserError, match="export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0"):
        connect(HashStore(), torch.device("cuda", 0), launch)


OF_NCCL = "NCCL error in: NCCLUtils.cpp:133, %s (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5\n%s\n"


@pytest.mark.parametrize(
    ("what", "lines", "said"),
    [
        (
            "invalid usage",
            "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
            "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000",
            "both on CUDA device 1b000. Start one process per GPU",
        ),
        (
            "unhandled cuda error",
            "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 'out of memory'",
            "NCCL can't start: Cuda failure 'out of memory'. Set NCCL_DEBUG=INFO for details.",
        ),
        (
            "unhandled system error",
            "ncclSystemError: System call failed.\nLast error:\nError while creating shared memory segment "
            "/dev/shm/nccl-4 (size 9637888), error: No space left on device (28)",
            "more shared memory",
        ),
        (
            "unhandled system error",
            "ncclSystemError: System call failed.\nLast error:\nsocketPollConnect: Connection refused",
            "export NCCL_SOCKET_IFNAME=eth0",
        ),
    ],
)
def test_errors_of_nccl_are_told_apart(monkeypatch: pytest.MonkeyPatch, what: str, lines: str, said: str):
    error = DistBackendError(OF_NCCL % (what, lines))
    monkeypatch.setenv("MASTER_ADDR", "node0")
    monkeypatch.setattr("torch.distributed.init_process_group", Mock(side_effect=error))
    with pytest.raises((UserError, MachineError)) as raised:
        connect(HashStore(), torch.device("cuda", 0), Launch(world_size=2, local_world_size=2, launched=True))
    assert said in str(raised.value) and "\n" not in str(raised.value)
    assert distributed.is_lost_contact(error) == ("NCCL_SOCKET_IFNAME" in said)


def test_a_name_of_the_loopback_is_that_of_the_default_route(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rendezvous, "_interface_to", lambda address: "lo" if address.startswith("127.") else "eth0")
    monkeypatch.setattr("socket.gethostbyname", lambda host: "127.0.1.1" if host == "node0" else "127.0.0.1")
    assert [rendezvous.interface_towards(host) for host in ("node0", "localhost", "127.0.0.1")] == ["eth0", "lo", "lo"]


@pytest.mark.slow
def test_predicting_needs_a_folder_that_all_nodes_see(apart: list[Path], tmp_path: Path):
    model, table = save_tiny_model(tmp_path / "model"), write_table(tmp_path / "t.csv")
    command = ("-m", "histocoder", "predict", "--model", model, "--input", table, "--columns", "pred_", "--output")
    with ranks(*([*map(str, command), f"{out}.csv"] for out in apart), each_a_node=True) as started:
        ended = [end_of(process) for process in started]
    assert [one.returncode for one in ended] == [2, 2]
    assert "Name one that all nodes see." in ended[0].stderr and "Traceback" not in ended[0].stderr


JOINING = """
import sys
from pathlib import Path
import torch
import torch.distributed.distributed_c10d as c10d
from histocoder import distributed
from histocoder.distributed.nodes import on_each_node

class Nccl:
    def perform_nocolor_split(self, device):
        raise RuntimeError("a split of NCCL's communicator, which the others do not join")

distributed.start(device="cpu")
c10d._get_default_group().bound_device_id = torch.device("cuda", 0)
c10d._get_split_source = lambda group: Nccl()
on_each_node(Path(sys.argv[1]), marker="mark", is_whole=Path.is_dir)
distributed.stop()
"""


def test_sending_joins_no_collective_of_nccl(tmp_path: Path):
    folders = [tmp_path / name for name in "aba"]  # ranks 0 and 2 see one folder, rank 1 has its own
    folders[0].mkdir()
    (folders[0] / "mark").write_text("whole")
    with ranks(*(("-c", JOINING, folder) for folder in folders), each_a_node=True) as started:
        ended = [end_of(process) for process in started]
    assert [one.returncode for one in ended] == [0, 0, 0], [one.stderr for one in ended]
    assert (folders[1] / "mark").read_text() == "whole"
