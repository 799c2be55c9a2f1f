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
from histocoder.data.normalize import description_keys
from histocoder.errors import UserError
from histocoder.evaluation import scores
from histocoder.evaluation.baselines import Baselines
from histocoder.evaluation.evaluator import compare, evaluate, right_rows
from histocoder.evaluation.scores import code_sets
from histocoder.inference.known import Known

CELLS = st.sampled_from([None, "?", "-1", "61110", "61115", "80110"])
TABLES = st.integers(1, 12).flatmap(
    lambda n: st.tuples(*[st.lists(st.tuples(CELLS, CELLS, CELLS), min_size=n, max_size=n)] * 2)
)
CONFIDENCES = st.lists(st.tuples(st.sampled_from([0, 0.1, 0.25, 0.5, 0.99, 1.0]), st.booleans()), min_size=1)


@given(TABLES)
def test_scores_agree_with_scikit_learn(tables):
    truth, guess = map(code_sets, tables)
    found = scores.score_sets(truth, guess)
    assert found["accuracy"].tolist() == [set(a) == set(b) for a, b in zip(truth, guess, strict=True)]
    neither = [i for i in range(len(truth)) if not truth[i] and not guess[i]]
    assert (found.iloc[neither] == 1).all(axis=None)
    some = [i for i in range(len(truth)) if i not in neither]  # scikit-learn scores only these
    if some:
        binarizer = MultiLabelBinarizer(classes=sorted(SIX_CODES))
        y_true, y_pred = (binarizer.fit_transform([sets[i] for i in some]) for sets in (truth, guess))
        expected = precision_recall_fscore_support(y_true, y_pred, average="samples", zero_division=0)[:3]
        np.testing.assert_allclose(found.iloc[some][["precision", "recall", "f1"]].mean(), expected)


def test_scores_of_each_code_by_hand():
    first, second, third = scores.scores_by_code([("a",), ("a", "b"), ("c",)], [("a",), ("b", "c"), ("b",)])
    assert first == {"code": "a", "n": 2, "predicted": 1, "precision": 1, "recall": 0.5, "f1": pytest.approx(2 / 3)}
    assert second == {"code": "b", "n": 1, "predicted": 2, "precision": 0.5, "recall": 1, "f1": pytest.approx(2 / 3)}
    assert (third["precision"], third["recall"], third["f1"]) == (0, 0, 0)


def test_codes_are_cut_and_special_ones_are_not():
    assert scores.cut_codes([("61110", "61220"), ("-1", "05310")], 2) == [("61",), ("-1", "05")]
    assert scores.cut_codes([("1,10,2", "1,11")], 2, separator=",") == [("1,10", "1,11")]


def test_rank_of_the_first_true_code():
    ranked = np.array([["c", "b"], ["a", "b"], ["a", "b"], ["a", "b"]], dtype=object)
    ranks = scores.first_true_rank([("a", "b"), ("c",), (), ("a",)], ranked)
    np.testing.assert_array_equal(ranks, [2, np.inf, np.nan, 1])
    accuracy = scores.top_k_accuracy(ranks, k=3)
    assert accuracy == {"1": pytest.approx(1 / 3), "2": pytest.approx(2 / 3), "3": pytest.approx(2 / 3)}


@given(CONFIDENCES)
def test_calibration_agrees_with_scikit_learn(rows):
    conf, right = (np.array(column) for column in zip(*rows, strict=True))
    found = scores.calibration(conf, right)
    bins = [one for one in found["bins"] if one["count"]]
    accuracy, mean_conf = calibration_curve(right, conf, n_bins=10)
    np.testing.assert_allclose([one["accuracy"] for one in bins], accuracy)
    np.testing.assert_allclose([one["conf"] for one in bins], mean_conf)
    gaps = np.abs(accuracy - mean_conf) * [one["count"] for one in bins]
    assert found["ece"] == pytest.approx(gaps.sum() / len(conf))


def test_production_curve_by_hand():
    curve = scores.production_curve(np.array([0.1, 0.9, 0.5, 0.5]), np.array([False, True, True, False]), num_shares=5)
    assert curve["share"] == [0, 0.25, 0.5, 0.75, 1]
    assert curve["accuracy"] == [None, 1, 0.75, pytest.approx(2 / 3), 0.5]  # of two equally certain, half a right one
    assert curve["conf"] == [None, 0.9, 0.5, 0.5, 0.1]


def test_confusions_by_hand():
    truth = [("a",), ("a",), ("a",), ("a", "b"), ("c",), ("d",)]
    guess = [("x",), ("x",), ("a",), ("a",), ("c", "y"), ("d",)]
    texts = ["one", "one", "two", "three", "four", "five"]
    found = scores.confusions(truth, guess, texts)
    assert found == [
        {"true": "a", "predicted": "x", "count": 2, "of": 4, "example": "one"},
        {"true": None, "predicted": "y", "count": 1, "of": None, "example": "four"},
        {"true": "b", "predicted": None, "count": 1, "of": 1, "example": "three"},
    ]
    assert scores.confusions(truth, guess, texts, limit=1) == found[:1]
    assert scores.confusions(truth, truth, texts) == []


def test_evaluation_of_a_model():
    coder, examples = tiny_coder(), few_examples()
    trained = Baselines(examples, Known(), max_size=0)
    for text, code, times in (("farmer", "61110", 3), ("other", "61110", 27), ("y", "61115", 200), ("z", "80110", 1)):
        trained.add(Examples.of([text] * times, ["en"] * times, pd.DataFrame({"hisco_1": [code] * times})))
    evaluation = evaluate(coder, examples, trained=trained)
    metrics, rows = evaluation.metrics, evaluation.rows
    json.dumps(metrics, allow_nan=False)
    assert (metrics["num_rows"], metrics["num_texts"]) == (6, 5)
    found = metrics["answer"]
    once = rows.assign(key=description_keys(rows["text"].tolist())).groupby("key")["right"].mean()
    assert len(once) == 5 and found["production"]["accuracy"][-1] == pytest.approx(once.mean())
    assert found["by_digits"]["5"]["accuracy"] == found["overall"]["accuracy"]
    assert {lang: s["n"] for lang, s in found["by_language"].items()} == {"da": 2, "en": 4}
    assert {group: s["n"] for group, s in found["by_text_seen"].items()} == {"0": 4, "2-5": 2}
    assert {group: s["n"] for group, s in found["by_code_seen"].items()} == {"0": 1, "1": 2, "21-100": 2}
    decoded = coder.predict(examples.texts, examples.langs, progress=False)
    np.testing.assert_allclose(rows["conf"], decoded["conf"])
    known = decoded[["hisco_1", "hisco_2"]].isin([*SIX_CODES, None]).all(axis=1)
    assert metrics["num_outside_key"] == (~known).sum()
    assert rows["right"].mean() == metrics["answer"]["overall"]["accuracy"]


def test_descriptions_without_codes_are_evaluated():
    evaluation = evaluate(tiny_coder(), few_examples().take(np.array([5, 5])))
    json.dumps(evaluation.metrics, allow_nan=False)
    assert evaluation.metrics["answer"]["overall"]["accuracy"] == evaluation.rows["right"].mean()
    with pytest.raises(UserError, match="no descriptions"):
        evaluate(tiny_coder(), Examples.of([], [], pd.DataFrame({"hisco_1": []})))


def test_groups_are_cells_or_ranges_of_numbers():
    assert scores.named_groups(["a", None, "b"]).tolist() == ["a", "(blank)", "b"]
    years = scores.named_groups([str(1850 + i) for i in range(50)] + [None])
    assert [years[0], years[10], years[49], years[50]] == ["1850-1859", "1860-1869", "1890-1899", "(blank)"]
    assert scores.named_groups([f"parish {i}" for i in range(60)]).tolist().count("others") == 20


def test_scores_by_group_agree_with_the_means():
    right, conf = np.array([True, False, True, True]), np.array([0.9, 0.4, 0.8, 0.6])
    one, two = scores.scores_by_group(right, conf, list("abcd"), np.array(["x", "x", "y", "y"]))
    assert (one["group"], one["n"], one["share"], two["share"]) == ("x", 2, 0.5, 1.0)
    assert two["low"] < 1.0 == two["high"] and one["conf"] == pytest.approx(0.65)


def test_two_models_are_compared_row_by_row():
    first, second = tiny_coder(), tiny_coder()
    second.mode = "flat"
    examples = few_examples().coded()
    found, changed = compare(first, second, examples)
    right = [right_rows(one, examples, progress=False).mean() for one in (first, second)]
    assert [found["first"]["rows"], found["second"]["rows"]] == right
    assert found["difference"]["rows"]["mean"] == pytest.approx(right[1] - right[0])
    assert (changed["codes_first"] != changed["codes_second"]).all()
    same, unchanged = compare(first, first, examples)
    assert same["difference"]["rows"] == {"mean": 0, "low": 0, "high": 0} and unchanged.empty
