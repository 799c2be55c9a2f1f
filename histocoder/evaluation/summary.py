"""Describe an evaluation in sentences, those of `sentences.txt.jinja`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from jinja2 import Environment, StrictUndefined

from histocoder.evaluation.metrics import Difference, EvaluationMetrics, ProductionCurve, as_json

TARGET_ACCURACY = 0.95  # wanted of automatically coded rows
FEW_TEXTS = 100  # distinct descriptions below which shares say little


class Remainder(NamedTuple):
    """Share of the descriptions to leave to a person, and the least confidence of the others."""

    share: float
    conf: float


def summary(metrics: EvaluationMetrics) -> list[str]:
    """Return an evaluation in sentences, the most important first."""
    return overall_in_words(metrics) + details_in_words(metrics)


def overall_in_words(metrics: EvaluationMetrics) -> list[str]:
    """Say how right the model is overall, and what to leave to a person."""
    return _sentences(
        "overall",
        as_json(metrics),
        share_to_leave(metrics.answer.production),
        f"{100 * TARGET_ACCURACY:.0f}\u00a0%",
        metrics.num_texts < FEW_TEXTS,
    )


def details_in_words(metrics: EvaluationMetrics) -> list[str]:
    """Say how right the model is on rows that it has seen, on attributes, beside simple methods,
    and what it gained from corrections; nothing of what was not measured.
    """
    plain = as_json(metrics)
    sentences = []
    for part in ("seen", "attributes", "comparison", "gain"):
        sentences += _sentences(part, plain)
    return sentences


def too_few(num_texts: int) -> str:
    """Say what figures of few distinct descriptions can't show."""
    return _sentences("too_few", num_texts)[0]


def num_descriptions(metrics: EvaluationMetrics) -> str:
    """Return the number of descriptions, in words."""
    return _sentences("descriptions", as_json(metrics))[0]


def share_to_leave(production: ProductionCurve) -> Remainder | None:
    """Return the least share to leave to a person to have enough of the others right; None where no
    share is enough.
    """
    remainders = []
    points = zip(production.share, production.conf, production.accuracy, strict=True)
    for share, conf, accuracy in points:
        if conf is not None and accuracy is not None and accuracy >= TARGET_ACCURACY:
            remainders.append(Remainder(1 - share, conf))
    return min(remainders, default=None)


def table_of_shares(rows: Sequence[Any]) -> str:
    """Return a table of dataclasses or mappings whose shares, some of them 95 % intervals from
    `low` to `high`, are in percent.
    """
    table = pd.DataFrame(rows)
    for name in table.columns.intersection(["share", "low", "high", "conf", "ece"]):
        table[name] = table[name].map(percent)
    return table.to_string(index=False, na_rep="\u2013", float_format="{:.3f}".format)


def points(difference: Difference) -> str:
    """Return a difference in percentage points with its 95 % interval, for a table."""
    interval = "too few for an interval"
    if difference.low is not None and difference.high is not None:
        interval = f"{_points(difference.low)} to {_points(difference.high)}"
    return f"{_points(difference.mean)} ({interval})"


def percent(share: float | None) -> str:
    """Return a share in percent, such as "63.8 %"; a dash for None."""
    if share is None:
        return "\u2013"
    return f"{100 * share:.1f}\u00a0%"


def _points(share: float) -> str:
    return f"{100 * share:+.1f}"


def _margin(num_texts: int) -> str:
    """Return the margin of a share of one half, by the normal approximation of its 95 % interval,
    in percentage points.
    """
    return f"{100 * 1.96 * (0.25 / max(num_texts, 1)) ** 0.5:.0f}"


def _both_shares(shares: Mapping[str, float]) -> str:
    return f"{percent(shares['rows'])} / {percent(shares['texts'])}"


def _sentences(macro: str, *values: object) -> list[str]:
    """Return the lines of a macro of the template."""
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(
        count="{:,}".format,
        percent=percent,
        points=_points,
        margin=_margin,
        both_shares=_both_shares,
    )
    path = Path(__file__).with_name("sentences.txt.jinja")
    template = environment.from_string(path.read_text(encoding="utf-8"))
    text = getattr(template.module, macro)(*values)
    return [line for line in text.split("\n") if line]
