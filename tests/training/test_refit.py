"""What happens to a model once it is trained: its experts are weighed, and best/ learns from the
validation data.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from conftest import run, write, write_table
from jobs import two_ranks, weights
from models import CODES, tiny_model
from pretended_gpu import Log
from trainers import begin, dataset

from histocoder.data.examples import Examples
from histocoder.data.samplers import BatchIndices
from histocoder.formatters import MISSING
from histocoder.inference.coder import Coder
from histocoder.ops import kernels
from histocoder.text.tokenizers import lower_characters
from histocoder.training import svm
from histocoder.training.expert_weights import fit_weights, least_probability, votes_on
from histocoder.training.svm import fit_linear_expert


def trained(table: Path, out: Path, *extra: object) -> list[str]:
    args = ("--dataset", table, "--target-cols", "hisco_1", "--language", "en", "--save-path", out)
    sizes = (
        "--encoder",
        "ngram",
        "--max-steps",
        4,
        "--batch-size",
        16,
        "--precision",
        "fp32",
        "--no-report",
    )
    return [*map(str, ("finetune.py", *args, *sizes, *extra))]


def config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def evaluated(model: Path, data: Path, report: Path) -> str:
    ended = run(
        "-m", "histocoder", "evaluate", "--model", model, "--data", data, "--output", report
    )
    return ended.stdout + ended.stderr


@pytest.mark.slow
def test_best_learns_from_the_validation_data(table: Path, tmp_path: Path):
    out = tmp_path / "out"
    assert (
        "now trained on all 64 rows, including the 13 validation rows"
        in run(*trained(table, out)).stdout
    )
    assert config(out / "best")["fitted_to_validation"] and not config(out).get(
        "fitted_to_validation"
    )
    assert config(out / "best")["experts"] and config(out / "best")["num_linear_features"]
    remembered = [config(folder)["num_nearest_rows"] for folder in (out, out / "best")]
    assert 0 < remembered[0] < remembered[1]  # the validation rows as well
    card = (out / "best" / "README.md").read_text(encoding="utf-8")
    assert card.count("it was trained on the validation data as well.\n\n## Model\n") == 1
    before = (out / "best" / "model.safetensors").read_bytes()
    again = run(*trained(table, out)).stdout
    assert (
        "is now trained on" not in again
        and (out / "best" / "model.safetensors").read_bytes() == before
    )

    notice = "Notice: 13 of these 13 descriptions are in the run's validation data"
    assert notice in evaluated(out / "best", out / "data_val.csv", tmp_path / "e")
    assert "run's validation data" not in evaluated(out, out / "data_val.csv", tmp_path / "f")

    more = tmp_path / "more"
    run(*trained(table, more, "--initial-checkpoint", out / "best", "--no-refit", "--no-experts"))
    args = yaml.safe_load((more / "args.yaml").read_text(encoding="utf-8"))
    assert args["initial_checkpoint"] == str(out) and not config(more / "best").get(
        "fitted_to_validation"
    )


@pytest.mark.slow
def test_a_run_on_corrections_reports_its_gain(table: Path, tmp_path: Path):
    run(*trained(table, tmp_path / "one"))
    checked = write(
        tmp_path / "review.csv",
        "occ1,checked,hisco_1",
        *(f"ostler no {i},x,62430" for i in range(40)),
    )
    more = [word for word in trained(table, tmp_path / "two") if word != "--no-report"]
    said = run(
        *more, "--initial-checkpoint", tmp_path / "one" / "best", "--corrections", checked
    ).stdout
    found = json.loads((tmp_path / "two" / "metrics.json").read_text(encoding="utf-8"))[
        "corrections"
    ]
    number = found["held_out"]["num_rows"]
    assert f"{number} of 40 corrections, chosen at random, are held out" in said
    assert f"{number} held-out corrections" in said
    assert found["validation"]["num_rows"] == 13 and not found["before_has_seen"]
    assert "rows, including the 13 validation rows and the held-out corrections" in said


@pytest.mark.slow
def test_two_ranks_refit_as_one_does(table: Path, tmp_path: Path):
    extra = ("--no-experts", "--ngram-dropout", 0, "--unk-lang-prob", 0)
    run(*trained(table, tmp_path / "one", *extra))
    two_ranks(trained(table, tmp_path / "two", *extra, "--batch-size", 8))
    torch.testing.assert_close(
        *(weights(tmp_path / name / "best") for name in ("one", "two")), atol=2e-4, rtol=1e-3
    )


def test_restarted_learners_step_as_new_ones(table: Path, tmp_path: Path):
    data = dataset(tmp_path / "cache", table)
    ours, new = (begin(tmp_path, data).learner for _ in range(2))
    start = {name: weight.clone() for name, weight in ours.strategy.weights().items()}
    batch = data[
        BatchIndices(rows=np.arange(8), epoch=0, num_rows=8, num_target_blocks=1, weight=1.0)
    ]
    for _ in range(3):
        ours.train_step([batch])
    for learner in (ours, new):
        learner.restart(start, share=0.5, total_steps=9)
        learner.train_step([batch])
    torch.testing.assert_close(ours.strategy.weights(), new.strategy.weights(), rtol=0, atol=0)


@pytest.mark.skipif(kernels.library() is None, reason="the kernels were not compiled")
@pytest.mark.parametrize("codes", [("hisco_1",), ("hisco_1", "hisco_2")])
def test_linear_experts_need_no_kernels(
    codes: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    data = dataset(tmp_path / "cache", write_table(tmp_path / "table.csv", two_codes=True), *codes)
    monkeypatch.setattr(svm, "_MAX_COST", 0)  # a large table
    with_kernels = fit_linear_expert(data, num_classes=8)
    with monkeypatch.context() as patch:
        patch.setattr(svm, "MAX_ROWS", len(data) - 1)
        assert fit_linear_expert(data, num_classes=8) is None
    monkeypatch.setattr(kernels, "library", lambda: None)
    assert fit_linear_expert(data, num_classes=8) is None
    monkeypatch.setattr(svm, "_MAX_COST", 10_000_000)
    without = fit_linear_expert(data, num_classes=8)
    characters = torch.from_numpy(
        lower_characters(data.examples.inputs.texts(np.arange(len(data))))
    )
    assert torch.equal(*(expert(characters).argmax(1) for expert in (with_kernels, without)))


def test_weights_are_fitted_without_true_candidates():
    codes = pd.DataFrame({"hisco_1": ["99999"], "hisco_2": [None]}, dtype=object)
    (of_codes, of_ends), *others = votes_on(
        Coder(tiny_model(), "cpu"), Examples.of(["a farmer"], ["en"], codes)
    )
    assert not others
    for votes, is_true in (of_codes, of_ends):
        assert not is_true.any() and set(fit_weights([votes], [is_true], num_train=500)) == set(
            votes
        )


def test_rows_without_codes_do_not_weigh_experts():
    codes = pd.DataFrame(
        {"hisco_1": ["61110", MISSING, "99999"], "hisco_2": [None] * 3}, dtype=object
    )
    texts = ["a farmer", "his wife", "a stranger"]
    coder = Coder(tiny_model(), "cpu")
    ((_, is_true), _), *_ = votes_on(coder, Examples.of(texts, ["en"] * 3, codes))
    assert len(is_true) == 2 and not is_true[1].any()  # whose code the model does not know


def test_a_row_has_no_more_codes_than_candidates():
    model = tiny_model(num_blocks=10)
    model.config = replace(
        model.config, experts={"decoder": 1.0, "flat": 1.0, "few": -50.0}
    )  # never ends by itself
    found = Coder(model, "cpu").predict("a farmer", mode="combined").iloc[0]
    assert set(found.filter(like="hisco_").dropna()) == set(CODES) and 0 < found["conf"] <= 1


def test_weights_are_fitted_to_votes_on_a_gpu(gpu: Log):
    torch.manual_seed(0)
    votes = {name: torch.randn(40, 5).log_softmax(-1) for name in ("decoder", "flat", "linear")}
    is_true = torch.nn.functional.one_hot(votes["flat"].argmax(1), 5).bool()
    on_gpu = {name: vote.cuda() for name, vote in votes.items()}
    for may_be_other in (False, True):
        options = {"num_train": 100, "may_be_other": may_be_other}
        assert fit_weights([on_gpu], [is_true.cuda()], **options) == fit_weights(
            [votes], [is_true], **options
        )
    assert not gpu.doubles  # GPUs of Macs have none


def test_few_rows_leave_usual_weights_of_experts():
    torch.manual_seed(0)
    votes = {name: torch.randn(400, 5).log_softmax(-1) for name in ("decoder", "flat", "linear")}
    is_true = torch.nn.functional.one_hot(
        votes["decoder"].argmax(1), 5
    ).bool()  # the decoder is always right
    few = fit_weights(
        [{name: vote[:4] for name, vote in votes.items()}], [is_true[:4]], num_train=9000
    )
    many = fit_weights([votes], [is_true], num_train=9000)
    assert abs(few["linear"] - 0.45) < 0.1 and many["decoder"] > 10 * many["linear"]
    assert fit_weights([votes], [torch.zeros_like(is_true)], num_train=9)["linear"] == 0.45
    is_true[:60] = False  # the true codes of these rows are no candidates
    weights = fit_weights([votes], [is_true], num_train=9000, may_be_other=True)
    scores = sum(weights[name] * vote.double() for name, vote in votes.items())
    other = torch.full((len(scores), 1), weights["other"], dtype=torch.float64)
    assert float(torch.cat([scores, other], dim=1).softmax(1)[:, -1].mean()) == pytest.approx(
        60 / len(scores), rel=0.3
    )


def test_further_codes_are_as_often_right_as_first():
    further = np.linspace(1.0, 0.4, 400)
    probs = np.stack([np.ones(400), further], axis=1)
    is_true = np.arange(400)[:, None] < [
        320,
        250,
    ]  # of first and of further codes, the most probable
    least = least_probability(probs, is_true)
    assert 0.8 < is_true[further >= least, 1].mean() < 0.85 and further[250] > least
    assert least_probability(probs[::40], is_true[::40]) > least
    assert least_probability(probs, np.ones_like(is_true)) == 0.5
    probs[:, 1] = np.nan
    assert least_probability(probs, is_true) == pytest.approx(0.8, abs=0.001)
