"""Measure how right a model is on descriptions whose codes are known.

Accuracy, precision, recall and F1 of an observation are those of Dahl, Johansen and Vedel (2024),
Breaking the HISCO Barrier, https://arxiv.org/abs/2402.13604.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from histocoder.config import PredictOptions
from histocoder.data.examples import Examples
from histocoder.data.hashes import are_among
from histocoder.errors import UserError
from histocoder.evaluation import scores
from histocoder.evaluation.baselines import Baselines, difference_interval, shares
from histocoder.evaluation.scores import (
    code_sets,
    mean_scores,
    mean_scores_by,
    score_sets,
    seen_groups,
)
from histocoder.inference.coder import Coder
from histocoder.inference.predictions import Prediction
from histocoder.text.normalize import description_keys

_MAX_DIGITS = 5
_TOP = 5  # maximum k of top-k accuracy


@dataclass
class Evaluation:
    """Result of `evaluate`."""

    metrics: dict[str, Any]
    """Plain values, for JSON. `answer`, in the model's own `mode`, holds the means of `score_sets`:
    `overall`, `by_language`, `by_num_codes`, `by_digits` that are compared, and by how often the
    rarest code and the description occur in the training data; and the results of `calibration`
    and, with each description once, `production_curve`. `attributes` are those of `of_attributes`;
    `topk`, `confusions`, `by_code` and, by the names of columns, `by_group` those of functions in
    `scores`.
    """
    rows: pd.DataFrame
    """One line for each description: its `text` and `lang`, its sets of codes `true` and
    `predicted`, whether these are `right`, and `conf`.
    """


def evaluate(
    coder: Coder,
    examples: Examples,
    *,
    trained: Baselines | None = None,
    groups: Mapping[str, np.ndarray] | None = None,
    batch_size: int | None = None,
) -> Evaluation:
    """Let a model code descriptions whose codes are known, and count what it gets right.

    `trained` has been given all training rows, if there are any; the model is compared with it.
    `groups` are names of columns, each with the group that every row is in. Raise UserError where
    there are no rows.
    """
    if len(examples) == 0:
        raise UserError("There are no descriptions with codes to evaluate on.")
    decoded, ranked = coder.predict_ranked(examples.texts, examples.langs, batch_size=batch_size)
    texts, langs, conf = (
        examples.texts,
        np.array(examples.langs, dtype=object),
        np.nan_to_num(decoded.conf),
    )
    truth, predicted = code_sets(examples.codes), code_sets(decoded.codes)
    keys, known = description_keys(texts), set(coder.codes)
    by_row = score_sets(truth, predicted)
    right = by_row["accuracy"].to_numpy()
    # with each description once: a threshold that a frequent one decides does not hold for others
    once = pd.DataFrame({"conf": conf, "right": right}).groupby(keys, sort=False).mean()
    answer: dict[str, Any] = {
        "overall": {**mean_scores(by_row), "conf": float(conf.mean())},
        "by_language": mean_scores_by(by_row, langs),
        "by_num_codes": mean_scores_by(by_row, [len(true) for true in truth]),
        "by_digits": {},
        "calibration": scores.calibration(conf, right),
        "production": scores.production_curve(once["conf"].to_numpy(), once["right"].to_numpy()),
    }
    if trained is not None:
        codes_seen = [
            min((trained.codes_seen[code] for code in true), default=np.nan) for true in truth
        ]
        answer["by_code_seen"] = mean_scores_by(by_row, seen_groups(codes_seen))
        answer["by_text_seen"] = mean_scores_by(
            by_row, seen_groups([trained.texts_seen[key] for key in keys])
        )
    system = coder.formatter.system
    for digits in range(
        1, 1 if system.labels is not None else min(system.block_size, _MAX_DIGITS) + 1
    ):
        cut = (
            scores.cut_codes(sets, digits, separator=system.separator)
            for sets in (truth, predicted)
        )
        answer["by_digits"][str(digits)] = mean_scores(score_sets(*cut))
    ranks = scores.first_true_rank(truth, ranked.codes)
    metrics = {
        "num_rows": len(examples),
        "num_texts": len(set(keys)),
        "num_true_outside_key": sum(not known.issuperset(codes) for codes in truth),
        "num_outside_key": sum(not known.issuperset(codes) for codes in predicted),
        "mode": coder.mode,
        "answer": answer,
        "topk": {
            "overall": scores.top_k_accuracy(ranks, k=_TOP),
            "by_language": {
                lang: scores.top_k_accuracy(ranks[langs == lang], k=_TOP)
                for lang in sorted(set(langs))
            },
        },
        "confusions": scores.confusions(truth, predicted, texts),
        "attributes": of_attributes(decoded, examples, trained),
        "by_code": scores.scores_by_code(truth, predicted),
        "by_group": {
            name: scores.scores_by_group(right, conf, texts, one)
            for name, one in (groups or {}).items()
        },
    }
    if trained is not None:
        metrics["baselines"] = trained.compare(right)
    columns = {
        "text": texts,
        "lang": langs,
        "true": truth,
        "predicted": predicted,
        "right": right,
        "conf": conf,
    }
    return Evaluation(metrics, pd.DataFrame(columns))


def of_attributes(
    decoded: Prediction, examples: Examples, trained: Baselines | None
) -> dict[str, Any]:
    """Return, for each attribute that some rows state, `n`, and the scores of the `model`, of
    `none` and of the `svc`.

    `none` answers always none; `svc`, where there is one, is a linear model fitted on the training
    data.
    """
    found: dict[str, Any] = {}
    for name, attribute in decoded.attributes.items():
        truth = (
            examples.attributes[name].to_pandas()
            if name in examples.attributes
            else pd.Series(dtype=object)
        )
        if not (is_known := truth.notna().to_numpy()).any():
            continue
        answers = {
            "model": pd.Series(attribute.best[0]).fillna("").to_numpy(),
            "none": np.full(len(truth), ""),
        }
        if trained is not None and (linear := trained.attribute(name)) is not None:
            answers["svc"] = linear
        true = truth[is_known].to_numpy()
        of_answers = {
            way: scores.attribute_scores(true, answer[is_known]) for way, answer in answers.items()
        }
        found[name] = {"n": int(is_known.sum()), "categories": len(set(true) - {""}), **of_answers}
    return found


def right_rows(
    coder: Coder, examples: Examples, *, mode: str | None = None, progress: bool = True
) -> np.ndarray:
    """Return where a model gives exactly the true set of codes, of shape (n,)."""
    given = coder.distinct(examples.texts, examples.langs)
    decoded = coder.code(given, PredictOptions(mode=mode), progress=progress)
    return score_sets(code_sets(examples.codes), code_sets(decoded.codes))["accuracy"].to_numpy()


def gain(
    before: Coder,
    after: Coder,
    validation: Examples,
    held_out: Examples | None,
    *,
    right: np.ndarray,
) -> dict[str, Any]:
    """Compare a model that was trained on corrections, `after`, with the one that they correct.

    `validation` has no corrected description, and `right`, of shape (n,), says where `after` is
    right on it; `after` has not been trained on `held_out`. Return plain values, for JSON:
    `validation` and, where there is one, `held_out`, each with `num_rows`, `before` and `after`
    (see `shares`), and their `difference` (see `difference_interval`). `before_has_seen` says
    whether the model before was trained on validation data, so that the comparison favours it.
    """
    trained_on = before.model.trained_on
    has_seen = before.model.config.fitted_to_validation
    if trained_on is not None:
        has_seen = bool(are_among(validation.texts, trained_on.cpu().numpy()).any())
    found: dict[str, Any] = {"before_has_seen": has_seen}
    for part, examples in {"validation": validation, "held_out": held_out}.items():
        if examples is not None:
            right_before = right_rows(before, examples)
            right_after = right if part == "validation" else right_rows(after, examples)
            found[part] = {
                "num_rows": len(examples),
                "before": shares(right_before, examples.texts),
                "after": shares(right_after, examples.texts),
                "difference": difference_interval(right_after, right_before, examples.texts),
            }
    return found


def compare(first: Coder, second: Coder, examples: Examples) -> tuple[dict[str, Any], pd.DataFrame]:
    """Compare two models on the same n descriptions, whose codes are known.

    Return plain values, for JSON: `first` and `second` (see `shares`), and the `difference`, second
    - first (see `difference_interval`); and the rows that they code differently: `text`, `lang`,
    the `true` codes, and each model's `codes_…`, `conf_…` and `right_…`. Rows that the first alone
    has right are the first.
    """
    texts, langs, truth = examples.texts, examples.langs, code_sets(examples.codes)
    rows, right = pd.DataFrame({"text": texts, "lang": langs, "true": truth}), {}
    for name, coder in {"first": first, "second": second}.items():
        found = coder.code(coder.distinct(texts, langs), PredictOptions())
        codes = code_sets(found.codes)
        right[name] = score_sets(truth, codes)["accuracy"].to_numpy()
        rows = rows.assign(
            **{f"codes_{name}": codes, f"conf_{name}": found.conf, f"right_{name}": right[name]}
        )
    result: dict[str, Any] = {name: shares(one, texts) for name, one in right.items()}
    result["difference"] = difference_interval(right["second"], right["first"], texts)
    changed = rows[rows["codes_first"].map(frozenset) != rows["codes_second"].map(frozenset)]
    return result, changed.sort_values(
        ["right_first", "right_second"], ascending=[False, True], kind="stable"
    )
