"""What a run says at its start, and of the time that it will take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from conftest import run
from jobs import finetune, two_ranks

from histocoder.training import console
from histocoder.training.console import Progress, RunFacts, banner

FACTS = RunFacts(
    script="finetune.py",
    encoder="google/canine-s",
    num_trained=8_049_000,
    num_frozen=132_082_944,
    num_train=1_234_567,
    num_distinct=98_765,
    num_val=137_000,
    num_codes=1_919,
    devices=("NVIDIA A100",) * 4 + ("NVIDIA H100",) * 4,
    num_nodes=2,
    backend="nccl",
    strategy="DDP",
    precision="bf16",
    batch_size=64,
    batch_unit="rows",
    accumulation=2,
    step_size=1_024,
    num_steps=12_057,
    num_epochs=10,
)


def test_the_lines_of_a_large_run():
    assert banner(FACTS) == [
        "script      finetune.py",
        "encoder     google/canine-s",
        "parameters  140.1 million: 8.0 million trained, 132.1 million frozen",
        "data        1,234,567 rows to train on (98,765 distinct descriptions), 137,000 to validate on, 1,919 codes",
        "machine     8 processes, 2 nodes, 4 × NVIDIA A100, 4 × NVIDIA H100",
        "strategy    DDP, nccl, bf16",
        "batch       64 × 2 accumulated × 8 processes = 1,024 rows a step",
        "steps       12,057 in 10 epochs",
    ]


def test_the_lines_of_a_small_one():
    alone = {"devices": ("Xeon (2 threads)",), "num_nodes": 1, "backend": None, "strategy": "one process"}
    batch = {"batch_size": 4_096, "batch_unit": "positions", "accumulation": 1, "step_size": 4_096}
    size = {"num_trained": 62_345, "num_frozen": 0, "num_codes": 1, "num_steps": 100, "num_epochs": None}
    lines = banner(replace(FACTS, **alone, **batch, **size))
    assert lines[2] == "parameters  62,345: 62,345 trained"
    assert lines[3].endswith(", 1 code")
    assert lines[4:] == [
        "machine     1 process, 1 node, Xeon (2 threads)",
        "strategy    one process, bf16",
        "batch       4,096 × 1 process = 4,096 positions a step",
        "steps       100",
    ]


def test_two_ranks_say_what_they_are_together(table: Path, tmp_path: Path):
    extra = ("--batch-size", 2, "--gradient-accumulation-steps", 2, "--num-epochs", 1, "--min-steps", 16)
    first, other = two_ranks(finetune(table, tmp_path / "out", *extra))
    lines = first.stdout.splitlines()
    start = lines.index("script      finetune.py")
    assert lines[start + 1] == "encoder     tiny"
    assert "58 rows to train on (58 distinct descriptions), 6 to validate on, 8 codes" in lines[start + 3]
    assert lines[start + 4].startswith("machine     2 processes, 1 node, 2 × ")
    assert lines[start + 5 : start + 8] == [
        "strategy    DDP, gloo, fp32",
        "batch       2 × 2 accumulated × 2 processes = 8 rows a step",
        "steps       16 in 2 epochs",
    ]
    assert "script" not in other.stdout


def test_the_time_of_all_steps_is_that_of_steps_alone(monkeypatch: pytest.MonkeyPatch, capsys):
    now = 1000.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    shown = Progress(10_000, start=1_000)
    for step in range(1, 31):
        now += 60.0 if step <= 5 else 0.5  # the first ones take long
        shown.advance()
        if step % 8 == 0:  # a validation, which ends later
            now += 100.0
            shown.pause(100.0)
    assert capsys.readouterr().out == "about 1:15:00 for 9,000 steps, 0.5 s each, without validation\n"


def test_the_time_is_said_once_after_twenty_steps(table: Path, tmp_path: Path):
    lines = run(*finetune(table, tmp_path / "out", "--batch-size", 8, "--max-steps", 22)).stdout.splitlines()
    said = [i for i, line in enumerate(lines) if line.startswith("about 0:")]
    assert len(said) == 1 and lines[said[0] - 1].startswith("step 20/22")
    assert " for 22 steps, " in lines[said[0]]
