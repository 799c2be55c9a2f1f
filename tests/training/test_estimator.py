"""The estimator with scikit-learn's conventions, and scikit-learn's own checks of it."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import NOTES, ROOT, TITLES, cases, run
from pretended_gpu import Log
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import check_estimator
from sklearn.utils.validation import check_is_fitted, validate_data

from histocoder import Coder, OccupationClassifier

TEXTS = [f"{title}{note}" for note in NOTES for title in TITLES]
CODES = [*TITLES.values()] * len(NOTES)
SMALL = {
    "initial_checkpoint": str(ROOT / "tests" / "fixtures" / "ngram"),
    "only_encoder": True,
    "titles": "none",
}
SMALL |= {"max_steps": 40, "device": "cpu", "precision": "fp32"}
"""Settings of an n-gram encoder of few rows, which is fitted in a second."""


def classifier(**settings: Any) -> OccupationClassifier:
    return OccupationClassifier(language="en", random_state=0, settings=SMALL | settings)


@pytest.fixture(scope="module")
def fitted() -> OccupationClassifier:
    return classifier().fit(TEXTS, CODES)


def test_predictions_are_the_most_probable_classes(fitted: OccupationClassifier):
    probabilities, found = fitted.predict_proba(TEXTS), fitted.predict(TEXTS)
    assert fitted.classes_.tolist() == sorted(set(CODES)) and probabilities.shape == (64, 8)
    np.testing.assert_allclose(probabilities.sum(1), 1)
    assert (fitted.classes_[probabilities.argmax(1)] == found).all()
    assert fitted.score(TEXTS, CODES) == np.mean(found == CODES) > 0.9


def test_the_cpu_is_used_where_it_is_named(gpu: Log, fitted: OccupationClassifier):
    assert classifier(max_steps=2).fit(TEXTS, CODES).coder_.device.type == "cpu"
    assert pickle.loads(pickle.dumps(fitted)).coder_.device.type == "cpu" and not gpu.launches


def test_fitted_model_is_that_of_train(fitted: OccupationClassifier, tmp_path: Path):
    fitted.coder_.save_pretrained(tmp_path / "model")
    codes = Coder.from_pretrained(tmp_path / "model", "cpu").predict(TEXTS, "en", mode="combined")[
        "code"
    ]
    assert codes.tolist() == fitted.predict(TEXTS).tolist()


@pytest.mark.parametrize(
    "kind", [int, float, lambda code: f"Nr. {code}, æ & ö"], ids=["int", "float", "words"]
)
def test_classes_keep_the_type_of_codes(kind: Any):
    codes = pd.Series([kind(code) for code in CODES], index=range(100, 164))
    fitted = classifier().fit(pd.Series(TEXTS), codes)
    assert fitted.classes_.tolist() == sorted(set(codes)) and fitted.score(TEXTS, codes) > 0.9


def test_second_column_holds_languages():
    X = pd.DataFrame(
        {"occ1": [f"{text} x" for text in TEXTS], "lang": [*["en", "da"] * 31, None, float("nan")]}
    )
    fitted = classifier().fit(X, CODES)
    assert fitted.coder_.model.config.languages == ("da", "en", "unk")
    assert fitted.score(X, CODES) > 0.9 and fitted.predict(X[["occ1"]]).shape == (64,)


def test_clones_repeat_a_fit_and_keep_parameters(fitted: OccupationClassifier):
    again = clone(fitted)
    assert again.get_params() == fitted.get_params() and not hasattr(again, "coder_")
    with pytest.raises(NotFittedError):
        again.predict(TEXTS)
    assert again.fit(TEXTS, CODES) is again
    assert (again.predict_proba(TEXTS) == fitted.predict_proba(TEXTS)).all()
    other = clone(fitted).set_params(random_state=1).fit(TEXTS, CODES)
    assert (other.predict_proba(TEXTS) != fitted.predict_proba(TEXTS)).any()


def test_pickled_model_predicts_in_a_new_process(fitted: OccupationClassifier, tmp_path: Path):
    (tmp_path / "fitted.pkl").write_bytes(pickle.dumps(fitted))
    code = (
        "import pickle, sys; print(*pickle.load(open(sys.argv[1], 'rb')).predict(['miner', "
        "'baker (retired)']))"
    )
    printed = run("-c", code, tmp_path / "fitted.pkl", fresh=True).stdout
    assert printed.split() == fitted.predict(["miner", "baker (retired)"]).tolist()
    assert pickle.loads(pickle.dumps(classifier())).get_params() == classifier().get_params()


@pytest.mark.slow
def test_tools_of_sklearn_use_it(capsys: pytest.CaptureFixture[str]):
    pipeline = make_pipeline(
        FunctionTransformer(lambda texts: [text.lower() for text in texts]), classifier()
    )
    assert cross_val_score(pipeline, TEXTS, CODES, cv=2).mean() > 0.8
    search = GridSearchCV(classifier(), {"language": ["en"]}, cv=2).fit(TEXTS, CODES)
    assert search.best_score_ > 0.8 and search.predict(["miner"]) == ["71105"]
    assert capsys.readouterr().out == ""


def test_two_descriptions_are_enough():
    fitted = classifier().fit(
        ["farmer", "baker"] * 8, ["b", "a"] * 8
    )  # one to train on, one to validate on
    assert fitted.predict_proba(["farmer", "baker"]).shape == (2, 2)


@cases(
    ("X", "y", "says"),
    (["baker", " "], ["a", "b"], "in row 1, but ' '"),
    (["baker", None], ["a", "b"], "in row 1, but None"),
    ([[1.5, 2.0], [1.0, 2.0]], ["a", "b"], "in row 0, but 1.5"),
    ([["a", "b", "c"]] * 2, ["a", "b"], "of shape"),
    (["baker", "smith"], ["a", "a"], "one class"),
    (["baker", "smith"], ["a", " "], "blank codes"),
    (["baker", "smith", "miner"], ["a", "b", "?"], "no '' or '\\?'"),
    (["baker", "smith"], ["a", None], "y has no code in row 1"),
    (["baker", "smith"], pd.Series([float("nan"), "a"]), "y has no code in row 0"),
    (["baker", "smith"], ["a", "b", "a"], "length 3"),
    (["baker", "smith"], [0.5, 1.5], "continuous"),
    (["baker", "smith"], None, "1d array"),
)
def test_wrong_input_is_refused_with_a_reason(X: Any, y: Any, says: str):
    with pytest.raises(ValueError, match=says):
        classifier().fit(X, y)


class OfNumbers(OccupationClassifier):
    """Reads the rows of numbers that scikit-learn's checks give, once validated as usual, as a word
    for each number.
    """

    def fit(self, X: Any, y: Any) -> OfNumbers:
        X, y = validate_data(self, X, y)
        super().fit(as_words(X), y)
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        return super().predict_proba(as_words(validate_data(self, X, reset=False)))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = True
        return tags


def as_words(X: np.ndarray) -> list[str]:
    return [
        " ".join(f"{chr(97 + i % 26)}{round(float(cell))}" for i, cell in enumerate(row))
        for row in X
    ]


@pytest.mark.slow
def test_checks_of_sklearn_pass_on_numbers_as_words():
    results = check_estimator(OfNumbers(random_state=0, settings=SMALL), on_skip=None, on_fail=None)
    found = Counter(
        (result["check_name"], result["status"])
        for result in results
        if result["status"] != "passed"
    )
    # array API: skipped unless SCIPY_ARRAY_API is set
    assert set(found) <= {("check_array_api_input", "skipped")} and len(results) > 50, found
