"""W&B and TensorBoard: what they are told, under which names, and what happens where they fail."""

import socket
from pathlib import Path

import pytest
import torch
from conftest import cases, environment, free_port, run
from forked import Ended
from jobs import faulty, finetune, logged, two_ranks
from pretended_gpu import Log

from histocoder.model.devices import peak_gpu_memory
from histocoder.training.tracking import Dashboard, RunLog

VALIDATION = "loss loss_linear loss_seq2seq seq_acc token_acc flat_acc greedy_seq_acc".split()
TRAINING = {f"train/{name}" for name in ("loss", "grad_norm", "epoch", "skipped_steps")}
ON_A_CPU = (
    {f"val/{name}" for name in VALIDATION} | TRAINING | {"hyperparams/lr", "perf/rows_per_sec"}
)


def curves(out: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    return {
        tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


def test_the_memory_of_a_gpu_is_logged(tmp_path: Path, gpu: Log):
    sent = []
    dashboard = Dashboard(lambda values, step: sent.append((step, values)), lambda: None)
    tracker = RunLog(tmp_path / "logs.csv")
    tracker.begin(start_step=0)
    tracker.add_dashboard("W&B", lambda: dashboard)
    tracker.log(1, {"train_loss": 1.0, **peak_gpu_memory(torch.device("cuda", 0))})
    assert logged(tmp_path, "gpu_memory_gb") == [2.0]
    assert sent == [(1, {"train/loss": 1.0, "perf/gpu_memory_gb": 2.0})]


def assert_complete(result: Ended, out: Path, service: str, why: str) -> None:
    """One warning; everything else as in a run without the service."""
    warnings = [line for line in result.stderr.splitlines() if f"Warning: {service}" in line]
    assert len(warnings) == 1 and why in warnings[0], result.stderr
    assert (out / "model.safetensors").exists()
    assert logged(out, "step") == [1, 2, 3, 4, 4] and len(logged(out, "train_loss")) == 4


@pytest.mark.slow
def test_two_ranks_show_what_one_process_shows(table: Path, tmp_path: Path):
    extra = ("--max-steps", 6, "--eval-interval", 3, "--log-interval", 2, "--log-tensorboard")
    run(*finetune(table, tmp_path / "one", "--batch-size", 8, *extra, "--log-wandb"), fresh=True)
    assert list((tmp_path / "one" / "wandb").glob("offline-run-*/*.wandb"))
    two_ranks(finetune(table, tmp_path / "two", "--batch-size", 4, *extra))
    assert len(list((tmp_path / "two" / "tensorboard").iterdir())) == 1  # rank 0's
    one, two = curves(tmp_path / "one"), curves(tmp_path / "two")
    assert set(two) == ON_A_CPU
    for name in ON_A_CPU - {"perf/rows_per_sec"}:
        assert [step for step, _ in two[name]] == [step for step, _ in one[name]]
        assert [value for _, value in two[name]] == pytest.approx(
            [value for _, value in one[name]], abs=1e-4
        ), name
    for column, name in (
        ("train_loss", "train/loss"),
        ("lr", "hyperparams/lr"),
        ("seq_acc", "val/seq_acc"),
    ):
        assert [value for _, value in one[name]] == pytest.approx(
            logged(tmp_path / "one", column), rel=1e-5
        )


def test_a_resumed_run_continues_its_curves(table: Path, tmp_path: Path):
    out, extra = (
        tmp_path / "out",
        ("--batch-size", 8, "--save-interval", 2, "--keep-checkpoints", 9),
    )
    run(*finetune(table, out, *extra, "--max-steps", 6, "--log-tensorboard"))
    older = (
        "--max-steps",
        5,
        "--resume",
        out / "checkpoints" / "step-0000002",
        "--log-tensorboard",
    )
    run(*finetune(table, out, *extra, *older))
    assert [step for step, _ in curves(out)["train/loss"]] == [1, 2, 3, 4, 5]
    assert [step for step, _ in curves(out)["val/loss"]] == [5]
    assert sorted(path.name[-1] for path in (out / "checkpoints").iterdir()) == ["2", "4", "5"]


WRITING = "EROFS:tensorboard.summary.writer.record_writer.RecordWriter.write"


@cases(
    ("fault", "flag", "service", "why"),
    (f"{WRITING}:1", "--log-tensorboard", "TensorBoard", "Read-only file system"),
    (f"{WRITING}:20", "--log-tensorboard", "TensorBoard", "Read-only file system"),
    *(
        (f"wandb:{call}", "--log-wandb", "W&B", "the service is ill")
        for call in ("init", "log", "finish")
    ),
)
def test_failing_dashboards_end_no_run(
    table: Path, tmp_path: Path, fault: str, flag: str, service: str, why: str
):
    args = finetune(table, tmp_path / "out", "--batch-size", 8, "--max-steps", 4, flag)
    assert_complete(run(*faulty(args, fault)), tmp_path / "out", service, why)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["refuses", "hangs"])
def test_wandb_with_an_unreachable_server(table: Path, tmp_path: Path, how: str):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1] if how == "hangs" else free_port()
        online = {
            "WANDB_MODE": "online",
            "WANDB_API_KEY": "0" * 40,
            "WANDB_BASE_URL": f"http://127.0.0.1:{port}",
        }
        args = finetune(table, tmp_path / "out", "--batch-size", 8, "--max-steps", 4, "--log-wandb")
        result = run(*args, env=environment(**online), fresh=True)
    assert_complete(result, tmp_path / "out", "W&B", "")


@pytest.mark.slow
def test_wandb_offline_keeps_its_run(table: Path, tmp_path: Path):
    out = tmp_path / "out"
    for steps in (2, 4):
        run(
            *finetune(table, out, "--batch-size", 8, "--max-steps", steps, "--log-wandb"),
            fresh=True,
        )
    run_id = (out / "wandb_run_id").read_text().strip()
    assert {path.name.rpartition("-")[2] for path in (out / "wandb").glob("offline-run-*")} == {
        run_id
    }
