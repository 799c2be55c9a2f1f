"""Where memory runs out, a run says what to try."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import refused, run
from jobs import faulty, finetune, leftovers, two_ranks

from histocoder.config import TrainConfig
from histocoder.errors import UserError
from histocoder.training.out_of_memory import advice, explaining_out_of_memory

CPU = torch.device("cpu")
CONFIG = TrainConfig(batch_size=8, num_epochs=1, min_steps=0, learning_rate=1e-3, warmup_pct=0.05)
STEPS = ("--max-steps", 6, "--eval-interval", 3, "--save-interval", 3, "--dropout", 0.1)


def test_out_of_memory_says_what_to_try(table: Path, tmp_path: Path):
    args = finetune(table, tmp_path / "out", *STEPS, "--batch-size", 8)
    first, *tries = refused(*faulty(args, "memory:0:5")).splitlines()
    assert "Out of memory (cpu) while allocating 931,322.57 GiB, with batches of 8 rows" in first
    flags = ["--batch-size", "--gradient-checkpointing", "--max-len", "several"]
    assert [line.split()[1].rstrip(";,") for line in tries] == flags
    assert "--batch-size 4 with --gradient-accumulation-steps 2; the steps stay the same" in tries[0]
    again = run(*finetune(table, tmp_path / "out", *STEPS, "--batch-size", 4, "--gradient-accumulation-steps", 2))
    assert "Resuming from step 3" in again.stdout


def test_out_of_memory_on_one_rank_ends_all(table: Path, tmp_path: Path):
    args = finetune(table, tmp_path / "out", *STEPS, "--batch-size", 8)
    ended = two_ranks(faulty(args, "memory:1:5"), check=False)
    assert [one.returncode for one in ended] == [2, 2] and not leftovers(tmp_path / "out")
    said = "".join(one.stderr for one in ended)
    assert said.count("Out of memory") == 1 and "--fsdp full_shard, which shards" in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0"), UserError, "allocating 2.50"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), UserError, "(cpu), with"),
        (MemoryError(), UserError, "(cpu), with"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), RuntimeError, "mat1 and mat2 shapes"),
    ],
)
def test_errors_of_memory_are_known(error: Exception, kind: type[Exception], said: str):
    with pytest.raises(kind, match=re.escape(said)), explaining_out_of_memory(CONFIG, CPU, max_len=128):
        raise error


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
