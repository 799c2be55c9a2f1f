from pathlib import Path

import numpy as np
import pytest
from models import few_examples, tiny_coder

from histocoder.evaluation.baselines import gain
from histocoder.evaluation.evaluate import evaluate
from histocoder.evaluation.report import write_report
from histocoder.evaluation.summary import gain_in_words


def test_the_corrected_model_is_compared_on_the_same_rows(tmp_path: Path):
    examples = few_examples()
    before, after = tiny_coder(fitted_to_validation=True), tiny_coder()
    examples.codes = before.predict(examples.texts, examples.langs)[["hisco_1", "hisco_2"]]
    examples.codes.loc[4:, "hisco_1"], examples.codes.loc[4:, "hisco_2"] = "99999", None
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
