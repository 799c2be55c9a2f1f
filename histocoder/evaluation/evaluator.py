"""Measure how right a model is on descriptions whose codes are known.

Accuracy, precision, recall and F1 of an observation are those of Dahl, Johansen and Vedel (2024),
Breaking the HISCO Barrier, https://arxiv.org/abs/2402.13604.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from histocoder.config import PredictOptions
from histocoder.data.examples import Examples
from histocoder.data.hashes import are_among
from histocoder.errors import UserError
from histocoder.evaluation import scores
from histocoder.evaluation.baselines import Baselines, difference_interval, shares
from histocoder.evaluation.metrics import (
    AnswerMetrics,
    AttributeMetrics,
    CorrectionMetrics,
    EvaluationMetrics,
    Gain,
    ModelComparison,
    TopK,
)
from histocoder.evaluation.scores import code_sets, mean_scores, mean_scores_by, score_sets
from histocoder.inference.coder import Coder
from histocoder.inference.predictions import Prediction
from histocoder.text.normalize import description_keys

_MAX_DIGITS = 5
_MAX_K = 5  # of top-k accuracy
_MAX_NUMBERS = 12  # distinct numbers of a column beyond which its groups are ranges
_NUM_RANGES = 5
_MAX_GROUPS = 40
_SEEN_GROUPS = ("0", "1", "2-5", "6-20", "21-100", ">100")
_SEEN_EDGES = (-1, 0, 1, 5, 20, 100, np.inf)


@dataclass
class Evaluation:
    """Result of `evaluate`."""

    metrics: EvaluationMetrics
    rows: pd.DataFrame
    """One line for each description: its `text` and `lang`, its sets of codes `true` and
    `predicted`, whether these are `right`, and `conf`.
    """


def evaluate(
    coder: Coder,
    examples: Examples,
    *,
    baselines: Baselines | None = None,
    groups: Mapping[str, np.ndarray] | None = None,
    batch_size: int | None = None,
) -> Evaluation:
    """Let a model code descriptions whose codes are known, and count what it gets right.

    `baselines`, if given, have read all training rows; the model is compared with them.
    `groups` are names of columns, each with the group that every row is in. Raise UserError where
    there are no rows.
    """
    if len(examples) == 0:
        raise UserError("There are no descriptions with codes to evaluate on.")
    decoded, ranked = coder.predict_ranked(examples.texts, examples.langs, batch_size=batch_size)
    rows = pd.DataFrame(
        {
            "text": examples.texts,
            "lang": np.array(examples.langs, dtype=object),
            "true": code_sets(examples.codes),
            "predicted": code_sets(decoded.codes),
            "conf": np.nan_to_num(decoded.conf),
        }
    )

    # whether each row is right, from which all figures are
    row_scores = score_sets(rows["true"], rows["predicted"])
    rows.insert(4, "right", row_scores["accuracy"])  # before `conf`
    right = rows["right"].to_numpy()
    conf = rows["conf"].to_numpy()
    codes = set(coder.codes)

    metrics = EvaluationMetrics(
        num_rows=len(rows),
        num_texts=len(set(description_keys(examples.texts))),
        num_true_outside_key=int((~rows["true"].map(codes.issuperset)).sum()),
        num_outside_key=int((~rows["predicted"].map(codes.issuperset)).sum()),
        mode=coder.mode,
        answer=_answer_metrics(rows, row_scores, coder),
        topk=_top_k(rows, ranked),
        confusions=scores.confusions(rows["true"], rows["predicted"], examples.texts),
        attributes=attribute_metrics(decoded, examples, baselines),
        by_code=scores.scores_by_code(rows["true"], rows["predicted"]),
        by_group={},
    )
    for name, names in (groups or {}).items():
        metrics.by_group[name] = scores.scores_by_group(right, conf, examples.texts, names)

    if baselines is not None:
        is_learned = are_learned(coder, examples.texts)
        _compare_with_training(metrics, rows, row_scores, baselines, is_learned=is_learned)
    return Evaluation(metrics, rows)


def named_groups(cells: Sequence[str | None]) -> np.ndarray:
    """Return the name of each row's group, of shape (n,): its cell, or, of many numbers, one of
    five ranges of them.

    Beyond the 40 with the most rows, groups are "others".
    """
    names = pd.Series(cells, dtype=object)
    numbers = pd.to_numeric(names, errors="coerce")

    # many numbers, such as years, are ranges with about as many rows each
    are_numbers = numbers.count() == names.count()  # but for blank cells
    if are_numbers and numbers.nunique() > _MAX_NUMBERS:
        quantiles = pd.qcut(numbers, _NUM_RANGES, duplicates="drop")
        ranges = numbers.groupby(quantiles, observed=True)
        low = ranges.transform("min").map("{:.15g}".format)
        high = ranges.transform("max").map("{:.15g}".format)
        names = (low + "-" + high).where(numbers.notna())  # a blank cell is in no range

    # as many groups as a table can show
    names = names.fillna("(blank)")
    largest = names.value_counts().index[:_MAX_GROUPS]
    return names.where(names.isin(largest), "others").to_numpy(dtype=object)


def seen_groups(times: Sequence[float]) -> pd.Series:
    """Group numbers of times: 0, 1, 2-5, 6-20, 21-100, >100."""
    return pd.cut(pd.Series(times, dtype=float), _SEEN_EDGES, labels=_SEEN_GROUPS)


def are_learned(coder: Coder, texts: Sequence[str]) -> np.ndarray:
    """Return which of n descriptions a model has a record of having been trained on, of shape
    (n,).
    """
    trained_on = coder.model.trained_on
    if trained_on is None:
        return np.zeros(len(texts), dtype=bool)
    return are_among(texts, trained_on.cpu().numpy())


def _compare_with_training(
    metrics: EvaluationMetrics,
    rows: pd.DataFrame,
    row_scores: pd.DataFrame,
    baselines: Baselines,
    *,
    is_learned: np.ndarray,
) -> None:
    """Add scores by how often codes and descriptions were seen in training, and those of simple
    methods.

    `is_learned`, of shape (n,), says on which descriptions the model was trained, also before
    these training data.
    """
    keys = description_keys(rows["text"].tolist())
    texts_seen: list[float] = []
    for key, was_learned in zip(keys, is_learned, strict=True):
        times = baselines.texts_seen[key]

        # how often training data before these had it is not known
        texts_seen.append(np.nan if was_learned and not times else times)

    # a row is as hard as its rarest code
    codes_seen = []
    for true in rows["true"]:
        codes_seen.append(min((baselines.codes_seen[code] for code in true), default=np.nan))
    metrics.answer.by_code_seen = mean_scores_by(row_scores, seen_groups(codes_seen))
    metrics.answer.by_text_seen = mean_scores_by(row_scores, seen_groups(texts_seen))
    metrics.baselines = baselines.compare(rows["right"].to_numpy())


def _answer_metrics(rows: pd.DataFrame, row_scores: pd.DataFrame, coder: Coder) -> AnswerMetrics:
    """Return the scores of the model's answers, of all rows and of groups of them."""
    conf = rows["conf"].to_numpy()
    overall = mean_scores(row_scores)
    overall.conf = float(conf.mean())

    # the production curve counts each description once: a threshold that a frequent one decides
    # does not hold for others
    keys = description_keys(rows["text"].tolist())
    texts = rows[["conf", "right"]].astype(float).groupby(keys, sort=False).mean()

    system = coder.formatter.system
    max_digits = 0  # codes that are labels have no digits
    if system.labels is None:
        max_digits = min(system.block_size, _MAX_DIGITS)
    by_digits = {}
    for digits in range(1, max_digits + 1):
        true = scores.cut_codes(rows["true"], digits, separator=system.separator)
        predicted = scores.cut_codes(rows["predicted"], digits, separator=system.separator)
        by_digits[str(digits)] = mean_scores(score_sets(true, predicted))
    return AnswerMetrics(
        overall=overall,
        by_language=mean_scores_by(row_scores, rows["lang"]),
        by_num_codes=mean_scores_by(row_scores, rows["true"].str.len()),
        by_digits=by_digits,
        calibration=scores.calibration(conf, rows["right"].to_numpy()),
        production=scores.production_curve(texts["conf"].to_numpy(), texts["right"].to_numpy()),
    )


def _top_k(rows: pd.DataFrame, ranked: Prediction) -> TopK:
    ranks = scores.first_true_rank(rows["true"], ranked.codes)
    by_language = {}
    for lang in sorted(rows["lang"].unique()):
        by_language[lang] = scores.top_k_accuracy(ranks[rows["lang"] == lang], k=_MAX_K)
    return TopK(scores.top_k_accuracy(ranks, k=_MAX_K), by_language)


def attribute_metrics(
    decoded: Prediction, examples: Examples, baselines: Baselines | None
) -> dict[str, AttributeMetrics]:
    """Return the scores of each attribute that some rows state: of the model, of always none, and,
    where there is one, of a linear model fitted on the training data.
    """
    metrics = {}
    for name, attribute in decoded.attributes.items():
        if name not in examples.attributes:
            continue
        truth = examples.attributes[name].to_pandas()
        is_known = truth.notna().to_numpy()
        if not is_known.any():
            continue

        # a blank cell of the model's is the category none
        true = truth[is_known].to_numpy()
        labels = pd.Series(attribute.best[0]).fillna("").to_numpy()
        metrics[name] = AttributeMetrics(
            n=len(true),
            categories=len(set(true) - {""}),
            model=scores.attribute_scores(true, labels[is_known]),
            none=scores.attribute_scores(true, np.full(len(true), "")),
        )

        # beside a linear model, if there is one
        linear = baselines.attribute(name) if baselines is not None else None
        if linear is not None:
            metrics[name].svc = scores.attribute_scores(true, linear[is_known])
    return metrics


def right_rows(
    coder: Coder, examples: Examples, *, mode: str | None = None, progress: bool = True
) -> np.ndarray:
    """Return where a model gives exactly the true set of codes, of shape (n,)."""
    descriptions = coder.distinct(examples.texts, examples.langs)
    decoded = coder.code(descriptions, PredictOptions(mode=mode), progress=progress)
    return score_sets(code_sets(examples.codes), code_sets(decoded.codes))["accuracy"].to_numpy()


def gain(
    before: Coder,
    after: Coder,
    validation: Examples,
    held_out: Examples | None,
    *,
    right: np.ndarray,
) -> CorrectionMetrics:
    """Compare a model that was trained on corrections, `after`, with the one that they correct.

    `validation` has no corrected description, and `right`, of shape (n,), says where `after` is
    right on it; `after` has not been trained on `held_out`. The comparison favours a model before
    that was trained on validation data.
    """
    has_seen = before.model.config.fitted_to_validation
    if before.model.trained_on is not None:
        has_seen = bool(are_learned(before, validation.texts).any())
    metrics = CorrectionMetrics(has_seen, _gain(validation, right_rows(before, validation), right))
    if held_out is not None:
        metrics.held_out = _gain(
            held_out, right_rows(before, held_out), right_rows(after, held_out)
        )
    return metrics


def _gain(examples: Examples, before: np.ndarray, after: np.ndarray) -> Gain:
    return Gain(
        num_rows=len(examples),
        before=shares(before, examples.texts),
        after=shares(after, examples.texts),
        difference=difference_interval(after, before, examples.texts),
    )


def compare(
    first: Coder, second: Coder, examples: Examples
) -> tuple[ModelComparison, pd.DataFrame]:
    """Compare two models on the same n descriptions, whose codes are known.

    Return the comparison, and the rows that they code differently: `text`, `lang`, the `true`
    codes, and each model's `codes_…`, `conf_…` and `right_…`. Rows that the first alone has right
    are the first.
    """
    texts = examples.texts
    truth = code_sets(examples.codes)
    rows = pd.DataFrame({"text": texts, "lang": examples.langs, "true": truth})
    for name, coder in (("first", first), ("second", second)):
        decoded = coder.code(coder.distinct(texts, examples.langs), PredictOptions())
        codes = code_sets(decoded.codes)
        rows[f"codes_{name}"] = codes
        rows[f"conf_{name}"] = decoded.conf
        rows[f"right_{name}"] = score_sets(truth, codes)["accuracy"]
    first_right = rows["right_first"].to_numpy()
    second_right = rows["right_second"].to_numpy()
    comparison = ModelComparison(
        first=shares(first_right, texts),
        second=shares(second_right, texts),
        difference=difference_interval(second_right, first_right, texts),
    )
    changed = rows[rows["codes_first"].map(frozenset) != rows["codes_second"].map(frozenset)]
    return comparison, changed.sort_values(
        ["right_first", "right_second"], ascending=[False, True], kind="stable"
    )
