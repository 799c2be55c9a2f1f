"""What a run says at its start, and of the time that it will take."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import run, write_table
from jobs import finetune, two_ranks
from trainers import begin, dataset

from histocoder.training import banner as banner_module
from histocoder.training import meter
from histocoder.training.banner import banner
from histocoder.training.meter import Progress


def test_devices_and_parameters_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trainer = begin(
        tmp_path, dataset(tmp_path, write_table(tmp_path / "table.csv"), ("hisco_1",)), precision="fp32", num_classes=1
    )
    trainer.model.freeze_encoder()
    names = ["NVIDIA A100"] * 4 + ["NVIDIA H100"] * 4
    monkeypatch.setattr(banner_module, "device_name", lambda _: "GPU")
    monkeypatch.setattr(
        banner_module.distributed, "gather_objects", lambda text: names if text == "GPU" else ["a", "b"] * 4
    )
    lines = banner(trainer, encoder="tiny", num_distinct=64)
    assert re.fullmatch(r"parameters  [\d.]+ million: [\d.]+ million trainable, [\d.]+ million frozen", lines[2])
    assert lines[3].endswith(", 1 code")
    assert lines[4] == "machine     8 processes, 2 nodes, 4 × NVIDIA A100, 4 × NVIDIA H100"
    assert lines[6] == "batch       16 × 8 processes = 128 rows a step"


def test_two_ranks_say_what_they_are_together(table: Path, tmp_path: Path):
    extra = ("--batch-size", 2, "--gradient-accumulation-steps", 2, "--num-epochs", 1, "--min-steps", 16)
    first, other = two_ranks(finetune(table, tmp_path / "out", *extra))
    lines = first.stdout.splitlines()
    start = lines.index("script      finetune.py")
    assert lines[start + 1] == "encoder     tiny"
    assert "58 training rows (58 distinct descriptions), 6 validation rows, 8 codes" in lines[start + 3]
    assert lines[start + 4].startswith("machine     2 processes, 1 node, 2 × ")
    assert lines[start + 5 : start + 8] == [
        "strategy    DDP, gloo, fp32",
        "batch       2 × 2 accumulated × 2 processes = 8 rows a step",
        "steps       16 in 2 epochs",
    ]
    assert "script" not in other.stdout


def test_the_time_of_all_steps_is_that_of_steps_alone(monkeypatch: pytest.MonkeyPatch, capsys):
    now = 1000.0
    monkeypatch.setattr(meter.time, "monotonic", lambda: now)
    shown = Progress(10_000, start=1_000)
    for step in range(1, 31):
        now += 60.0 if step <= 5 else 0.5  # the first ones take long
        shown.advance()
        if step % 8 == 0:  # a validation, which ends later
            now += 100.0
            shown.pause(100.0)
    assert capsys.readouterr().out == "estimated time for 9,000 steps, without validation: 1:15:00 (0.5 s each)\n"


def test_the_time_is_said_once_after_twenty_steps(table: Path, tmp_path: Path):
    lines = run(*finetune(table, tmp_path / "out", "--batch-size", 8, "--max-steps", 22)).stdout.splitlines()
    said = [i for i, line in enumerate(lines) if line.startswith("estimated time for 22 steps")]
    assert len(said) == 1 and lines[said[0] - 1].startswith("step 20/22")
