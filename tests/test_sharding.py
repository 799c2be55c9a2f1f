"""Ways to train in less memory, each of which comes to what training comes to."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import run, write_table
from jobs import finetune, two_ranks
from test_scripts import assert_same_weights, logs
from test_speed import begin, dataset, losses

from histocoder.config import StrategyConfig
from histocoder.engine import _Run
from histocoder.errors import UserError
from histocoder.strategies import check_strategy

STEPS = ("--target-cols", "hisco_1", "hisco_2", "--language-col", "lang", "--max-steps", 10, "--eval-interval", 5)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_table(tmp_path_factory.mktemp("data") / "table.csv", two_codes=True)


@pytest.fixture(scope="module")
def alone(data: Path) -> Path:
    """A run of one process, with checkpoints at steps 4, 8 and 10."""
    run(*finetune(data, data.parent / "alone", *STEPS, "--batch-size", 8, "--save-interval", 4))
    return data.parent / "alone"


def begun(folder: Path, **options: Any) -> _Run:
    """A run that draws random numbers in every layer."""
    found = begin(
        folder, dataset(folder, write_table(folder / "table.csv"), ("hisco_1",)), num_classes=8, batch_size=4, **options
    )
    found.model.encoder.config.hidden_dropout_prob = 0.1
    for module in found.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
    return found


@pytest.mark.parametrize(
    "options", [{"precision": "fp32"}, {"precision": "bf16"}, {"precision": "fp32", "compile": True}]
)
def test_checkpointing_keeps_less_and_changes_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    found = []
    for checkpointing in (False, True):
        torch._dynamo.reset()
        kept: list[int] = []
        trained = begun(tmp_path, gradient_checkpointing=checkpointing, **options)
        with torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: kept.append(x.numel()) or x, lambda x: x):
            found.append((losses(trained, 6, pad=False), [p.detach() for p in trained.model.parameters()], sum(kept)))
    (before, weights, num_before), (after, others, num_after) = found
    assert before == after and all(map(torch.equal, weights, others))
    assert num_after < num_before / 2


@pytest.mark.parametrize("frozen", [(), ("--freeze-encoder", "--augmentation-prob", 0, "--unk-lang-prob", 0)])
def test_checkpointing_goes_with_a_frozen_encoder(data: Path, tmp_path: Path, frozen: tuple[object, ...]):
    args = (*STEPS, "--max-steps", 4, "--batch-size", 8, "--dropout", 0.1, *(frozen or ("--freeze-encoder",)))
    for name, extra in (("one", ()), ("other", ("--gradient-checkpointing",))):
        run(*finetune(data, tmp_path / name, *args, *extra))
    assert_same_weights(tmp_path / "one", tmp_path / "other", tolerance=0)


@pytest.mark.parametrize(
    ("flags", "tolerance", "name"),
    [
        (("--zero-optimizer",), 1e-6, "DDP, ZeRO-1"),
        (("--ddp-comm-hook", "fp16"), 1e-3, "DDP, fp16 gradients"),
    ],
)
def test_two_ranks_come_to_what_one_does(
    alone: Path, data: Path, tmp_path: Path, flags: tuple[str, ...], tolerance: float, name: str
):
    two_ranks(finetune(data, tmp_path / "out", *STEPS, "--batch-size", 4, *flags))
    for column in ("train_loss", "val_loss"):
        assert logs(tmp_path / "out", column) == pytest.approx(logs(alone, column), abs=tolerance)


def test_a_comm_hook_that_a_device_can_not_do_is_refused():
    with pytest.raises(UserError, match="needs GPUs"):
        check_strategy(StrategyConfig(ddp_comm_hook="bf16"), torch.device("cpu"))


def test_one_process_says_what_has_no_effect(alone: Path, data: Path, tmp_path: Path):
    flags = ("--zero-optimizer", "--ddp-comm-hook", "fp16")
    output = run(*finetune(data, tmp_path / "out", *STEPS, "--batch-size", 8, *flags)).stdout
    assert "Notice: --zero-optimizer and --ddp-comm-hook fp16 has no effect" in output
    assert_same_weights(tmp_path / "out", alone, tolerance=0)
