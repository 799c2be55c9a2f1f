"""Where the time of steps goes, and the same bits every time."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from conftest import run
from jobs import assert_same_end, assert_same_weights, finetune, training, two_ranks


def traced(out: Path) -> list[str]:
    with gzip.open(out / "profile" / "trace.json.gz", "rt") as file:
        return [event["name"] for event in json.load(file)["traceEvents"]]


def traced_steps(out: Path) -> list[str]:
    return sorted({name for name in traced(out) if name.startswith("ProfilerStep#")})


def test_a_profile_of_some_steps_changes_nothing_else(alone: Path, tmp_path: Path):
    out = tmp_path / "out"
    said = run(*training(out, "--profile", 3, batch_size=8)).stdout
    assert traced_steps(out) == ["ProfilerStep#5", "ProfilerStep#6", "ProfilerStep#7"]
    table = (out / "profile" / "table.txt").read_text()
    assert "AdamW" in table and "Self CPU" in table and table in said
    assert f"The profile is in {out / 'profile'}." in said
    assert_same_end(alone, out)
    run(*training(out, "--overwrite", batch_size=8, steps=1))
    assert not (out / "profile").exists()


@pytest.mark.slow
def test_gradients_are_exchanged_once_a_step(tmp_path: Path):
    counts = []
    for parts in (1, 3):
        accumulating = ("--gradient-accumulation-steps", parts, "--eval-interval", 99)
        first, other = two_ranks(training(tmp_path / str(parts), "--profile", 2, *accumulating, steps=8))
        assert "The profile is in" in first.stdout and "profile" not in other.stdout
        counts.append(traced(tmp_path / str(parts)).count("c10d::allreduce_"))
    # of gradients, and whether to stop; a sum for the log falls into one step or the next
    assert counts[0] >= 4 and abs(counts[0] - counts[1]) <= 1


DETERMINISTIC = """
import os, runpy, sys, torch
torch.set_num_threads(2)
sys.argv = {args!r}
runpy.run_path(sys.argv[0], run_name="__main__")
cudnn = torch.backends.cudnn
print(torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, os.environ.get("CUBLAS_WORKSPACE_CONFIG"))
"""


def test_deterministic_runs_agree_to_the_last_bit(table: Path, tmp_path: Path):
    extra = ("--batch-size", 8, "--max-steps", 6, "--dropout", 0.1, "--num-workers", 2)
    for name in ("one", "other"):
        args = finetune(table, tmp_path / name, *extra, "--deterministic")
        lines = run("-c", DETERMINISTIC.format(args=args)).stdout.splitlines()
        assert any("(2 threads)" in line for line in lines) and lines[-1] == "True True :4096:8"
    assert_same_weights(tmp_path / "one", tmp_path / "other")
