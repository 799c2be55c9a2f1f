"""How right a model is on descriptions whose codes are known.

Accuracy, precision, recall and F1 of an observation are those of Dahl, Johansen and Vedel (2024), Breaking the HISCO
Barrier, https://arxiv.org/abs/2402.13604.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from histocoder.data.examples import Examples
from histocoder.data.normalize import folded
from histocoder.errors import UserError
from histocoder.evaluation.scores import (
    THRESHOLDS,
    best_thresholds,
    calibration,
    code_sets,
    confusions,
    cut_codes,
    first_true_rank,
    is_best,
    mean_scores,
    mean_scores_by,
    production_curve,
    score_sets,
    scores_by_code,
    seen_groups,
    top_k_accuracy,
)
from histocoder.formatters import CODE_SEP
from histocoder.formatters.general import WITHIN_BLOCK_SEP
from histocoder.inference.coder import Coder
from histocoder.inference.flat import threshold_of

_MAX_DIGITS = 5
_FLAT_ROWS = 2048  # rows whose many probable classes are held as a table at once


@dataclass
class Evaluation:
    """What `evaluate` found."""

    metrics: dict[str, Any]
    """Plain values, for JSON. `answer` (in the model's own `mode`) and `flat` (the flat head at its thresholds) hold
    what `head_metrics` tells; `topk`, `thresholds`, `confusions` and `by_code` are those of the functions in
    `scores`."""
    rows: pd.DataFrame
    """One line for each description: its true and predicted codes; whether they are `right`, their `precision`,
    `recall`, `f1` and `conf`; the `rank` of the first true code (inf: not among the best k); the same of `flat`."""

    def thresholds(self) -> dict[str, float]:
        """Return the flat head's best threshold by language, as `ModelConfig.thresholds` takes it."""
        return {lang: best["threshold"] for lang, best in self.metrics["thresholds"].items()}


def evaluate(
    coder: Coder,
    examples: Examples,
    *,
    texts_seen: Mapping[str, int] | None = None,
    codes_seen: Mapping[str, int] | None = None,
    k: int = 5,
    batch_size: int = 256,
    progress: bool = True,
) -> Evaluation:
    """Let a model code descriptions whose codes are known, and count what it gets right.

    Parameters
    ----------
    coder : Coder
    examples : Examples
        Of n rows.
    texts_seen, codes_seen : mapping, optional
        How often each description (as `folded` makes it) and each code occur in the training data (see `times_seen`);
        what is missing never occurs there.
    k : int
        Of top-k accuracy.
    batch_size : int
    progress : bool
        Whether to show bars.

    Returns
    -------
    Evaluation

    Raises
    ------
    UserError
        Where there are no rows.
    """
    if len(examples) == 0:
        raise UserError("There are no descriptions with codes to evaluate on.")
    options: dict[str, Any] = {"batch_size": batch_size, "progress": progress}
    decoded = coder.predict(examples.texts, examples.langs, mode=coder.mode, **options)
    ranked = coder.predict(examples.texts, examples.langs, mode="topk", k=k, **options)
    probable, flat_conf = _probable_classes(coder, examples, **options)

    langs = pd.Series(examples.langs, dtype=object)
    truth, answer = code_sets(examples.codes), code_sets(_code_columns(coder, decoded))
    applied = langs.map(partial(threshold_of, coder.model.config)).to_numpy()
    flat = probable[(probable["prob"] > applied[probable["row"]]) | is_best(probable)]
    groups = _groups(examples, truth, texts_seen, codes_seen)
    system = coder.formatter.system
    separator = WITHIN_BLOCK_SEP if getattr(system, "use_within_block_sep", False) else ""
    cuts = {digits: separator for digits in range(1, min(system.block_size, _MAX_DIGITS) + 1)}
    conf = decoded["conf"].fillna(0).to_numpy()
    answer_metrics, answer_scores = head_metrics(truth, answer, conf, groups=groups, cuts=cuts)
    flat_metrics, flat_scores = head_metrics(truth, flat, flat_conf, groups=groups, cuts=cuts)
    ranks = first_true_rank(truth, _code_columns(coder, ranked))
    metrics = {
        "num_rows": len(examples),
        "num_texts": len(set(examples.texts)),
        "num_true_outside_key": int(truth.loc[~truth["code"].isin(coder.codes), "row"].nunique()),
        "num_outside_key": int(answer.loc[~answer["code"].isin(coder.codes), "row"].nunique()),
        "mode": coder.mode,
        "answer": answer_metrics,
        "flat": flat_metrics,
        "topk": {
            "overall": top_k_accuracy(ranks, k=k),
            "by_language": {lang: top_k_accuracy(ranks[langs == lang], k=k) for lang in sorted(set(langs))},
        },
        "thresholds": best_thresholds(truth, probable, langs),
        "confusions": confusions(truth, answer, examples.texts),
        "by_code": scores_by_code(truth, answer),
    }
    rows = _rows(examples, decoded, answer_scores, flat, flat_scores)
    rows = rows.assign(conf=conf, rank=ranks, flat_conf=flat_conf)
    return Evaluation(metrics, rows.assign(**{name: groups[name] for name in groups if name.endswith("_seen")}))


def times_seen(chunks: Iterable[Examples], texts: Iterable[str]) -> tuple[dict[str, int], dict[str, int]]:
    """Count how often each description (`folded`) and each code occurs in the training data, for `evaluate`."""
    wanted = set(folded(list(texts)))
    texts_seen: Counter[str] = Counter()
    codes_seen: Counter[str] = Counter()
    for examples in chunks:
        texts_seen.update(text for text in folded(examples.texts) if text in wanted)
        codes_seen.update(code_sets(examples.codes)["code"].value_counts().to_dict())
    return dict(texts_seen), dict(codes_seen)


def head_metrics(
    truth: pd.DataFrame,
    predicted: pd.DataFrame,
    conf: np.ndarray,
    *,
    groups: Mapping[str, pd.Series],
    cuts: Mapping[int, str],
) -> tuple[dict[str, Any], pd.DataFrame]:
    """Compute the metrics of one way of predicting.

    Parameters
    ----------
    truth, predicted : DataFrame
        See `code_sets`.
    conf : ndarray of shape (n,)
    groups : mapping
        Name -> each row's group.
    cuts : mapping
        Number of digits -> the separator; see `cut_codes`.

    Returns
    -------
    metrics : dict
        `overall`, `by_{name}` of each group, and `by_digits`: `n` and the means of `score_sets`; `calibration` and
        `production`: see the functions `calibration` and `production_curve`.
    scores : DataFrame
        `score_sets` of the rows.
    """
    num_rows = len(conf)
    scores = score_sets(truth, predicted, num_rows)
    right = scores["accuracy"].to_numpy()
    by_digits = {}
    for digits, separator in cuts.items():
        short, short_predicted = (cut_codes(sets, digits, separator=separator) for sets in (truth, predicted))
        by_digits[str(digits)] = mean_scores(score_sets(short, short_predicted, num_rows))
    metrics = {
        "overall": {**mean_scores(scores), "conf": float(conf.mean())},
        **{f"by_{name}": mean_scores_by(scores, by) for name, by in groups.items()},
        "by_digits": by_digits,
        "calibration": calibration(conf, right),
        "production": production_curve(conf, right),
    }
    return metrics, scores


def _groups(
    examples: Examples,
    truth: pd.DataFrame,
    texts_seen: Mapping[str, int] | None,
    codes_seen: Mapping[str, int] | None,
) -> dict[str, pd.Series]:
    """Return each row's language, number of true codes, and how often its description and its rarest code were seen."""
    num_rows = len(examples)
    groups = {
        "language": pd.Series(examples.langs, dtype=object),
        "num_codes": pd.Series(np.bincount(truth["row"], minlength=num_rows)),
    }
    if codes_seen is not None:
        times = truth["code"].map(dict(codes_seen)).fillna(0)
        groups["code_seen"] = seen_groups(times.groupby(truth["row"]).min().reindex(range(num_rows)))
    if texts_seen is not None:
        groups["text_seen"] = seen_groups(
            pd.Series(folded(examples.texts), dtype=object).map(dict(texts_seen)).fillna(0)
        )
    return groups


def _rows(
    examples: Examples, decoded: pd.DataFrame, scores: pd.DataFrame, flat: pd.DataFrame, flat_scores: pd.DataFrame
) -> pd.DataFrame:
    """Return each description with its true codes, and what both ways of predicting make of it."""
    rows = pd.DataFrame({"text": examples.texts, "lang": examples.langs})
    rows = rows.join(examples.codes.reset_index(drop=True).add_prefix("true_"))
    rows = rows.join(decoded.drop(columns="conf").add_prefix("predicted_"))
    rows = rows.join(scores.rename(columns={"accuracy": "right"}))
    rows["flat"] = flat.groupby("row")["code"].agg(CODE_SEP.join).reindex(rows.index)
    return rows.assign(flat_right=flat_scores["accuracy"], flat_f1=flat_scores["f1"])


def _probable_classes(
    coder: Coder, examples: Examples, *, batch_size: int, progress: bool
) -> tuple[pd.DataFrame, np.ndarray]:
    """Return the flat head's classes above the lowest threshold (`row`, `code`, `prob`), and each row's best one."""
    order = np.argsort(np.array(examples.texts, dtype=object), kind="stable")  # like texts go into the same table
    texts, langs = (np.array(values, dtype=object) for values in (examples.texts, examples.langs))
    parts, conf = [], np.zeros(len(order))
    for start in range(0, len(order), _FLAT_ROWS):
        rows = order[start : start + _FLAT_ROWS]
        table = coder.predict(
            texts[rows],
            langs[rows],
            mode="flat",
            threshold=float(THRESHOLDS[0]),
            batch_size=batch_size,
            progress=progress,
        )
        codes = _code_columns(coder, table)
        probs = table[[name for name in table.columns if name.startswith("prob_")]].to_numpy(dtype=float)
        where, place = np.nonzero(pd.notna(codes))
        parts.append(pd.DataFrame({"row": rows[where], "code": codes[where, place], "prob": probs[where, place]}))
        conf[rows] = table["conf"].fillna(0)
    return pd.concat(parts, ignore_index=True), conf


def _code_columns(coder: Coder, table: pd.DataFrame) -> np.ndarray:
    """Predicted codes, an array of shape (n, width)."""
    width = sum(name.startswith("prob_") for name in table.columns)
    return table[[f"{coder.system}_{i + 1}" for i in range(width)]].to_numpy(dtype=object)
