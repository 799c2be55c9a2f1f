"""Steps on a pretended GPU: they never wait, launch few kernels, and learn what a CPU learns."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import cases, slow
from models import config_of
from pretended_gpu import Log, pretended_gpu
from pretrained import model_of, save_pretrained
from trainers import CPU, MAX_LEN, dataset
from transformers.models.bert import modeling_bert

from histocoder.checkpoints.run_folder import RunFolder
from histocoder.config import TrainConfig
from histocoder.data.dataset import OccupationDataset
from histocoder.model import MixerModel, load_encoder
from histocoder.model.canine import Canine, CanineConfig
from histocoder.training.encoded_rows import frozen_outputs
from histocoder.training.trainer import Trainer

GPU = torch.device("cuda", 0)
CANINE_S = {
    "num_hidden_layers": 12,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
"""CANINE-s's layers, in small."""


def model_for(encoder: str, data: OccupationDataset, folder: Path) -> MixerModel:
    """A model whose encoder has no dropout of n-grams, so that devices compare."""
    torch.manual_seed(0)
    if encoder == "bert":
        return model_of(save_pretrained("bert", folder / "bert"), max_len=MAX_LEN)
    if encoder == "canine-s":
        module: Any = Canine(CanineConfig(**CANINE_S, num_hash_buckets=128))
    else:
        module = load_encoder(encoder.removesuffix(", frozen"), max_len=MAX_LEN, ngram_dropout=0.0)
    config = config_of(
        module, data.formatter, data.classes, target_cols=("hisco_1",), decoder_prior=True
    )
    model = MixerModel(config, module)
    if encoder.endswith("frozen"):
        model.freeze_encoder()
    return model


def losses(
    folder: Path, table: Path, encoder: str, device: torch.device, log: Log | None = None, **options
) -> list:
    """The losses of four steps; the log is that of the last one."""
    data = dataset(folder, table)
    model = model_for(encoder, data, folder)
    data = replace(data, tokenizer=model.tokenizer)
    config = TrainConfig(
        **{
            "batch_size": 8,
            "num_epochs": 9,
            "min_steps": 0,
            "learning_rate": 1e-2,
            "warmup_pct": 0.0,
            **options,
        }
    )
    trainer = Trainer(model, data, data, config, device=device, run=RunFolder(folder), settings={})
    trainer.learner.outputs = frozen_outputs(model, data)
    model.train()
    found, batches = [], iter(trainer.train_loader)
    for _ in range(4):
        parts = [next(batches) for _ in range(config.gradient_accumulation_steps)]
        if log is not None:
            log.clear()
        loss, grad_norm = trainer.learner.train_step(parts)
        trainer.meter.add(loss, grad_norm, rows=len(parts))
        found.append(loss)
    if log is None:
        return [float(loss) for loss in found]
    waits, launches = log.waits.copy(), log.launches.copy()
    values = [float(loss) for loss in found]
    log.waits, log.launches = waits, launches  # without reading the losses
    assert not waits
    return values


@cases(
    ("encoder", "precision"),
    ("tiny", "bf16"),
    ("ngram", "fp32"),
    ("ngram", "fp16"),
    ("bert", "bf16"),
    ("tiny, frozen", "fp32"),
    *(slow("tiny", precision) for precision in ("fp32", "fp16")),
    slow("ngram", "bf16"),
    *(slow("bert", precision) for precision in ("fp32", "fp16")),
    *(slow("tiny, frozen", precision) for precision in ("bf16", "fp16")),
)
def test_steps_never_wait_and_learn_alike(
    tmp_path: Path, table: Path, encoder: str, precision: str
):
    if encoder == "bert" and not hasattr(modeling_bert, "create_bidirectional_mask"):
        pytest.skip("this version of transformers waits, to look whether a mask is all True")
    options = {"gradient_accumulation_steps": 2, "batch_size": 4}
    expected = losses(tmp_path / "cpu", table, encoder, CPU, precision="fp32", **options)
    with pretended_gpu() as log:
        found = losses(tmp_path / "gpu", table, encoder, GPU, log, precision=precision, **options)
    assert found == pytest.approx(expected, rel=1e-4 if precision == "fp32" else 3e-2)


@pytest.mark.parametrize(("encoder", "most"), [("canine-s", 900), ("ngram", 480)])
def test_a_step_launches_few_kernels(tmp_path: Path, table: Path, encoder: str, most: int):
    with pretended_gpu() as log:
        losses(tmp_path, table, encoder, GPU, log, precision="bf16")
    assert log.launches.total() <= most, log.lines.most_common(20)
    assert log.launches["_to_copy"] < 20  # weights are cast together
