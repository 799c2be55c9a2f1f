"""What a run says at its start, and of the time that it will take."""

from __future__ import annotations

import re
from pathlib import Path

from jobs import finetune, two_ranks


def test_two_ranks_say_what_they_are_together(table: Path, tmp_path: Path):
    extra = ("--batch-size", 2, "--gradient-accumulation-steps", 2, "--num-epochs", 1, "--min-steps", 24)
    first, other = two_ranks(finetune(table, tmp_path / "out", *extra, "--freeze-encoder"))
    lines = first.stdout.splitlines()
    start = lines.index("script      finetune.py")
    assert lines[start + 1] == "encoder     tiny"
    parameters = r"parameters  [\d.]+ million: [\d.]+ million trainable, [\d.]+ million frozen"
    assert re.fullmatch(parameters, lines[start + 2])
    assert "58 training rows (58 distinct descriptions), 6 validation rows, 8 codes" in lines[start + 3]
    assert lines[start + 4].startswith("machine     2 processes, 1 node, 2 × ")
    assert lines[start + 5 : start + 8] == [
        "strategy    DDP, gloo, fp32",
        "batch       2 × 2 accumulated × 2 processes = 8 rows a step",
        "steps       24 in 3 epochs",
    ]
    assert "script" not in other.stdout
    (said,) = (i for i, line in enumerate(lines) if line.startswith("estimated time for 24 steps"))
    assert lines[said - 1].startswith("step 20/24")
