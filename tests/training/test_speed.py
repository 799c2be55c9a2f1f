"""What makes training fast, counted instead of timed; and that it learns as fast as what it replaces."""

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, write_table
from models import slow_in_bf16
from trainers import CPU, MAX_LEN, begin, dataset, losses

from histocoder.data.samplers import Share
from histocoder.errors import UserError
from histocoder.model import trimmed_length
from histocoder.model.devices import computing_dtype
from histocoder.training.losses import mixed_loss


@slow_in_bf16
def test_trimmed_bf16_learns_as_padded_fp32(tmp_path: Path):
    data = dataset(tmp_path, write_table(tmp_path / "table.csv", copies=2), ("hisco_1",))
    curves = [
        np.array(losses(begin(tmp_path, data, precision=precision, num_classes=8, batch_size=8), 200, pad=pad))
        for precision, pad in (("fp32", True), ("bf16", False))
    ]
    padded, trimmed = (curve.reshape(-1, 20).mean(1) for curve in curves)
    assert padded[-1] < 0.5 * padded[0]
    np.testing.assert_allclose(trimmed, padded, rtol=0.02)


def test_an_epoch_computes_hardly_more_than_its_characters(tmp_path: Path):
    data = dataset(tmp_path, ROOT / "data" / "train.csv", ("hisco_1",), noise=True)
    trainer = begin(tmp_path, data, precision="fp32", num_classes=8)
    trainer.sampler.set_position(1, 0)
    batches, lengths = list(trainer.train_loader), data.lengths(1)
    computed = sum(batch.input_ids.numel() for batch in batches)
    needed = sum(trimmed_length(int(lengths[row]), MAX_LEN) for batch in batches for row in batch.rows)
    assert needed <= computed <= 1.02 * needed


def test_equal_rows_are_computed_once_with_equal_gradients(tmp_path: Path):
    (tmp_path / "table.csv").write_text("occ1,hisco_1\n" + "farmer,61110\nbaker,77610\nbaker,61110\n" * 20)
    data = dataset(tmp_path, tmp_path / "table.csv", ("hisco_1",))
    trainers = [begin(tmp_path, data, precision="fp32", num_classes=2, batch_size=60) for _ in range(2)]
    (merged,) = trainers[0].train_loader
    assert len(merged.rows) == 16 and merged.counts.sum() == 60  # the least multiple of 16 from three distinct rows on
    every = data[Share(rows=np.arange(60), epoch=0, num_rows=60, num_target_blocks=1, weight=1.0)]
    gradients = []
    for trainer, batch in zip(trainers, (merged, every), strict=True):
        loss = mixed_loss(trainer.learner.forward(batch), batch, trainer.model.config, trainer.config)
        loss.backward()
        gradients.append([loss, *(p.grad for p in trainer.model.parameters())])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(("name", "message"), [("fp16", "fp16 needs a CUDA GPU"), ("fp8", "Unknown precision")])
def test_precisions(name: str, message: str):
    assert computing_dtype("fp32", CPU) == torch.float32
    assert computing_dtype("bf16", CPU) == torch.bfloat16
    assert computing_dtype("auto", CPU, use_amp=True) in (torch.float32, torch.bfloat16)
    with pytest.raises(UserError, match=message):
        computing_dtype(name, CPU)
