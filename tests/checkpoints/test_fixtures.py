"""What an earlier histocoder wrote is read: two models and a run's folder, trained with the flags
in args.yaml.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import run

from histocoder import Coder, FinetuneConfig
from histocoder.cli.arguments import parse

FIXTURES = Path(__file__).parents[1] / "fixtures"
FLAGS = (
    "--dataset tests/fixtures/table.csv --target-cols hisco_1 --language en --max-len "
    "32 --dropout 0 --batch-size 8"
)
FLAGS += (
    " --learning-rate 1e-2 --precision fp32 --no-report --eval-interval 4 "
    "--decoder-dim-feedforward 8"
)
FLAGS = [
    *FLAGS.split(),
    *"--text-normalization lower --titles none --no-experts --no-refit".split(),
]
RUN_FLAGS = (
    "--encoder tests/fixtures/encoder --save-interval 4 --max-steps 8 --log-interval 1".split()
)


@pytest.mark.parametrize("name", ["run", "ngram"])
def test_an_earlier_model_predicts_the_same(name: str):
    args = FIXTURES / name / "args.yaml"
    assert "zero_optimizer: false" in args.read_text(encoding="utf-8")  # which is no flag any more
    assert parse(FinetuneConfig, ["--config", str(args)]).target_cols == ("hisco_1",)
    recorded = json.loads((FIXTURES / name / "predictions.json").read_text())
    coder = Coder.from_pretrained(str(FIXTURES / name), "cpu", precision="fp32")
    assert coder.mode in recorded
    for mode, then in recorded.items():
        found = coder.predict(["farmer", "retired baker", "shoemakers apprentice"], "en", mode=mode)
        assert list(found["hisco_1"].astype(str)) == then["codes"]
        # how sure combined is that there is no further code has changed since
        assert list(found["conf"]) == pytest.approx(
            then["confidence"], abs=1e-3 if mode == "combined" else 1e-4
        )


def test_an_earlier_run_resumes_as_it_did(tmp_path: Path):
    shutil.copytree(FIXTURES / "run" / "checkpoints", tmp_path / "run" / "checkpoints")
    shutil.copy2(FIXTURES / "run" / "args.yaml", tmp_path / "run")
    result = run(
        "finetune.py", "--save-path", tmp_path / "run", *RUN_FLAGS, *FLAGS, "--share-val", 0.1
    )
    assert "step 4 (" in result.stdout
    then, now = (
        pd.read_csv(folder / "logs.csv").set_index("step")
        for folder in (FIXTURES / "run", tmp_path / "run")
    )
    losses = ["train_loss", "val_loss"]
    assert set(now.index) == {5, 6, 7, 8}
    np.testing.assert_allclose(now[losses], then.loc[then.index > 4, losses], rtol=1e-3)


def test_an_earlier_model_keeps_its_tokens_in_training(tmp_path: Path):
    for start, has_all in (
        (("--initial-checkpoint", FIXTURES / "ngram"), True),
        (("--encoder", "tiny"), False),
    ):
        out = tmp_path / str(has_all)
        run("finetune.py", "--save-path", out, *FLAGS, *start, "--max-steps", 1)
        config = json.loads((out / "config.json").read_text())
        assert (config["vocab_size"] > 2000, "symbols" in config["formatter"]) == (
            has_all,
            not has_all,
        )
