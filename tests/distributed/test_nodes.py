"""Several nodes: network namespaces with an agent of torchrun each; and folders that not all processes see."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import DEADLINE, ROOT, environment, write_table
from jobs import assert_same_end, training, two_ranks
from models import save_tiny_model

STATIC = ("--master_addr=192.168.98.1", "--master_port=29500")
NAMED = ("--master_addr=node0", "--master_port=29500")
EXAMPLES = {f"cache/examples/{name}" for name in ("examples.arrow", "prepared.json")}
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
    two_ranks(training(out, steps=8))
    return out


def end_together(outs: list[Path], *extra: object, steps: int) -> str:
    """Train with two forked processes, each a node with a folder; what rank 0 printed."""
    return two_ranks(*(training(out, *extra, steps=steps) for out in outs), each_a_node=True)[0].stdout


@pytest.mark.slow
@pytest.mark.parametrize("rendezvous", [STATIC, NAMED])
def test_two_nodes_equal_one(nodes: list[str], one_node: Path, tmp_path: Path, rendezvous: tuple[str, ...]):
    out = tmp_path / "out"
    printed = on_two_nodes(nodes, [out, out], rendezvous)
    assert_same_end(one_node, out)
    assert "step 8/8" in printed[0] and "step" not in printed[1]
    assert files_of(out) == files_of(one_node) | {".launcher"}


@pytest.mark.slow
def test_two_nodes_without_a_shared_folder(nodes: list[str], one_node: Path, tmp_path: Path):
    outs = [tmp_path / "a" / "out", tmp_path / "b" / "out"]
    for out in outs:
        out.parent.mkdir()
    printed = on_two_nodes(nodes, outs, DYNAMIC)
    assert_same_end(one_node, outs[0])
    assert "step 8/8" in printed[0] and "step" not in printed[1]
    assert files_of(outs[0]) == files_of(one_node) | {".launcher"}
    assert files_of(outs[1]) == EXAMPLES  # a copy of them, and nothing of the run


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
def test_checkpoints_of_rank_0s_node_are_resumed(apart: list[Path], together: Path):
    end_together(apart, steps=24)
    shutil.rmtree(apart[0] / "checkpoints" / "step-0000024")  # as if it had been killed before
    assert "Resuming from step 20" in end_together(apart, steps=24)
    assert_same_end(together, apart[0])
    assert {path.name for path in apart[1].iterdir()} == {"cache"}


def test_damaged_copies_are_sent_again(apart: list[Path]):
    end_together(apart, steps=1)
    (path,) = apart[1].glob("cache/examples/examples.arrow")
    whole, sent = path.read_bytes(), path.stat().st_mtime_ns
    end_together(apart, steps=2)
    assert path.stat().st_mtime_ns == sent
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    end_together(apart, steps=3)
    assert path.read_bytes() == whole == (apart[0] / "examples.arrow").read_bytes()


def test_differing_flags_are_named(apart: list[Path]):
    others = ("--learning-rate", "2e-3", "--eval-interval", 9, "--gradient-checkpointing")
    ended = two_ranks(training(apart[0]), training(apart[1], *others), check=False, each_a_node=True)
    assert [one.returncode for one in ended] == [2, 2]
    assert "Rank 1 was launched with settings that differ from rank 0's" in ended[0].stderr
    named = {line.split()[0] for line in ended[0].stderr.splitlines() if line.startswith("  --")}
    assert named == {"--learning-rate", "--eval-interval", "--gradient-checkpointing"}
    assert not (apart[0] / "args.yaml").exists()


def test_a_wrong_network_interface_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    ended = two_ranks(training(tmp_path / "out"), check=False, each_a_node=True)
    assert [one.returncode for one in ended] == [2, 2]
    assert "export GLOO_SOCKET_IFNAME=eth0" in ended[0].stderr and "Traceback" not in ended[0].stderr


@pytest.mark.slow
def test_predicting_needs_a_shared_folder(apart: list[Path], tmp_path: Path):
    model, table = save_tiny_model(tmp_path / "model"), write_table(tmp_path / "t.csv")
    command = ("-m", "histocoder", "predict", "--model", model, "--input", table, "--columns", "pred_", "--output")
    ended = two_ranks(*([*command, f"{out}.csv"] for out in apart), check=False, each_a_node=True)
    assert [one.returncode for one in ended] == [2, 2]
    assert "Name one that all nodes see." in ended[1].stderr and "Traceback" not in ended[1].stderr
