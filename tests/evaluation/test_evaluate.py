"""How good codes are, and how far two models or two coders agree."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
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
from histocoder.data.hashes import text_hashes
from histocoder.errors import UserError
from histocoder.evaluation import scores
from histocoder.evaluation.baselines import Baselines, difference_interval, linear_codes
from histocoder.evaluation.evaluator import (
    Evaluation,
    compare,
    evaluate,
    gain,
    named_groups,
    right_rows,
)
from histocoder.evaluation.metrics import (
    BaselineMetrics,
    CodeScores,
    Confusion,
    Difference,
    MeanScores,
    Shares,
    as_json,
)
from histocoder.evaluation.report import write_report
from histocoder.evaluation.scores import code_sets
from histocoder.evaluation.summary import details_in_words, points
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
    table = scores.score_sets(truth, guess)
    is_equal = [set(a) == set(b) for a, b in zip(truth, guess, strict=True)]
    assert table["accuracy"].tolist() == is_equal
    has_codes = np.array([bool(a or b) for a, b in zip(truth, guess, strict=True)])
    assert (table[~has_codes] == 1).all(axis=None)
    if has_codes.any():  # scikit-learn scores only these
        binarizer = MultiLabelBinarizer(classes=sorted(SIX_CODES))
        y_true = binarizer.fit_transform(truth)[has_codes]
        y_pred = binarizer.fit_transform(guess)[has_codes]
        *expected, _ = precision_recall_fscore_support(
            y_true, y_pred, average="samples", zero_division=0
        )
        means = table.loc[has_codes, ["precision", "recall", "f1"]].mean()
        np.testing.assert_allclose(means, expected)


def test_scores_of_each_code_by_hand():
    truth = [("a",), ("a", "b"), ("c",)]
    predicted = [("a",), ("b", "c"), ("b",)]
    third = pytest.approx(2 / 3)
    assert scores.scores_by_code(truth, predicted) == [
        CodeScores("a", n=2, predicted=1, precision=1, recall=0.5, f1=third),
        CodeScores("b", n=1, predicted=2, precision=0.5, recall=1, f1=third),
        CodeScores("c", n=1, predicted=1, precision=0, recall=0, f1=0),
    ]


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
    calibration = scores.calibration(conf, right)
    bins = [row for row in calibration.bins if row.count]
    accuracy, mean_conf = calibration_curve(right, conf, n_bins=10)
    np.testing.assert_allclose([row.accuracy for row in bins], accuracy)
    np.testing.assert_allclose([row.conf for row in bins], mean_conf)
    gaps = np.abs(accuracy - mean_conf) * [row.count for row in bins]
    assert calibration.ece == pytest.approx(gaps.sum() / len(conf))


def test_production_curve_by_hand():
    curve = scores.production_curve(
        np.array([0.1, 0.9, 0.5, 0.5]), np.array([False, True, True, False]), num_shares=5
    )
    assert curve.share == [0, 0.25, 0.5, 0.75, 1]
    # of two equally certain rows, half a right one
    assert curve.accuracy == [None, 1, 0.75, pytest.approx(2 / 3), 0.5]
    assert curve.conf == [None, 0.9, 0.5, 0.5, 0.1]


def test_confusions_by_hand():
    truth = [("a",), ("a",), ("a",), ("a", "b"), ("c",), ("d",)]
    guess = [("x",), ("x",), ("a",), ("a",), ("c", "y"), ("d",)]
    texts = ["one", "one", "two", "three", "four", "five"]
    worst = [
        Confusion("a", "x", count=2, of=4, example="one"),
        Confusion(None, "y", count=1, of=None, example="four"),
        Confusion("b", None, count=1, of=1, example="three"),
    ]
    assert scores.confusions(truth, guess, texts) == worst
    assert scores.confusions(truth, guess, texts, limit=1) == worst[:1]
    assert scores.confusions(truth, truth, texts) == []


@pytest.fixture(scope="module")
def evaluation() -> Evaluation:
    """A tiny model's, which was trained on four descriptions."""
    examples = few_examples()
    baselines = Baselines(examples, Known(), max_size=0)
    for text, code, times in (
        ("farmer", "61110", 3),
        ("other", "61110", 27),
        ("y", "61115", 200),
        ("z", "80110", 1),
    ):
        codes = pd.DataFrame({"hisco_1": [code] * times})
        baselines.add(Examples.of([text] * times, ["en"] * times, codes))
    return evaluate(tiny_coder(), examples, baselines=baselines)


def num_rows(groups: dict[str, MeanScores]) -> dict[str, int]:
    return {name: group.n for name, group in groups.items()}


def test_evaluation_counts_rows_and_descriptions(evaluation: Evaluation):
    metrics = evaluation.metrics
    assert (metrics.num_rows, metrics.num_texts) == (6, 5)
    assert num_rows(metrics.answer.by_language) == {"da": 2, "en": 4}
    assert num_rows(metrics.answer.by_text_seen) == {"0": 4, "2-5": 2}
    assert num_rows(metrics.answer.by_code_seen) == {"0": 1, "1": 2, "21-100": 2}


def test_learned_descriptions_are_not_seen_0_times():
    coder = tiny_coder()
    coder.model.has_learned(torch.from_numpy(text_hashes(["Cobbler.", "farmer"])))
    examples = few_examples()
    baselines = Baselines(examples, Known(), max_size=0)
    baselines.add(examples.take(np.array([0])))
    evaluation = evaluate(coder, examples, baselines=baselines)
    assert num_rows(evaluation.metrics.answer.by_text_seen) == {"0": 3, "1": 2}


def test_production_counts_each_description_once(evaluation: Evaluation):
    rows = evaluation.rows
    by_text = rows["right"].groupby(description_keys(rows["text"].tolist())).mean()
    assert len(by_text) == 5
    accuracy = evaluation.metrics.answer.production.accuracy
    assert accuracy[-1] == pytest.approx(by_text.mean())


def test_evaluated_rows_are_those_of_prediction(evaluation: Evaluation):
    examples = few_examples()
    decoded = tiny_coder().predict(examples.texts, examples.langs, progress=False)
    np.testing.assert_allclose(evaluation.rows["conf"], decoded["conf"])
    is_in_key = decoded[["hisco_1", "hisco_2"]].isin([*SIX_CODES, None]).all(axis=1)
    assert evaluation.metrics.num_outside_key == (~is_in_key).sum()


def test_accuracies_of_an_evaluation_agree(evaluation: Evaluation):
    answer = evaluation.metrics.answer
    assert answer.overall.accuracy == evaluation.rows["right"].mean()
    assert answer.by_digits["5"].accuracy == answer.overall.accuracy


def test_metrics_are_json_without_what_is_missing(evaluation: Evaluation):
    plain = json.loads(json.dumps(as_json(evaluation.metrics), allow_nan=False))
    assert plain["answer"]["overall"]["n"] == 6
    assert "svc" not in plain["baselines"]
    assert "corrections" not in plain
    empty_bin = next(row for row in plain["answer"]["calibration"]["bins"] if not row["count"])
    assert empty_bin["accuracy"] is None


def test_descriptions_without_codes_are_evaluated():
    evaluation = evaluate(tiny_coder(), few_examples().take(np.array([5, 5])))
    json.dumps(as_json(evaluation.metrics), allow_nan=False)
    assert evaluation.metrics.answer.overall.accuracy == evaluation.rows["right"].mean()


def test_nothing_to_evaluate_is_an_error():
    with pytest.raises(UserError, match="no descriptions"):
        evaluate(tiny_coder(), Examples.of([], [], pd.DataFrame({"hisco_1": []})))


def test_groups_are_cells_or_ranges_of_numbers():
    assert named_groups(["a", None, "b"]).tolist() == ["a", "(blank)", "b"]
    years = named_groups([str(1850 + i) for i in range(50)] + [None])
    assert [years[0], years[10], years[49], years[50]] == [
        "1850-1859",
        "1860-1869",
        "1890-1899",
        "(blank)",
    ]
    dates = named_groups([str(18510101 + i) for i in range(50)])
    assert [dates[0], dates[49]] == ["18510101-18510110", "18510141-18510150"]
    assert named_groups([f"parish {i}" for i in range(60)]).tolist().count("others") == 20


def test_scores_by_group_agree_with_the_means():
    right, conf = np.array([True, False, True, True]), np.array([0.9, 0.4, 0.8, 0.6])
    groups = np.array(["x", "x", "y", "y"])
    first, second = scores.scores_by_group(right, conf, list("abcd"), groups)
    assert (first.group, first.n, first.share) == ("x", 2, 0.5)
    assert first.conf == pytest.approx(0.65)
    assert second.share == second.high == 1.0
    assert second.low < 1.0


def test_two_models_are_compared_row_by_row():
    first, second = tiny_coder(), tiny_coder()
    second.mode = "flat"
    examples = few_examples().coded()
    comparison, changed = compare(first, second, examples)
    first_share = right_rows(first, examples, progress=False).mean()
    second_share = right_rows(second, examples, progress=False).mean()
    assert comparison.first.rows == first_share
    assert comparison.second.rows == second_share
    assert comparison.difference.rows.mean == pytest.approx(second_share - first_share)
    assert (changed["codes_first"] != changed["codes_second"]).all()


def test_a_model_does_not_differ_from_itself():
    coder = tiny_coder()
    comparison, changed = compare(coder, coder, few_examples().coded())
    assert comparison.difference.rows == Difference(0, low=None, high=None)
    assert changed.empty


def test_agreement_by_hand():
    first = [["61110"], ["77610"], ["77610", None], ["-1"], ["61110", "77610"]]
    second = [["61110"], ["77120"], ["80110"], ["-1"], ["77610", "61110"]]
    levels = scores.agreement(first, second, ["a", "b", "c", "d", "e"], digits=2)
    assert [(level.digits, level.share) for level in levels] == [(1, 0.8), (2, 0.8), (None, 0.6)]
    # by chance: 61110 1 x 1, 77610 2 x 0, 77120 and 80110 0 x 1, -1 1 x 1, both 1 x 1 of 25
    assert levels[-1].kappa == pytest.approx((0.6 - 3 / 25) / (1 - 3 / 25))


def test_alpha_is_as_published():
    # section B of Krippendorff (2011): two observers of twelve articles
    (level,) = scores.agreement("aabbdcccedda", "babbbccceddd", list("abcdefghijkl"))
    assert round(level.alpha, 3) == 0.692


def test_one_code_alone_has_no_kappa():
    (level,) = scores.agreement("111", "111", ["a", "b", "c"])
    assert (level.share, level.kappa, level.alpha) == (1, None, None)


def test_interval_is_wilsons_of_distinct_descriptions():
    right = np.array([True, True, True, False, True])
    interval = binomtest(4, 5).proportion_ci(method="wilson")
    expected = pytest.approx((interval.low, interval.high))
    once = scores.share_interval(right, list("abcde"))
    often = scores.share_interval(np.repeat(right, 9), np.repeat([*"abcde"], 9).tolist())
    assert (once.low, once.high) == expected
    assert (often.low, often.high) == expected


def test_differences_in_the_first_digit_come_first():
    rows = [
        ("baker", ("77610",), ("77120",)),
        ("smith", ("83110",), ("61110",)),
        ("farmer", ("61110",), ("61110",)),
        ("baker", ("77610",), ("77610",)),
        ("farmer", ("1", "2"), ("2", "1")),  # the same, in another order
    ]
    table = pd.DataFrame(rows, columns=["text", "first", "second"]).assign(lang="en")
    differences = scores.to_settle(table, digits=5)
    assert differences["text"].tolist() == ["smith", "baker"]
    assert differences["digits"].tolist() == [0, 2]
    assert differences["times"].tolist() == [1, 1]


def examples(*rows: tuple[str, ...], lang: str = "en") -> Examples:
    """Rows of a description and up to two codes."""
    codes = pd.DataFrame(
        [(*row[1:], None)[:2] for row in rows], columns=["hisco_1", "hisco_2"], dtype=object
    )
    return Examples.of([row[0] for row in rows], [lang] * len(rows), codes)


TRAIN = (
    ("farmer", "61110"),
    ("old farmer", "61110"),
    ("baker", "77610"),
    ("master baker", "77610"),
    ("Smith", "83110"),
    ("smith ", "83110"),
    ("smith", "61110"),
    ("farmer and baker", "61110", "77610"),
)
ASKED = examples(
    ("SMITH", "83110"), ("bakers", "77610"), ("baker, farmer", "77610", "61110"), ("miner", "71105")
)


def compared(*, max_size: float = np.inf, **known: object) -> BaselineMetrics:
    """Simple methods beside a model that is right of the first row alone."""
    train = examples(*TRAIN)
    baselines = Baselines(ASKED, Known(**known), max_size=max_size)
    for rows in (np.arange(4), np.arange(4, len(train))):
        baselines.add(train.take(rows))
    return baselines.compare(np.array([True, False, False, False]))


def test_exact_match_by_hand():
    metrics = compared()
    exact = metrics.exact_match
    assert metrics.model == Shares(rows=0.25, texts=0.25)
    assert (exact.rows, exact.answered, exact.answered_right) == (0.25, 0.25, 1.0)
    assert exact.difference.rows == Difference(0, low=None, high=None)
    assert compared(exact=True).exact_match.answered == 0


def test_linear_model_by_hand():
    metrics = compared()
    assert metrics.svc.rows == 0.75
    assert metrics.svc.difference.texts.mean == -0.5
    assert metrics.notice is None


def test_no_linear_model_of_many_rows():
    metrics = compared(max_size=23)
    assert metrics.svc is None
    assert "8 rows with 3" in metrics.notice


def test_single_codes_equal_scikit_learns_classifier():
    rng = np.random.default_rng(0)
    rows = []
    for i in rng.integers(3, size=60):
        rows.append((f"{('farmer', 'baker', 'smith')[i]} {rng.integers(50)}", "abc"[i]))
    train, asked = examples(*rows[:40]), examples(*rows[40:])
    vectorizer = TfidfVectorizer(analyzer="char_wb", ngram_range=(1, 5), sublinear_tf=True)
    expected = LinearSVC().fit(vectorizer.fit_transform(train.texts), train.codes["hisco_1"])
    predicted = expected.predict(vectorizer.transform(asked.texts))
    assert linear_codes(train, asked) == [(code,) for code in predicted]


def test_one_code_alone_is_given_to_all():
    train = examples(("farmer", "a"), ("old farmer", "a"))
    assert linear_codes(train, examples(("baker", "b"), ("smith", "b"))) == [("a",), ("a",)]


def test_intervals_draw_rows_of_a_text_together():
    right = np.array([True] * 50 + [False] * 50)
    together = difference_interval(right, ~right, [str(i // 2) for i in range(100)])
    assert together.rows.low < -0.22  # as of fifty draws
    apart = difference_interval(right, ~right, [str(i) for i in range(100)])
    assert -0.25 < apart.rows.low < -0.15
    assert apart.rows == apart.texts
    assert apart == difference_interval(right, ~right, [str(i) for i in range(100)])


def test_few_descriptions_give_no_interval():
    right = np.array([True] * 29 + [False] * 29)
    difference = difference_interval(right, ~right, [str(i % 29) for i in range(58)])
    assert difference.texts == Difference(0, low=None, high=None)
    assert points(difference.rows) == "+0.0 (too few for an interval)"


@pytest.fixture(scope="module")
def corrected() -> Evaluation:
    """A model's on data whose codes are those of an earlier one, but for the last two rows."""
    examples = few_examples()
    before = tiny_coder(fitted_to_validation=True)
    after = tiny_coder()
    codes = before.predict(examples.texts, examples.langs)[["hisco_1", "hisco_2"]]
    codes.loc[4:, "hisco_1"] = "99999"
    codes.loc[4:, "hisco_2"] = None
    examples = Examples.of(examples.texts, examples.langs, codes)
    held_out = examples.take(np.array([0, 5]))
    evaluation = evaluate(after, examples)
    evaluation.metrics.corrections = gain(
        before, after, examples, held_out, right=np.ones(6, dtype=bool)
    )
    return evaluation


def test_a_corrected_model_is_compared_on_its_rows(corrected: Evaluation):
    validation = corrected.metrics.corrections.validation
    held_out = corrected.metrics.corrections.held_out
    assert validation.before.rows == pytest.approx(4 / 6)
    assert validation.after.rows == 1
    assert validation.difference.rows.mean == pytest.approx(2 / 6)
    assert held_out.before == held_out.after == Shares(rows=0.5, texts=0.5)


def test_gain_from_corrections_in_words(corrected: Evaluation):
    *_, validation, held_out, seen = details_in_words(corrected.metrics)
    assert validation.startswith(
        "Of the same 6 rows of validation data, 66.7\u00a0% were exactly right before"
    )
    assert held_out.startswith("Of the same 2 held-out corrections, 50.0\u00a0%")
    assert seen.endswith("so its accuracy there is too high.")


def test_gain_from_corrections_is_reported(corrected: Evaluation, tmp_path: Path):
    page = write_report(tmp_path, corrected, tiny_coder(), title="t").read_text(encoding="utf-8")
    assert "Gain from the corrections" in page
    assert "+33.3 (" in page
    assert details_in_words(corrected.metrics)[-1] in page
