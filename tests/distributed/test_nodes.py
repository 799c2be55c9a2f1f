"""Several nodes: network namespaces with an agent of torchrun each; and folders that not all processes see."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import DEADLINE, ROOT, environment
from jobs import STEPS, assert_same_end, training, two_ranks

NAMED = ("--master_addr=node0", "--master_port=29500")
DYNAMIC = ("--rdzv-backend=c10d", "--rdzv-endpoint=192.168.98.1:29500", "--rdzv-id=7")


@pytest.fixture
def nodes() -> Iterator[list[str]]:
    """Two network namespaces of this machine, joined by a cable: each has a loopback and one address.

    The name of the first stands for that, but on itself for its loopback, as under Debian.
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


@pytest.mark.slow
@pytest.mark.parametrize("rendezvous", [NAMED, DYNAMIC])
def test_two_nodes_equal_one(nodes: list[str], together: Path, tmp_path: Path, rendezvous: tuple[str, ...]):
    agents = []
    for i, node in enumerate(nodes):
        options = [*rendezvous, f"--node_rank={i}"]
        if rendezvous == DYNAMIC:  # which can't tell whose address it is where names are not known
            options = [*DYNAMIC, f"--rdzv-conf=is_host={1 - i}", f"--local-addr=192.168.98.{i + 1}"]
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1", *options]
        command = ["ip", "netns", "exec", node, *launcher, *training(tmp_path / "out")]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        agents.append(subprocess.Popen(command, cwd=ROOT, env=environment(), **pipes))
    try:
        printed = [agent.communicate(timeout=DEADLINE)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], printed
    assert_same_end(together, tmp_path / "out")
    assert f"step {STEPS}/{STEPS}" in printed[0] and "step" not in printed[1]


# Processes whose folders are on disks of their own, without a network between


def test_folders_of_one_node_alone_are_refused(tmp_path: Path):
    outs = [tmp_path / name / "out" for name in "ab"]
    for out in outs:
        out.parent.mkdir()
    ended = two_ranks(*map(training, outs), check=False, each_a_node=True)
    assert [one.returncode for one in ended] == [2, 2]
    said = ended[0].stderr + ended[1].stderr
    assert "Name one that all nodes see." in said and "Traceback" not in said


def test_differing_flags_are_named(tmp_path: Path):
    out, others = tmp_path / "out", ("--learning-rate", "2e-3", "--eval-interval", 9, "--use-amp")
    ended = two_ranks(training(out), training(out, *others), check=False)
    assert [one.returncode for one in ended] == [2, 2]
    assert "Rank 1 was launched with settings that differ from rank 0's" in ended[0].stderr
    named = {line.split()[0] for line in ended[0].stderr.splitlines() if line.startswith("  --")}
    assert named == {"--learning-rate", "--eval-interval", "--use-amp"}
    assert not (out / "args.yaml").exists()


def test_a_wrong_network_interface_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    ended = two_ranks(training(tmp_path / "out"), check=False, each_a_node=True)
    assert [one.returncode for one in ended] == [2, 2]
    assert "export GLOO_SOCKET_IFNAME=eth0" in ended[0].stderr and "Traceback" not in ended[0].stderr
