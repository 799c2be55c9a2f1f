"""What a run inherits from the model that it starts from, and which settings it then has."""

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from conftest import run, write_table
from jobs import finetune

from histocoder import Coder
from histocoder.checkpoints.model_files import read_model_config, save_config
from histocoder.config import RECIPES, FinetuneConfig
from histocoder.data.example_files import ExampleFiles
from histocoder.data.key import Key
from histocoder.formatters import build_formatter
from histocoder.model import MixerModel
from histocoder.training.building import build_model, fill_in, kind_of_start

NGRAM = Path(__file__).parents[1] / "fixtures" / "ngram"


def test_a_continued_run_reads_as_its_model(tmp_path: Path):
    table, first, second = write_table(tmp_path / "table.csv"), tmp_path / "first", tmp_path / "second"
    extra = ("--max-steps", 1, "--max-len", 64, "--batch-size", 8)
    run(*finetune(table, first, *extra, "--recipe", "reference"))
    as_imported = {"mask_memory": False, "pad_to": 64, "text_normalization": "lower_ascii", "flat_loss": "bce"}
    save_config(first, replace(read_model_config(first), **as_imported))
    run(*finetune(table, second, *extra, "--initial-checkpoint", first))
    found = json.loads((second / "config.json").read_text(encoding="utf-8"))
    assert {name: found[name] for name in as_imported} == as_imported
    assert not found.get("decoder_prior")  # the first model's decoder does not start from its flat head


def continued(path: Path, **settings: float) -> MixerModel:
    """The model that a run begins with which starts from the fixture, or a copy of it."""
    sizes = {"max_len": 32, "decoder_dim_feedforward": 8}
    start = {"dataset": "t.csv", "target_cols": ("hisco_1",), "initial_checkpoint": str(path)}
    config, codes = fill_in(FinetuneConfig(**start, **sizes, **settings)), read_model_config(path).codes
    files = ExampleFiles((), ("hisco_1",), build_formatter("general", num_blocks=1))
    return build_model(config, files, key=Key(codes), languages=("en", "unk"), attributes={})


def test_a_continued_run_drops_ngrams_as_told():
    model = continued(NGRAM, ngram_dropout=0.1)
    assert model.encoder.config.ngram_dropout_prob == model.config.encoder["ngram_dropout_prob"] == 0.1


@pytest.mark.parametrize(
    ("encoder", "num_blocks", "learns"), [("ngram", 1, False), ("ngram", 2, True), ("tiny", 1, True)]
)
def test_a_decoder_that_adds_nothing_does_not_learn(encoder: str, num_blocks: int, learns: bool):
    columns = ("hisco_1", "hisco_2")[:num_blocks]
    config = fill_in(FinetuneConfig(dataset="t.csv", target_cols=columns, encoder=encoder))
    files = ExampleFiles((), columns, build_formatter("hisco", num_blocks=num_blocks))
    codes = ("-1", "61110", "61115", "77610")
    model = build_model(config, files, key=Key(codes), languages=("en", "unk"), attributes={})
    assert model.config.decoder_learns == learns
    assert all(parameter.requires_grad == learns for parameter in model.decoder.parameters())
    if not learns:  # all modes give the classifier's answer
        torch.manual_seed(0)
        torch.nn.init.normal_(model.linear_decoder.weight)
        coder, texts = Coder(model, "cpu"), ["farmer", "wine merchant", "baker"]
        flat, best = (coder.predict(texts, "en", mode=mode) for mode in ("flat", "topk"))
        pd.testing.assert_frame_equal(flat, best[flat.columns], rtol=0.02)  # a prior leaves room for other tokens
        assert coder.predict(texts, "en", mode="greedy")["hisco_1"].isin(codes).all()


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"encoder": "ngram"}, "ngram"),
        ({"encoder": "small"}, "scratch"),
        ({"encoder": "some/bert"}, "pretrained"),
        ({"encoder": "some/bert", "freeze_encoder": True}, "frozen"),
        ({"encoder": "some/bert", "recipe": "reference"}, "reference"),
    ],
)
def test_settings_not_given_are_the_starts(settings: dict, kind: str):
    config = FinetuneConfig(dataset="t.csv", target_cols=("hisco_1",), **settings)
    assert kind_of_start(config) == kind
    assert fill_in(config).learning_rate == RECIPES[kind]["learning_rate"]
    assert fill_in(replace(config, learning_rate=0.5)).learning_rate == 0.5
