"""Ways to train on more processes or in less memory, each of which comes to what training comes
to.
"""

import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import run, slow, succeeded, write_table
from jobs import assert_same_weights, finetune, logged, ranks, two_ranks
from pretrained import save_pretrained
from trainers import begin, dataset

from histocoder.checkpoints.training_state import list_checkpoints, step_of
from histocoder.training.trainer import Trainer

STEPS = (
    "--target-cols",
    "hisco_1",
    "hisco_2",
    "--language-col",
    "lang",
    "--max-steps",
    8,
    "--eval-interval",
    4,
)
STEPS += (
    "--share-val",
    0.08,
)  # five rows, so that ranks may have different numbers of batches to validate on
SHARDED, GRADS = ("--fsdp", "full_shard"), ("--fsdp", "shard_grad_op")
IN_LESS = (*SHARDED, "--gradient-checkpointing")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_table(tmp_path_factory.mktemp("data") / "table.csv", two_codes=True)


@pytest.fixture(scope="module")
def alone(data: Path) -> Path:
    run(*finetune(data, data.parent / "alone", *STEPS, "--batch-size", 12))
    return data.parent / "alone"


def begun(folder: Path, **options: Any) -> Trainer:
    """A run that draws random numbers in every layer."""
    found = begin(
        folder, dataset(folder, write_table(folder / "table.csv")), batch_size=4, **options
    )
    sizes = found.model.encoder.config
    sizes.hidden_dropout_prob = sizes.attention_probs_dropout_prob = 0.1
    for module in found.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_checkpointing_keeps_less_and_changes_no_bit(tmp_path: Path, precision: str):
    found = []
    for checkpointing in (False, True):
        kept: list[int] = []
        trained = begun(tmp_path, gradient_checkpointing=checkpointing, precision=precision)
        trained.model.train()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, kept=kept: kept.append(x.numel()) or x, lambda x: x
        ):
            steps = [
                trained.learner.train_step([batch])[0] for batch in islice(trained.train_loader, 3)
            ]
            found.append((steps, [p.detach() for p in trained.model.parameters()], sum(kept)))
    (before, weights, num_before), (after, others, num_after) = found
    assert before == after and all(map(torch.equal, weights, others))
    assert num_after < num_before / 2


@pytest.mark.parametrize(
    ("processes", "accumulated", "flags"),
    [
        (1, 2, ()),
        slow(1, 3, ()),
        (2, 3, ()),
        (2, 3, SHARDED),
        slow(2, 1, GRADS),
        (1, 1, IN_LESS),
        slow(2, 1, IN_LESS),
    ],
)
def test_parts_train_as_one_process(
    alone: Path, data: Path, tmp_path: Path, processes: int, accumulated: int, flags
):
    size = 12 // processes // accumulated
    sizes = ("--batch-size", size, "--gradient-accumulation-steps", accumulated)
    args = finetune(data, tmp_path / "out", *STEPS, *sizes, *flags)
    printed = run(*args).stdout if processes == 1 else two_ranks(args)[0].stdout
    assert ("strategy    FSDP" in printed) == ("--fsdp" in flags)
    assert (
        accumulated == 1 or f"{size} × {accumulated} accumulated × {processes} process" in printed
    )
    assert "= 12 rows a step" in printed
    for column in ("train_loss", "val_loss", "grad_norm"):
        assert logged(tmp_path / "out", column) == pytest.approx(
            logged(alone, column), abs=2e-6, rel=1e-5
        )
    assert_same_weights(tmp_path / "out", alone, tolerance=1e-4)


def test_gradients_in_bf16_train_alike(alone: Path, data: Path, tmp_path: Path):
    two_ranks(finetune(data, tmp_path / "out", *STEPS, "--batch-size", 6, "--bf16-gradients"))
    for column in ("train_loss", "val_loss"):
        found, expected = logged(tmp_path / "out", column), logged(alone, column)
        assert found == pytest.approx(expected, rel=1e-2) and found != expected


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "precision"), [("xlm-r", "bf16"), ("byt5", "fp32")])
def test_other_encoders_are_sharded_too(table: Path, tmp_path: Path, kind: str, precision: str):
    encoder = ("--encoder", save_pretrained(kind, tmp_path / kind), "--precision", precision)
    args = (*encoder, "--max-len", 64, "--max-steps", 4, "--eval-interval", 2, "--share-val", 0.08)
    run(*finetune(table, tmp_path / "one", *args, "--batch-size", 4))
    ended = two_ranks(finetune(table, tmp_path / "two", *args, "--batch-size", 2, *SHARDED))
    assert all("deprecated" not in one.stderr for one in ended) and "Loading" not in ended[1].stderr
    for column in ("train_loss", "val_loss"):
        tolerance = 1e-5 if precision == "fp32" else 1e-2
        assert logged(tmp_path / "two", column) == pytest.approx(
            logged(tmp_path / "one", column), abs=tolerance
        )
    run("-m", "histocoder", "predict", "--model", tmp_path / "two", "farmer")


COUNTED = """
import runpy, sys
from histocoder.training.trainer import Trainer
save = Trainer.save_result
def count(trainer):
    save(trainer)
    own = sum(p.to_local().numel() for p in trainer.learner.model.parameters())
    moments = [t for state in trainer.learner.optimizer.state.values() for t in state.values() if t.dim()]
    total = sum(t.numel() for t in trainer.learner.model.parameters())
    print("numbers", total, own, sum(t.to_local().numel() for t in moments))
Trainer.save_result = count
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_each_of_two_ranks_holds_half(data: Path, tmp_path: Path):
    args = finetune(data, tmp_path / "out", *STEPS, "--max-steps", 2, "--batch-size", 6, *SHARDED)
    for one in two_ranks(["-c", COUNTED, *args]):
        total, own, state = map(int, one.stdout.split("numbers ")[1].splitlines()[0].split())
        assert own == pytest.approx(total / 2, rel=0.05) and state == pytest.approx(total, rel=0.05)


@pytest.mark.slow
def test_runs_resume_under_any_strategy(alone: Path, data: Path, tmp_path: Path):
    out, ways = (
        tmp_path / "out",
        ((3, ()), (2, GRADS), (3, SHARDED), (2, ()), (1, SHARDED), (1, ()), (2, ())),
    )
    for start, (processes, flags) in enumerate(ways):
        for checkpoint in list_checkpoints(out):
            if step_of(checkpoint) > start:
                shutil.rmtree(checkpoint)
        args = (
            *STEPS,
            "--batch-size",
            12 // processes,
            "--save-interval",
            1,
            "--keep-checkpoints",
            9,
            *flags,
        )
        with ranks(*[finetune(data, out, *args)] * processes) as started:
            ended = [succeeded(process.result()) for process in started]
        assert start == 0 or f"Resuming from step {start}" in ended[0].stdout
        for column in ("train_loss", "val_loss", "grad_norm"):
            assert logged(out, column) == pytest.approx(
                logged(alone, column), abs=2e-5
            )  # of six digits
