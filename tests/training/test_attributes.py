"""Attributes: columns of categories that are learned beside the codes, from a table to a coded
file.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import ROOT, refused, run, write, write_table
from jobs import assert_same_weights, finetune, logged, weights

from histocoder import Coder
from histocoder.checkpoints.model_files import read_model_config
from histocoder.checkpoints.training_state import list_checkpoints
from histocoder.config import FinetuneConfig
from histocoder.data.example_writer import EXAMPLES_FILE
from histocoder.data.examples import TITLES, TRAIN, VAL, Examples
from histocoder.data.prepare import prepare
from histocoder.evaluation.metrics import AttributeScores
from histocoder.evaluation.scores import attribute_scores

STATUS = {"'s apprentice": "23", " master": "21", ", journeyman": "22"}


def with_status(path: Path, *, copies: int = 1) -> Path:
    """A table whose descriptions say a status, 21.0 as a program writes it, or none; and a place in
    every row.
    """
    rows = pd.read_csv(write_table(path, copies=copies), dtype=str)
    said = [
        next((code for words, code in STATUS.items() if words in text), "") for text in rows["occ1"]
    ]
    rows.assign(status=[f"{one}.0" if one == "21" else one for one in said], place="Aa").to_csv(
        path, index=False
    )
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("attributes")
    table = with_status(folder / "table.csv", copies=4)
    flags = (
        "--attribute-cols",
        "status",
        "place",
        "--encoder",
        "ngram",
        "--max-steps",
        60,
        "--batch-size",
        32,
    )
    args = [
        arg
        for arg in finetune(table, folder / "out", *flags)
        if arg not in ("--no-report", "--no-experts")
    ]
    said = run(*args).stdout
    assert (
        "status: 3 categories, and none in 160 rows" in said
        and "place: 1 category, and none in 0 rows" in said
    )
    assert (
        "status, right / mean F1 of " in said
        and "place, right / mean F1 of 1 category and none" in said
    )
    return folder / "out"


def test_attributes_are_predicted(trained: Path):
    config = read_model_config(trained)
    assert config.attributes == {"status": ("21", "22", "23"), "place": ("Aa",)}
    assert {*config.attribute_experts["status"]} == {"flat", "linear"}
    coder, texts = (
        Coder.from_pretrained(trained),
        ["baker master", "weaver's apprentice", "miner", None],
    )
    found = coder.predict(texts, "unk")
    assert (
        found["status"].fillna("").tolist() == ["21", "23", "", ""]
        and found["place"].tolist()[:3] == ["Aa"] * 3
    )
    assert (found["status_prob"][:3] > 0.5).all() and np.isnan(found["status_prob"][3])
    assert found.columns[-5:].tolist() == ["conf", "status", "status_prob", "place", "place_prob"]
    attribute = coder.predict_ranked(texts)[0].attributes["status"]
    assert attribute.labels == (None, "21", "22", "23") and attribute.probs.shape == (4, 4)
    np.testing.assert_allclose(attribute.probs[:3].sum(1), 1, rtol=1e-6)
    for mode in ("flat", "greedy", "topk"):
        assert coder.predict(texts, "unk", mode=mode)["status"].equals(found["status"])
    assert logged(trained, "acc_status")[-1] > 80


def test_expected_values_count_each_status(trained: Path, tmp_path: Path):
    coder, text = Coder.from_pretrained(trained), "baker master, journeyman"
    hiscam = {status: 10.0 * i for i, status in enumerate(STATUS.values())}
    hisclass = {
        (code, one): (i + j) % 3
        for i, code in enumerate(coder.codes)
        for j, one in enumerate(hiscam)
    }
    lines = [
        f"{code},{status},{value},{hiscam[status]}" for (code, status), value in hisclass.items()
    ]
    classes = write(tmp_path / "classes.csv", "hisco,status,hisclass,hiscam", *lines)
    files = (
        "--input",
        write(tmp_path / "in.csv", "occ1", f'"{text}"'),
        "--output",
        tmp_path / "out.csv",
    )
    run(
        "-m",
        "histocoder",
        "predict",
        "--model",
        trained,
        "--language",
        "unk",
        *files,
        "--classes",
        classes,
    )
    row = pd.read_csv(tmp_path / "out.csv").iloc[0]

    found, ranked = coder.predict_ranked([text], "unk")
    codes = {code: p for code, p in zip(ranked.codes[0], ranked.probs[0], strict=True) if code}
    status = dict(
        zip(found.attributes["status"].labels, found.attributes["status"].probs[0], strict=True)
    )
    status = {label: p for label, p in status.items() if p >= 0.01}
    pairs = {(code, label): p * q for code, p in codes.items() for label, q in status.items()}
    valued = {pair: p for pair, p in pairs.items() if pair in hisclass}  # no status has no class
    assert len(codes) > 1 and len({label for _, label in valued}) > 1
    share = sum(valued.values())
    mean = sum(p * hiscam[label] for (_, label), p in valued.items()) / share
    assert [row["hiscam_share"], row["hiscam_mean"]] == pytest.approx([share, mean], abs=5e-3)

    same = {pair: p for pair, p in valued.items() if hisclass[pair] == row["hisclass"]}
    first = next(iter(codes))
    rest, same_rest = (
        sum(p for (code, _), p in one.items() if code != first) for one in (pairs, same)
    )
    expected = sum(same.values()) + (1 - sum(pairs.values())) * same_rest / rest
    assert row["hisclass_prob"] == pytest.approx(expected, abs=5e-3)


def test_cards_of_the_desk_show_attributes(trained: Path):
    pytest.importorskip("fastapi")
    from histocoder.desk.domain.coding import Coding

    coding = Coding(Coder.from_pretrained(trained), trained, name="")
    found = coding.answer(["baker master", "miner"], ["unk", "unk"])
    assert [(one.attribute, one.label) for one in found[0].attributes] == [
        ("status", "21"),
        ("place", "Aa"),
    ]
    assert found[1].attributes[0].label is None and found[1].attributes[0].probability > 0.5
    assert "Beside codes it predicts status, place." in coding.coder.card


def test_attributes_are_evaluated_reviewed_and_corrected(trained: Path, tmp_path: Path):
    shutil.copytree(trained.parent, tmp_path, dirs_exist_ok=True)
    table, out, coded, checked = (
        tmp_path / name for name in ("table.csv", "out", "coded.csv", "review.csv")
    )
    evaluation = (
        "--data",
        table,
        "--output",
        tmp_path / "report",
        "--baselines",
        "--language",
        "unk",
    )
    said = run("-m", "histocoder", "evaluate", "--model", out, *evaluation).stdout
    assert "always none" in said and "linear model" in said
    found = json.loads((tmp_path / "report" / "metrics.json").read_text())["attributes"]["status"]
    assert found["n"] == 256 and {"model", "none", "svc"} < {*found}
    assert "Attributes, by method." in (tmp_path / "report" / "report.html").read_text()

    run(
        "-m",
        "histocoder",
        "predict",
        "--model",
        out,
        *("--input", table, "--output", coded, "--columns", "m_"),
    )
    run(
        "-m",
        "histocoder",
        "review",
        "--model",
        out,
        "--predictions",
        coded,
        "--output",
        checked,
        "--budget",
        9,
    )
    review = pd.read_csv(checked, dtype=str, keep_default_na=False)
    assert {"status", "status_prob"} < {*review}
    review.loc[:1, ["checked", "status"]] = [["x", "24"], ["x", ""]]
    review.to_csv(checked, index=False)
    prepare(
        FinetuneConfig(table, ("hisco_1",), corrections=(checked,), attribute_cols=("status",)),
        tmp_path / "again",
    )
    rows = Examples.open(tmp_path / "again" / EXAMPLES_FILE, TRAIN)
    status = pd.Series(rows.attributes["status"].to_pylist(), rows.texts)
    assert status[review["occ1"][0]] == "24" and status[review["occ1"][1]] == ""


def test_nothing_changes_without_attributes(tmp_path: Path):
    table = with_status(tmp_path / "table.csv")
    steps = ("--batch-size", 16, "--max-steps", 3, "--dropout", 0.0)
    run(*finetune(table, tmp_path / "without", *steps))
    run(
        *finetune(
            table, tmp_path / "with", *steps, "--attribute-cols", "status", "--attribute-weight", 0
        )
    )
    without, with_ = weights(tmp_path / "without"), weights(tmp_path / "with")
    assert {*with_} - {*without} == {"attribute_head.weight", "attribute_head.bias"}
    shared = {name: with_[name] for name in without}
    torch.testing.assert_close(shared, without, rtol=0, atol=0)
    config = json.loads((tmp_path / "without" / "config.json").read_text())
    assert not config.pop("attributes") and not config.pop("attribute_experts")
    (tmp_path / "without" / "config.json").write_text(json.dumps(config))  # as of earlier versions
    (tmp_path / "without" / "manifest.json").unlink()
    coder = Coder.from_pretrained(tmp_path / "without")
    assert coder.predict(["farmer"]).columns[-1] == "conf" and not coder.attributes


def test_a_resumed_run_of_ngrams_is_bit_identical(tmp_path: Path):
    table, outs = (
        with_status(tmp_path / "table.csv"),
        [tmp_path / name for name in ("whole", "resumed")],
    )
    start = (
        "--initial-checkpoint",
        ROOT / "tests" / "fixtures" / "ngram",
        "--only-encoder",
        "--no-refit",
    )
    sizes = (
        "--batch-size",
        8,
        "--max-steps",
        12,
        "--save-interval",
        5,
        "--eval-interval",
        6,
        "--log-interval",
        1,
    )
    flags = (
        *start,
        *sizes,
        "--augmentation-prob",
        0.5,
        "--precision",
        "fp32",
        "--no-report",
        "--no-experts",
    )
    columns = ("--target-cols", "hisco_1", "--attribute-cols", "status", "--keep-checkpoints", 9)
    for out in outs:
        resume = ("--resume", list_checkpoints(outs[0])[0]) if out == outs[1] else ()
        run("finetune.py", "--dataset", table, *columns, "--save-path", out, *flags, *resume)
    assert [path.name[-2:] for path in list_checkpoints(outs[1])] == [
        "10",
        "12",
    ]  # it begins behind step 5
    assert_same_weights(*outs)
    assert len({(list_checkpoints(out)[-1] / "optimizer.pt").read_bytes() for out in outs}) == 1


def test_a_further_run_keeps_the_heads(tmp_path: Path):
    table = with_status(tmp_path / "table.csv")
    run(*finetune(table, tmp_path / "first", "--max-steps", 2, "--attribute-cols", "status"))
    table.write_text(table.read_text().replace(",22,", ",12,"))
    rates = (
        "--learning-rate",
        1e-60,
        "--encoder-learning-rate",
        1e-60,
    )  # which float32 rounds to 0
    still = ("--max-steps", 1, *rates, "--initial-checkpoint", tmp_path / "first")
    run(*finetune(table, tmp_path / "second", *still, "--attribute-cols", "place", "status"))
    old, new = (weights(tmp_path / name)["attribute_head.weight"] for name in ("first", "second"))
    assert read_model_config(tmp_path / "second").attributes == {
        "place": ("Aa",),
        "status": ("12", "21", "23"),
    }
    assert (new[[2, 4, 5]] == old[[0, 1, 3]]).all() and (new[[0, 1, 3]] == 0).all()


def test_what_is_not_known_is_not_none(tmp_path: Path):
    table = with_status(tmp_path / "table.csv")
    titles, out = (
        write(tmp_path / "titles.csv", "title,code", "master of hounds,61110"),
        tmp_path / "out",
    )
    prepare(
        FinetuneConfig(table, ("hisco_1",), attribute_cols=("status",), titles=str(titles)), out
    )
    of_titles = Examples.open(out / EXAMPLES_FILE, TITLES).attributes["status"]
    known = Examples.open(out / EXAMPLES_FILE, TRAIN, VAL).attributes["status"]
    assert of_titles.to_pylist() == [None] and {*known.to_pylist()} == {"", "21", "22", "23"}
    assert "status" in pd.read_csv(out / "data_train.csv") and "status" not in pd.read_csv(
        out / "data_titles.csv"
    )


def test_columns_that_can_not_be_attributes(tmp_path: Path):
    table = with_status(tmp_path / "table.csv")
    for columns, words in {
        ("hisco_1",): "'hisco_1' is a target column and another one",
        ("stat",): "has no column 'stat'",
        ("status", "status"): "specified twice in --attribute-cols",
        ("conf",): "can't be called conf",
    }.items():
        assert words in refused(*finetune(table, tmp_path / "out", "--attribute-cols", *columns))
    pd.read_csv(table, dtype=str).assign(status="").to_csv(table, index=False)
    said = refused(*finetune(table, tmp_path / "empty", "--attribute-cols", "status"))
    assert (
        "The column 'status' has 0 categories; a column of --attribute-cols has 1 to 1,000." in said
    )


def test_scores_of_categories():
    true = np.array(["", "", "21", "23"], dtype=object)
    assert attribute_scores(true, true) == AttributeScores(accuracy=1.0, macro_f1=1.0)
    guess = np.array(["", "", "21", "22"], dtype=object)
    assert attribute_scores(true, guess) == AttributeScores(0.75, macro_f1=pytest.approx(2 / 3))
