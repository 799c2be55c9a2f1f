"""W&B and TensorBoard: what they are told, under which names, and what happens where they fail."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import refused, run
from jobs import assert_complete, finetune, logged, two_ranks

TRAINING = {"train/loss", "train/grad_norm", "train/epoch", "train/skipped_steps"}
VALIDATION = {f"val/{name}" for name in ("loss", "loss_linear", "loss_seq2seq")} | {
    f"val/{name}" for name in ("seq_acc", "token_acc", "flat_acc", "greedy_seq_acc")
}
ON_A_CPU = TRAINING | VALIDATION | {"hyperparams/lr", "perf/rows_per_sec"}
Curves = dict[str, list[tuple[int, float]]]


def curves(out: Path) -> Curves:
    """What TensorBoard shows of a run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.slow
def test_the_same_numbers_everywhere(table: Path, tmp_path: Path):
    out, flags = tmp_path / "out", ("--log-wandb", "--log-tensorboard", "--wandb-artifact", "--max-steps", 3)
    result = run(*finetune(table, out, *flags, "--batch-size", 8), fresh=True)
    assert "warning" not in result.stderr.lower() and list((out / "wandb").glob("offline-run-*/*.wandb"))
    shown = curves(out)
    assert set(shown) == ON_A_CPU
    for column, name in (("train_loss", "train/loss"), ("lr", "hyperparams/lr"), ("seq_acc", "val/seq_acc")):
        assert [value for _, value in shown[name]] == pytest.approx(logged(out, column), rel=1e-5)
    assert [step for step, _ in shown["train/loss"]] == [1, 2, 3] and len(shown["val/loss"]) == 1


@pytest.mark.slow
def test_two_ranks_show_what_one_process_shows(table: Path, tmp_path: Path):
    extra = ("--max-steps", 6, "--eval-interval", 3, "--log-interval", 2, "--log-tensorboard")
    run(*finetune(table, tmp_path / "one", "--batch-size", 8, *extra))
    two_ranks(finetune(table, tmp_path / "two", "--batch-size", 4, *extra))
    assert len(list((tmp_path / "two" / "tensorboard").iterdir())) == 1  # rank 0's
    one, two = curves(tmp_path / "one"), curves(tmp_path / "two")
    assert set(two) == ON_A_CPU
    for name in ON_A_CPU - {"perf/rows_per_sec"}:
        assert [step for step, _ in two[name]] == [step for step, _ in one[name]]
        assert [value for _, value in two[name]] == pytest.approx([value for _, value in one[name]], abs=1e-4), name


def test_a_resumed_run_continues_its_curves(table: Path, tmp_path: Path):
    out, extra = tmp_path / "out", ("--batch-size", 8, "--save-interval", 2, "--keep-checkpoints", 9)
    run(*finetune(table, out, *extra, "--max-steps", 6, "--log-tensorboard"))
    older = ("--max-steps", 5, "--resume", out / "checkpoints" / "step-0000002", "--log-tensorboard")
    run(*finetune(table, out, *extra, *older))
    assert [step for step, _ in curves(out)["train/loss"]] == [1, 2, 3, 4, 5]
    assert [step for step, _ in curves(out)["val/loss"]] == [5]
    run(*finetune(table, out, *extra, "--max-steps", 1, "--overwrite"))
    assert not (out / "tensorboard").exists()


@pytest.mark.parametrize(
    ("flag", "missing", "said"),
    [
        ("--log-tensorboard", "tensorboard", "--log-tensorboard needs tensorboard: pip install tensorboard."),
        ("--log-wandb", "wandb", "--log-wandb needs wandb: pip install wandb."),
        ("--wandb-artifact", "", "needs --log-wandb"),
    ],
)
def test_what_is_missing_is_named_first(table: Path, tmp_path: Path, flag: str, missing: str, said: str):
    args = finetune(table, tmp_path / "out", "--batch-size", 8, flag)
    code = (
        f"import importlib.util as u, runpy, sys; find = u.find_spec\n"
        f"u.find_spec = lambda name, *rest: None if name == {missing!r} else find(name, *rest)\n"
        f"sys.argv = {args!r}; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    assert said in refused("-c", code) and not (tmp_path / "out").exists()


WRITING = "EROFS:tensorboard.summary.writer.record_writer.RecordWriter.write"


@pytest.mark.parametrize(
    ("fault", "flags", "service", "why"),
    [
        (f"{WRITING}:1", ("--log-tensorboard",), "TensorBoard", "Read-only file system"),
        (f"{WRITING}:20", ("--log-tensorboard",), "TensorBoard", "Read-only file system"),
        ("wandb:log_artifact:raises", ("--log-wandb", "--wandb-artifact"), "W&B", "failed (the service is ill)"),
    ],
)
def test_failing_dashboards_do_not_end_the_run(
    table: Path, tmp_path: Path, fault: str, flags: tuple[str, ...], service: str, why: str
):
    args = finetune(table, tmp_path / "out", "--batch-size", 8, "--max-steps", 4, *flags)
    assert_complete(run("tests/faulty.py", fault, "--", *args), tmp_path / "out", service, why)
