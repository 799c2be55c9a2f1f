import json

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import SIX_CODES, few_examples, tiny_coder
from sklearn.calibration import calibration_curve
from sklearn.metrics import precision_recall_fscore_support
from sklearn.preprocessing import MultiLabelBinarizer

from histocoder.data.examples import Examples
from histocoder.errors import UserError
from histocoder.evaluation.baselines import Baselines
from histocoder.evaluation.evaluator import evaluate
from histocoder.evaluation.scores import (
    calibration,
    code_sets,
    confusions,
    cut_codes,
    first_true_rank,
    mean_scores_by,
    production_curve,
    score_sets,
    scores_by_code,
    seen_groups,
    top_k_accuracy,
)
from histocoder.inference.known import Known

CELLS = st.sampled_from([None, "?", "-1", "61110", "61115", "80110"])
TABLES = st.integers(1, 12).flatmap(
    lambda n: st.tuples(*[st.lists(st.tuples(CELLS, CELLS, CELLS), min_size=n, max_size=n)] * 2)
)
CONFIDENCES = st.lists(st.tuples(st.sampled_from([0, 0.1, 0.25, 0.5, 0.99, 1.0]), st.booleans()), min_size=1)


def array(rows) -> np.ndarray:
    table = np.empty((len(rows), len(rows[0])), dtype=object)
    table[:] = rows
    return table


def as_sets(rows) -> list[set[str]]:
    return [{code for code in row if code not in (None, "?")} for row in rows]


@given(TABLES)
def test_scores_agree_with_scikit_learn(tables):
    truth, guess = tables
    scores = score_sets(code_sets(array(truth)), code_sets(array(guess)), len(truth))
    assert scores["accuracy"].tolist() == [a == b for a, b in zip(as_sets(truth), as_sets(guess), strict=True)]
    neither = [i for i in range(len(truth)) if not as_sets(truth)[i] and not as_sets(guess)[i]]
    assert (scores.iloc[neither] == 1).all(axis=None)
    some = [i for i in range(len(truth)) if i not in neither]  # scikit-learn scores only these
    if some:
        binarizer = MultiLabelBinarizer(classes=sorted(SIX_CODES))
        y_true, y_pred = (binarizer.fit_transform([as_sets(rows)[i] for i in some]) for rows in (truth, guess))
        expected = precision_recall_fscore_support(y_true, y_pred, average="samples", zero_division=0)[:3]
        found = scores.iloc[some][["precision", "recall", "f1"]].mean()
        np.testing.assert_allclose(found, expected)


def test_scores_of_each_code_by_hand():
    truth = code_sets(array([("a", None), ("a", "b"), ("c", None)]))
    guess = code_sets(array([("a", None), ("b", "c"), ("b", None)]))
    first, second, third = scores_by_code(truth, guess)
    assert first == {"code": "a", "n": 2, "predicted": 1, "precision": 1, "recall": 0.5, "f1": pytest.approx(2 / 3)}
    assert second == {"code": "b", "n": 1, "predicted": 2, "precision": 0.5, "recall": 1, "f1": pytest.approx(2 / 3)}
    assert (third["precision"], third["recall"], third["f1"]) == (0, 0, 0)


def test_codes_are_cut_and_special_ones_are_not():
    sets = code_sets(array([("61110", "61220"), ("-1", "05310")]))
    assert cut_codes(sets, 2).to_numpy().tolist() == [[0, "61"], [1, "-1"], [1, "05"]]
    tokens = code_sets(array([("1,10,2", "1,11")]))
    assert cut_codes(tokens, 2, separator=",")["code"].tolist() == ["1,10", "1,11"]


def test_rank_of_the_first_true_code():
    truth = code_sets(array([("a", "b"), ("c", None), (None, None), ("a", None)]))
    ranks = first_true_rank(truth, array([("c", "b"), ("a", "b"), ("a", "b"), ("a", "b")]))
    np.testing.assert_array_equal(ranks, [2, np.inf, np.nan, 1])
    accuracy = top_k_accuracy(ranks, k=3)
    assert accuracy == {"1": pytest.approx(1 / 3), "2": pytest.approx(2 / 3), "3": pytest.approx(2 / 3)}


def test_times_seen_are_grouped():
    groups = seen_groups(pd.Series([0, 1, 2, 5, 6, 20, 21, 100, 101]))
    assert groups.tolist() == ["0", "1", "2-5", "2-5", "6-20", "6-20", "21-100", "21-100", ">100"]
    means = mean_scores_by(pd.DataFrame({"accuracy": [True, False, True]}), seen_groups(pd.Series([3, 500, 3])))
    assert means == {"2-5": {"n": 2, "accuracy": 1.0}, ">100": {"n": 1, "accuracy": 0.0}}


@given(CONFIDENCES)
def test_calibration_agrees_with_scikit_learn(rows):
    conf, right = (np.array(column) for column in zip(*rows, strict=True))
    found = calibration(conf, right)
    bins = [one for one in found["bins"] if one["count"]]
    accuracy, mean_conf = calibration_curve(right, conf, n_bins=10)
    np.testing.assert_allclose([one["accuracy"] for one in bins], accuracy)
    np.testing.assert_allclose([one["conf"] for one in bins], mean_conf)
    gaps = np.abs(accuracy - mean_conf) * [one["count"] for one in bins]
    assert found["ece"] == pytest.approx(gaps.sum() / len(conf))


def test_production_curve_by_hand():
    curve = production_curve(np.array([0.1, 0.9, 0.5, 0.5]), np.array([False, True, True, False]), num_shares=5)
    assert curve["share"] == [0, 0.25, 0.5, 0.75, 1]
    assert curve["accuracy"] == [None, 1, 0.75, pytest.approx(2 / 3), 0.5]  # of two equally certain, half a right one
    assert curve["conf"] == [None, 0.9, 0.5, 0.5, 0.1]


def test_confusions_by_hand():
    truth = code_sets(array([("a", None), ("a", None), ("a", None), ("a", "b"), ("c", None), ("d", None)]))
    guess = code_sets(array([("x", None), ("x", None), ("a", None), ("a", None), ("c", "y"), ("d", None)]))
    found = confusions(truth, guess, ["one", "one", "two", "three", "four", "five"])
    assert found == [
        {"true": "a", "predicted": "x", "count": 2, "of": 4, "example": "one"},
        {"true": None, "predicted": "y", "count": 1, "of": None, "example": "four"},
        {"true": "b", "predicted": None, "count": 1, "of": 1, "example": "three"},
    ]
    assert confusions(truth, guess, ["-"] * 6, limit=1)[0]["predicted"] == "x"
    assert confusions(truth, truth, ["-"] * 6) == []


def test_evaluation_of_a_model():
    coder, examples = tiny_coder(), few_examples()
    trained = Baselines(examples, Known(), max_size=0)
    for text, code, times in (("farmer", "61110", 3), ("other", "61110", 27), ("y", "61115", 200), ("z", "80110", 1)):
        trained.add(Examples.of([text] * times, ["en"] * times, pd.DataFrame({"hisco_1": [code] * times})))
    evaluation = evaluate(coder, examples, trained=trained)
    metrics, rows = evaluation.metrics, evaluation.rows
    json.dumps(metrics, allow_nan=False)
    assert (metrics["num_rows"], metrics["num_texts"]) == (6, 5)
    top = list(metrics["topk"]["overall"].values())
    assert len(top) == 5 and top == sorted(top)
    found = metrics["answer"]
    assert found["production"]["accuracy"][-1] == pytest.approx(found["overall"]["accuracy"])
    assert found["by_digits"]["5"]["accuracy"] == found["overall"]["accuracy"]
    assert {lang: s["n"] for lang, s in found["by_language"].items()} == {"da": 2, "en": 4}
    assert {group: s["n"] for group, s in found["by_text_seen"].items()} == {"0": 4, "2-5": 2}
    assert {group: s["n"] for group, s in found["by_code_seen"].items()} == {"0": 1, "1": 2, "21-100": 2}
    assert {group: s["n"] for group, s in found["by_num_codes"].items()} == {"0": 1, "1": 4, "2": 1}
    decoded = coder.predict(examples.texts, examples.langs, progress=False)
    assert rows["predicted_hisco_1"].isna().equals(decoded["hisco_1"].isna())
    np.testing.assert_allclose(rows["conf"], decoded["conf"])
    written = decoded[["hisco_1", "hisco_2"]].apply(
        lambda row: any(code not in SIX_CODES for code in row.dropna()), axis=1
    )
    assert metrics["num_outside_key"] == written.sum()
    assert rows["right"].mean() == metrics["answer"]["overall"]["accuracy"]


def test_codes_are_ranked_by_all_that_answer():
    coder, examples = tiny_coder(mode="combined", experts={"decoder": 0.0, "flat": 1.0}), few_examples()
    coder.model.linear_decoder.bias.data[SIX_CODES.index("80110")] = 9.0
    examples.codes = pd.DataFrame({"hisco_1": ["80110"] * 6, "hisco_2": None}, dtype=object)
    assert list(evaluate(coder, examples).metrics["topk"]["overall"].values()) == [1.0] * 5


def test_unknown_languages_are_told_once(recwarn: pytest.WarningsRecorder):
    evaluate(tiny_coder(languages=("en", "unk")), few_examples())
    assert [str(one.message).partition(" and")[0] for one in recwarn] == ["The model does not know the language 'da'"]


def test_descriptions_that_all_have_no_code():
    evaluation = evaluate(tiny_coder(), few_examples().take(np.array([5, 5])))
    json.dumps(evaluation.metrics, allow_nan=False)
    assert (
        evaluation.metrics["answer"]["overall"]["accuracy"] == evaluation.rows["right"].mean()
        and evaluation.metrics["num_rows"] == 2
    )


def test_nothing_to_evaluate_on_is_said():
    with pytest.raises(UserError, match="no descriptions"):
        evaluate(tiny_coder(), Examples.of([], [], pd.DataFrame({"hisco_1": []})))
