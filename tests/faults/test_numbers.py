"""Losses and gradients that are not finite: no rank takes such a step, and no such weights are saved."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from conftest import run, write_table
from jobs import assert_same_weights, faulty, finetune, logged, two_ranks
from safetensors.torch import load_file
from trainers import begin, dataset

from histocoder.checkpoints.training_state import list_checkpoints
from histocoder.errors import UserError
from histocoder.training import learner as learner_module
from histocoder.training.meter import Meter
from histocoder.training.trainer import Trainer


@pytest.fixture
def started(tmp_path: Path) -> Trainer:
    """A run of one process that has done a step, so that its optimizer has a state."""
    data = dataset(tmp_path, write_table(tmp_path / "table.csv"), ("hisco_1",))
    trainer = begin(tmp_path, data, precision="fp32", num_classes=8)
    one_step(trainer)
    return trainer


def one_step(trainer: Trainer) -> None:
    batch = next(iter(trainer.train_loader))
    loss, grad_norm = trainer.learner.train_step([batch])
    trainer.state.step += 1
    trainer.meter.add(loss, grad_norm, rows=batch.num_rows)


def state_of(trainer: Trainer) -> list[torch.Tensor]:
    """Copies of the weights and of the optimizer's state."""
    moments = [tensor for state in trainer.learner.optimizer.state.values() for tensor in state.values()]
    return [tensor.detach().clone() for tensor in (*trainer.model.parameters(), *moments)]


@pytest.mark.parametrize(("summand", "factor"), [(0, math.nan), (0, math.inf), (math.inf, 1)])
def test_a_step_that_is_not_finite_changes_nothing(started: Trainer, monkeypatch, summand: float, factor: float):
    mixed_loss, before = learner_module.mixed_loss, state_of(started)  # of inf + loss, the gradients would be finite
    with monkeypatch.context() as patched:
        patched.setattr(learner_module, "mixed_loss", lambda *args: summand + factor * mixed_loss(*args))
        one_step(started)
    assert all(map(torch.equal, before, state_of(started)))
    one_step(started)
    assert not any(map(torch.equal, before, state_of(started)))
    found = started.meter.read()
    assert found["skipped_steps"] == 1 and math.isfinite(found["train_loss"] + found["grad_norm"])
    assert started.meter.skipped_in_a_row == 0


def test_losses_may_lie_elsewhere_than_norms(monkeypatch: pytest.MonkeyPatch):
    """As with --fsdp-cpu-offload; meta stands in for a GPU, which takes no mask from the CPU's memory."""
    fill = torch.Tensor.masked_fill

    def filled(tensor: torch.Tensor, mask: torch.Tensor, value: float) -> torch.Tensor:
        assert tensor.device == mask.device
        return fill(tensor, mask, value)

    monkeypatch.setattr(torch.Tensor, "masked_fill", filled)
    meter = Meter()
    meter.add(torch.ones((), device="meta"), torch.tensor(math.nan), rows=2)
    meter.add(torch.ones((), device="meta"), torch.tensor(2.0), rows=2)
    assert meter.loss.device.type == "meta" and (int(meter.skipped), float(meter.grad_norm)) == (1, 2.0)


def test_weights_that_are_not_finite_are_not_saved(started: Trainer):
    started.save()
    with torch.no_grad():
        next(started.model.parameters())[0] = math.inf
    started.state.step += 1
    with pytest.raises(UserError, match=r"weights are not finite.*last good checkpoint is .*step-0000001.*--init"):
        started.save()
    assert [path.name for path in list_checkpoints(started.run.path)] == ["step-0000001"]


def test_validation_losses_that_are_not_finite_end_runs(table: Path, tmp_path: Path):
    out = tmp_path / "out"
    extra = ("--batch-size", 8, "--max-steps", 3, "--learning-rate", "1e30")
    ended = run(*finetune(table, out, *extra), check=False)
    assert ended.returncode == 2 and ended.stderr.startswith("error: The validation loss of step 3 is not finite, and")
    assert not (out / "model.safetensors").exists() and "Saved" not in ended.stdout
    better = run(
        *finetune(table, out, *extra, "--resume", "never", "--eval-interval", 1, "--warmup-pct", 1), check=False
    )
    assert better.returncode == 2 and f"{out / 'best'} holds the best model so far" in better.stderr
    assert (out / "best" / "model.safetensors").exists()


def test_a_nan_loss_makes_all_ranks_skip(table: Path, tmp_path: Path):
    extra = ("--max-steps", 8, "--eval-interval", 4)
    run("tests/faulty.py", "nan:0:3-4", "--", *finetune(table, tmp_path / "one", *extra, "--batch-size", 8))
    two_ranks(faulty(finetune(table, tmp_path / "two", *extra, "--batch-size", 4), "nan:1:3-4"))
    assert_same_weights(tmp_path / "one", tmp_path / "two", tolerance=1e-4)
    for out in (tmp_path / "one", tmp_path / "two"):
        assert logged(out, "skipped_steps") == [0, 0, 1, 1, 0, 0, 0, 0]
        assert len(logged(out, "train_loss")) == 6 and all(map(math.isfinite, logged(out, "train_loss")))
    # each rank validates its share of the rows with its own weights
    assert logged(tmp_path / "two", "val_loss") == pytest.approx(logged(tmp_path / "one", "val_loss"), abs=1e-5)


@pytest.mark.slow
def test_too_many_skipped_steps_end_the_run_at_its_last_good_checkpoint(table: Path, tmp_path: Path):
    out = tmp_path / "out"
    extra = ("--batch-size", 4, "--max-steps", 20, "--save-interval", 2, "--max-skipped-steps", 3)
    ended = two_ranks(faulty(finetune(table, out, *extra), "nan:1:5-20"), check=False)
    said = ended[0].stderr + ended[1].stderr
    told = [line for line in said.splitlines() if line.startswith("error: ")]  # torch may add that a connection is gone
    assert 0 not in [one.returncode for one in ended] and len(told) == 1, said
    assert f"last 3 steps are not finite; the last good checkpoint is {out}/checkpoints/step-0000006" in said
    assert [path.name[-1] for path in list_checkpoints(out)] == ["4", "6"] and not (out / "model.safetensors").exists()
    four, six = (load_file(path / "model.safetensors") for path in list_checkpoints(out))
    assert all(torch.equal(four[name], six[name]) for name in four)
    again = run(*finetune(table, out, *extra, "--batch-size", 8))
    assert "Resuming from step 6" in again.stdout and (out / "model.safetensors").exists()


SCALED = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import torch
from trainers import begin, dataset
from histocoder import distributed
from histocoder.training.losses import mixed_loss
from histocoder.training.optimizer import is_table

distributed.start(device="cpu")
folder = Path({folder!r}, str(distributed.rank()))
data = dataset(folder, Path({folder!r}, "table.csv"), ("hisco_1",))
trainer = begin(folder, data, precision="fp32", num_classes=8, encoder_name="ngram", batch_size=8)
learner, model = trainer.learner, trainer.model
learner.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)  # as in fp16, which is for GPUs
for step, batch in zip(range(3), trainer.train_loader):
    learner.backward(batch.weight * mixed_loss(learner.forward(batch), batch, model.config, learner.config))
    if (step, distributed.rank()) == (1, 1):
        next(filter(is_table, model.parameters())).grad._values()[0] = float("inf")
    learner.step()
torch.save([learner.scaler.get_scale(), *model.parameters()], folder / "end.pt")
distributed.stop()
"""


def test_an_inf_of_one_rank_lowers_all_scales(table: Path):
    two_ranks(["-c", SCALED.format(tests=str(Path(__file__).parents[1]), folder=str(table.parent))])
    (scale, *weights), (other_scale, *other) = (torch.load(table.parent / rank / "end.pt") for rank in "01")
    assert scale == other_scale == 2.0
    assert all(map(torch.equal, weights, other)) and all(weight.isfinite().all() for weight in weights)
