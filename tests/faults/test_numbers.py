"""Losses and gradients that are not finite: no rank takes such a step, and no such weights are
saved.
"""

import math
from pathlib import Path

import pytest
import torch
from conftest import refused, run
from jobs import assert_same_weights, faulty, finetune, logged, two_ranks
from trainers import begin, dataset

from histocoder.checkpoints.training_state import list_checkpoints
from histocoder.errors import UserError


def test_weights_that_are_not_finite_are_not_saved(table: Path, tmp_path: Path):
    trainer = begin(tmp_path, dataset(tmp_path, table))
    trainer.learner.train_step([next(iter(trainer.train_loader))])
    trainer.state.step = 1
    trainer.save()
    with torch.no_grad():
        next(trainer.model.parameters())[0] = math.inf
    trainer.state.step = 2
    with pytest.raises(
        UserError, match=r"weights are not finite.*last good checkpoint is .*step-0000001.*--init"
    ):
        trainer.save()
    assert [path.name for path in list_checkpoints(trainer.run.path)] == ["step-0000001"]


def test_validation_losses_that_are_not_finite_end_runs(table: Path, tmp_path: Path):
    out, extra = tmp_path / "out", ("--batch-size", 8, "--max-steps", 3, "--learning-rate", "1e30")
    assert refused(*finetune(table, out, *extra)).startswith(
        "error: The validation loss of step 3 is not finite, and"
    )
    assert not (out / "model.safetensors").exists()
    better = ("--resume", "never", "--eval-interval", 1, "--warmup-pct", 1)
    assert f"{out / 'best'} holds the best model so far" in refused(
        *finetune(table, out, *extra, *better)
    )
    assert (out / "best" / "model.safetensors").exists()


def test_the_advice_after_divergence_works(table: Path, tmp_path: Path):
    out, steps = (
        tmp_path / "out",
        ("--batch-size", 8, "--max-steps", 5, "--eval-interval", 1, "--warmup-pct", 1),
    )
    args = finetune(table, out, *steps)
    said = refused(*faulty([*args, "--max-skipped-steps", "2"], "nan:0:3-5"))
    assert "The same command would diverge at the same step" in said
    flags = said.rpartition("such as a tenth: ")[2].strip().rstrip(".").split()
    assert flags == ["--initial-checkpoint", str(out / "best"), "--learning-rate", "0.0001"]
    more = run(*finetune(table, tmp_path / "more", *steps, *flags))
    assert "Saved in" in more.stdout and "not finite" not in more.stderr


@pytest.mark.parametrize("kind", ["nan", "inf"])
def test_a_loss_of_one_rank_makes_all_skip(table: Path, tmp_path: Path, kind: str):
    one, two = tmp_path / "one", tmp_path / "two"
    extra = ("--max-steps", 8, "--eval-interval", 4, "--save-interval", 2, "--keep-checkpoints", 9)
    run(*faulty(finetune(table, one, *extra, "--batch-size", 8), f"{kind}:0:3-4"))
    two_ranks(faulty(finetune(table, two, *extra, "--batch-size", 4), f"{kind}:1:3-4"))
    assert_same_weights(one, two, tolerance=1e-4)
    for out in (one, two):
        assert logged(out, "skipped_steps") == [0, 0, 1, 1, 0, 0, 0, 0]
        assert len(logged(out, "train_loss")) == 6 and all(
            map(math.isfinite, logged(out, "train_loss"))
        )
        before, after, later = list_checkpoints(out)[:3]
        assert_same_weights(before, after)
        with pytest.raises(AssertionError):
            assert_same_weights(after, later)
    # each rank validates its share of the rows with its own weights
    assert logged(two, "val_loss") == pytest.approx(logged(one, "val_loss"), abs=1e-5)


@pytest.mark.slow
def test_too_many_skipped_steps_end_the_run(table: Path, tmp_path: Path):
    out, extra = (
        tmp_path / "out",
        ("--max-steps", 20, "--save-interval", 2, "--max-skipped-steps", 3),
    )
    ended = two_ranks(
        faulty(finetune(table, out, *extra, "--batch-size", 4), "nan:1:5-20"), status=None
    )
    said = ended[0].stderr + ended[1].stderr
    told = [
        line for line in said.splitlines() if line.startswith("error: ")
    ]  # torch may add that a connection is gone
    assert 0 not in [one.returncode for one in ended] and len(told) == 1, said
    assert (
        "last 3 steps are not finite, and the last good checkpoint is "
        f"{out}/checkpoints/step-0000006"
    ) in said
    assert [path.name[-1] for path in list_checkpoints(out)] == ["4", "6"] and not (
        out / "model.safetensors"
    ).exists()
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
trainer = begin(folder, dataset(folder, Path({folder!r}, "table.csv")), encoder="ngram", batch_size=8)
learner, model = trainer.learner, trainer.model
learner.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)  # as in fp16, which is for GPUs
for step, batch in zip(range(3), trainer.train_loader):
    learner.backward(batch.weight * mixed_loss(learner.forward(batch), batch, model.config, learner.config))
    if (step, distributed.rank()) == (1, 1):
        next(filter(is_table, model.parameters())).grad *= float("inf")
    learner.step()
torch.save([learner.scaler.get_scale(), *model.parameters()], folder / "end.pt")
distributed.stop()
"""


def test_an_inf_of_one_rank_lowers_all_scales(table: Path):
    two_ranks(["-c", SCALED.format(tests=str(Path(__file__).parents[1]), folder=str(table.parent))])
    (scale, *weights), (other_scale, *other) = (
        torch.load(table.parent / rank / "end.pt") for rank in "01"
    )
    assert scale == other_scale == 2.0
    assert all(map(torch.equal, weights, other)) and all(
        weight.isfinite().all() for weight in weights
    )
