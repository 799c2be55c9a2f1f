"""How good codes are, and how far two models or two coders agree."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import SIX_CODES, few_examples, tiny_coder
from scipy.stats import binomtest
from sklearn.calibration import calibration_curve
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.metrics import precision_recall_fscore_support
from sklearn.preprocessing import MultiLabelBinarizer
from sklearn.svm import LinearSVC

from histocoder.data.examples import Examples
from histocoder.errors import UserError
from histocoder.evaluation import scores
from histocoder.evaluation.baselines import Baselines, difference_interval, linear_codes
from histocoder.evaluation.evaluator import compare, evaluate, gain, right_rows
from histocoder.evaluation.report import write_report
from histocoder.evaluation.scores import code_sets
from histocoder.evaluation.summary import gain_in_words, points
from histocoder.inference.known import Known
from histocoder.text.normalize import description_keys

ROWS = st.tuples(*[st.sampled_from([None, "?", "-1", "61110", "61115", "80110"])] * 3)
TABLES = st.integers(1, 12).flatmap(
    lambda n: st.tuples(*[st.lists(ROWS, min_size=n, max_size=n)] * 2)
)
CONFIDENCES = st.lists(
    st.tuples(st.sampled_from([0, 0.1, 0.25, 0.5, 0.99, 1.0]), st.booleans()), min_size=1
)


@given(TABLES)
def test_scores_agree_with_scikit_learn(tables):
    truth, guess = map(code_sets, tables)
    found = scores.score_sets(truth, guess)
    assert found["accuracy"].tolist() == [
        set(a) == set(b) for a, b in zip(truth, guess, strict=True)
    ]
    neither = [i for i in range(len(truth)) if not truth[i] and not guess[i]]
    assert (found.iloc[neither] == 1).all(axis=None)
    some = [i for i in range(len(truth)) if i not in neither]  # scikit-learn scores only these
    if some:
        binarizer = MultiLabelBinarizer(classes=sorted(SIX_CODES))
        y_true, y_pred = (
            binarizer.fit_transform([sets[i] for i in some]) for sets in (truth, guess)
        )
        expected = precision_recall_fscore_support(
            y_true, y_pred, average="samples", zero_division=0
        )[:3]
        np.testing.assert_allclose(found.iloc[some][["precision", "recall", "f1"]].mean(), expected)


def test_scores_of_each_code_by_hand():
    first, second, third = scores.scores_by_code(
        [("a",), ("a", "b"), ("c",)], [("a",), ("b", "c"), ("b",)]
    )
    assert first == {
        "code": "a",
        "n": 2,
        "predicted": 1,
        "precision": 1,
        "recall": 0.5,
        "f1": pytest.approx(2 / 3),
    }
    assert second == {
        "code": "b",
        "n": 1,
        "predicted": 2,
        "precision": 0.5,
        "recall": 1,
        "f1": pytest.approx(2 / 3),
    }
    assert (third["precision"], third["recall"], third["f1"]) == (0, 0, 0)


def test_codes_are_cut_and_special_ones_are_not():
    assert scores.cut_codes([("61110", "61220"), ("-1", "05310")], 2) == [("61",), ("-1", "05")]
    assert scores.cut_codes([("1,10,2", "1,11")], 2, separator=",") == [("1,10", "1,11")]


def test_rank_of_the_first_true_code():
    ranked = np.array([["c", "b"], ["a", "b"], ["a", "b"], ["a", "b"]], dtype=object)
    ranks = scores.first_true_rank([("a", "b"), ("c",), (), ("a",)], ranked)
    np.testing.assert_array_equal(ranks, [2, np.inf, np.nan, 1])
    accuracy = scores.top_k_accuracy(ranks, k=3)
    assert accuracy == {
        "1": pytest.approx(1 / 3),
        "2": pytest.approx(2 / 3),
        "3": pytest.approx(2 / 3),
    }


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
    curve = scores.production_curve(
        np.array([0.1, 0.9, 0.5, 0.5]), np.array([False, True, True, False]), num_shares=5
    )
    assert curve["share"] == [0, 0.25, 0.5, 0.75, 1]
    assert curve["accuracy"] == [
        None,
        1,
        0.75,
        pytest.approx(2 / 3),
        0.5,
    ]  # of two equally certain, half a right one
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
    for text, code, times in (
        ("farmer", "61110", 3),
        ("other", "61110", 27),
        ("y", "61115", 200),
        ("z", "80110", 1),
    ):
        trained.add(
            Examples.of([text] * times, ["en"] * times, pd.DataFrame({"hisco_1": [code] * times}))
        )
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
    assert {group: s["n"] for group, s in found["by_code_seen"].items()} == {
        "0": 1,
        "1": 2,
        "21-100": 2,
    }
    decoded = coder.predict(examples.texts, examples.langs, progress=False)
    np.testing.assert_allclose(rows["conf"], decoded["conf"])
    assert (
        metrics["num_outside_key"]
        == (~decoded[["hisco_1", "hisco_2"]].isin([*SIX_CODES, None]).all(axis=1)).sum()
    )
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
    assert [years[0], years[10], years[49], years[50]] == [
        "1850-1859",
        "1860-1869",
        "1890-1899",
        "(blank)",
    ]
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
    assert same["difference"]["rows"] == {"mean": 0, "low": None, "high": None} and unchanged.empty


def test_agreement_by_hand():
    first = [["61110"], ["77610"], ["77610", None], ["-1"], ["61110", "77610"]]
    second = [["61110"], ["77120"], ["80110"], ["-1"], ["77610", "61110"]]
    one, two, whole = scores.agreement(first, second, ["a", "b", "c", "d", "e"], digits=2)
    assert (one["digits"], two["digits"], whole["digits"]) == (1, 2, None)
    assert (one["share"], two["share"], whole["share"]) == (0.8, 0.8, 0.6)
    # by chance: 61110 1 x 1, 77610 2 x 0, 77120 and 80110 0 x 1, -1 1 x 1, both 1 x 1 of 25
    assert whole["kappa"] == pytest.approx((0.6 - 3 / 25) / (1 - 3 / 25))


def test_alpha_is_as_published():
    # section B of Krippendorff (2011): two observers of twelve articles
    (found,) = scores.agreement("aabbdcccedda", "babbbccceddd", list("abcdefghijkl"))
    assert round(found["alpha"], 3) == 0.692
    (of_one,) = scores.agreement("111", "111", ["a", "b", "c"])
    assert of_one["share"] == 1 and of_one["kappa"] is None and of_one["alpha"] is None


def test_interval_is_wilsons_of_distinct_descriptions():
    right = np.array([True, True, True, False, True])
    interval = binomtest(4, 5).proportion_ci(method="wilson")
    found = scores.share_interval(right, list("abcde"))
    assert (found["low"], found["high"]) == pytest.approx((interval.low, interval.high))
    wider = scores.share_interval(np.repeat(right, 9), np.repeat([*"abcde"], 9).tolist())
    assert (wider["low"], wider["high"]) == pytest.approx((interval.low, interval.high))


def test_differences_in_the_first_digit_come_first():
    rows = [
        ("baker", ("77610",), ("77120",)),
        ("smith", ("83110",), ("61110",)),
        ("farmer", ("61110",), ("61110",)),
    ]
    rows += [
        *[("baker", ("77610",), ("77610",))] * 2,
        ("farmer", ("1", "2"), ("2", "1")),
    ]  # in any order
    found = scores.to_settle(
        pd.DataFrame(rows, columns=["text", "first", "second"]).assign(lang="en"), digits=5
    )
    assert found["text"].tolist() == ["smith", "baker"]
    assert found["digits"].tolist() == [0, 2] and found["times"].tolist() == [1, 1]


def examples(*rows: tuple[str, ...], lang: str = "en") -> Examples:
    """Rows of a description and up to two codes."""
    codes = pd.DataFrame(
        [(*row[1:], None)[:2] for row in rows], columns=["hisco_1", "hisco_2"], dtype=object
    )
    return Examples.of([row[0] for row in rows], [lang] * len(rows), codes)


TRAIN = (
    *(("farmer", "61110"), ("old farmer", "61110"), ("baker", "77610"), ("master baker", "77610")),
    *(
        ("Smith", "83110"),
        ("smith ", "83110"),
        ("smith", "61110"),
        ("farmer and baker", "61110", "77610"),
    ),
)
ASKED = examples(
    ("SMITH", "83110"), ("bakers", "77610"), ("baker, farmer", "77610", "61110"), ("miner", "71105")
)


def compared(train: Examples, *, max_size: float = np.inf, **known: object) -> dict:
    """What is found of a model that is right of the first row alone."""
    found = Baselines(ASKED, Known(**known), max_size=max_size)
    for rows in (np.arange(4), np.arange(4, len(train))):
        found.add(train.take(rows))
    return found.compare(np.array([True, False, False, False]))


def test_baselines_by_hand():
    found = compared(examples(*TRAIN))
    assert found["model"] == {"rows": 0.25, "texts": 0.25}
    exact, svc = found["exact_match"], found["svc"]
    assert (exact["rows"], exact["answered"], exact["answered_right"]) == (0.25, 0.25, 1.0)
    assert exact["difference"]["rows"] == {"mean": 0, "low": None, "high": None}
    assert (
        svc["rows"] == 0.75 and svc["difference"]["texts"]["mean"] == -0.5 and "notice" not in found
    )
    assert (
        "svc" not in (without := compared(examples(*TRAIN), max_size=23))
        and "8 rows with 3" in without["notice"]
    )
    assert compared(examples(*TRAIN), exact=True)["exact_match"]["answered"] == 0


def test_single_codes_equal_scikit_learns_classifier():
    rng = np.random.default_rng(0)
    rows = [
        (f"{'farmer baker smith'.split()[i]} {rng.integers(50)}", "abc"[i])
        for i in rng.integers(3, size=60)
    ]
    train, asked = examples(*rows[:40]), examples(*rows[40:])
    vectorizer = TfidfVectorizer(analyzer="char_wb", ngram_range=(1, 5), sublinear_tf=True)
    expected = LinearSVC().fit(vectorizer.fit_transform(train.texts), train.codes["hisco_1"])
    assert linear_codes(train, asked) == [
        (code,) for code in expected.predict(vectorizer.transform(asked.texts))
    ]
    assert (
        linear_codes(examples(("farmer", "a"), ("old farmer", "a")), asked) == [("a",)] * 20
    )  # of one code alone


def test_intervals_draw_rows_of_a_text_together():
    right = np.array([True] * 50 + [False] * 50)
    together = difference_interval(right, ~right, [str(i // 2) for i in range(100)])
    assert together["rows"]["low"] < -0.22  # as of fifty draws
    apart = difference_interval(right, ~right, [str(i) for i in range(100)])
    assert -0.25 < apart["rows"]["low"] < -0.15 and apart["rows"] == apart["texts"]
    assert apart == difference_interval(right, ~right, [str(i) for i in range(100)])


def test_few_descriptions_give_no_interval():
    right = np.array([True] * 29 + [False] * 29)
    difference = difference_interval(right, ~right, [str(i % 29) for i in range(58)])
    assert difference["texts"] == {"mean": 0, "low": None, "high": None}
    assert points(difference["rows"]) == "+0.0 (too few for an interval)"


def test_a_corrected_model_is_compared_on_its_rows(tmp_path: Path):
    examples = few_examples()
    before, after = tiny_coder(fitted_to_validation=True), tiny_coder()
    codes = before.predict(examples.texts, examples.langs)[["hisco_1", "hisco_2"]]
    codes.loc[4:, "hisco_1"], codes.loc[4:, "hisco_2"] = "99999", None
    examples = Examples.of(examples.texts, examples.langs, codes)
    found = gain(
        before, after, examples, examples.take(np.array([0, 5])), right=np.ones(6, dtype=bool)
    )
    assert (
        found["validation"]["before"]["rows"] == pytest.approx(4 / 6)
        and found["validation"]["after"]["rows"] == 1
    )
    assert found["validation"]["difference"]["rows"]["mean"] == pytest.approx(2 / 6)
    assert found["held_out"]["before"] == found["held_out"]["after"] == {"rows": 0.5, "texts": 0.5}
    words = gain_in_words({"corrections": found})
    assert words[0].startswith(
        "Of the same 6 rows of validation data, 66.7\u00a0% were exactly right before"
    )
    assert (
        words[1].startswith("Of the same 2 held-out corrections, 50.0\u00a0%")
        and "is too high" in words[2]
    )
    evaluation = evaluate(after, examples)
    evaluation.metrics["corrections"] = found
    page = write_report(tmp_path, evaluation, after, title="t").read_text(encoding="utf-8")
    assert "Gain from the corrections" in page and "+33.3 (" in page and words[2] in page
