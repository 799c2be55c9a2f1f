"""A frozen encoder's outputs: computed once for each text, and the same as those computed in each step."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from conftest import write_table
from models import slow_in_bf16, tiny_model
from trainers import dataset

from histocoder.checkpoints.run_folder import RunFolder
from histocoder.config import LoaderConfig, TrainConfig
from histocoder.model import MixerModel
from histocoder.model.canine import Canine
from histocoder.training.trainer import Trainer

CPU = torch.device("cpu")
NUM_EPOCHS, COPIES, NUM_VALIDATIONS = 3, 2, 6


class Trained(NamedTuple):
    model: MixerModel
    results: dict[str, float]


def fit(folder: Path, *, precision: str = "fp32", seed: int = 5, noise: bool = False) -> Trained:
    """Train for some epochs on a table that holds each description twice; `seed` is of the model's weights."""
    if not (folder / "table.csv").exists():
        lines = write_table(folder / "table.csv").read_text().splitlines()
        (folder / "table.csv").write_text("\n".join(lines + lines[1:] * (COPIES - 1)))
        write_table(folder / "val.csv")
    train = dataset(folder / "cache", folder / "table.csv", ("hisco_1",), noise=noise)
    val = dataset(folder / "cache", folder / "val.csv", ("hisco_1",))
    model = tiny_model(num_blocks=1)
    torch.manual_seed(seed)
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
    options = {"loader": LoaderConfig(), "device": CPU, "run": RunFolder(folder / "out"), "settings": {}}
    return Trained(model, Trainer(model, train, val, config, **options).fit())


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


def test_each_text_is_encoded_once(folder: Path, encoded: list[int], capsys: pytest.CaptureFixture[str]):
    fit(folder)
    assert sum(encoded) == 64 + 64  # of 128 rows to train on, in three epochs, and 64 to validate on, six times
    assert capsys.readouterr().out.count("64 distinct descriptions are computed once and stored: 0.0") == 2
    fit(folder)
    assert sum(encoded) == 64 + 64 and "once" not in capsys.readouterr().out


def test_with_noise_only_validation_texts_are_encoded_once(folder: Path, encoded: list[int]):
    fit(folder, noise=True)
    assert NUM_EPOCHS * 64 < sum(encoded) - 64 <= NUM_EPOCHS * 64 * COPIES  # a batch that has both has one of them


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), pytest.param("bf16", 1e-2, marks=slow_in_bf16)])
def test_training_on_kept_encodings_is_training(
    folder: Path,
    encoded: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    precision: str,
    tolerance: float,
):
    with monkeypatch.context() as patch:  # without room for encodings, they are computed in each step
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**5))
        plain = fit(folder, precision=precision)
    assert "0.0001 GB free" in capsys.readouterr().out
    assert NUM_EPOCHS * 64 < sum(encoded) - NUM_VALIDATIONS * 64 <= NUM_EPOCHS * 64 * COPIES
    assert not list((folder / "cache").glob("train-*"))
    kept = fit(folder, precision=precision)
    assert kept.results == pytest.approx(plain.results, abs=tolerance)
    weights = plain.model.state_dict()
    for name, tensor in kept.model.state_dict().items():
        torch.testing.assert_close(tensor, weights[name], atol=tolerance, rtol=0, msg=name)
    assert not torch.equal(weights["linear_decoder.weight"], tiny_model(num_blocks=1).linear_decoder.weight)


@pytest.mark.slow
def test_other_encoders_and_damaged_files_are_encoded_again(folder: Path, encoded: list[int]):
    fit(folder)
    kept, _ = (folder / "cache").glob("*/memory")
    kept.write_bytes(kept.read_bytes()[:-4])
    for seed, num_texts in ((5, 64), (6, 64 + 64)):
        encoded.clear()
        fit(folder, seed=seed)
        assert sum(encoded) == num_texts
    assert len(list((folder / "cache").glob("train-*"))) == 4  # the cache may serve other runs as well
