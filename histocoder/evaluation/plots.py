"""Draw figures of an evaluation and of a run, in Okabe and Ito's colours, which the colour-blind tell apart too.

Results of two ways of predicting come as a mapping from name to result, in the order of `ANSWER`, `FLAT`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

BLUE, ORANGE, GREEN, PINK = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
INK, GREY, PALE = "#222222", "#8A8A8A", "#E3E3E3"
ANSWER, FLAT = "answer", "flat head"
_WIDTH = 8.0  # inches
_ACCURACIES = {
    "greedy_seq_acc": ("decoder", BLUE, "-", "o"),
    "flat_acc": ("flat head", ORANGE, "-.", "s"),
    "seq_acc": ("decoder, teacher-forced", GREEN, "--", "^"),
    "token_acc": ("tokens, teacher-forced", PINK, ":", "D"),
}


def training_curves(log: pd.DataFrame) -> Figure:
    """Draw losses, on a logarithmic axis, and validation accuracies by step, from the columns of `logs.csv`."""
    figure, (left, right) = _figure(height=4.4, columns=2)
    for column, label, colour in (("train_loss", "training", GREY), ("val_loss", "validation", BLUE)):
        _line(left, log, column, label=label, colour=colour, style="-" if column == "val_loss" else "--")
    left.set_yscale("log")
    left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    left.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else ""))
    left.set(xlabel="step", title="Loss")
    for column, (label, colour, style, marker) in _ACCURACIES.items():
        _line(right, log, column, label=label, colour=colour, style=style, marker=marker)
    right.set(xlabel="step", ylim=(0, 100), title="Validation accuracy")
    _percent(right.yaxis)
    for axes in (left, right):
        axes.set_xlim(0, 1.03 * log["step"].max())
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        _legend(axes, loc="upper left", bbox_to_anchor=(0, -0.16))
    return figure


def reliability(calibrations: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Draw accuracy by confidence, and below how many descriptions have it; see `scores.calibration`."""
    figure, (upper, lower) = _figure(height=5.6, rows=2, height_ratios=(3, 1), sharex=True)
    upper.plot([0, 100], [0, 100], color=GREY, linestyle="--", linewidth=1, label="perfect calibration")
    shift = 100 / len(next(iter(calibrations.values()))["bins"]) * 0.4
    for i, (name, found) in enumerate(calibrations.items()):
        colour = (BLUE, ORANGE)[i]
        bins = [one for one in found["bins"] if one["count"]]
        x, y = ([100 * one[value] for one in bins] for value in ("conf", "accuracy"))
        upper.plot(
            x,
            y,
            color=colour,
            marker="o",
            clip_on=False,
            label=f"{name} (calibration error {100 * found['ece']:.1f} %)",
        )
        lows = [100 * one["low"] for one in found["bins"]]
        counts = [one["count"] for one in found["bins"]]
        lower.bar(np.array(lows) + shift * (i + 0.25), counts, width=shift, align="edge", color=colour)
    upper.set(ylabel="exactly right", xlim=(0, 100), ylim=(0, 100))
    _legend(upper, loc="upper left")
    lower.set(xlabel="confidence", ylabel="descriptions")
    lower.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    lower.set_xticks(range(0, 101, 10))
    _percent(upper.yaxis)
    _percent(lower.xaxis)
    return figure


def production_curve(curves: Mapping[str, Mapping[str, Sequence[float | None]]]) -> Figure:
    """Draw accuracy of what is coded automatically, by the share left to a person; see `scores.production_curve`."""
    figure, (axes,) = _figure(height=3.8)
    for (name, curve), colour in zip(curves.items(), (BLUE, ORANGE), strict=False):
        accuracy = np.array(curve["accuracy"], dtype=float)
        left = 1 - np.array(curve["share"], dtype=float)
        axes.plot(100 * left, 100 * accuracy, color=colour, label=name, linewidth=2)
    low = min(float(np.nanmin(np.array(curve["accuracy"], dtype=float))) for curve in curves.values())
    axes.set(xlim=(0, 100), ylim=(max(0, np.floor(10 * low - 0.5) * 10), 100.8))
    axes.set(xlabel="descriptions left to a person, least certain first", ylabel="others exactly right")
    _percent(axes.xaxis)
    _percent(axes.yaxis)
    _legend(axes, loc="lower right")
    return figure


def accuracy_by_language(by_language: Mapping[str, Mapping[str, float]]) -> Figure:
    """Draw bars of accuracy, the best language on top; see `scores.mean_scores_by`."""
    ordered = sorted(by_language.items(), key=lambda item: (item[1]["accuracy"], item[1]["n"]))
    figure, (axes,) = _figure(height=1.0 + 0.3 * len(ordered))
    values = [100 * scores["accuracy"] for _, scores in ordered]
    # a language is the user's text, in which $ begins no formula
    bars = axes.barh([lang.replace("$", r"\$") for lang, _ in ordered], values, color=BLUE, height=0.7)
    axes.bar_label(bars, [f"{v:.1f} %   n = {s['n']:,}" for v, (_, s) in zip(values, ordered, strict=True)], padding=5)
    axes.set(xlim=(0, 124), xlabel="exactly right", ylabel="language")
    axes.set_xticks(range(0, 101, 20))
    axes.grid(visible=False)  # the bars say their values
    _percent(axes.xaxis)
    return figure


def accuracy_by_group(
    groups: Mapping[str, Mapping[str, Mapping[str, float]]], *, xlabel: str, show_n: bool = True
) -> Figure:
    """Draw pairs of bars of accuracy for each group, such as numbers of digits; see `scores.mean_scores_by`.

    `xlabel` says what the groups are; `show_n` writes the number of rows below each.
    """
    figure, (axes,) = _figure(height=3.4)
    width = 0.8 / len(groups)
    for i, (name, by) in enumerate(groups.items()):
        values = [100 * scores["accuracy"] for scores in by.values()]
        x = np.arange(len(by)) + width * (i + 0.5) - 0.4
        bars = axes.bar(x, values, width * 0.94, color=(BLUE, ORANGE)[i], label=name)
        axes.bar_label(bars, [f"{value:.0f}" for value in values], padding=2, fontsize=9)
    first = next(iter(groups.values()))
    labels = [f"{group}\nn = {scores['n']:,}" if show_n else group for group, scores in first.items()]
    axes.set_xticks(range(len(first)), labels)
    axes.set(xlabel=xlabel, ylabel="exactly right", ylim=(0, 108))
    axes.set_yticks(range(0, 101, 20))
    axes.grid(visible=False, axis="x")
    _percent(axes.yaxis)
    _legend(axes, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    return figure


def _figure(*, height: float, rows: int = 1, columns: int = 1, **grid: Any) -> tuple[Figure, list[Axes]]:
    """Return a figure and its axes, row by row."""
    figure = Figure(figsize=(_WIDTH, height), layout="constrained", facecolor="white")
    panels = figure.subplots(rows, columns, squeeze=False, **grid).ravel().tolist()
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(GREY)
        axes.tick_params(color=GREY, labelcolor=INK, labelsize=10)
        axes.grid(color=PALE, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.xaxis.label.set_size(10.5)
        axes.yaxis.label.set_size(10.5)
        axes.title.set_size(11.5)
    return figure, panels


def _line(
    axes: Axes, log: pd.DataFrame, column: str, *, label: str, colour: str, style: str, marker: str = "o"
) -> None:
    """Draw a column of the log by step, where it was measured; few points are marked."""
    if column in log:
        known = log[["step", column]].dropna()
        width = 3.5 if column == "greedy_seq_acc" else 1.8  # what lies on top of it lets it be seen
        marks: dict[str, Any] = {"marker": marker, "markersize": 5.5} if len(known) <= 30 else {}
        axes.plot(known["step"], known[column], style, color=colour, label=label, linewidth=width, **marks)


def _percent(axis: Any) -> None:
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))


def _legend(axes: Axes, **location: Any) -> None:
    axes.legend(frameon=False, fontsize=9.5, labelcolor=INK, **location)
