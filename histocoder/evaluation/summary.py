"""Describe an evaluation in sentences."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from histocoder.errors import counted

TARGET_ACCURACY = (
    0.95  # wanted accuracy of automatically coded rows; the summary says how many may be coded so
)

FEW_TEXTS = (
    100  # distinct descriptions below which shares say little, and no share to leave is named
)

Metrics = Mapping[str, Any]  # `Evaluation.metrics`, or a part of it


def summary(metrics: Metrics) -> list[str]:
    """Return an evaluation in sentences, the most important first."""
    answer, production, topk = (
        metrics["answer"],
        metrics["answer"]["production"],
        metrics["topk"]["overall"],
    )
    accuracy, conf, last = answer["overall"]["accuracy"], answer["overall"]["conf"], str(len(topk))
    gap = conf - accuracy
    leaning = "overconfident" if gap > 0 else "underconfident"
    if abs(gap) <= 0.02:
        leaning = "about as confident as it is accurate"
    lines = [
        f"Of {num_descriptions(metrics)}, {percent(accuracy)} got exactly the right codes; "
        "with each distinct "
        f"description counted once, {percent(production['accuracy'][100])}, or "
        f"{percent(production['accuracy'][80])} "
        "if the least certain 20\u00a0% are left to a person.",
        _target(production),
        f"The most probable code is right for {percent(topk['1'])} of all descriptions; "
        f"one of the {last} most "
        f"probable is right for {percent(topk[last])}.",
        f"The model is {leaning}: its mean confidence is {percent(conf)}, and its "
        "confidence is off by "
        f"{100 * answer['calibration']['ece']:.1f} percentage points on average (expected "
        "calibration error).",
    ]
    if metrics["num_texts"] < FEW_TEXTS:
        lines[1] = too_few(metrics["num_texts"])
    if number := metrics.get("num_true_outside_key"):
        lines.append(
            f"{percent(number / metrics['num_rows'])} of the descriptions have a true code "
            "that is not in the model's "
            "key; the model can't get them exactly right."
        )
    if number := metrics["num_outside_key"]:
        lines.append(
            f"For {percent(number / metrics['num_rows'])} the decoder wrote a code that is "
            "not in the key."
        )
    if "by_text_seen" in answer:
        unseen = answer["by_text_seen"].get("0", {"n": 0, "accuracy": None})
        right = (
            f"; of these, {percent(unseen['accuracy'])} are exactly right" if unseen["n"] else ""
        )
        lines.append(
            f"{unseen['n']:,} of the descriptions do not occur in the training data{right}."
        )
    lines += seen_in_words(metrics) + attributes_in_words(metrics)
    if "baselines" in metrics:
        lines += comparison(metrics)
    return [*lines, *gain_in_words(metrics)]


def too_few(num_texts: int) -> str:
    """Say what figures of few distinct descriptions can't show.

    The margin is that of a share of one half, by the normal approximation of its 95 % interval.
    """
    margin = 100 * 1.96 * (0.25 / max(num_texts, 1)) ** 0.5
    distinct = counted(num_texts, "distinct description", "distinct descriptions")
    return (
        f"These are figures of {distinct} only: each may be wrong by {margin:.0f} "
        "percentage points or more, and they "
        "don't show how many to leave to a person, or which of two models is better. Set "
        "more coded rows aside."
    )


def comparison(metrics: Metrics) -> list[str]:
    """Compare the model with simple methods (see `Baselines.compare`), and suggest what to try if
    it is behind.
    """
    found, num_rows = metrics["baselines"], metrics["num_rows"]
    exact, svc = found["exact_match"], found.get("svc")
    shares = {
        f"this model ({metrics['mode']})": found["model"],
        "exact match with the training data": exact,
    }
    if svc:
        shares["character n-grams with a linear model"] = svc
    parts = [
        f"{method} {percent(s['rows'])} / {percent(s['texts'])}" for method, s in shares.items()
    ]
    lead = (svc or exact)["difference"]["texts"]
    is_sure = lead["low"] is not None and not lead["low"] <= 0 <= lead["high"]
    lines = [
        f"Exactly right, of rows / of distinct descriptions: {', '.join(parts)}. On "
        "distinct descriptions the model is "
        f"{100 * abs(lead['mean']):.1f} percentage points "
        f"{'ahead of' if lead['mean'] > 0 else 'behind'} "
        f"{'the linear model' if svc else 'exact match'}{'' if is_sure else ', which may be chance'} "
        f"({interval_in_words(lead)})."
    ]
    if "notice" in found:
        lines.append(found["notice"])
    if lead["mean"] < 0:
        lines.append(
            f"A simple method {'does' if is_sure else 'may do'} better than this model. "
            "Try more epochs "
            "(--num-epochs), another encoder (--encoder), or more training data."
        )
    right = (
        f"; of these, {percent(exact['answered_right'])} are exactly right"
        if exact["answered"]
        else ""
    )
    lines.append(
        "histocoder predict --known would take the codes of "
        f"{round(exact['answered'] * num_rows):,} of the "
        f"{num_rows:,} descriptions ({percent(exact['answered'])}) from the training data{right}."
    )
    return lines


def seen_in_words(metrics: Metrics) -> list[str]:
    """Say how right the model is on validation data that it has seen in training; nothing where
    there are none.
    """
    if "seen" not in metrics:
        return []
    found = metrics["seen"]
    line = (
        f"{found['num_rows']:,} validation rows are of descriptions that the model was trained on; "
        f"{percent(found['accuracy'])} of these are exactly right. "
    )
    if found["left_out"]:
        return [
            f"{line}The other figures, the best model, its mode and its weights are without them."
        ]
    return [
        f"{line}There are too few others to choose or to judge by, so the figures are too high."
    ]


def attributes_in_words(metrics: Metrics) -> list[str]:
    """Say how right each attribute is; see `of_attributes`."""
    lines = []
    for name, found in metrics.get("attributes", {}).items():
        ways = {"this model": found["model"], "always none": found["none"]}
        ways |= {"linear model": found["svc"]} if "svc" in found else {}
        parts = [
            f"{way} {percent(one['accuracy'])} / {one['macro_f1']:.3f}" for way, one in ways.items()
        ]
        categories = counted(found["categories"], "category", "categories")
        lines.append(f"{name}, right / mean F1 of {categories} and none: {', '.join(parts)}.")
    return lines


def gain_in_words(metrics: Metrics) -> list[str]:
    """Say what `gain` found; nothing where no codes were corrected."""
    if "corrections" not in metrics:
        return []
    found, lines = metrics["corrections"], []
    for part, name in {
        "validation": "rows of validation data",
        "held_out": "held-out corrections",
    }.items():
        if part not in found:
            continue
        before, after = (percent(found[part][when]["rows"]) for when in ("before", "after"))
        lead = found[part]["difference"]["rows"]
        lines.append(
            f"Of the same {found[part]['num_rows']:,} {name}, {before} were exactly right "
            "before training on the "
            f"corrections, and {after} are now. The difference is "
            f"{100 * lead['mean']:+.1f} percentage points "
            f"({interval_in_words(lead)})."
        )
    if found["before_has_seen"]:
        lines.append(
            "The earlier model was trained on that validation data, too, so its accuracy "
            "there is too high."
        )
    return lines


def interval_in_words(difference: Metrics) -> str:
    """Return the 95 % interval of a difference in percentage points, or that there are too few
    descriptions for one.
    """
    low, high = difference["low"], difference["high"]
    if low is None or high is None:
        return "there are too few descriptions for an interval"
    return f"95\u00a0% confidence interval: {100 * low:+.1f} to {100 * high:+.1f}"


def points(difference: Metrics) -> str:
    """Return a difference in percentage points with its 95 % interval, for a table."""
    low, high = difference["low"], difference["high"]
    interval = (
        "too few for an interval" if low is None else f"{100 * low:+.1f} to {100 * high:+.1f}"
    )
    return f"{100 * difference['mean']:+.1f} ({interval})"


def share_to_leave(production: Metrics) -> tuple[float, float] | None:
    """Return the least share to leave to a person to have enough of the others right, and the least
    `conf` of these.

    None where no share is enough.
    """
    points = zip(*(production[name] for name in ("share", "conf", "accuracy")), strict=True)
    enough = [
        (1 - share, conf) for share, conf, accuracy in points if (accuracy or 0) >= TARGET_ACCURACY
    ]
    return min(enough, default=None)


def _target(production: Metrics) -> str:
    found, wanted = share_to_leave(production), f"{100 * TARGET_ACCURACY:.0f}\u00a0%"
    if found is None:
        return f"However many are left to a person, fewer than {wanted} of the others are right."
    left, conf = found
    if left == 0:
        return f"That is {wanted} or more even if none are left to a person."
    return (
        f"To get {wanted} of the automatically coded distinct descriptions right, leave "
        "the least certain "
        f"{100 * left:.0f}\u00a0%, those with a confidence below {conf:.2f}, to a person."
    )


def table_of_shares(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table whose shares, some of them 95 % intervals from `low` to `high`, are in
    percent.
    """
    table = pd.DataFrame(rows)
    for name in table.columns.intersection(["share", "low", "high", "conf", "ece"]):
        table[name] = table[name].map(percent)
    return table.to_string(index=False, na_rep="\u2013", float_format="{:.3f}".format)


def num_descriptions(metrics: Metrics) -> str:
    """Return the number of descriptions, in words."""
    rows, texts = metrics["num_rows"], metrics["num_texts"]
    distinct = f" ({texts:,} distinct ones)" if texts < rows else ""
    return f"{rows:,} description{'s' if rows != 1 else ''}{distinct}"


def percent(share: float | None) -> str:
    """Return a share in percent, such as "63.8 %"; a dash for None."""
    return "\u2013" if share is None else f"{100 * share:.1f}\u00a0%"
