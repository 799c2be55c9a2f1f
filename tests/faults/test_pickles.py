"""Files that execute something when they are read as pickles usually are: refused, and nothing is executed."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import run
from jobs import finetune
from pretrained import save_pretrained

from histocoder.checkpoints.training_state import list_checkpoints


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def write_pickle(content: object, path: Path) -> None:
    path.write_bytes(pickle.dumps(content, protocol=2))


def write_old_form(content: object, path: Path) -> None:
    torch.save(content, path, _use_new_zipfile_serialization=False)


@pytest.fixture
def trap(tmp_path: Path) -> Iterator[Evil]:
    """What must not be unpickled."""
    yield Evil(tmp_path / "executed")
    assert not (tmp_path / "executed").exists()


def refused(*args: object) -> str:
    """What the program says, in one line."""
    result = run(*args, check=False)
    assert result.returncode == 2 and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    return result.stderr


def test_the_trap_would_catch(tmp_path: Path):
    torch.save({"model": Evil(tmp_path / "executed")}, tmp_path / "evil.bin")
    torch.load(tmp_path / "evil.bin", weights_only=False)
    assert (tmp_path / "executed").exists()


@pytest.mark.parametrize("write", [torch.save, write_old_form, write_pickle])
def test_as_initial_checkpoint(table: Path, tmp_path: Path, trap: Evil, write):
    write({"model": {"decoder.head.weight": trap}, "key": trap}, tmp_path / "last.bin")
    args = finetune(table, tmp_path / "out", "--batch-size", 8, "--initial-checkpoint", tmp_path / "last.bin")
    assert "last.bin contains no weights that can be read" in refused(*args)
    assert not (tmp_path / "out" / "config.json").exists()


def test_as_a_folder_from_the_hub(table: Path, tmp_path: Path, trap: Evil):
    (tmp_path / "hub").mkdir()
    torch.save({"weight": trap}, tmp_path / "hub" / "pytorch_model.bin")
    args = finetune(table, tmp_path / "out", "--batch-size", 8, "--initial-checkpoint", tmp_path / "hub")
    assert "pytorch_model.bin contains no weights that can be read" in refused(*args)


def test_as_an_encoder(table: Path, tmp_path: Path, trap: Evil):
    folder = save_pretrained("canine", tmp_path / "encoder")
    (folder / "model.safetensors").unlink()
    torch.save({"char_embeddings": trap}, folder / "pytorch_model.bin")
    args = [folder if arg == "tiny" else arg for arg in finetune(table, tmp_path / "out", "--batch-size", 8)]
    assert f"Could not load the encoder '{folder}'" in refused(*args)


def test_as_a_model_to_convert(tmp_path: Path, trap: Evil):
    torch.save({"model": trap, "key": {"61110": 0}}, tmp_path / "last.bin")
    convert = ("-m", "histocoder", "convert", "--from-occcanine", tmp_path / "last.bin", "--formatter", "hisco")
    assert "contains objects other than tensors" in refused(*convert, "--output", tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_in_a_checkpoint_whose_sums_are_right(table: Path, tmp_path: Path, trap: Evil):
    args = finetune(table, tmp_path / "out", "--batch-size", 8, "--max-steps", 2)
    run(*args)
    (checkpoint,) = list_checkpoints(tmp_path / "out")
    torch.save({"optimizer": trap, "scheduler": {}}, checkpoint / "optimizer.pt")
    sums = json.loads((checkpoint / "manifest.json").read_text())
    sums["optimizer.pt"] = hashlib.sha256((checkpoint / "optimizer.pt").read_bytes()).hexdigest()
    (checkpoint / "manifest.json").write_text(json.dumps(sums))
    assert "optimizer.pt contains no weights that can be read: it contains objects other than tensors" in refused(*args)
