"""Runs that faults are done to: one process, two ranks that are forked, or two under torchrun."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from conftest import DEADLINE, ROOT, environment, free_port, write_table
from forked import Ended, Forked
from safetensors.torch import load_file

from histocoder.checkpoints.manifest import write_manifest
from histocoder.checkpoints.training_state import list_checkpoints

TINY = (
    "--encoder tiny --learning-rate 1e-3 --precision fp32 --log-interval 1 --no-report --no-experts"
).split()
STEPS = 24
MEASURED = "samples_per_sec"


def finetune(table: Path, out: Path, *extra: object) -> list[str]:
    flags = ("--target-cols", "hisco_1", *TINY, "--no-refit", "--titles", "none", *extra)
    return [*map(str, ("finetune.py", "--dataset", table, "--save-path", out, *flags))]


def training(out: Path, *extra: object, batch_size: int = 4, steps: int = STEPS) -> list[str]:
    """A run of several epochs that draws random numbers, saves and validates now and then."""
    table = out.parent / "table.csv"
    if not table.exists():
        write_table(table)
    sizes = ("--batch-size", batch_size, "--max-steps", steps, "--dropout", 0.1)
    return finetune(table, out, *sizes, "--save-interval", 5, "--eval-interval", 8, *extra)


def faulty(args: list[str], *faults: str) -> list[str]:
    """The same with faults: see `faulty.py`."""
    return [str(Path(__file__).with_name("faulty.py")), *faults, "--", *args]


@contextmanager
def ranks(*commands: Sequence[object], each_a_node: bool = False) -> Iterator[list[Forked]]:
    """Processes that train together, one for each command; none is left in the end."""
    env = environment(
        WORLD_SIZE=str(len(commands)), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port())
    )
    started = []
    for rank, command in enumerate(commands):
        place = {"RANK": str(rank), "LOCAL_RANK": "0" if each_a_node else str(rank)}
        started.append(Forked([*map(str, command)], cwd=ROOT, env=env | place))
    try:
        yield started
    finally:
        for process in started:
            process.kill()


def two_ranks(
    args: Sequence, others: Sequence = (), *, status: int | None = 0, each_a_node=False
) -> list[Ended]:
    """How two processes ended, with any status if None, that trained together; `others` are rank
    1's own arguments.
    """
    with ranks(args, others or args, each_a_node=each_a_node) as started:
        ended = [process.result() for process in started]
    assert status is None or [one.returncode for one in ended] == [status] * 2, [
        one.stderr for one in ended
    ]
    return ended


def wait_until(happened: Callable[[], bool]) -> None:
    started = time.monotonic()
    while not happened():
        assert time.monotonic() - started < DEADLINE, "it has not happened in time"
        time.sleep(0.02)


def wait_for_step(process: Forked, step: int) -> None:
    wait_until(lambda: f"step {step}/" in process.stdout or not process.is_running())
    assert process.is_running(), process.stderr


@contextmanager
def torchrun(args: list[str], *options: str) -> Iterator[Forked]:
    """Two ranks under torchrun, each in a new Python interpreter; none is left in the end."""
    launcher = (
        "-m",
        "torch.distributed.run",
        "--nproc_per_node=2",
        f"--master_port={free_port()}",
        *options,
    )
    process = Forked([*launcher, *args], cwd=ROOT, env=environment())
    try:
        yield process
    finally:
        left = workers(process)
        process.kill()
        for pid in filter(is_alive, left):
            os.kill(pid, signal.SIGKILL)


def workers(launcher: Forked) -> list[int]:
    """Process ids of the ranks that torchrun has started, by rank."""
    ranks = {variables(pid).get("RANK"): pid for pid in children_of(launcher.process.pid)}
    return [ranks[rank] for rank in "01" if rank in ranks]


@contextmanager
def serving(model: Path | None, *flags: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server, and its address."""
    given = () if model is None else ("--model", model, "--workspace", model / "desk")
    command = [sys.executable, "-m", "histocoder", "serve", *given, "--no-browser", *flags]
    started = subprocess.Popen(
        [*map(str, command)], cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True
    )
    try:
        assert started.stdout is not None
        line = next(line for line in started.stdout if line.startswith("Open "))
        yield started, line.split()[1]
    finally:
        started.kill()
        started.wait()


def children_of(pid: int | None) -> list[int]:
    """The processes that one has started, from any of its threads, as Java does."""
    found = list[int]()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, path.read_text().split())
    return found


def variables(pid: int) -> dict[str, str]:
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode()
    except OSError:
        return {}
    return dict(line.split("=", 1) for line in text.split("\0") if "=" in line)


def is_alive(pid: int) -> bool:
    """Whether a process is there, and more than a name that nobody has asked for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def logs(out: Path) -> list[dict[str, str]]:
    with (out / "logs.csv").open(newline="") as file:
        return [
            {name: cell for name, cell in row.items() if name != MEASURED}
            for row in csv.DictReader(file)
        ]


def logged(out: Path, column: str) -> list[float]:
    return [float(row[column]) for row in logs(out) if row[column]]


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model.safetensors")


def assert_same_weights(one: Path, other: Path, *, tolerance: float = 0.0) -> None:
    torch.testing.assert_close(weights(other), weights(one), atol=tolerance, rtol=0)


def assert_same_end(one: Path, other: Path) -> None:
    """Weights, the last checkpoint's optimizer and random states, and the log, are equal to the
    last bit.
    """
    last = (list_checkpoints(one)[-1], list_checkpoints(other)[-1])
    assert last[0].name == last[1].name
    for name in ("model.safetensors", "optimizer.pt"):
        assert (last[0] / name).read_bytes() == (last[1] / name).read_bytes(), name
    assert torch.equal(*(load_file(path / "ranks.safetensors")["rng"] for path in last))
    assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    assert logs(one) == logs(other)


def change_state(checkpoint: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Alter what a checkpoint's `state.json` holds, and its checksum."""
    state = json.loads((checkpoint / "state.json").read_text())
    change(state)
    (checkpoint / "state.json").write_text(json.dumps(state))
    write_manifest(checkpoint)


def leftovers(out: Path) -> list[Path]:
    return [
        path
        for path in out.rglob(".*")
        if path.name.endswith(".tmp") or path.name.startswith(".lock")
    ]
