"""Where memory runs out, a run says what to try; and the largest batch that fits is found before it starts."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import yaml
from conftest import run
from jobs import assert_same_weights, faulty, finetune, leftovers, two_ranks
from models import tiny_model

from histocoder.checkpoints.training_state import list_checkpoints
from histocoder.cli.arguments import parse
from histocoder.config import FinetuneConfig, TrainConfig
from histocoder.errors import Notice, UserError
from histocoder.ops.memory import RowsAtOnce
from histocoder.training.batch_size import find_batch_size, largest_that_fits, peak_of_step
from histocoder.training.learner import Learner
from histocoder.training.losses import mixed_loss
from histocoder.training.out_of_memory import advice, explaining_out_of_memory
from histocoder.training.settings import check_machine

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
    assert said.count("Out of memory") == 1 and "--fsdp full_shard, which shards" in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("error", "size"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total"),
            "while allocating 2.50 GiB",
        ),
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
    ("base", "each", "most", "limit", "size", "tried"),
    [
        (10, 3, math.inf, 1000, 16, [1, 2, 4, 8, 16]),  # 32 are expected not to fit, and not tried
        (10, 3, 30, 1000, 4, [1, 2, 4, 8]),  # memory runs out, though there seems to be room
        (10, 3, math.inf, 11, 8, [1, 2, 4, 8]),  # no more rows
        (100, 3, math.inf, 1000, 0, [1]),
    ],
)
def test_the_largest_size_that_fits(base: float, each: float, most: float, limit: int, size: int, tried: list[int]):
    seen: list[int] = []

    def peak(rows: int) -> float:
        seen.append(rows)
        used = base + each * rows
        return used if used <= most else math.inf

    assert largest_that_fits(peak, room=60, limit=limit)[0] == size
    assert seen == tried


def test_the_peak_of_the_search_is_not_that_of_the_run(monkeypatch: pytest.MonkeyPatch):
    reset: list[torch.device] = []
    monkeypatch.setattr("histocoder.training.batch_size.Learner", lambda model, *_, **__: Mock(model=model))
    monkeypatch.setattr("histocoder.training.batch_size.peak_of_step", lambda _, rows: float(rows))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (12, 24))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.append)
    gpu = torch.device("cuda", 0)
    assert find_batch_size(tiny_model, CONFIG, gpu, num_rows=100)[0] == 8 and reset == [gpu]


def test_memory_that_runs_out_in_a_trial_is_no_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 0)
    learner = Learner(tiny_model(), CONFIG, CPU, total_steps=9)
    assert peak_of_step(learner, 2) < math.inf
    monkeypatch.setattr("histocoder.training.learner.mixed_loss", lambda *_: torch.empty(10**15))
    assert peak_of_step(learner, 4) == math.inf


def test_sums_of_gradients_are_in_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 0)
    held: list[bool] = []

    def loss(*args: Any) -> torch.Tensor:
        held.append(any(p.grad is not None for p in model.parameters()))
        return mixed_loss(*args)

    monkeypatch.setattr("histocoder.training.learner.mixed_loss", loss)
    for steps, expected in ((1, [False, False]), (4, [False, True, False, True])):
        held.clear()
        config = replace(CONFIG, gradient_accumulation_steps=steps)
        peak_of_step(Learner(model := tiny_model(), config, CPU, total_steps=9), 2)
        assert held == expected


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_a_batch_size_is_sought_on_gpus_alone(device: str):
    config = parse(FinetuneConfig, ["--dataset", "t.csv", "--target-cols", "hisco_1", "--auto-batch-size"])
    with pytest.raises(UserError, match="--auto-batch-size needs a GPU; on this device set --batch-size"):
        check_machine(config, torch.device(device))


def test_a_batch_size_is_not_sought_on_a_cpu(table: Path, tmp_path: Path):
    ended = run(*finetune(table, tmp_path / "out", "--auto-batch-size"), "--device", "cpu", check=False)
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1 and "set --batch-size" in ended.stderr
    assert not (tmp_path / "out").exists()


WITH_ROOM = """
import os, runpy, sys
import torch
from histocoder.training import batch_size, train
torch.cuda.mem_get_info = lambda device: (100 / batch_size._SHARE_OF_MEMORY, None)
torch.cuda.memory_reserved = lambda device: 0
torch.cuda.reset_peak_memory_stats = lambda device: None
batch_size.peak_of_step = lambda learner, rows: rows * (20 if os.environ.get("RANK") == "1" else 1)
train.check_machine = lambda config, device: None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_a_run_with_the_size_that_was_found_is_the_run_with_that_size(table: Path, tmp_path: Path):
    args = (*STEPS, "--augmentation-prob", 0.5)
    command = ["-c", WITH_ROOM, *finetune(table, tmp_path / "auto", *args, "--auto-batch-size")]
    output = run(*command).stdout
    assert "Batches of 32 rows fit" in output and "32 × 1 process = 32 rows a step" in output
    run(*finetune(table, tmp_path / "set", *args, "--batch-size", 32))
    assert_same_weights(tmp_path / "auto", tmp_path / "set", tolerance=0)
    kept = yaml.safe_load((tmp_path / "auto" / "args.yaml").read_text())
    assert kept["batch_size"] == 32 and kept["auto_batch_size"] is False

    checkpoint = list_checkpoints(tmp_path / "auto")[-1]
    checkpoint.rename(tmp_path / "last")
    again = run(*command).stdout
    assert "fit:" not in again and "Resuming from step 3" in again and "32 × 1 process" in again
    assert_same_weights(tmp_path / "auto", tmp_path / "set", tolerance=0)


@pytest.mark.slow
def test_all_ranks_take_what_fits_on_each(table: Path, tmp_path: Path):
    args = finetune(table, tmp_path / "out", "--max-steps", 2, "--auto-batch-size")
    ended = two_ranks(["-c", WITH_ROOM, *args])
    assert "Batches of 4 rows fit" in ended[0].stdout and "4 × 2 processes = 8 rows a step" in ended[0].stdout


def test_rows_are_not_sought_where_positions_are_given(table: Path, tmp_path: Path):
    args = finetune(table, tmp_path / "out", "--auto-batch-size", "--tokens-per-batch", 512)
    ended = run(*args, check=False)
    assert ended.returncode == 2 and "choose one" in ended.stderr


RESUMED = """
import runpy, sys, weakref
from histocoder.checkpoints.run_folder import RunFolder
from histocoder.training.learner import Learner

held = []

def open_checkpoint(*args, opened=RunFolder.checkpoint):
    checkpoint = opened(*args)
    held.extend(map(weakref.ref, (checkpoint, *checkpoint.learner.weights.values(), *checkpoint.ranks.values())))
    return checkpoint

def train_step(self, parts, step=Learner.train_step):
    print("alive:", sum(ref() is not None for ref in held), "of", len(held))
    return step(self, parts)

RunFolder.checkpoint, Learner.train_step = open_checkpoint, train_step
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
    with pytest.warns(Notice, match="with (10|5) descriptions at once; continuing with (5|2)") as notices:
        pieces = list(RowsAtOnce(CPU).each(work, rows, -rows))
    assert len(notices) == 2
    assert [piece for piece, _ in pieces] == [slice(start, start + 2) for start in range(0, 10, 2)]
    own, others = zip(*(found for _, found in pieces), strict=True)
    assert [*chain(*own)] == rows.tolist() and [*chain(*others)] == (-rows).tolist()
    room = 0
    with pytest.raises(UserError, match="a single description"), pytest.warns(Notice):
        list(RowsAtOnce(CPU).each(work, rows, None))
    with pytest.raises(RuntimeError, match="size of tensor"):  # what fails for another reason is not tried again
        list(RowsAtOnce(CPU).each(lambda some: some + torch.ones(3), rows))
