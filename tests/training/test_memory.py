"""Where memory runs out, a run says what to try, and prediction continues with less."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch
from conftest import run
from jobs import faulty, finetune, leftovers, two_ranks

from histocoder.config import TrainConfig
from histocoder.errors import Notice, UserError
from histocoder.ops.memory import RowsAtOnce
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


RESUMED = """
import runpy, sys, weakref
from histocoder.checkpoints.run_folder import RunFolder
from histocoder.training.learner import Learner

held = []

def open_checkpoint(*args, opened=RunFolder.checkpoint, **options):
    checkpoint = opened(*args, **options)
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
