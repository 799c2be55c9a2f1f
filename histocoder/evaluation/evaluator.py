"""Measure how right a model is on descriptions whose codes are known.

Accuracy, precision, recall and F1 of an observation are those of Dahl, Johansen and Vedel (2024), Breaking the HISCO
Barrier, https://arxiv.org/abs/2402.13604.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from histocoder.config import PredictOptions
from histocoder.data.examples import Examples
from histocoder.data.normalize import description_keys
from histocoder.errors import UserError
from histocoder.evaluation.baselines import Baselines, difference_interval, shares
from histocoder.evaluation.scores import (
    calibration,
    code_sets,
    confusions,
    cut_codes,
    first_true_rank,
    mean_scores,
    mean_scores_by,
    production_curve,
    score_sets,
    scores_by_code,
    seen_groups,
    top_k_accuracy,
)
from histocoder.formatters import CodeSystem
from histocoder.inference.coder import Coder

_MAX_DIGITS = 5
_TOP = 5  # maximum k of top-k accuracy


@dataclass
class Evaluation:
    """Result of `evaluate`."""

    metrics: dict[str, Any]
    """Plain values, for JSON. `answer`, in the model's own `mode`, holds the result of `answer_metrics`; `topk`,
    `confusions` and `by_code` are those of the functions in `scores`."""
    rows: pd.DataFrame
    """One line for each description: its `text` and `lang`, its `true_…` and `predicted_…` columns, whether these are
    `right`, and `conf`."""


def evaluate(
    coder: Coder, examples: Examples, *, trained: Baselines | None = None, batch_size: int = 256
) -> Evaluation:
    """Let a model code descriptions whose codes are known, and count what it gets right.

    `trained` has been given all training rows, if there are any; the model is compared with it. Raise UserError where
    there are no rows.
    """
    if len(examples) == 0:
        raise UserError("There are no descriptions with codes to evaluate on.")
    decoded, ranked, _ = coder.predict_ranked(examples.texts, examples.langs, batch_size=batch_size)
    langs, conf = pd.Series(examples.langs, dtype=object), np.nan_to_num(decoded.conf)
    truth, answer = code_sets(examples.codes), code_sets(decoded.codes)
    ranks = first_true_rank(truth, ranked.codes)
    groups = _groups(examples, truth, trained)
    num_true_outside, num_outside = (
        int(sets.loc[~sets["code"].isin(coder.codes), "row"].nunique()) for sets in (truth, answer)
    )
    metrics = {
        "num_rows": len(examples),
        "num_texts": len(set(description_keys(examples.texts))),
        "num_true_outside_key": num_true_outside,
        "num_outside_key": num_outside,
        "mode": coder.mode,
        "answer": answer_metrics(truth, answer, conf, groups=groups, system=coder.formatter.system),
        "topk": {
            "overall": top_k_accuracy(ranks, k=_TOP),
            "by_language": {lang: top_k_accuracy(ranks[langs == lang], k=_TOP) for lang in sorted(set(langs))},
        },
        "confusions": confusions(truth, answer, examples.texts),
        "by_code": scores_by_code(truth, answer),
    }
    rows = pd.DataFrame({"text": examples.texts, "lang": examples.langs})
    true_codes = examples.codes.reset_index(drop=True).add_prefix("true_")
    written = decoded.frame(coder.model.config).drop(columns="conf").add_prefix("predicted_")
    rows = rows.join([true_codes, written])
    right = score_sets(truth, answer, len(examples))["accuracy"]
    if trained is not None:
        metrics["baselines"] = trained.compare(right.to_numpy())
    return Evaluation(metrics, rows.assign(right=right, conf=conf))


def right_rows(coder: Coder, examples: Examples, *, mode: str | None = None, progress: bool = True) -> np.ndarray:
    """Return where a model gives exactly the true set of codes, of shape (n,)."""
    given = coder.distinct(examples.texts, examples.langs)
    decoded = coder.code(given, PredictOptions(mode=mode), progress=progress)
    truth, answer = code_sets(examples.codes), code_sets(decoded.codes)
    return score_sets(truth, answer, len(examples))["accuracy"].to_numpy(dtype=bool)


def gain(
    before: Coder, after: Coder, validation: Examples, held_out: Examples | None, *, right: np.ndarray
) -> dict[str, Any]:
    """Compare a model that was trained on corrections, `after`, with the one that they correct.

    `validation` has no corrected description, and `right`, of shape (n,), says where `after` is right on it; `after`
    has not been trained on `held_out`. Return plain values, for JSON: `validation` and, where there is one, `held_out`,
    each with `num_rows`, `before` and `after` (see `shares`), and their `difference` (see `difference_interval`).
    `before_has_seen` says whether the model before was trained on validation data, so that the comparison favours it.
    """

    def compared(examples: Examples, right_after: np.ndarray) -> dict[str, Any]:
        texts, right_before = examples.texts, right_rows(before, examples)
        return {
            "num_rows": len(examples),
            "before": shares(right_before, texts),
            "after": shares(right_after, texts),
            "difference": difference_interval(right_after, right_before, texts),
        }

    found: dict[str, Any] = {"before_has_seen": before.model.config.fitted_to_validation}
    found["validation"] = compared(validation, right)
    if held_out is not None:
        found["held_out"] = compared(held_out, right_rows(after, held_out))
    return found


def answer_metrics(
    truth: pd.DataFrame,
    predicted: pd.DataFrame,
    conf: np.ndarray,
    *,
    groups: Mapping[str, pd.Series],
    system: CodeSystem,
) -> dict[str, Any]:
    """Compute the metrics of predictions, from sets of codes (see `code_sets`).

    `groups` are each row's group by the name of the grouping; `system` says what the digits of codes are. Return
    `overall`, `by_{name}` of each grouping, and `by_digits`: `n` and the means of `score_sets`; `calibration` and
    `production`: see the functions `calibration` and `production_curve`.
    """
    scores = score_sets(truth, predicted, len(conf))
    right = scores["accuracy"].to_numpy()
    by_digits = {}
    most_digits = 0 if system.labels is not None else min(system.block_size, _MAX_DIGITS)
    for digits in range(1, most_digits + 1):
        cut_truth, cut_predicted = (cut_codes(sets, digits, separator=system.separator) for sets in (truth, predicted))
        by_digits[str(digits)] = mean_scores(score_sets(cut_truth, cut_predicted, len(conf)))
    return {
        "overall": {**mean_scores(scores), "conf": float(conf.mean())},
        **{f"by_{name}": mean_scores_by(scores, by) for name, by in groups.items()},
        "by_digits": by_digits,
        "calibration": calibration(conf, right),
        "production": production_curve(conf, right),
    }


def _groups(examples: Examples, truth: pd.DataFrame, trained: Baselines | None) -> dict[str, pd.Series]:
    """Return each row's language, number of true codes, and how often its description and its rarest code were seen."""
    num_rows = len(examples)
    groups = {
        "language": pd.Series(examples.langs, dtype=object),
        "num_codes": pd.Series(np.bincount(truth["row"], minlength=num_rows)),
    }
    if trained is not None:
        times = truth["code"].map(dict(trained.codes_seen)).fillna(0)
        groups["code_seen"] = seen_groups(times.groupby(truth["row"]).min().reindex(range(num_rows)))
        groups["text_seen"] = seen_groups(
            pd.Series([trained.texts_seen[key] for key in description_keys(examples.texts)])
        )
    return groups
