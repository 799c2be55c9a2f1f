"""W&B and TensorBoard: what they are told, under which names, and what happens where they fail."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import run
from jobs import assert_complete, finetune, logged, two_ranks
from pretrained import save_pretrained

from histocoder.ops.memory import peak_gpu_memory
from histocoder.training.dashboards import run_name

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


def wandb_records(out: Path) -> list:
    """What an offline run would send to W&B: its file is a log in LevelDB's form behind a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = (out / "wandb").glob("offline-run-*/*.wandb")
    content, at, parts, records = path.read_bytes(), 7, b"", []
    while at < len(content):
        if (left := -at % 32_768) < 7:  # no room for a part's header in this block
            at += left
        size, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        parts += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            records.append(Record.FromString(parts))
            parts = b""
    return records


def wandb_names(records: list) -> set[str]:
    names = {item.nested_key[0] if item.nested_key else item.key for r in records for item in r.history.item}
    return {name for name in names if not name.startswith("_")}


def artifact_of(records: list) -> Any:
    (artifact,) = (r.request.log_artifact.artifact if r.HasField("request") else r.artifact
                   for r in records if r.HasField("artifact") or r.request.HasField("log_artifact"))  # fmt: skip
    return artifact


@pytest.mark.slow
def test_the_same_names_and_numbers_everywhere(table: Path, tmp_path: Path):
    out = tmp_path / "out"
    extra = ("--batch-size", 8, "--max-steps", 3, "--log-wandb", "--log-tensorboard", "--wandb-artifact")
    result = run(*finetune(table, out, *extra), fresh=True)
    assert "warning" not in result.stderr
    shown = curves(out)
    assert set(shown) == ON_A_CPU
    for column, name in (("train_loss", "train/loss"), ("lr", "hyperparams/lr"), ("seq_acc", "val/seq_acc")):
        assert [value for _, value in shown[name]] == pytest.approx(logged(out, column), rel=1e-5)
    assert [step for step, _ in shown["train/loss"]] == [1, 2, 3] and len(shown["val/loss"]) == 1

    records = wandb_records(out)
    assert wandb_names(records) == ON_A_CPU
    names = {r.run.display_name for r in records if r.HasField("run")}
    assert names == {"tiny_hisco_gpu1"} and {r.run.project for r in records if r.HasField("run")} == {"histco-v2-mixer"}
    artifact = artifact_of(records)
    assert (artifact.name, artifact.type) == ("tiny_hisco_gpu1", "model")
    files = {entry.path: Path(entry.local_path) for entry in artifact.manifest.contents}
    assert set(files) == {"config.json", "model.safetensors", "manifest.json", "README.md"}
    assert files["model.safetensors"].read_bytes() == (out / "model.safetensors").read_bytes()
    assert files["model.safetensors"].is_relative_to(out)  # not in the user's home


@pytest.mark.slow
def test_an_artifact_predicts_without_the_folder_that_it_comes_from(table: Path, tmp_path: Path):
    encoder = ("--encoder", save_pretrained("bert", tmp_path / "bert"), "--max-len", 32)
    extra = ("--batch-size", 8, "--max-steps", 1, "--log-wandb", "--wandb-artifact")
    run(*finetune(table, tmp_path / "out", *extra, *encoder))
    for entry in artifact_of(wandb_records(tmp_path / "out")).manifest.contents:
        file = tmp_path / "downloaded" / entry.path
        file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(entry.local_path, file)
    for folder in ("bert", "out"):
        shutil.rmtree(tmp_path / folder)
    assert "farmer" in run("-m", "histocoder", "predict", "--model", tmp_path / "downloaded", "farmer").stdout


def test_the_name_of_a_run():
    assert run_name("google/canine-s", "hisco", world_size=4) == "canine-s_hisco_gpu4"
    assert run_name("/models/my-encoder/", "psti", world_size=1) == "my-encoder_psti_gpu1"


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


def test_a_resumed_run_goes_on_in_its_curves_and_a_new_one_begins_new_ones(table: Path, tmp_path: Path):
    out, extra = tmp_path / "out", ("--batch-size", 8, "--save-interval", 2, "--keep-checkpoints", 9)
    run(*finetune(table, out, *extra, "--max-steps", 6, "--log-tensorboard"))
    older = ("--max-steps", 5, "--resume", out / "checkpoints" / "step-0000002", "--log-tensorboard")
    run(*finetune(table, out, *extra, *older))
    assert [step for step, _ in curves(out)["train/loss"]] == [1, 2, 3, 4, 5]
    assert [step for step, _ in curves(out)["val/loss"]] == [5]
    run(*finetune(table, out, *extra, "--max-steps", 1, "--overwrite"))
    assert not (out / "tensorboard").exists()


@pytest.mark.parametrize(("flag", "module"), [("--log-tensorboard", "tensorboard"), ("--log-wandb", "wandb")])
def test_a_dashboard_that_is_not_installed_is_named_before_anything_is_written(
    table: Path, tmp_path: Path, flag: str, module: str
):
    args = finetune(table, tmp_path / "out", "--batch-size", 8, flag)
    code = (
        f"import importlib.util as u, runpy, sys; find = u.find_spec\n"
        f"u.find_spec = lambda name, *rest: None if name == {module!r} else find(name, *rest)\n"
        f"sys.argv = {args!r}; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    result = run("-c", code, check=False)
    assert result.returncode == 2 and f"{flag} needs {module}: pip install {module}." in result.stderr
    assert not (tmp_path / "out").exists()


def test_an_artifact_without_wandb_is_refused(table: Path, tmp_path: Path):
    result = run(*finetune(table, tmp_path / "out", "--batch-size", 8, "--wandb-artifact"), check=False)
    assert result.returncode == 2 and "needs --log-wandb" in result.stderr and not (tmp_path / "out").exists()


@pytest.mark.parametrize("at", [1, 20])
def test_a_disk_that_fails_tensorboard_does_not_end_the_run(table: Path, tmp_path: Path, at: int):
    fault = f"EROFS:tensorboard.summary.writer.record_writer.RecordWriter.write:{at}"
    args = finetune(table, tmp_path / "out", "--batch-size", 8, "--max-steps", 4, "--log-tensorboard")
    result = run("tests/faulty.py", fault, "--", *args)
    assert_complete(result, tmp_path / "out", "TensorBoard", "Read-only file system")


def test_an_artifact_that_fails_does_not_end_the_run(table: Path, tmp_path: Path):
    extra = ("--batch-size", 8, "--max-steps", 4, "--log-wandb", "--wandb-artifact")
    result = run("tests/faulty.py", "wandb:log_artifact:raises", "--", *finetune(table, tmp_path / "out", *extra))
    assert_complete(result, tmp_path / "out", "W&B", "failed (the service is ill)")


def test_the_memory_of_a_gpu(monkeypatch: pytest.MonkeyPatch):
    import torch

    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 12_345_000_000)
    assert peak_gpu_memory(torch.device("cuda", 0)) == {"gpu_memory_gb": 12.345}
    assert peak_gpu_memory(torch.device("cpu")) == {}
