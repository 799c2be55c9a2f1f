"""Files that execute something when they are read as pickles usually are: refused, and nothing is
executed.
"""

import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import refused, run
from jobs import finetune
from pretrained import save_pretrained

from histocoder.checkpoints.manifest import write_manifest
from histocoder.checkpoints.training_state import list_checkpoints


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


@pytest.fixture
def trap(tmp_path: Path) -> Iterator[Evil]:
    """What must not be unpickled."""
    yield Evil(tmp_path / "executed")
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    "write", [torch.save, lambda content, path: path.write_bytes(pickle.dumps(content, 2))]
)
@pytest.mark.parametrize("name", ["last.bin", "hub/pytorch_model.bin"])
def test_as_initial_checkpoint(table: Path, tmp_path: Path, trap: Evil, name: str, write):
    path, start = tmp_path / name, tmp_path / name.partition("/")[0]
    path.parent.mkdir(exist_ok=True)
    write({"model": {"decoder.head.weight": trap}, "key": trap}, path)
    said = refused(
        *finetune(table, tmp_path / "out", "--batch-size", 8, "--initial-checkpoint", start)
    )
    assert f"{path.name} contains no weights that can be read" in said and said.count("\n") == 1
    assert not (tmp_path / "out" / "config.json").exists()


def test_as_an_encoder(table: Path, tmp_path: Path, trap: Evil):
    folder = save_pretrained("canine", tmp_path / "encoder")
    (folder / "model.safetensors").unlink()
    torch.save({"char_embeddings": trap}, folder / "pytorch_model.bin")
    args = [
        folder if arg == "tiny" else arg
        for arg in finetune(table, tmp_path / "out", "--batch-size", 8)
    ]
    assert f"Could not load the encoder '{folder}'" in refused(*args)


def test_as_a_model_to_convert(tmp_path: Path, trap: Evil):
    torch.save({"model": trap, "key": {"61110": 0}}, tmp_path / "last.bin")
    convert = (
        "-m",
        "histocoder",
        "convert",
        "--from-occcanine",
        tmp_path / "last.bin",
        "--formatter",
        "hisco",
    )
    assert "contains objects other than tensors" in refused(
        *convert, "--output", tmp_path / "model"
    )
    assert not (tmp_path / "model").exists()


def test_in_a_checkpoint(table: Path, tmp_path: Path, trap: Evil):
    args = finetune(table, tmp_path / "out", "--batch-size", 8, "--max-steps", 2)
    run(*args)
    (checkpoint,) = list_checkpoints(tmp_path / "out")
    torch.save({"optimizer": trap, "scheduler": {}}, checkpoint / "optimizer.pt")
    write_manifest(checkpoint)
    assert (
        "optimizer.pt contains no weights that can be read: it contains objects other than tensors"
        in refused(*args)
    )
