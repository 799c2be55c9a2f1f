"""--compile: a few graphs for all lengths, the same numbers, and a sentence where there is no compiler."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import environment, run, write_table
from jobs import finetune, logged
from models import save_tiny_model, tiny_model
from torch._dynamo.utils import counters
from trainers import begin, dataset, losses

from histocoder import Coder
from histocoder.data.dataset import OccupationDataset


@pytest.fixture(autouse=True)
def no_compiled_graphs() -> Iterator[None]:
    """Reset the compiler around each test."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compile_with(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))


def num_graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.fixture
def data(tmp_path: Path) -> OccupationDataset:
    """Descriptions of many lengths."""
    return dataset(tmp_path, write_table(tmp_path / "table.csv"), ("hisco_1",), noise=True)


@pytest.mark.slow
def test_three_graphs_serve_all_lengths_and_batches(
    data: OccupationDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    compile_with(monkeypatch, "eager")
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


@pytest.mark.slow
def test_training_compiled_gives_the_losses_of_training(
    data: OccupationDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    compile_with(monkeypatch, "aot_eager")
    curves = []
    for compiled in (False, True):
        assert num_graphs() == 0
        trained = begin(tmp_path, data, precision="fp32", num_classes=8, compile=compiled)
        names = list(trained.model.state_dict())
        curves.append(losses(trained, 12, pad=False))
        assert list(trained.model.state_dict()) == names
    assert num_graphs() == 3
    np.testing.assert_allclose(curves[1], curves[0], atol=1e-4)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_predicting_compiled_gives_what_predicting_gives():
    texts = [f"farmer{' and dealer' * (i % 4)} no {i}" for i in range(9)]
    tables = [Coder(tiny_model(), "cpu", compile=compiled).predict(texts, "en", mode="full") for compiled in (0, 1)]
    assert num_graphs() == 2  # full search takes the decoder apart, so that its layers are not called
    np.testing.assert_allclose(*tables, atol=1e-4)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_a_run_that_is_compiled_takes_the_steps_of_one_that_is_not(table: Path, tmp_path: Path):
    extra = ("--batch-size", 8, "--max-steps", 4)
    run(*finetune(table, tmp_path / "one", *extra))
    run(*finetune(table, tmp_path / "two", *extra, "--compile"))
    for column in ("train_loss", "val_loss"):
        assert logged(tmp_path / "two", column) == pytest.approx(logged(tmp_path / "one", column), abs=1e-4)


def test_without_a_compiler_a_sentence_says_so(tmp_path: Path):
    table = write_table(tmp_path / "table.csv")
    train = (*finetune(table, tmp_path / "out"), "--batch-size", 8, "--max-steps", 1, "--compile")
    predict = ("-m", "histocoder", "predict", "--model", save_tiny_model(tmp_path / "model"), "--compile", "farmer")
    for command in (train, predict):
        ended = run(*command, env=environment(CXX="no-such-compiler"), check=False)
        assert ended.returncode == 2
        assert ended.stderr.count("\n") == 1 and "there is no no-such-compiler here" in ended.stderr
