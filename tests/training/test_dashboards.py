"""W&B and TensorBoard: what they are told, under which names, and what happens where they fail."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from conftest import refused, run
from jobs import assert_complete, finetune, logged, two_ranks
from pretrained import save_pretrained

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


@pytest.mark.slow
def test_the_same_names_and_numbers_everywhere(table: Path, tmp_path: Path):
    out = tmp_path / "out"
    flags = ("--log-wandb", "--log-tensorboard", "--wandb-artifact", "--batch-size", 8, "--max-steps", 3)
    encoder = ("--encoder", save_pretrained("bert", tmp_path / "bert"), "--max-len", 32)
    result = run(*finetune(table, out, *flags, *encoder), fresh=True)
    assert "warning" not in result.stderr
    shown = curves(out)
    assert set(shown) == ON_A_CPU
    for column, name in (("train_loss", "train/loss"), ("lr", "hyperparams/lr"), ("seq_acc", "val/seq_acc")):
        assert [value for _, value in shown[name]] == pytest.approx(logged(out, column), rel=1e-5)
    assert [step for step, _ in shown["train/loss"]] == [1, 2, 3] and len(shown["val/loss"]) == 1

    records = wandb_records(out)
    runs = [(record.run.display_name, record.run.project) for record in records if record.HasField("run")]
    assert wandb_names(records) == ON_A_CPU and set(runs) == {("bert_hisco_gpu1", "histco-v2-mixer")}
    (artifact,) = (
        record.request.log_artifact.artifact if record.HasField("request") else record.artifact
        for record in records
        if record.HasField("artifact") or record.request.HasField("log_artifact")
    )
    assert (artifact.name, artifact.type) == ("bert_hisco_gpu1", "model")
    for entry in artifact.manifest.contents:
        file = tmp_path / "downloaded" / entry.path
        file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(entry.local_path, file)
        assert Path(entry.local_path).is_relative_to(out)  # not in the user's home
    for folder in ("bert", "out"):
        shutil.rmtree(tmp_path / folder)
    assert "farmer" in run("-m", "histocoder", "predict", "--model", tmp_path / "downloaded", "farmer").stdout


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
