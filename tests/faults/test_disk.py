"""What happens to the files of a run: saves that are killed, damage, disks that are full or gone."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import run, write_table
from jobs import (
    STEPS,
    assert_same_end,
    change_state,
    end_of,
    faulty,
    leftovers,
    logs,
    ranks,
    training,
    two_ranks,
    wait_for_step,
)
from models import save_tiny_model
from trainers import begin, dataset

from histocoder.checkpoints.model_files import load_model
from histocoder.checkpoints.occcanine import initial_weights
from histocoder.checkpoints.training_state import find_checkpoint, list_checkpoints, verify_checkpoint
from histocoder.errors import DamagedError, UserError
from histocoder.files import remove_leftovers
from histocoder.training.checks import notices

# Programs that are killed


def killed_at_changes(program: Callable[[Path], list[str]], folder: Path, *, every: int) -> Iterator[Path]:
    """Run a program in new folders, killed at its first change there, then `every` changes later, until it ends."""
    for number in range(1, 999, every):
        out = folder / str(number) / "out"
        out.parent.mkdir()
        status = run(*faulty(program(out), f"change:{number}/out:{number}"), check=False).returncode
        assert status in (0, -signal.SIGKILL)
        yield out
        shutil.rmtree(out.parent)
        if status == 0:
            assert number > 1 + 2 * every
            return


SAVE = """
import sys
from pathlib import Path
import torch
from models import tiny_model
from histocoder.checkpoints.training_state import Checkpoint, LearnerState, TrainState, checkpoint_path, save_checkpoint
model, out, step = tiny_model(), Path(sys.argv[1]), int(sys.argv[2])
out.mkdir(exist_ok=True)
learner = LearnerState(model.state_dict(), {"x": torch.ones(9)}, {}, {})
path, ranks = checkpoint_path(out, step), {"rng": torch.ones(1, 9)}
checkpoint = Checkpoint(path, TrainState(step=step), learner, ranks, {}, model.config, model.tokenizer)
save_checkpoint(checkpoint, keep=1)
"""


@pytest.fixture(scope="module")
def first_saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one checkpoint."""
    out = tmp_path_factory.mktemp("saved") / "out"
    run("-c", SAVE, out, 1)
    return out


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_a_killed_save_leaves_one_checkpoint_whole(first_saved: Path, tmp_path: Path, every: int):
    def save(out: Path) -> list[str]:
        shutil.copytree(first_saved, out)
        return ["-c", SAVE, str(out), "2"]

    found = [find_checkpoint(out, "auto") for out in killed_at_changes(save, tmp_path, every=every)]
    steps = [checkpoint.name[-1] for checkpoint in found if checkpoint is not None]
    assert len(steps) == len(found) and steps == sorted(steps) and {*steps} == {"1", "2"}


REPLACE = """
import sys
from pathlib import Path
from histocoder.files import replacing_folder
from histocoder.training.checks import notices
with replacing_folder(Path(sys.argv[1], "best")) as new:
    for name in "ab":
        (new / name).write_text("new")
"""


def test_a_folder_replaced_is_old_or_new(tmp_path: Path):
    def replace(out: Path) -> list[str]:
        (out / "best").mkdir(parents=True)
        for name in "ab":
            (out / "best" / name).write_text("old")
        return ["-c", REPLACE, str(out)]

    contents = []
    for out in killed_at_changes(replace, tmp_path, every=1):
        remove_leftovers(out)
        assert not leftovers(out)
        contents.append([path.read_text() for path in (out / "best" / name for name in "ab")])
    assert contents == sorted(contents, reverse=True) and contents[0] == ["old", "old"]
    assert contents[-1] == ["new", "new"] and ["old", "new"] not in contents


@pytest.mark.parametrize(
    ("encoder", "every"),
    [("tiny", 50), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("tiny", 20), ("ngram", 7)))],
)
def test_a_run_killed_anywhere_ends_the_same(tmp_path: Path, encoder: str, every: int):
    def finetuning(out: Path) -> list[str]:
        flags = ("--dataset", table, "--target-cols", "hisco_1", "--save-path", out, "--precision", "fp32")
        sizes = ("--encoder", encoder, "--max-steps", 4, "--eval-interval", 2, "--save-interval", 3, "--batch-size", 16)
        return ["finetune.py", *map(str, (*flags, *sizes, "--log-interval", 1, "--no-report"))]

    def end_of_run(out: Path) -> list[object]:
        """The log, and the checksums and cards of the last and the best model."""
        names = ("manifest.json", "README.md")
        return [logs(out), *((out / folder / name).read_bytes() for folder in (".", "best") for name in names)]

    table = write_table(tmp_path / "table.csv")
    run(*finetuning(tmp_path / "whole"))
    for out in killed_at_changes(finetuning, tmp_path, every=every):
        if (out / "best").exists():
            load_model(out / "best")
        run(*finetuning(out))
        assert end_of_run(out) == end_of_run(tmp_path / "whole") and not leftovers(out)


@pytest.mark.parametrize("number", [2, *(pytest.param(number, marks=pytest.mark.slow) for number in (1, 4))])
def test_a_killed_prediction_resumes_identically(tmp_path: Path, number: int):
    model, table = save_tiny_model(tmp_path / "model"), write_table(tmp_path / "table.csv", copies=40)

    def predict(name: str) -> list[str]:
        flags = (
            "--model",
            model,
            "--mode",
            "flat",
            "--input",
            table,
            "--columns",
            "pred_",
            "--output",
            tmp_path / name,
        )
        return ["-m", "histocoder", "predict", *map(str, flags)]

    run(*predict("whole.csv"))
    assert run(*faulty(predict("parts.csv"), f"kill:os.replace:{number}"), check=False).returncode == -signal.SIGKILL
    assert not (tmp_path / "parts.csv").exists()
    run(*predict("parts.csv"))
    assert (tmp_path / "whole.csv").read_bytes() == (tmp_path / "parts.csv").read_bytes()


# Damage


@pytest.fixture
def saved(first_saved: Path, tmp_path: Path) -> Path:
    """A folder with two checkpoints."""
    out = shutil.copytree(first_saved, tmp_path / "saved")
    shutil.copytree(out / "checkpoints" / "step-0000001", out / "checkpoints" / "step-0000002")
    return out


def damaged(content: bytes, draw: random.Random) -> Iterator[bytes]:
    """Cut a file's content at five places, and flip one of its bits at 30."""
    for share in (0, 0.1, 0.5, 0.9, 0.999):
        yield content[: int(share * len(content))]
    for _ in range(30):
        flipped = bytearray(content)
        flipped[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        yield bytes(flipped)


def test_damaged_checkpoints_are_named_and_passed_over(saved: Path, capsys: pytest.CaptureFixture[str]):
    newest, draw = list_checkpoints(saved)[-1], random.Random(2)
    for path in sorted(newest.iterdir()):
        whole = path.read_bytes()
        for content in damaged(whole, draw):
            path.write_bytes(content)
            assert find_checkpoint(saved, "auto") == newest.with_name("step-0000001")
            # a checksum that has changed makes another file look damaged
            assert str(newest if path.name == "manifest.json" else path) in capsys.readouterr().out
        path.write_bytes(whole)
    assert find_checkpoint(saved, "auto") == newest


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("kind", ["model", "checkpoint"])
def test_damaged_models_are_not_loaded(saved: Path, tmp_path: Path, kind: str, name: str):
    folder = save_tiny_model(tmp_path / "model") if kind == "model" else list_checkpoints(saved)[-1]
    load_model(folder)
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[:-1] + bytes([whole[-1] ^ 42]))  # of config.json's last line end, a blank
    for load in (load_model, initial_weights):
        with pytest.raises(DamagedError, match=rf"/{name} is missing or damaged"):
            load(folder)
    if kind == "model":
        load_model(folder, verify=False)
        (folder / "manifest.json").unlink()
        load_model(folder)  # as one from elsewhere


def test_others_may_read_models(tmp_path: Path, first_saved: Path):
    for folder in (save_tiny_model(tmp_path / "model"), *list_checkpoints(first_saved)):
        modes = {path.name: path.stat().st_mode for path in folder.iterdir()}
        assert set(modes.values()) == {modes["config.json"]}, modes


def test_leftovers_that_are_links_are_removed(tmp_path: Path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".x.1.tmp").symlink_to(tmp_path / "elsewhere")
    remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]


def test_without_a_whole_checkpoint_nothing_is_deleted(saved: Path):
    for checkpoint in list_checkpoints(saved):
        (checkpoint / "optimizer.pt").unlink()
    with pytest.raises(UserError, match=r"step-0000002/optimizer.pt is missing.* start a new run in another folder"):
        find_checkpoint(saved, "auto")
    assert len(list_checkpoints(saved)) == 2


@pytest.mark.parametrize(
    ("version", "message"), [(3, "Update histocoder"), (1, "Resume it with the histocoder that wrote it")]
)
def test_checkpoints_of_another_version_are_refused(saved: Path, version: int, message: str):
    change_state(list_checkpoints(saved)[-1], lambda state: state.update(format_version=version))
    with pytest.raises(UserError, match=f"format version {version}.*{message}"):
        find_checkpoint(saved, "auto")


def test_a_run_resumes_from_the_newest_whole_checkpoint(alone: Path, tmp_path: Path):
    out = tmp_path / "out"
    shutil.copytree(alone, out)
    shutil.copy(alone.parent / "table.csv", tmp_path)
    newest = list_checkpoints(out)[-1]
    (newest / "model.safetensors").write_bytes(b"")
    again = run(*training(out, batch_size=8))
    assert f"Warning: The file {newest}/model.safetensors is missing or damaged" in again.stdout
    assert "Resuming from step 20" in again.stdout
    assert_same_end(alone, out)


# Disks


@pytest.mark.slow
def test_a_full_disk_keeps_the_last_checkpoint(together: Path, tmp_path: Path):
    out = tmp_path / "out"
    two_ranks(training(out, steps=STEPS))
    shutil.rmtree(list_checkpoints(out)[-1])
    room = (out / "model.safetensors").stat().st_size + 10_000  # enough for weights, not for an optimizer
    before = {path: path.read_bytes() for path in list_checkpoints(out)[0].iterdir()}
    args = training(out)
    ended = two_ranks(faulty(args, f"room:{room}"), args, check=False)
    assert [one.returncode for one in ended] == [2, 2]
    assert "Could not save the checkpoint" in ended[0].stderr and "Traceback" not in ended[0].stderr
    assert before == {path: path.read_bytes() for path in list_checkpoints(out)[-1].iterdir()}
    assert not leftovers(out)
    two_ranks(args)
    assert_same_end(together, out)


@pytest.mark.parametrize("kind", ["ENOSPC", pytest.param("EROFS", marks=pytest.mark.slow)])
def test_a_folder_that_became_read_only(tmp_path: Path, kind: str):
    out = tmp_path / "out"
    run(*training(out, batch_size=8, steps=5))
    for number in range(1, 12):
        ended = run(*faulty(training(out, batch_size=8, steps=10), f"{kind}:os.replace:{number}"), check=False)
        if ended.returncode == 0:
            break
        assert ended.returncode == 2 and "Traceback" not in ended.stderr
        assert os.strerror({"ENOSPC": 28, "EROFS": 30}[kind]) in ended.stderr
        assert not leftovers(out)
        verify_checkpoint(list_checkpoints(out)[0])
    assert number > 3


def test_a_removed_folder_ends_the_run(tmp_path: Path):
    args = training(tmp_path / "out", steps=10**6)
    with ranks(args, args) as started:
        wait_for_step(started[0], 3)
        (tmp_path / "out").rename(tmp_path / "gone")
        ended = [end_of(process) for process in started]
    assert ended[0].returncode == 2 and ended[1].returncode > 0 and "Traceback" not in ended[0].stderr
    assert "Could not" in ended[0].stderr and str(tmp_path / "out") in ended[0].stderr


def test_a_small_disk_is_warned_of(table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trainer = begin(tmp_path, dataset(tmp_path, table, ("hisco_1",)), precision="fp32", num_classes=8)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10_000))
    assert "Warning: two checkpoints take" in notices(trainer, trainer.config, None)[0]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10**12))
    assert not notices(trainer, trainer.config, None)
