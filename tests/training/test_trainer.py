"""What a trainer saves of its device, and what ranks decide together."""

from pathlib import Path

import pytest
import torch
from jobs import finetune, two_ranks
from trainers import begin, dataset

from histocoder.checkpoints.training_state import list_checkpoints, load_checkpoint


def test_checkpoints_hold_the_random_state_of_macs(
    tmp_path: Path, table: Path, monkeypatch: pytest.MonkeyPatch
):
    restored: list[torch.Tensor] = []
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda: torch.tensor([4, 2], dtype=torch.uint8))
    monkeypatch.setattr(torch.mps, "set_rng_state", restored.append)
    trainer = begin(tmp_path, dataset(tmp_path, table))
    trainer.device = torch.device("mps")
    trainer.save()
    trainer.restore(load_checkpoint(list_checkpoints(tmp_path)[-1]))
    assert [state.tolist() for state in restored] == [[4, 2]]


LITTLE_MEMORY = """
import os, runpy, sys
from histocoder.training import encoded_rows
encoded_rows.total_bytes = lambda: 0.0 if os.environ["RANK"] == "1" else float("inf")
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_frozen_outputs_are_kept_by_all_ranks_or_none(tmp_path: Path, table: Path):
    args = finetune(
        table, tmp_path / "out", "--freeze-encoder", "--batch-size", 4, "--max-steps", 2
    )
    first, _ = two_ranks(["-c", LITTLE_MEMORY, *args])
    assert "are computed in each step" in first.stdout
