"""What happens to the files of a run: saves that are killed, damage, disks that are full or gone."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
from pathlib import Path

import pytest
from conftest import run, write_table
from jobs import (
    FAULTY,
    STEPS,
    assert_same_end,
    end_of,
    faulty,
    leftovers,
    ranks,
    training,
    two_ranks,
    wait_for_step,
)
from models import save_tiny_model, tiny_model

from histocoder.checkpoints.model_files import load_model
from histocoder.checkpoints.occcanine import initial_weights
from histocoder.checkpoints.training_state import find_checkpoint, list_checkpoints, verify_checkpoint
from histocoder.errors import DamagedError, UserError
from histocoder.files import remove_leftovers

# Saves


SAVE = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import faulty
import torch
from models import tiny_model
from histocoder.checkpoints.training_state import Checkpoint, LearnerState, TrainState, checkpoint_path, save_checkpoint
if {fault!r}:
    faulty.install({fault!r})
model = tiny_model()
learner = LearnerState(model.state_dict(), {{"x": torch.ones(9)}}, {{}}, {{}})
path, ranks = checkpoint_path(Path({out!r}), {step}), {{"rng": torch.ones(1, 9)}}
checkpoint = Checkpoint(path, TrainState(step={step}), learner, ranks, {{}}, model.config, model.tokenizer)
save_checkpoint(checkpoint, keep=1)
"""


def save(out: Path, step: int, fault: str = "") -> int:
    """Save a checkpoint in a process of its own; how that ended."""
    out.mkdir(parents=True, exist_ok=True)
    code = SAVE.format(tests=str(FAULTY.parent), fault=fault, out=str(out), step=step)
    return run("-c", code, check=False).returncode


@pytest.fixture(scope="module")
def first_saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one checkpoint."""
    out = tmp_path_factory.mktemp("saved") / "out"
    assert save(out, 1) == 0
    return out


SAVE_CALLS = (
    "kill:os.replace",
    "cut:torch.save",
    *(pytest.param(f"kill:{call}", marks=pytest.mark.slow) for call in ("os.fsync", "torch.save", "shutil.rmtree")),
)


@pytest.mark.parametrize("call", SAVE_CALLS)
def test_a_save_killed_at_any_point_leaves_the_old_checkpoint_or_the_new(first_saved: Path, tmp_path: Path, call: str):
    outcomes = []
    for number in range(1, 20):
        out = shutil.copytree(first_saved, tmp_path / str(number))
        status = save(out, 2, f"{call}:{number}")
        found = find_checkpoint(out, "auto")
        assert found is not None and found.name in ("step-0000001", "step-0000002")
        outcomes.append(found.name[-1])
        if status == 0:
            break
        assert status == -signal.SIGKILL
    assert status == 0 and len(outcomes) > 1  # killed at least once, and all calls were tried
    assert outcomes == sorted(outcomes) and outcomes[-1] == "2"


REPLACE = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import faulty
from histocoder.files import remove_leftovers, replacing_folder
folder = Path({folder!r})
faulty.install("change:best:{number}")
with replacing_folder(folder) as new:
    for name in "ab":
        (new / name).write_text("new")
"""


def test_a_folder_replaced_is_old_or_new(tmp_path: Path):
    contents = []
    for number in range(1, 99):
        best = tmp_path / str(number) / "best"
        best.mkdir(parents=True)
        for name in "ab":
            (best / name).write_text("old")
        code = REPLACE.format(tests=str(FAULTY.parent), folder=str(best), number=number)
        ended = run("-c", code, check=False).returncode
        remove_leftovers(best.parent)
        contents.append({path.read_text() for path in best.iterdir()})
        assert sorted(path.name for path in best.iterdir()) == ["a", "b"] and not leftovers(best.parent)
        if ended == 0:
            break
        assert ended == -signal.SIGKILL
    assert contents[0] == {"old"} and contents[-1] == {"new"} and all(len(one) == 1 for one in contents)
    assert len(contents) > 7


def sums_of(out: Path) -> list[bytes]:
    """Checksums of the last and the best model, and their cards."""
    return [(out / folder / name).read_bytes() for folder in (".", "best") for name in ("manifest.json", "README.md")]


@pytest.mark.parametrize(
    ("encoder", "first", "every"), [("tiny", 225, 35), pytest.param("ngram", 1, 7, marks=pytest.mark.slow)]
)
def test_a_run_killed_anywhere_ends_the_same(tmp_path: Path, encoder: str, first: int, every: int):
    def finetuning(name: str) -> list[str]:
        flags = ("--dataset", table, "--target-cols", "hisco_1", "--save-path", tmp_path / name / "out")
        sizes = ("--encoder", encoder, "--max-steps", 4, "--eval-interval", 2, "--save-interval", 3, "--batch-size", 16)
        return ["finetune.py", *map(str, (*flags, *sizes, "--precision", "fp32", "--no-report"))]

    table = write_table(tmp_path / "table.csv")
    run(*finetuning("whole"))
    for number in range(first, 999, every):
        out = tmp_path / str(number) / "out"
        if run(*faulty(finetuning(str(number)), f"change:out/:{number}"), check=False).returncode == 0:
            break
        run(*finetuning(str(number)))
        assert sums_of(out) == sums_of(tmp_path / "whole" / "out") and not leftovers(out)
        shutil.rmtree(out)
    assert number > first + 2 * every


def test_preparing_killed_at_any_point_starts_over(tmp_path: Path):
    for number in range(1, 20):
        out = tmp_path / str(number)
        args = training(out, "--prepare-only")
        if run(*faulty(args, f"kill:os.replace:{number}"), check=False).returncode == 0:
            break
        assert "Prepared" in run(*args).stdout
    assert number > 7


@pytest.mark.slow
@pytest.mark.parametrize("call", ["kill:os.replace", "kill:os.fsync", "cut:torch.save"])
def test_a_run_killed_while_saving_ends_the_same(alone: Path, tmp_path: Path, call: str):
    for number in range(1, 100):
        out = tmp_path / str(number) / "out"
        out.parent.mkdir()
        args = training(out, batch_size=8)
        if run(*faulty(args, f"{call}:{number}"), check=False).returncode == 0:
            break
        run(*args)
        assert_same_end(alone, out)
        assert not leftovers(out)
        shutil.rmtree(out.parent)
    assert number > 3


@pytest.mark.slow
def test_the_next_start_removes_a_killed_save(alone: Path, tmp_path: Path):
    args = training(tmp_path / "out", batch_size=8)
    assert run(*faulty(args, "cut:torch.save:2"), check=False).returncode == -signal.SIGKILL
    assert leftovers(tmp_path / "out")
    run(*args)
    assert not leftovers(tmp_path / "out")
    assert_same_end(alone, tmp_path / "out")


# Damage


@pytest.fixture
def saved(first_saved: Path, tmp_path: Path) -> Path:
    """A folder with two checkpoints."""
    out = shutil.copytree(first_saved, tmp_path / "saved")
    shutil.copytree(out / "checkpoints" / "step-0000001", out / "checkpoints" / "step-0000002")
    return out


@pytest.mark.parametrize("share", [0, 0.1, 0.5, 0.9, 0.999])
def test_a_file_that_is_cut_is_named_and_the_older_checkpoint_is_taken(saved: Path, share: float, capsys):
    newest = list_checkpoints(saved)[-1]
    for path in sorted(newest.iterdir()):
        whole = path.read_bytes()
        path.write_bytes(whole[: int(share * len(whole))])
        assert find_checkpoint(saved, "auto") == newest.with_name("step-0000001")
        assert str(path) in capsys.readouterr().out
        path.write_bytes(whole)
    assert find_checkpoint(saved, "auto") == newest


def test_each_of_200_bits_that_flip_is_noticed(saved: Path):
    newest, draw = list_checkpoints(saved)[-1], random.Random(2)
    files = sorted(newest.iterdir())
    for i in range(200):
        path = files[i % len(files)]
        whole = path.read_bytes()
        flipped = bytearray(whole)
        flipped[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        path.write_bytes(flipped)
        with pytest.raises(DamagedError):
            verify_checkpoint(newest)
        path.write_bytes(whole)


def test_a_model_is_not_loaded_from_a_checkpoint_that_is_damaged(saved: Path):
    checkpoint = list_checkpoints(saved)[-1]
    load_model(checkpoint)
    weights = bytearray((checkpoint / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (checkpoint / "model.safetensors").write_bytes(weights)
    for load in (load_model, initial_weights):
        with pytest.raises(DamagedError, match=r"model\.safetensors is missing or damaged.*Get another"):
            load(checkpoint)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_altered_files_of_models_are_named(tmp_path: Path, name: str):
    model = save_tiny_model(tmp_path / "model")
    whole = (model / name).read_bytes()
    (model / name).write_bytes(whole[:-1] + bytes([whole[-1] ^ 42]))  # of config.json's last line end, a blank
    for load in (load_model, initial_weights):
        with pytest.raises(DamagedError, match=rf"model/{name} is missing or damaged"):
            load(model)
    load_model(model, verify=False)
    (model / "manifest.json").unlink()
    load_model(model)  # as one from elsewhere


def test_others_may_read_models(tmp_path: Path, first_saved: Path):
    for folder in (save_tiny_model(tmp_path / "model"), *list_checkpoints(first_saved)):
        modes = {path.name: path.stat().st_mode for path in folder.iterdir()}
        assert set(modes.values()) == {modes["config.json"]}, modes


def test_leftovers_that_are_links_are_removed(tmp_path: Path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".x.1.tmp").symlink_to(tmp_path / "elsewhere")
    remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]


def test_where_no_checkpoint_is_whole_the_run_is_refused_and_nothing_is_deleted(saved: Path):
    for checkpoint in list_checkpoints(saved):
        (checkpoint / "optimizer.pt").unlink()
    with pytest.raises(UserError, match=r"step-0000002/optimizer.pt is missing.* start a new run in another folder"):
        find_checkpoint(saved, "auto")
    assert len(list_checkpoints(saved)) == 2


@pytest.mark.parametrize(
    ("version", "message"), [(3, "Update histocoder"), (1, "Resume it with the histocoder that wrote it")]
)
def test_a_checkpoint_of_another_form_is_refused_by_its_version(saved: Path, version: int, message: str):
    newest = list_checkpoints(saved)[-1]
    before = (newest / "state.json").read_text()
    (newest / "state.json").write_text(before.replace('"format_version": 2', f'"format_version": {version}'))
    sums = json.loads((newest / "manifest.json").read_text())
    sums["state.json"] = hashlib.sha256((newest / "state.json").read_bytes()).hexdigest()
    (newest / "manifest.json").write_text(json.dumps(sums))
    with pytest.raises(UserError, match=f"format version {version}.*{message}"):
        find_checkpoint(saved, "auto")


def test_a_run_goes_on_from_an_older_checkpoint_where_the_newest_is_damaged(alone: Path, tmp_path: Path):
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
def test_a_full_disk_ends_all_ranks_and_keeps_the_last_checkpoint(together: Path, tmp_path: Path):
    out = tmp_path / "out"
    two_ranks(training(out, steps=STEPS))
    shutil.rmtree(list_checkpoints(out)[-1])
    room = (out / "model.safetensors").stat().st_size + 10_000  # enough for weights, not for an optimizer
    before = {path: path.read_bytes() for path in list_checkpoints(out)[0].iterdir()}
    args = training(out)
    with ranks(faulty(args, f"room:{room}"), args) as started:
        ended = [end_of(process) for process in started]
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


def test_a_disk_without_room_for_two_checkpoints_is_warned_of(table: Path, tmp_path: Path, monkeypatch, capsys):
    from histocoder.training import train

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10_000))
    train.warn_of_a_small_disk(tmp_path, tiny_model())
    assert "Warning: two checkpoints take" in capsys.readouterr().out
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10**12))
    train.warn_of_a_small_disk(tmp_path, tiny_model())
    assert not capsys.readouterr().out


# Predicting


@pytest.mark.parametrize("number", [2, *(pytest.param(number, marks=pytest.mark.slow) for number in (1, 4))])
def test_a_killed_prediction_resumes_identically(tmp_path: Path, number: int):
    model = save_tiny_model(tmp_path / "model")
    table = write_table(tmp_path / "table.csv", copies=4)
    code = (
        "import sys; sys.path.insert(0, {tests!r}); import faulty; {fault}\n"
        "from pathlib import Path; from histocoder.inference import predict_file as p\n"
        "from histocoder.inference.coder import Coder\n"
        "c = p.PredictConfig(input={table!r}, output={output!r}, columns='pred_')\n"
        "p.predict_file(Coder.from_pretrained({model!r}), c, model_id='m', block_rows=40)"
    )

    def predict(output: Path, fault: str = "") -> int:
        values = {"tests": str(FAULTY.parent), "table": str(table), "output": str(output), "model": str(model)}
        fault = f"faulty.install({fault!r})" if fault else ""
        ended = run("-c", code.format(fault=fault, **values), check=False)
        print(ended.stderr)
        return ended.returncode

    assert predict(tmp_path / "whole.csv") == 0
    assert predict(tmp_path / "parts.csv", f"kill:os.replace:{number}") == -signal.SIGKILL
    assert not (tmp_path / "parts.csv").exists()
    assert predict(tmp_path / "parts.csv") == 0
    assert (tmp_path / "whole.csv").read_bytes() == (tmp_path / "parts.csv").read_bytes()
