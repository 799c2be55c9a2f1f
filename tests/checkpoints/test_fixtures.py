"""What an earlier histocoder wrote is read: see tests/fixtures/make.py."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import run
from fixtures.make import FLAGS, RUN_FLAGS, predictions

FIXTURES = Path(__file__).parents[1] / "fixtures"


@pytest.mark.parametrize("name", ["run", "ngram"])
def test_an_earlier_model_predicts_the_same(name: str):
    recorded = json.loads((FIXTURES / name / "predictions.json").read_text())
    found = predictions(FIXTURES / name)
    assert set(found) == set(recorded)
    for mode, then in recorded.items():
        assert found[mode]["codes"] == then["codes"]
        # how sure combined is that there is no further code has changed since
        tolerance = 1e-3 if mode == "combined" else 1e-4
        assert found[mode]["confidence"] == pytest.approx(then["confidence"], abs=tolerance)


def test_an_earlier_run_resumes_as_it_did(tmp_path: Path):
    shutil.copytree(FIXTURES / "run" / "checkpoints", tmp_path / "run" / "checkpoints")
    shutil.copy2(FIXTURES / "run" / "args.yaml", tmp_path / "run")
    result = run("finetune.py", "--save-path", tmp_path / "run", *RUN_FLAGS, "--no-experts", "--no-refit")
    assert "step 4 (" in result.stdout
    then, now = (pd.read_csv(folder / "logs.csv").set_index("step") for folder in (FIXTURES / "run", tmp_path / "run"))
    losses = ["train_loss", "val_loss"]
    assert set(now.index) == {5, 6, 7, 8}
    np.testing.assert_allclose(now[losses], then.loc[then.index > 4, losses], rtol=1e-3)


def test_an_earlier_model_keeps_its_tokens_in_training(tmp_path: Path):
    for start, has_all in ((("--initial-checkpoint", FIXTURES / "ngram"), True), (("--encoder", "tiny"), False)):
        out = tmp_path / str(has_all)
        run("finetune.py", "--save-path", out, *FLAGS, *start, "--max-steps", 1, "--no-experts", "--no-refit")
        config = json.loads((out / "config.json").read_text())
        assert (config["vocab_size"] > 2000, "symbols" in config["formatter"]) == (has_all, not has_all)
