"""A frozen encoder's outputs: computed once for each text, and the same as those computed in each step."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from conftest import write_table
from models import slow_in_bf16, tiny_model
from trainers import dataset

from histocoder.checkpoints.run_folder import RunFolder
from histocoder.config import TrainConfig
from histocoder.model import MixerModel
from histocoder.model.canine import Canine
from histocoder.training import frozen
from histocoder.training.trainer import Trainer

NUM_EPOCHS, COPIES, NUM_VALIDATIONS = 3, 2, 6


class Trained(NamedTuple):
    model: MixerModel
    results: dict[str, float]


def fit(folder: Path, *, precision: str = "fp32") -> Trained:
    """Train for some epochs on a table that holds each description twice."""
    if not (folder / "table.csv").exists():
        lines = write_table(folder / "table.csv").read_text().splitlines()
        (folder / "table.csv").write_text("\n".join(lines + lines[1:] * (COPIES - 1)))
        write_table(folder / "val.csv")
    train = dataset(folder / "cache", folder / "table.csv", ("hisco_1",))
    val = dataset(folder / "cache", folder / "val.csv", ("hisco_1",))
    model = tiny_model(num_blocks=1)
    torch.manual_seed(5)
    torch.nn.init.normal_(model.encoder.pooler.dense.weight, std=0.1)
    model.freeze_encoder()
    config = TrainConfig(
        batch_size=20,
        num_epochs=NUM_EPOCHS,
        min_steps=0,
        learning_rate=1e-3,
        warmup_pct=0.05,
        seq2seq_weight=0.5,
        eval_interval=4,
        precision=precision,
        seed=1,
    )
    trainer = Trainer(model, train, val, config, device=torch.device("cpu"), run=RunFolder(folder / "out"), settings={})
    return Trained(model, trainer.fit())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each call of the encoder."""
    counts: list[int] = []

    def count(model, input_ids, **options):
        counts.append(len(input_ids))
        return canine(model, input_ids, **options)

    canine = Canine.forward
    monkeypatch.setattr(Canine, "forward", count)
    return counts


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), pytest.param("bf16", 1e-2, marks=slow_in_bf16)])
def test_training_on_kept_outputs_is_training(
    folder: Path, encoded: list[int], monkeypatch: pytest.MonkeyPatch, capsys, precision: str, tolerance: float
):
    with monkeypatch.context() as patch:  # without room for outputs, they are computed in each step
        patch.setattr(frozen, "total_bytes", lambda: 1e5)
        plain = fit(folder, precision=precision)
    assert NUM_EPOCHS * 64 < sum(encoded) - NUM_VALIDATIONS * 64 <= NUM_EPOCHS * 64 * COPIES
    encoded.clear()
    capsys.readouterr()
    kept = fit(folder, precision=precision)
    assert sum(encoded) == 64 + 64  # of 128 rows to train on, in three epochs, and 64 to validate on, six times
    assert capsys.readouterr().out.count("outputs for 64 distinct descriptions") == 2
    assert kept.results == pytest.approx(plain.results, abs=tolerance)
    weights = plain.model.state_dict()
    for name, tensor in kept.model.state_dict().items():
        torch.testing.assert_close(tensor, weights[name], atol=tolerance, rtol=0, msg=name)
    assert not torch.equal(weights["linear_decoder.weight"], tiny_model(num_blocks=1).linear_decoder.weight)
