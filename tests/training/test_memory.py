"""Where memory runs out, a run says what to try; and the largest batch that fits is found before it starts."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch
import yaml
from conftest import run
from jobs import assert_same_weights, faulty, finetune, leftovers, two_ranks
from models import tiny_model

from histocoder.checkpoints.training_state import list_checkpoints
from histocoder.config import TrainConfig
from histocoder.errors import Notice, UserError
from histocoder.ops.memory import RowsAtOnce, available_bytes, total_bytes
from histocoder.training.batch_size import _Trial, find_batch_size, largest_that_fits
from histocoder.training.out_of_memory import advice, explaining_out_of_memory

CPU = torch.device("cpu")
CONFIG = TrainConfig(batch_size=8, num_epochs=1, min_steps=0, learning_rate=1e-3, warmup_pct=0.05)
STEPS = ("--max-steps", 6, "--eval-interval", 3, "--save-interval", 3, "--dropout", 0.1)


def test_out_of_memory_says_what_to_try(table: Path, tmp_path: Path):
    ended = run(*faulty(finetune(table, tmp_path / "out", *STEPS, "--batch-size", 8), "memory:0:5"), check=False)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    first, *tries = ended.stderr.splitlines()
    assert "Out of memory (cpu) while allocating 931,322.57 GiB, with batches of 8 rows" in first
    assert [line.split()[1].rstrip(";,") for line in tries] == [
        "--batch-size",
        "--gradient-checkpointing",
        "--max-len",
        "several",
    ]
    assert "--batch-size 4 with --gradient-accumulation-steps 2; the steps stay the same" in tries[0]
    again = run(*finetune(table, tmp_path / "out", *STEPS, "--batch-size", 4, "--gradient-accumulation-steps", 2))
    assert "Resuming from step 3" in again.stdout


def test_out_of_memory_on_one_rank_is_said_once_and_ends_all(table: Path, tmp_path: Path):
    args = finetune(table, tmp_path / "out", *STEPS, "--batch-size", 8)
    ended = two_ranks(faulty(args, "memory:1:5"), check=False)
    assert [one.returncode for one in ended] == [2, 2] and not leftovers(tmp_path / "out")
    said = "".join(one.stderr for one in ended)
    assert said.count("Out of memory") == 1 and "--fsdp full_shard, which shares" in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("error", "size"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total"), "2.50 GiB more"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), "(cpu), with"),
        (MemoryError(), "(cpu), with"),
    ],
)
def test_errors_of_memory_are_known(error: Exception, size: str):
    with pytest.raises(UserError) as raised, explaining_out_of_memory(CONFIG, CPU, max_len=128):
        raise error
    assert size in str(raised.value)


def test_other_errors_stay_as_they_are():
    with pytest.raises(RuntimeError, match="shapes"), explaining_out_of_memory(CONFIG, CPU, max_len=128):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")


def test_what_is_in_use_is_not_advised(monkeypatch: pytest.MonkeyPatch):
    config = replace(CONFIG, batch_size=1, gradient_checkpointing=True)
    assert "--" not in advice(config, CPU, max_len=32).replace("--fsdp full_shard", "")
    assert "1. --fsdp full_shard --fsdp-cpu-offload, which" in advice(config, torch.device("cuda", 0), max_len=32)
    monkeypatch.setattr("histocoder.distributed.world_size", lambda: 2)
    sharded = replace(config, fsdp="full_shard")
    assert advice(sharded, CPU, max_len=32).endswith("No other flag saves memory.")
    assert advice(sharded, torch.device("cuda", 0), max_len=32).endswith("\n  1. --fsdp-cpu-offload")
    assert "1. --fsdp full_shard in place" in advice(replace(config, fsdp="shard_grad_op"), CPU, max_len=32)
    tokens = replace(CONFIG, tokens_per_batch=512)
    assert "1. --tokens-per-batch 256 with" in advice(tokens, CPU, max_len=128)
    assert "1. --gradient-checkpointing" in advice(tokens, CPU, max_len=512)


@pytest.mark.parametrize(
    ("base", "each", "most", "limit", "reckons", "size", "tried"),
    [
        (10, 3, math.inf, 1000, False, 16, [1, 2, 4, 8, 16]),  # 32 are expected not to fit, and not tried
        (10, 3, 30, 1000, False, 4, [1, 2, 4, 8]),  # memory runs out, though there seems to be room
        (10, 3, math.inf, 11, False, 8, [1, 2, 4, 8]),  # no more rows
        (10, 0.3, math.inf, 1000, True, 128, [1, 2, 4, 8]),
        (1e-9, 0, math.inf, 32, True, 32, [1, 2, 4, 8, 16, 32]),  # nothing to reckon with
        (100, 3, math.inf, 1000, False, 0, [1]),
    ],
)
def test_the_largest_size_that_fits(
    base: float, each: float, most: float, limit: int, reckons: bool, size: int, tried: list[int]
):
    seen: list[int] = []

    def peak(rows: int) -> float:
        seen.append(rows)
        used = base + each * rows
        return used if used <= most else math.inf

    assert largest_that_fits(peak, room=60, limit=limit, reckons=reckons)[0] == size
    assert seen == tried


class Steps:
    """A trial of steps that take a byte for each row."""

    room, max_len = 10.0, 8

    def __init__(self, *_: object) -> None:
        pass

    def peak(self, num_rows: int) -> float:
        return float(num_rows)


def test_the_peak_of_the_search_is_not_that_of_the_run(monkeypatch: pytest.MonkeyPatch):
    reset: list[torch.device] = []
    monkeypatch.setattr("histocoder.training.batch_size._Trial", Steps)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.append)
    gpu = torch.device("cuda", 0)
    assert find_batch_size(tiny_model, CONFIG, gpu, num_rows=100)[0] == 8 and reset == [gpu]


def test_memory_that_runs_out_in_a_trial_is_no_error(monkeypatch: pytest.MonkeyPatch):
    trial = _Trial(tiny_model(), CONFIG, CPU)
    assert trial.peak(2) < math.inf
    monkeypatch.setattr("histocoder.training.batch_size.mixed_loss", lambda *_: torch.empty(10**15))
    assert trial.peak(4) == math.inf


GIB = 2**30


@pytest.mark.parametrize(
    ("membership", "folder", "files", "cached"),
    [
        ("0::/system/job_7/step_0", "system/job_7", ("memory.max", "memory.current"), "inactive_file"),
        (
            "5:cpu:/\n4:memory:/slurm/job_7\n0::/",
            "memory/slurm/job_7",
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            "total_inactive_file",
        ),
        ("0::/a/name/of/the/host", ".", ("memory.max", "memory.current"), "inactive_file"),
    ],
)
def test_a_job_may_take_less_than_its_machine_has(
    membership: str, folder: str, files: tuple[str, str], cached: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "membership").write_text(membership)
    group = tmp_path / folder
    (group / "step_0").mkdir(parents=True)
    for place, allowed in ((group, str(GIB)), (group / "step_0", "max")):
        for name, text in zip((*files, "memory.stat"), (allowed, str(GIB // 2), f"{cached} {GIB // 4}"), strict=True):
            (place / name).write_text(f"{text}\n")
    monkeypatch.setattr("histocoder.ops.memory._GROUPS", tmp_path)
    monkeypatch.setattr("histocoder.ops.memory._MEMBERSHIP", tmp_path / "membership")
    assert total_bytes() == GIB
    assert available_bytes() == GIB - (GIB // 2 - GIB // 4)  # what was read from files can be given up


def test_other_systems_are_told_to_set_the_size(monkeypatch: pytest.MonkeyPatch):
    def not_here(*_: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", not_here)
    for device in (CPU, torch.device("mps")):
        with pytest.raises(UserError, match="set --batch-size"):
            _Trial(tiny_model(), CONFIG, device)


def test_sums_of_gradients_take_room(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("histocoder.training.batch_size.free_bytes", lambda _: 1e9)
    rooms = [_Trial(tiny_model(), replace(CONFIG, gradient_accumulation_steps=steps), CPU).room for steps in (1, 2)]
    assert rooms[0] - rooms[1] == 4 * sum(p.numel() for p in tiny_model().parameters())


@pytest.mark.slow
def test_a_run_with_the_size_that_was_found_is_the_run_with_that_size(table: Path, tmp_path: Path):
    args = (*STEPS, "--augmentation-prob", 0.5)
    output = run(*finetune(table, tmp_path / "auto", *args, "--auto-batch-size")).stdout
    assert "Batches of 32 rows fit" in output and "32 × 1 process = 32 rows a step" in output
    run(*finetune(table, tmp_path / "set", *args, "--batch-size", 32))
    assert_same_weights(tmp_path / "auto", tmp_path / "set", tolerance=0)
    kept = yaml.safe_load((tmp_path / "auto" / "args.yaml").read_text())
    assert kept["batch_size"] == 32 and kept["auto_batch_size"] is False

    checkpoint = list_checkpoints(tmp_path / "auto")[-1]
    checkpoint.rename(tmp_path / "last")
    again = run(*finetune(table, tmp_path / "auto", *args, "--auto-batch-size")).stdout
    assert "fit:" not in again and "Resuming from step 3" in again and "32 × 1 process" in again
    assert_same_weights(tmp_path / "auto", tmp_path / "set", tolerance=0)


UNEQUAL = """
import os, runpy, sys
from histocoder.training import batch_size
batch_size._Trial.peak = lambda trial, rows: rows * (20 if os.environ["RANK"] == "1" else 1)
init = batch_size._Trial.__init__
def begin(trial, *args):
    init(trial, *args)
    trial.room = 100
batch_size._Trial.__init__ = begin
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_all_ranks_take_what_fits_on_each(table: Path, tmp_path: Path):
    ended = two_ranks(["-c", UNEQUAL, *finetune(table, tmp_path / "out", "--max-steps", 2, "--auto-batch-size")])
    assert "Batches of 4 rows fit" in ended[0].stdout and "4 × 2 processes = 8 rows a step" in ended[0].stdout


def test_rows_are_not_sought_where_positions_are_given(table: Path, tmp_path: Path):
    args = finetune(table, tmp_path / "out", "--auto-batch-size", "--tokens-per-batch", 512)
    ended = run(*args, check=False)
    assert ended.returncode == 2 and "choose one" in ended.stderr


RESUMED = """
import runpy, sys, weakref
from histocoder.training import train
from histocoder.training import trainer

held = []

def open_checkpoint(*args, opened=train.open_checkpoint):
    checkpoint = opened(*args)
    held.extend(map(weakref.ref, (checkpoint, *checkpoint.learner.weights.values(), *checkpoint.ranks.values())))
    return checkpoint

def train_step(self, parts, step=trainer.Trainer.train_step):
    print("alive:", sum(ref() is not None for ref in held), "of", len(held))
    return step(self, parts)

train.open_checkpoint, trainer.Trainer.train_step = open_checkpoint, train_step
sys.argv = {args!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_resumed_run_holds_nothing_of_what_it_has_read(table: Path, tmp_path: Path):
    args = finetune(table, tmp_path / "out", "--batch-size", 8, "--max-steps")
    run(*args, 2)
    lines = [line for line in run("-c", RESUMED.format(args=[*args, "4"])).stdout.splitlines() if "alive:" in line]
    assert len(lines) == 2 and all(re.fullmatch(r"alive: 0 of [1-9]\d+", line) for line in lines), lines


def test_rows_are_halved_until_they_fit():
    def work(rows: torch.Tensor, others: torch.Tensor | None) -> tuple[list[int], list[int] | None]:
        if len(rows) > room:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return rows.tolist(), None if others is None else others.tolist()

    room, rows = 3, torch.arange(10)
    with pytest.warns(Notice, match="with (10|5) descriptions at once; going on with (5|2)") as notices:
        pieces = list(RowsAtOnce(CPU).each(work, rows, -rows))
    assert len(notices) == 2
    assert [piece for piece, _ in pieces] == [slice(start, start + 2) for start in range(0, 10, 2)]
    own, others = zip(*(found for _, found in pieces), strict=True)
    assert [*chain(*own)] == rows.tolist() and [*chain(*others)] == (-rows).tolist()
    room = 0
    with pytest.raises(UserError, match="one description at once"), pytest.warns(Notice):
        list(RowsAtOnce(CPU).each(work, rows, None))
    with pytest.raises(RuntimeError, match="size of tensor"):  # what fails for another reason is not tried again
        list(RowsAtOnce(CPU).each(lambda some: some + torch.ones(3), rows))
