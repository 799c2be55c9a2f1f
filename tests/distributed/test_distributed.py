"""The launcher's environment, the device, the collectives, how ranks end together; and several
nodes.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import DEADLINE, ROOT, cases, environment, slow
from jobs import STEPS, assert_same_end, assert_same_weights, training, two_ranks

from histocoder import distributed
from histocoder.errors import Notice, UserError
from histocoder.launcher import Launch, choose_device, master_address, read_launch


@cases(
    ("environ", "launch"),
    ("", Launch()),
    ("RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4", Launch(5, 8, 1, 4, True)),
    (
        "SLURM_STEP_NUM_TASKS=6 SLURM_STEP_NUM_NODES=3 SLURM_PROCID=4 SLURM_LOCALID=1",
        Launch(4, 6, 1, 2, True),
    ),
    # srun with one task
    ("SLURM_STEP_NUM_TASKS=1 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=1", Launch(launched=True)),
    # plain python in an allocation of several tasks, without srun
    ("SLURM_NTASKS=4 SLURM_PROCID=0 SLURM_JOB_ID=1", Launch()),
)
def test_launchers(environ: str, launch: Launch):
    assert read_launch(dict(one.split("=") for one in environ.split()), local_rank=None) == launch


def test_older_launchers_say_the_local_rank_by_flag():
    launch = Launch(rank=1, world_size=2, local_rank=1, launched=True)
    assert read_launch({"RANK": "1", "WORLD_SIZE": "2"}, local_rank=1) == launch


@cases(
    ("nodes", "host"),
    *(
        ("node1", "node1"),
        ("node[3-5,9]", "node3"),
        ("a01,a02", "a01"),
        ("gpu-[007,009],fat", "gpu-007"),
    ),
    *(("a-[1-2]-[3-4]", "a-1-3"), ("n[12]-ib.cluster,m[1-2]", "n12-ib.cluster")),
)
def test_master_of_a_slurm_step(nodes: str, host: str):
    step = {"SLURM_STEP_NODELIST": nodes, "SLURM_JOB_ID": "40123"}
    assert master_address(step) == (host, 20123)
    assert master_address({**step, "MASTER_ADDR": "other", "MASTER_PORT": "7"}) == ("other", 7)


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    third = Launch(rank=2, world_size=3, local_rank=2, local_world_size=3)
    for launch in (
        third,
        replace(third, local_world_size=1),
    ):  # a launcher that does not say how many there are
        with pytest.raises(UserError, match=r"3 processes .* 2 GPUs.*--nproc_per_node=2"):
            choose_device("auto", launch)
    assert choose_device("auto", replace(third, local_rank=1, local_world_size=2)) == torch.device(
        "cuda", 1
    )
    with pytest.raises(UserError, match="--device mps: torch finds no GPU"):
        choose_device("mps", third)


NO_DRIVER = (
    "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU, "
    "from http://address"
)
OLD_DRIVER = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update "
    "your GPU driver."
)


@cases(
    ("is_built", "problem", "visible", "reason"),
    (False, "", None, "this torch ({version}) is built without CUDA"),
    (True, NO_DRIVER, None, "torch finds no GPU (Found no NVIDIA driver on your system)"),
    (
        True,
        OLD_DRIVER,
        None,
        "torch finds no GPU (The NVIDIA driver on your system is too old (found version 11040))",
    ),
    (
        True,
        "No CUDA GPUs are available",
        "",
        "torch finds no GPU (No CUDA GPUs are available); CUDA_VISIBLE_DEVICES is ''",
    ),
)
def test_a_missing_gpu_is_explained(
    monkeypatch: pytest.MonkeyPatch, is_built: bool, problem: str, visible: str | None, reason: str
):
    def init() -> None:
        raise RuntimeError(problem)

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: is_built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    reason = reason.format(version=torch.__version__)
    with pytest.raises(UserError, match=re.escape(f"--device cuda: {reason}. Omit --device")):
        choose_device("cuda", Launch())
    monkeypatch.setattr(
        distributed.shutil, "which", lambda name: f"/usr/bin/{name}"
    )  # NVIDIA's driver is there
    with pytest.warns(Notice, match=re.escape(f"computing on the CPU, since {reason}.")):
        assert distributed.start() == torch.device("cpu")


PLACE = ["-c", "from histocoder import distributed as d; print(d.start(), d.backend()); d.stop()"]


def on_gpus(visible: str, *args: object) -> list[object]:
    """A program on a pretended machine with these GPUs."""
    return ["tests/pretended_ranks.py", visible, "--", *args]


@cases(
    ("first", "second", "devices"),
    ("0,1", "0,1", ["cuda:0 nccl", "cuda:1 nccl"]),
    ("0", "1", ["cuda:0 nccl", "cuda:0 nccl"]),  # srun with a GPU for each task
)
def test_each_rank_has_a_gpu(first: str, second: str, devices: list[str]):
    ended = two_ranks(on_gpus(first, *PLACE), on_gpus(second, *PLACE))
    assert [one.stdout.strip() for one in ended] == devices


SENTENCE = """
from histocoder import distributed
from histocoder.cli.script import run_script
run_script(distributed.start)
"""


@cases(
    ("first", "second", "sentence"),
    ("0", "0", "Ranks 0 and 1 compute on the same GPU of "),
    ("MIG-a,MIG-b", "MIG-a,MIG-b", "torchrun --nproc_per_node=1; srun with --gpus-per-task=1"),
    ("0", "", "computes on cuda, but rank 1 on "),
)
def test_ranks_without_gpus_of_their_own_are_refused(first: str, second: str, sentence: str):
    ended = two_ranks(on_gpus(first, "-c", SENTENCE), on_gpus(second, "-c", SENTENCE), status=2)
    messages = ended[0].stderr + ended[1].stderr
    assert messages.count(sentence) == 1 and "Traceback" not in messages


COLLECTIVES = """
import torch
from histocoder import distributed as d
d.start(device="cpu")
own = torch.arange(d.rank() + 1.0)
print([x.tolist() for x in d.gather(own)], d.all_reduce(own[:1] + 1).item(), d.all_reduce(own[-1:], "max").item())
print(d.gather_objects(d.rank()), d.broadcast(d.rank()), d.broadcast_from_primary(lambda: [d.rank()], doing="it"))
d.stop()
"""


def test_collectives_of_two_ranks():
    for ended in two_ranks(["-c", COLLECTIVES]):
        assert ended.stdout.splitlines() == ["[[0.0], [0.0, 1.0]] 2.0 1.0", "[0, 1] 0 [0]"]


DELAYED = """
import time
from histocoder import distributed as d
d.start(device="cpu")
number, last_values = d.DelayedMax(), []
for step in range(4):
    if d.rank() == 1:
        time.sleep(0.5)
    started = time.monotonic()
    last_values.append(number.exchange({(1, 1): 15, (1, 3): 12}.get((d.rank(), step), 0)))
    if step == 0:
        print("waited" if time.monotonic() - started > 0.25 else "did not wait")
print(last_values, number.last())
d.stop()
"""


def test_a_signal_is_exchanged_without_waiting():
    for ended in two_ranks(["-c", DELAYED]):
        assert ended.stdout.splitlines() == ["did not wait", "[0, 0, 15, 0] 12"]


ENDING = """
import sys
from histocoder import distributed
from histocoder.cli.script import run_script
from histocoder.errors import Interrupted, UserError

def main():
    distributed.start(device="cpu")
    if distributed.rank() == int(sys.argv[1]):
        errors = {"mistake": UserError("mistake"), "stopped": Interrupted("stopped", 10), "KeyError": KeyError()}
        raise errors.get(sys.argv[2], RuntimeError("can't allocate memory"))
    distributed.barrier()

run_script(main)
"""


ERRORS = {
    "mistake": 2,
    "stopped": 138,
    "KeyError": 1,
    "Out of memory": 2,
}  # what ends a rank -> its status


@cases(
    ("error", "status", "rank"),
    *((error, status, "0") for error, status in ERRORS.items()),
    ("mistake", 2, "1"),
    *(slow(error, status, "1") for error, status in ERRORS.items() if error != "mistake"),
)
def test_a_failing_rank_ends_waiting_ones(rank: str, error: str, status: int):
    ended = two_ranks(["-c", ENDING, rank, error], status=status)
    assert (ended[0].stderr + ended[1].stderr).count(error) == 1


def test_an_existing_group_is_adopted(together: Path, tmp_path: Path):
    script = """
import sys, threading, torch.distributed as dist
from histocoder import FinetuneConfig, train
from histocoder.cli.arguments import parse
dist.init_process_group("gloo")
thread = threading.Thread(target=train, args=(parse(FinetuneConfig, sys.argv[1:]),))  # as Ray Train does
thread.start()
thread.join()
dist.barrier()
dist.destroy_process_group()
"""
    two_ranks(["-c", script, *training(tmp_path / "out")[1:]])
    assert_same_weights(tmp_path / "out", together)


NAMED = ("--master_addr=node0", "--master_port=29500")
DYNAMIC = ("--rdzv-backend=c10d", "--rdzv-endpoint=192.168.98.1:29500", "--rdzv-id=7")


@pytest.fixture
def nodes() -> Iterator[list[str]]:
    """Two network namespaces of this machine, joined by a cable: each has a loopback and one
    address.

    The name of the first stands for that, but on itself for its loopback, as under Debian.
    """
    names = [f"histocoder-{os.getpid()}-{i}" for i in range(2)]
    try:
        for name in names:
            ip("netns", "add", name)
            ip("netns", "exec", name, "true")
        ip(
            "link",
            "add",
            "eth0",
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            names[1],
        )
        for i, name in enumerate(names):
            ip("-n", name, "address", "add", f"192.168.98.{i + 1}/24", "dev", "eth0")
            for interface in ("lo", "eth0"):
                ip("-n", name, "link", "set", interface, "up")
            ip("-n", name, "route", "add", "default", "via", f"192.168.98.{2 - i}")
            hosts = Path("/etc/netns", name, "hosts")  # which stands in for /etc/hosts there
            hosts.parent.mkdir(parents=True)
            hosts.write_text(f"127.0.0.1 localhost\n{('127.0.1.1', '192.168.98.1')[i]} node0\n")
            hosts.with_name("resolv.conf").write_text(
                "nameserver 127.0.0.1\n"
            )  # where nothing is, so that none waits
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
        pytest.skip(
            f"network namespaces can't be had here (ip {' '.join(args)}: {done.stderr.strip()})"
        )


@pytest.mark.slow
@pytest.mark.parametrize("rendezvous", [NAMED, DYNAMIC])
def test_two_nodes_equal_one(
    nodes: list[str], together: Path, tmp_path: Path, rendezvous: tuple[str, ...]
):
    agents, how = (
        [],
        {"cwd": ROOT, "env": environment(), "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT},
    )
    for i, node in enumerate(nodes):
        options = [*rendezvous, f"--node_rank={i}"]
        if rendezvous == DYNAMIC:  # which can't tell whose address it is where names are not known
            options = [*DYNAMIC, f"--rdzv-conf=is_host={1 - i}", f"--local-addr=192.168.98.{i + 1}"]
        launcher = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes=2",
            "--nproc_per_node=1",
            *options,
        ]
        command = ["ip", "netns", "exec", node, *launcher, *training(tmp_path / "out")]
        agents.append(subprocess.Popen(command, text=True, **how))
    try:
        printed = [agent.communicate(timeout=DEADLINE)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], printed
    assert_same_end(together, tmp_path / "out")
    assert f"step {STEPS}/{STEPS}" in printed[0] and "step" not in printed[1]


def test_folders_of_one_node_alone_are_refused(tmp_path: Path):
    outs = [tmp_path / name / "out" for name in "ab"]
    for out in outs:
        out.parent.mkdir()
    said = "".join(
        one.stderr for one in two_ranks(*map(training, outs), status=2, each_a_node=True)
    )
    assert "Name one that all nodes see." in said and "Traceback" not in said


def test_differing_flags_are_named(tmp_path: Path):
    out, others = tmp_path / "out", ("--learning-rate", "2e-3", "--eval-interval", 9, "--use-amp")
    said = two_ranks(training(out), training(out, *others), status=2)[0].stderr
    assert "Rank 1 was launched with settings that differ from rank 0's" in said
    named = {line.split()[0] for line in said.splitlines() if line.startswith("  --")}
    assert named == {"--learning-rate", "--eval-interval", "--use-amp"}
    assert not (out / "args.yaml").exists()


def test_a_wrong_network_interface_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    said = two_ranks(training(tmp_path / "out"), status=2, each_a_node=True)[0].stderr
    assert "export GLOO_SOCKET_IFNAME=eth0" in said and "Traceback" not in said
