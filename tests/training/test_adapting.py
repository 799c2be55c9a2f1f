"""Adaptation of a trained model to few rows, in place of training."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import program

from histocoder import Coder, FinetuneConfig
from histocoder.checkpoints.starter import BOX
from histocoder.model.linear_expert import LinearExpert
from histocoder.text.tokenizers import lower_characters
from histocoder.training.adapting import adapted, is_adapted
from histocoder.training.start import Start, fill_in

DECISIONS = pd.DataFrame(
    {
        "occ1": ["loom tuner's mate", "loom tuner", "keeper of the beam", "cheese factor"],
        "hisco_1": ["75432", "75432", "98590", "41030"],
        "lang": "en",
        "checked": "x",
    }
)
"""What a person decides on descriptions that the box codes otherwise."""

CONFIG = FinetuneConfig(
    dataset="my.csv",
    target_cols=("hisco_1",),
    encoder="ngram",
    initial_checkpoint=BOX,
    language="da",
)


@pytest.fixture(scope="module")
def coder() -> Coder:
    return Coder.from_pretrained(device="cpu")


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that learns the decisions."""
    folder = tmp_path_factory.mktemp("adapted")
    rows = pd.concat([DECISIONS] * 2).assign(occ1=lambda table: table["occ1"] + ["", "s"] * 4)
    rows.drop_duplicates("occ1").to_csv(folder / "review.csv", index=False)
    command = (sys.executable, "-m", "histocoder", "finetune", "--no-report")
    done = program(*command, "--corrections", folder / "review.csv", "--save-path", folder / "own")
    assert "steps       none: these rows are few" in done.stdout
    return folder / "own"


def decisions_of(expert: LinearExpert, texts: list[str]) -> torch.Tensor:
    return expert.margins(torch.from_numpy(lower_characters(texts)))


def test_an_adapted_expert_has_the_margins_of_its_texts(coder: Coder):
    texts = [f"en[SEP]{text}" for text in DECISIONS["occ1"]]
    true_classes = [coder.codes.index(code) for code in DECISIONS["hisco_1"]]
    is_true = np.zeros((len(texts), len(coder.codes)), dtype=bool)
    is_true[np.arange(len(texts)), true_classes] = True
    before = coder.model.linear_expert
    after = adapted(before, texts, is_true)
    assert decisions_of(before, texts).argmax(1).tolist() != true_classes
    assert decisions_of(after, texts).argmax(1).tolist() == true_classes


def test_an_adapted_model_keeps_what_the_box_knows(coder: Coder, run_folder: Path):
    own = Coder.from_pretrained(run_folder / "best", device="cpu")
    predicted = own.predict(DECISIONS["occ1"], "en", progress=False)
    is_right = predicted["hisco_1"] == DECISIONS["hisco_1"]
    assert is_right.sum() >= 3, predicted

    known = ["husmand", "Schneidermeister", "domestic servant", "timmerman", "cultivateur"]
    langs = ["da", "ge", "en", "nl", "fr"]
    before = coder.predict(known, langs, progress=False)
    after = own.predict(known, langs, progress=False)
    assert after["hisco_1"].tolist() == before["hisco_1"].tolist()
    assert own.model.config.experts == coder.model.config.experts
    assert own.model.config.confidence == coder.model.config.confidence


def test_a_model_from_the_box_has_its_licence(run_folder: Path):
    for folder in (run_folder, run_folder / "best"):
        card = (folder / "README.md").read_text(encoding="utf-8")
        assert "license: cc-by-sa-4.0" in card and "share it under the same licence" in card
    own = Start.of(replace(CONFIG, initial_checkpoint=str(run_folder / "best")))
    assert own.config is not None and own.config.license == "cc-by-sa-4.0"


def test_the_measured_model_has_not_learned_the_validation_rows(run_folder: Path):
    measured = json.loads((run_folder / "config.json").read_text(encoding="utf-8"))
    best = json.loads((run_folder / "best" / "config.json").read_text(encoding="utf-8"))
    assert not measured["fitted_to_validation"] and best["fitted_to_validation"]
    assert best["num_nearest_rows"] > measured["num_nearest_rows"]


def test_a_run_adapts_few_rows_of_known_codes(tmp_path: Path):
    config = replace(CONFIG, save_path=str(tmp_path))
    start = Start.of(config)
    assert start.config is not None
    model = start.config
    assert is_adapted(fill_in(config, start), start, model, num_rows=100)
    assert not is_adapted(fill_in(config, start), start, model, num_rows=1_000)

    # or a setting asks for training
    for settings in (
        {"num_epochs": 2},
        {"max_steps": 5},
        {"batch_size": 8},
        {"freeze_encoder": True},
        {"no_experts": True},
    ):
        trained = fill_in(replace(config, **settings), start)
        assert not is_adapted(trained, start, model, num_rows=100), settings
    more_codes = replace(model, codes=(*model.codes, "new"))
    assert not is_adapted(fill_in(config, start), start, more_codes, num_rows=100)
