from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from models import few_examples, tiny_coder
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.svm import LinearSVC

from histocoder.data.examples import Examples
from histocoder.evaluation.baselines import Baselines, difference_interval, linear_codes
from histocoder.evaluation.evaluator import evaluate, gain
from histocoder.evaluation.report import write_report
from histocoder.evaluation.summary import gain_in_words
from histocoder.inference.known import Known


def examples(*rows: tuple[str, ...], lang: str = "en") -> Examples:
    """Rows of a description and up to two codes."""
    codes = pd.DataFrame([(*row[1:], None)[:2] for row in rows], columns=["hisco_1", "hisco_2"], dtype=object)
    return Examples.of([row[0] for row in rows], [lang] * len(rows), codes)


TRAIN = (
    *(("farmer", "61110"), ("old farmer", "61110"), ("baker", "77610"), ("master baker", "77610")),
    *(("Smith", "83110"), ("smith ", "83110"), ("smith", "61110"), ("farmer and baker", "61110", "77610")),
)
ASKED = examples(("SMITH", "83110"), ("bakers", "77610"), ("baker, farmer", "77610", "61110"), ("miner", "71105"))


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
    assert exact["difference"]["rows"] == {"mean": 0, "low": 0, "high": 0}
    assert svc["rows"] == 0.75 and svc["difference"]["texts"]["mean"] == -0.5 and "notice" not in found
    assert svc["difference"]["texts"]["low"] < -0.5 < svc["difference"]["texts"]["high"]
    assert "svc" not in (without := compared(examples(*TRAIN), max_size=23)) and "8 rows with 3" in without["notice"]
    assert compared(examples(*TRAIN), exact=True)["exact_match"]["answered"] == 0


def test_single_codes_equal_scikit_learns_classifier():
    rng = np.random.default_rng(0)
    rows = [(f"{'farmer baker smith'.split()[i]} {rng.integers(50)}", "abc"[i]) for i in rng.integers(3, size=60)]
    train, asked = examples(*rows[:40]), examples(*rows[40:])
    vectorizer = TfidfVectorizer(analyzer="char_wb", ngram_range=(1, 5), sublinear_tf=True)
    expected = LinearSVC().fit(vectorizer.fit_transform(train.texts), train.codes["hisco_1"])
    codes = linear_codes(train, asked)
    assert codes == [(code,) for code in expected.predict(vectorizer.transform(asked.texts))]
    assert linear_codes(examples(("farmer", "a"), ("old farmer", "a")), asked) == [("a",)] * 20  # of one code alone


def test_intervals_draw_rows_of_a_text_together():
    right = np.array([True] * 50 + [False] * 50)
    texts = ["a"] * 50 + ["b"] * 50
    found = difference_interval(right, ~right, texts)
    assert found["texts"] == {"mean": 0, "low": -1, "high": 1}  # with two texts there are four draws
    apart = difference_interval(right, ~right, [str(i) for i in range(100)])
    assert -0.25 < apart["rows"]["low"] < -0.15 and apart["rows"] == apart["texts"]
    assert apart == difference_interval(right, ~right, [str(i) for i in range(100)])


def test_a_corrected_model_is_compared_on_its_rows(tmp_path: Path):
    examples = few_examples()
    before, after = tiny_coder(fitted_to_validation=True), tiny_coder()
    codes = before.predict(examples.texts, examples.langs)[["hisco_1", "hisco_2"]]
    codes.loc[4:, "hisco_1"], codes.loc[4:, "hisco_2"] = "99999", None
    examples = Examples.of(examples.texts, examples.langs, codes)
    found = gain(before, after, examples, examples.take(np.array([0, 5])), right=np.ones(6, dtype=bool))
    assert found["validation"]["before"]["rows"] == pytest.approx(4 / 6) and found["validation"]["after"]["rows"] == 1
    assert found["validation"]["difference"]["rows"]["mean"] == pytest.approx(2 / 6)
    assert found["held_out"]["before"] == found["held_out"]["after"] == {"rows": 0.5, "texts": 0.5}
    words = gain_in_words({"corrections": found})
    assert words[0].startswith("Of the same 6 rows of validation data, 66.7\u00a0% were exactly right before")
    assert words[1].startswith("Of the same 2 held-out corrections, 50.0\u00a0%") and "is too high" in words[2]
    evaluation = evaluate(after, examples)
    evaluation.metrics["corrections"] = found
    page = write_report(tmp_path, evaluation, after, title="t").read_text(encoding="utf-8")
    assert "Gain from the corrections" in page and "+33.3 (" in page and words[2] in page
