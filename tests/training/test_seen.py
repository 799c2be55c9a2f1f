"""Accuracy on descriptions that a model was trained on is not taken for accuracy on new ones."""

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import write

from histocoder import FinetuneConfig, train
from histocoder.checkpoints.model_files import load_model
from histocoder.cli.main import main
from histocoder.config import MixerConfig
from histocoder.data.hashes import are_among
from histocoder.training.start import Start

FEW_STEPS = {
    "encoder": "tiny",
    "max_steps": 1,
    "batch_size": 16,
    "max_len": 32,
    "precision": "fp32",
    "num_workers": 0,
}


def rows(first: int, last: int) -> list[str]:
    return [f"maker of thing {i},en,{61110 + i % 3}" for i in range(first, last)]


def texts(folder: Path, part: str) -> list[str]:
    return pd.read_csv(folder / f"data_{part}.csv")["occ1"].tolist()


def finetuned(table: Path, out: Path, **changes: object) -> Path:
    settings = {
        "language_col": "lang",
        "titles": "none",
        "no_report": True,
        "no_experts": True,
        "no_refit": True,
    }
    return train(
        FinetuneConfig(
            str(table), ("hisco_1",), save_path=str(out), **FEW_STEPS | settings | changes
        )
    )


@pytest.fixture
def start(tmp_path: Path) -> Path:
    """A run on 120 descriptions."""
    return finetuned(
        write(tmp_path / "t.csv", "occ1,lang,hisco_1", *rows(0, 120)),
        tmp_path / "start",
        no_refit=False,
    )


def test_a_further_run_validates_on_new_descriptions(start: Path, tmp_path: Path):
    learned, validated = texts(start, "train"), texts(start, "val")
    trained_on = load_model(start).trained_on.numpy()
    assert are_among([text.upper() + "." for text in learned], trained_on).all()
    assert not are_among(validated, trained_on).any() and len(trained_on) == len(learned)
    assert are_among(
        validated, load_model(start / "best").trained_on.numpy()
    ).all()  # it is refitted

    again = finetuned(
        tmp_path / "t.csv", tmp_path / "again", initial_checkpoint=str(start / "best"), seed=7
    )
    assert sorted(texts(again, "val")) == sorted(validated)
    more = write(tmp_path / "more.csv", "occ1,lang,hisco_1", *rows(0, 300))
    out = finetuned(more, tmp_path / "more", initial_checkpoint=str(start), seed=8)
    assert len(texts(out, "val")) == 60 and not are_among(texts(out, "val"), trained_on).any()
    of_both = load_model(out).trained_on.numpy()
    assert are_among([*learned, *texts(out, "train")], of_both).all() and len(of_both) <= 240


def test_a_copy_says_that_accuracy_is_too_high(start: Path, tmp_path: Path, logged: list[str]):
    shutil.copytree(start / "best", tmp_path / "copy")
    finetuned(tmp_path / "t.csv", tmp_path / "out", initial_checkpoint=str(tmp_path / "copy"))
    notice = next(line for line in logged if "24 of 24 validation rows (24 descriptions)" in line)
    assert "initial model" in notice and "accuracy is too high" in notice

    config = json.loads((tmp_path / "copy" / "config.json").read_text())  # as of an earlier version
    (tmp_path / "copy" / "config.json").write_text(json.dumps({**config, "num_trained_on": 0}))
    (tmp_path / "copy" / "manifest.json").unlink(missing_ok=True)
    finetuned(tmp_path / "t.csv", tmp_path / "new", initial_checkpoint=str(tmp_path / "copy"))
    assert "does not record what it was trained on" in "\n".join(logged)


def test_evaluation_of_a_copy_says_what_it_learned(start: Path, tmp_path: Path, logged: list[str]):
    shutil.copytree(start / "best", tmp_path / "copy")
    table = write(tmp_path / "e.csv", "occ1,lang,hisco_1", *rows(100, 150))
    main(
        [
            "evaluate",
            "--model",
            str(tmp_path / "copy"),
            "--data",
            str(table),
            "--output",
            str(tmp_path / "e"),
        ]
    )
    assert f"Notice: {tmp_path / 'copy'} was trained on 20 of these 50 descriptions." in logged


def test_the_data_of_an_earlier_run_are_looked_up(start: Path):
    config = FinetuneConfig("t.csv", ("hisco_1",), initial_checkpoint=str(start))
    recorded = Start.of(config).trained_on
    model = json.loads((start / "config.json").read_text())
    (start / "config.json").write_text(json.dumps({**model, "num_trained_on": 0}))
    assert np.array_equal(Start.of(config).trained_on, recorded)


def mixed(tmp_path: Path, train_rows: list[str], val_rows: list[str]) -> dict:
    header = "occ1,lang,hisco_1"
    paths = {
        f"{name}_data": (str(write(tmp_path / f"{name}.csv", header, *some)),)
        for name, some in {"train": train_rows, "val": val_rows}.items()
    }
    out = train(
        MixerConfig(**paths, save_dir=str(tmp_path / "out"), target_cols=("hisco_1",), **FEW_STEPS)
    )
    return json.loads((out / "metrics.json").read_text())


def test_mixer_judges_by_new_descriptions(tmp_path: Path, logged: list[str]):
    metrics = mixed(
        tmp_path,
        rows(0, 60),
        [*(f"{row[:5].upper()}.{row[5:]}" for row in rows(40, 60)), *rows(60, 90)],
    )
    assert metrics["num_rows"] == 30
    assert metrics["seen"]["num_rows"] == 20 and metrics["seen"]["left_out"]
    lines = "\n".join(logged)
    assert (
        "20 of 50 validation rows (20 descriptions) are of descriptions in the training data"
        in lines
    )
    assert "20 validation rows are of descriptions that the model was trained on" in lines


def test_mixer_says_that_all_is_seen(tmp_path: Path, logged: list[str]):
    metrics = mixed(tmp_path, rows(0, 40), rows(0, 40))
    assert metrics["num_rows"] == 40 and not metrics["seen"]["left_out"]
    assert any("so the figures are too high" in line for line in logged)
    assert any(
        "40 of 40 validation rows" in line and "accuracy is too high" in line for line in logged
    )
