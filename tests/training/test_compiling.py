"""`--compile`: one graph for all lengths, and a run that ends as one without it."""

from pathlib import Path

import pytest
from conftest import write
from jobs import assert_same_weights
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._inductor import config
from trainers import MAX_LEN, begin, dataset

from histocoder import FinetuneConfig, train
from histocoder.errors import UserError


def settings(table: Path, out: Path, **options: object) -> FinetuneConfig:
    run = {
        "target_cols": ("hisco_1",),
        "encoder": "tiny",
        "device": "cpu",
        "max_steps": 3,
        "precision": "fp32",
    }
    switches = {"titles": "none", "no_refit": True, "no_report": True, "no_experts": True}
    return FinetuneConfig(dataset=str(table), save_path=str(out), **{**run, **switches, **options})


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_graph_serves_all_lengths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
):
    counter, compile_module = CompileCounter(), nn.Module.compile

    def count(module: nn.Module, **options: bool) -> None:
        compile_module(module, backend=counter, fullgraph=True, **options)

    monkeypatch.setattr(nn.Module, "compile", count)
    rows = [f"{'farmer ' * (1 + i % 12)}{i},61110" for i in range(96)]
    data = dataset(tmp_path, write(tmp_path / "table.csv", "occ1,hisco_1", *rows))
    trainer = begin(tmp_path, data, compile=True, precision=precision, batch_size=8)
    trainer.model.train()
    widths = set()
    for batch in trainer.train_loader:
        trainer.learner.train_step([batch])
        widths.add(batch.input_ids.shape[1])
    # texts that are cut have a graph of their own, since nothing follows their last position
    assert counter.frame_count == 2 and len(widths) > 5 and MAX_LEN in widths
    assert [name for name in trainer.learner.strategy.weights() if "_orig_mod" in name] == []


@pytest.mark.slow
def test_a_compiled_run_ends_as_any_other(tmp_path: Path, table: Path):
    train(settings(table, tmp_path / "eager"))
    train(settings(table, tmp_path / "compiled", compile=True))
    assert_same_weights(tmp_path / "compiled", tmp_path / "eager", tolerance=1e-4)
    train(settings(table, tmp_path / "compiled", max_steps=4))  # resumes without it


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"encoder": "ngram"}, "n-gram encoders"),
        ({"fsdp": "full_shard"}, "--compile can't be used with --fsdp"),
        ({}, "needs a C\\+\\+ compiler"),
    ],
)
def test_what_cannot_be_compiled_is_refused(
    tmp_path: Path, table: Path, options: dict, message: str
):
    with config.patch({"cpp.cxx": (None, "/no/compiler")}), pytest.raises(UserError, match=message):
        train(settings(table, tmp_path / "out", compile=True, **options))
