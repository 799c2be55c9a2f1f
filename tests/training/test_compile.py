"""--compile: a few graphs for all lengths, the same numbers, and a sentence where there is no compiler."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import environment, refused, run, write_table
from jobs import finetune, logged
from models import save_tiny_model, tiny_model
from pretrained import model_of, save_pretrained
from safetensors.torch import load_file
from torch._dynamo.utils import counters
from trainers import begin, dataset

from histocoder import Coder


@pytest.fixture(autouse=True)
def no_compiled_graphs() -> Iterator[None]:
    """Reset the compiler around each test."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def num_graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.slow
def test_three_graphs_serve_all_lengths_and_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    data = dataset(tmp_path, write_table(tmp_path / "table.csv"), ("hisco_1",), noise=True)
    trained = begin(tmp_path, data, precision="fp32", num_classes=8, batch_size=6, compile=True)
    trained.model.train()
    shapes = set()
    for epoch in range(3):
        trained.sampler.set_position(epoch, 0)
        for batch in trained.train_loader:
            shapes.add(batch.input_ids.shape)
            trained.learner.train_step([batch])
    assert {size for size, _ in shapes} == {4, 6} and len({length for _, length in shapes}) >= 5
    assert num_graphs() == 3  # the encoder's first layer, all others, and the decoder's
    assert not counters["graph_break"]
    trained.validate()
    assert num_graphs() == 6  # the same without gradients


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.parametrize("kind", ["tiny", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("bert", "byt5"))])
def test_predicting_compiled_gives_what_predicting_gives(tmp_path: Path, kind: str):
    model = tiny_model() if kind == "tiny" else model_of(save_pretrained(kind, tmp_path))
    texts = [f"farmer{' and dealer' * (i % 4)} no {i}" for i in range(9)]
    plain, compiled = (Coder(model, "cpu", compile=one).predict(texts, "en", mode="full") for one in (False, True))
    assert num_graphs() > 0
    np.testing.assert_allclose(compiled, plain, atol=1e-4)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_training_compiled_takes_the_same_steps(table: Path, tmp_path: Path):
    extra = ("--batch-size", 8, "--max-steps", 4)
    run(*finetune(table, tmp_path / "one", *extra))
    run(*finetune(table, tmp_path / "two", *extra, "--compile"))
    for column in ("train_loss", "val_loss"):
        assert logged(tmp_path / "two", column) == pytest.approx(logged(tmp_path / "one", column), abs=1e-4)
    names = [load_file(tmp_path / name / "model.safetensors").keys() for name in ("one", "two")]
    assert names[0] == names[1]


def test_without_a_compiler_a_sentence_says_so(tmp_path: Path):
    table = write_table(tmp_path / "table.csv")
    train = (*finetune(table, tmp_path / "out"), "--batch-size", 8, "--max-steps", 1, "--compile")
    predict = ("-m", "histocoder", "predict", "--model", save_tiny_model(tmp_path / "model"), "--compile", "farmer")
    for command in (train, predict):
        said = refused(*command, env=environment(CXX="no-such-compiler"))
        assert said.count("\n") == 1 and "there is no no-such-compiler here" in said
