"""What happens to the files of a run: saves that are killed, damage, disks that are full or
gone.
"""

import errno
import json
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import refused, run, slow, write_table
from jobs import change_state, faulty, finetune, leftovers, logs, ranks, training, wait_for_step
from models import save_tiny_model

from histocoder.checkpoints.manifest import MANIFEST_FILE
from histocoder.checkpoints.model_files import load_model
from histocoder.checkpoints.occcanine import initial_weights
from histocoder.checkpoints.training_state import find_checkpoint, list_checkpoints, load_checkpoint
from histocoder.errors import DamagedError, UserError
from histocoder.files import remove_leftovers


def killed_at_changes(
    program: Callable[[Path], list[str]], folder: Path, *, every: int
) -> Iterator[Path]:
    """Run a program in new folders, killed at its first change there, then `every` changes later,
    until it ends.
    """
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
from histocoder.checkpoints.model_files import save_model
from histocoder.checkpoints.run_folder import RunFolder
from histocoder.checkpoints.training_state import Checkpoint, LearnerState, TrainState, checkpoint_path, save_checkpoint
model, run, step = tiny_model(), RunFolder(Path(sys.argv[1])), int(sys.argv[2])
run.path.mkdir(exist_ok=True)
learner = LearnerState(model.state_dict(), {"x": torch.ones(9)}, {}, {})
path, ranks = checkpoint_path(run.path, step), {"rng": torch.ones(1, 9)}
save_checkpoint(Checkpoint(path, TrainState(step=step), learner, ranks, {}, model.config, model.tokenizer), keep=1)
model.linear_decoder.bias.data.fill_(step)
for folder in (run.best, run.path):
    save_model(folder, model.config, model.state_dict(), tokenizer=model.tokenizer)
"""


@pytest.fixture(scope="module")
def first_saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one checkpoint, a best model and a last one."""
    out = tmp_path_factory.mktemp("saved") / "out"
    run("-c", SAVE, out, 1)
    return out


@pytest.mark.parametrize("every", [4, slow(1)])
def test_a_killed_save_leaves_old_or_new(first_saved: Path, tmp_path: Path, every: int):
    def save(out: Path) -> list[str]:
        shutil.copytree(first_saved, out)
        return ["-c", SAVE, str(out), "2"]

    found = []
    for out in killed_at_changes(save, tmp_path, every=every):
        for folder in (out, out / "checkpoints"):
            remove_leftovers(folder)
        checkpoint = find_checkpoint(out, "auto")
        assert checkpoint is not None and not leftovers(out)
        best, last = (bias_of(folder) for folder in (out / "best", out))
        found.append((checkpoint.state.step, best or 0, last))
    assert {step for step, _, _ in found} == {best for _, best, _ in found} == {1, 2}
    assert {last for _, _, last in found} <= {1, 2, None} and found[-1] == (
        2,
        2,
        2,
    )  # None: refused
    assert found == sorted(found, key=lambda one: one[:2])


def bias_of(folder: Path) -> int | None:
    """The step at which a model was saved; None if it is damaged."""
    try:
        return int(load_model(folder).linear_decoder.bias[0])
    except DamagedError:
        return None


@pytest.mark.parametrize(("encoder", "every"), [("tiny", 50), slow("tiny", 20), slow("ngram", 7)])
def test_a_run_killed_anywhere_ends_the_same(table: Path, tmp_path: Path, encoder: str, every: int):
    def finetuning(out: Path) -> list[str]:
        flags = (
            "--dataset",
            table,
            "--target-cols",
            "hisco_1",
            "--save-path",
            out,
            "--precision",
            "fp32",
        )
        sizes = (
            "--encoder",
            encoder,
            "--max-steps",
            4,
            "--eval-interval",
            2,
            "--save-interval",
            3,
            "--batch-size",
            16,
        )
        return ["finetune.py", *map(str, (*flags, *sizes, "--log-interval", 1, "--no-report"))]

    def end_of_run(out: Path) -> list[object]:
        """The log, and the files of the last and the best model."""
        names = ("config.json", "model.safetensors", "README.md")
        return [
            logs(out),
            *((out / folder / name).read_bytes() for folder in (".", "best") for name in names),
        ]

    run(*finetuning(tmp_path / "whole"))
    for out in killed_at_changes(finetuning, tmp_path, every=every):
        if (out / "best").exists():
            load_model(out / "best")
        run(*finetuning(out))
        assert end_of_run(out) == end_of_run(tmp_path / "whole") and not leftovers(out)


@pytest.mark.parametrize("number", [2, slow(1), slow(4)])
def test_a_killed_prediction_resumes_identically(tmp_path: Path, number: int):
    model, table = (
        save_tiny_model(tmp_path / "model"),
        write_table(tmp_path / "table.csv", copies=40),
    )

    def predict(name: str) -> list[str]:
        flags = ("--model", model, "--mode", "flat", "--input", table, "--columns", "pred_")
        return ["-m", "histocoder", "predict", *map(str, (*flags, "--output", tmp_path / name))]

    run(*predict("whole.csv"))
    assert (
        run(*faulty(predict("parts.csv"), f"kill:os.replace:{number}"), check=False).returncode
        == -signal.SIGKILL
    )
    assert not (tmp_path / "parts.csv").exists()
    run(*predict("parts.csv"))
    assert (tmp_path / "whole.csv").read_bytes() == (tmp_path / "parts.csv").read_bytes()


@pytest.fixture
def saved(first_saved: Path, tmp_path: Path) -> Path:
    out = shutil.copytree(first_saved, tmp_path / "saved")
    shutil.copytree(out / "checkpoints" / "step-0000001", out / "checkpoints" / "step-0000002")
    return out


def damaged(content: bytes, draw: random.Random) -> Iterator[bytes]:
    """A file's content cut at five places, and with one of its bits flipped at each of 30."""
    for share in (0, 0.1, 0.5, 0.9, 0.99):
        yield content[: int(share * len(content))]
    for _ in range(30):
        flipped = bytearray(content)
        flipped[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        yield bytes(flipped)


def resumed_from(folder: Path) -> str:
    """The name of the checkpoint that a run in a folder resumes from."""
    checkpoint = find_checkpoint(folder, "auto")
    assert checkpoint is not None
    return checkpoint.path.name


def test_damaged_checkpoints_are_named_and_passed_over(
    saved: Path, capsys: pytest.CaptureFixture[str]
):
    newest, draw = list_checkpoints(saved)[-1], random.Random(2)
    for path in sorted(newest.iterdir()):
        whole = path.read_bytes()
        for content in damaged(whole, draw):
            path.write_bytes(content)
            assert resumed_from(saved) == "step-0000001"
            # a checksum that has changed makes another file look damaged
            assert str(newest if path.name == MANIFEST_FILE else path) in capsys.readouterr().out
        path.write_bytes(whole)
    assert resumed_from(saved) == newest.name
    for checkpoint in list_checkpoints(saved):
        (checkpoint / "optimizer.pt").unlink()
    with pytest.raises(
        UserError, match=r"step-0000002/optimizer.pt .* start a new run in another folder"
    ):
        find_checkpoint(saved, "auto")
    assert len(list_checkpoints(saved)) == 2


def test_checkpoints_without_checksums_are_read(saved: Path, capsys: pytest.CaptureFixture[str]):
    newest = list_checkpoints(saved)[-1]
    (newest / MANIFEST_FILE).unlink()
    assert resumed_from(saved) == newest.name
    for path in sorted(newest.iterdir()):
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        assert resumed_from(saved) == "step-0000001" and str(path) in capsys.readouterr().out
        path.write_bytes(whole)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_damaged_models_are_not_loaded(tmp_path: Path, name: str):
    folder = save_tiny_model(tmp_path / "model")
    load_model(folder)
    assert (
        len({path.stat().st_mode for path in folder.iterdir()}) == 1
    )  # others may read all of them
    whole = (folder / name).read_bytes()
    # the last cut and the last flip are of config.json's last line end
    contents = [whole[:length] for length in (0, len(whole) // 2, len(whole) - 9)]
    for content in (*contents, whole[:-1] + bytes([whole[-1] ^ 42])):
        (folder / name).write_bytes(content)
        for load in (load_model, initial_weights):
            with pytest.raises(DamagedError, match=rf"/{name} "):
                load(folder)
    (folder / MANIFEST_FILE).write_text(json.dumps({name: "0" * 64}))  # as in development versions
    load_model(folder)


def test_a_flipped_bit_is_not_trained_on(table: Path, tmp_path: Path):
    out = tmp_path / "out"
    args = finetune(table, out, "--batch-size", 8, "--save-interval", 2)
    run(*args, "--max-steps", 4)
    weights = list_checkpoints(out)[-1] / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 4
    weights.write_bytes(content)
    said = run(*args, "--max-steps", 6).stdout
    assert f"Warning: {weights} is missing or damaged" in said and "Resuming from step 2 " in said
    start = ("--batch-size", 8, "--max-steps", 1, "--initial-checkpoint")
    content = bytearray((out / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (out / "model.safetensors").write_bytes(content)
    assert "model.safetensors is missing or damaged" in refused(
        *finetune(table, tmp_path / "more", *start, out)
    )


def test_checkpoints_of_another_version_are_refused(saved: Path):
    change_state(list_checkpoints(saved)[-1], lambda state: state.update(format_version=3))
    with pytest.raises(
        UserError, match=r"format version 3; this histocoder reads 2.*--initial-checkpoint"
    ):
        find_checkpoint(saved, "auto")


def test_a_full_disk_ends_in_one_sentence(tmp_path: Path):
    out = tmp_path / "out"
    run(*training(out, batch_size=8, steps=5))
    for number in range(1, 12):
        ended = run(
            *faulty(training(out, batch_size=8, steps=10), f"ENOSPC:os.replace:{number}"),
            check=False,
        )
        if ended.returncode == 0:
            break
        assert ended.returncode == 2 and "Traceback" not in ended.stderr and not leftovers(out)
        assert os.strerror(errno.ENOSPC) in ended.stderr
        load_checkpoint(list_checkpoints(out)[0])
    assert number > 3


def test_a_removed_folder_ends_the_run(tmp_path: Path):
    args = training(tmp_path / "out", steps=10**6)
    with ranks(args, args) as started:
        wait_for_step(started[0], 3)
        (tmp_path / "out").rename(tmp_path / "gone")
        first, second = (process.result() for process in started)
    assert first.returncode == 2 and second.returncode > 0 and "Traceback" not in first.stderr
    assert "Could not" in first.stderr and str(tmp_path / "out") in first.stderr
