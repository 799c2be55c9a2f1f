"""What makes training fast, counted instead of timed; and that it learns as fast as what it
replaces.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, spied, write, write_table
from models import slow_in_bf16, tiny_model
from trainers import CPU, MAX_LEN, begin, dataset

from histocoder.checkpoints.run_folder import RunFolder
from histocoder.config import TrainConfig
from histocoder.data.samplers import BatchIndices
from histocoder.errors import UserError
from histocoder.model import MixerModel, trimmed_length
from histocoder.model.canine import Canine
from histocoder.model.devices import computing_dtype
from histocoder.training import encoded_rows
from histocoder.training.losses import mixed_loss
from histocoder.training.trainer import Trainer


def test_an_epoch_computes_hardly_more_than_its_characters(tmp_path: Path):
    data = dataset(tmp_path, ROOT / "data" / "train.csv", noise=True)
    trainer = begin(tmp_path, data)
    trainer.sampler.set_position(1, 0)
    batches, lengths = list(trainer.train_loader), data.lengths(1)
    computed = sum(batch.input_ids.numel() for batch in batches)
    needed = sum(
        trimmed_length(int(lengths[row]), MAX_LEN) for batch in batches for row in batch.rows
    )
    assert needed <= computed <= 1.02 * needed


def test_equal_rows_are_computed_once_with_equal_gradients(tmp_path: Path):
    rows = ["farmer,61110", "baker,77610", "baker,61110"] * 20
    data = dataset(tmp_path, write(tmp_path / "table.csv", "occ1,hisco_1", *rows))
    trainers = [begin(tmp_path, data, batch_size=60) for _ in range(2)]
    (merged,) = trainers[0].train_loader
    assert (
        len(merged.rows) == 16 and merged.counts.sum() == 60
    )  # the least multiple of 16 from three distinct rows on
    every = data[
        BatchIndices(rows=np.arange(60), epoch=0, num_rows=60, num_target_blocks=1, weight=1.0)
    ]
    gradients = []
    for trainer, batch in zip(trainers, (merged, every), strict=True):
        loss = mixed_loss(
            trainer.learner.forward(batch), batch, trainer.model.config, trainer.config
        )
        loss.backward()
        gradients.append([loss, *(p.grad for p in trainer.model.parameters())])
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-4)


NUM_EPOCHS, COPIES, NUM_VALIDATIONS = 3, 2, 6


def frozen_run(folder: Path, precision: str) -> tuple[MixerModel, dict[str, float]]:
    """A model with a frozen encoder, trained for some epochs on a table that holds each description
    twice.
    """
    header, *rows = write_table(folder / "val.csv").read_text().splitlines()
    write(folder / "table.csv", header, *rows * COPIES)
    train, val = (dataset(folder / "cache", folder / name) for name in ("table.csv", "val.csv"))
    model = tiny_model(num_blocks=1)
    torch.manual_seed(5)
    torch.nn.init.normal_(model.encoder.pooler.dense.weight, std=0.1)
    model.freeze_encoder()
    sizes = {
        "batch_size": 20,
        "num_epochs": NUM_EPOCHS,
        "min_steps": 0,
        "eval_interval": 4,
        "seq2seq_weight": 0.5,
    }
    config = TrainConfig(learning_rate=1e-3, warmup_pct=0.05, seed=1, precision=precision, **sizes)
    return model, Trainer(
        model, train, val, config, device=CPU, run=RunFolder(folder / "out"), settings={}
    ).fit()


@pytest.mark.parametrize(
    ("precision", "tolerance"), [("fp32", 1e-5), pytest.param("bf16", 1e-2, marks=slow_in_bf16)]
)
def test_training_on_kept_outputs_is_training(
    tmp_path: Path, monkeypatch, capsys, precision: str, tolerance: float
):
    (tmp_path / "out").mkdir()
    encoded = spied(monkeypatch, Canine, "forward", lambda _, input_ids, **__: input_ids.tolist())
    with monkeypatch.context() as patch:  # without room for outputs, they are computed in each step
        patch.setattr(encoded_rows, "total_bytes", lambda: 1e5)
        model, results = frozen_run(tmp_path, precision)
    assert NUM_EPOCHS * 64 < len(encoded) - NUM_VALIDATIONS * 64 <= NUM_EPOCHS * 64 * COPIES
    encoded.clear()
    capsys.readouterr()
    kept, kept_results = frozen_run(tmp_path, precision)
    assert (
        len(encoded) == 64 + 64
    )  # of 128 rows to train on, in three epochs, and 64 to validate on, six times
    assert capsys.readouterr().out.count("outputs for 64 distinct descriptions") == 2
    assert kept_results == pytest.approx(results, abs=tolerance)
    torch.testing.assert_close(kept.state_dict(), model.state_dict(), atol=tolerance, rtol=0)
    assert not torch.equal(
        model.linear_decoder.weight, tiny_model(num_blocks=1).linear_decoder.weight
    )


def test_precisions():
    assert computing_dtype("fp32", CPU) == torch.float32
    assert computing_dtype("bf16", CPU) == torch.bfloat16
    assert computing_dtype("auto", CPU, use_amp=True) in (torch.float32, torch.bfloat16)
    for name, message in (("fp16", "fp16 needs a CUDA GPU"), ("fp8", "Unknown precision")):
        with pytest.raises(UserError, match=message):
            computing_dtype(name, CPU)
