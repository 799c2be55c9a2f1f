"""Write the report of an evaluation: what a person looks at after training.

Lines differ in their styles too, which the colour-blind tell apart.
"""

import base64
import io
import json
import platform
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jinja2 import Environment
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from histocoder._version import __version__
from histocoder.checkpoints.run_files import FIGURES_FOLDER, METRICS_FILE, REPORT_FILE
from histocoder.evaluation.evaluator import Evaluation
from histocoder.evaluation.metrics import (
    Calibration,
    Difference,
    EvaluationMetrics,
    MeanScores,
    ProductionCurve,
    as_json,
)
from histocoder.evaluation.summary import (
    num_descriptions,
    percent,
    points,
    share_to_leave,
    summary,
)
from histocoder.files import make_folder, replacing
from histocoder.inference.coder import Coder
from histocoder.text.languages import NAMES, Language

_TEMPLATE = Path(__file__).with_name("report.html.jinja")
_MAX_CODES = 100  # rows of the table of codes
_MAX_ERRORS = 30
_DPI = 170
_WIDTH_INCHES = 8.0
_BLUE = "#0072B2"
_INK = "#222222"
_GREY = "#8A8A8A"
_PALE = "#E3E3E3"
_CURVES = {
    "Loss": {"train_loss": ("training", "k--"), "val_loss": ("validation", "C0o-")},
    "Validation accuracy": {
        "greedy_seq_acc": ("decoder", "C0o-"),
        "flat_acc": ("classifier", "C1s-."),
        "seq_acc": ("decoder, given the true codes so far", "C2^--"),
        "token_acc": ("its tokens, given these", "C3D:"),
    },
}
"""Panels: column of `logs.csv` -> label, and format of `Axes.plot`."""
_GROUPS = {
    "languages": ("by_language", "language"),
    "digits": ("by_digits", "digits compared"),
    "code_seen": ("by_code_seen", "times that the rarest code occurs in the training data"),
    "text_seen": ("by_text_seen", "times that the description occurs in the training data"),
}


def write_report(
    folder: Path, evaluation: Evaluation, coder: Coder, *, title: str, logs: Path | None = None
) -> Path:
    """Write `metrics.json`, figures as `report/*.png`, and `report.html`, which holds all it shows;
    return its path.

    Without a run's `logs`, or where there is no such file, there are no training curves.
    """
    make_folder(folder / FIGURES_FOLDER)
    figures = {}
    for name, figure in _figures(evaluation.metrics, logs):
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=_DPI)
        figures[name] = buffer.getvalue()
    page = _page(evaluation, figures, coder, title=title)

    # a report is written whole, and an earlier one's figures do not stay
    for name in {"training", *_GROUPS} - figures.keys():
        (folder / FIGURES_FOLDER / f"{name}.png").unlink(missing_ok=True)  # an earlier report's
    numbers = json.dumps(as_json(evaluation.metrics), indent=2, ensure_ascii=False, allow_nan=False)
    files = {METRICS_FILE: f"{numbers}\n".encode(), REPORT_FILE: page.encode()}
    for name, png in figures.items():
        files[f"{FIGURES_FOLDER}/{name}.png"] = png
    for name, content in files.items():
        with replacing(folder / name) as temporary:
            temporary.write_bytes(content)
    return folder / REPORT_FILE


def _page(evaluation: Evaluation, figures: Mapping[str, bytes], coder: Coder, *, title: str) -> str:
    """Return the page, which holds its figures and needs no other file."""
    metrics = evaluation.metrics

    # the errors of which the model is surest, each description once
    errors = evaluation.rows[~evaluation.rows["right"]]
    errors = errors.sort_values("conf", ascending=False, kind="stable")
    errors = errors.drop_duplicates(["text", "lang"]).head(_MAX_ERRORS)

    # the template knows the figures as metrics.json has them
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(
        percent=percent,
        points=lambda difference: points(Difference(**difference)),
        count="{:,}".format,
        language=_language,
    )
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        metrics=as_json(metrics),
        figures={name: base64.b64encode(png).decode() for name, png in figures.items()},
        errors=errors.to_dict("records"),
        coder=coder,
        title=title,
        descriptions=num_descriptions(metrics),
        summary=summary(metrics),
        target=share_to_leave(metrics.answer.production),
        max_codes=_MAX_CODES,
        date=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        versions=(
            f"histocoder {__version__}, torch {torch.__version__}, Python "
            f"{platform.python_version()}"
        ),
    )


def _figures(metrics: EvaluationMetrics, logs: Path | None) -> Iterator[tuple[str, Figure]]:
    """Yield all figures by name; none without data to show."""
    if logs is not None and logs.exists():
        log = pd.read_csv(logs)
        # a run that adapts its model takes no step
        if len(log) and log["step"].max() > 0:
            yield "training", _training_curves(log)
    yield "production", _production_curve(metrics.answer.production)
    yield "calibration", _reliability(metrics.answer.calibration)

    # a group of one row says nothing, nor does a figure of one group
    for name, (field, label) in _GROUPS.items():
        accuracies = {}
        for group, scores in (getattr(metrics.answer, field) or {}).items():
            title = group
            if name == "languages":
                title = _language(group)
            if scores.n > 1:
                accuracies[title] = scores
        if len(accuracies) > 1:
            yield name, bars(accuracies, label)


def _training_curves(log: pd.DataFrame) -> Figure:
    """Draw losses and validation accuracies by step, from the columns of `logs.csv`."""
    figure, panels = _figure(height=4.4, columns=2)
    for axes, (title, lines) in zip(panels, _CURVES.items(), strict=True):
        for column, (label, style) in lines.items():
            if column in log:
                known = log[["step", column]].dropna()
                axes.plot(
                    known["step"], known[column], style, label=label, linewidth=1.8, markersize=4
                )
        axes.set(xlabel="step", title=title, xlim=(0, 1.03 * log["step"].max()), ylim=(0, None))
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        _legend(axes, corner=(0, -0.16))
    panels[1].set(ylim=(0, 100))
    _percent(panels[1].yaxis)
    return figure


def _reliability(calibration: Calibration) -> Figure:
    """Draw accuracy by confidence, and below how many descriptions have it; see
    `scores.calibration`.
    """
    figure, (upper, lower) = _figure(height=5.6, rows=2, height_ratios=(3, 1), sharex=True)
    upper.plot(
        [0, 100], [0, 100], color=_GREY, linestyle="--", linewidth=1, label="perfect calibration"
    )
    bins = pd.DataFrame(calibration.bins)
    known = 100 * bins[bins["count"] > 0][["conf", "accuracy"]].astype(float)
    label = f"this model (calibration error {100 * calibration.ece:.1f} %)"
    upper.plot(
        known["conf"], known["accuracy"], color=_BLUE, marker="o", clip_on=False, label=label
    )
    lower.bar(100 * bins["low"] + 1, bins["count"], width=8, align="edge", color=_BLUE)
    upper.set(ylabel="exactly right", xlim=(0, 100), ylim=(0, 100))
    _legend(upper)

    # confidence is the same axis in both panels
    lower.set(xlabel="confidence", ylabel="descriptions", xticks=range(0, 101, 10))
    lower.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    _percent(upper.yaxis)
    _percent(lower.xaxis)
    return figure


def _production_curve(production: ProductionCurve) -> Figure:
    """Draw accuracy of what is coded automatically, by the share left to a person; see
    `scores.production_curve`.
    """
    figure, (axes,) = _figure(height=3.8)
    curve = pd.DataFrame(vars(production)).astype(float)
    axes.plot(100 * (1 - curve["share"]), 100 * curve["accuracy"], color=_BLUE, linewidth=2)
    axes.set(
        xlabel="descriptions left to a person, least certain first", ylabel="others exactly right"
    )
    axes.set(xlim=(0, 100), ylim=(None, 100.8))
    _percent(axes.xaxis)
    _percent(axes.yaxis)
    return figure


def bars(groups: Mapping[str, MeanScores], label: str) -> Figure:
    """Draw a bar of accuracy for each group, the first on top; see `scores.mean_scores_by`."""
    figure, (axes,) = _figure(height=1.0 + 0.3 * len(groups))
    # a group may be the user's text, in which $ begins no formula
    names = []
    values = []
    labels = []
    for group, scores in groups.items():
        names.append(group.replace("$", r"\$"))
        values.append(100 * scores.accuracy)
        labels.append(f"{100 * scores.accuracy:.1f} %   n = {scores.n:,}")
    axes.bar_label(axes.barh(names, values, color=_BLUE, height=0.7), labels, padding=5)
    axes.set(xlim=(0, 124), xlabel="exactly right", ylabel=label, xticks=range(0, 101, 20))
    axes.invert_yaxis()
    axes.grid(visible=False)  # the bars say their values
    _percent(axes.xaxis)
    return figure


def _figure(
    *,
    height: float,
    rows: int = 1,
    columns: int = 1,
    height_ratios: Sequence[float] | None = None,
    sharex: bool = False,
) -> tuple[Figure, list[Axes]]:
    """Return a figure and its axes, row by row."""
    figure = Figure(figsize=(_WIDTH_INCHES, height), layout="constrained", facecolor="white")
    grid = figure.subplots(rows, columns, squeeze=False, height_ratios=height_ratios, sharex=sharex)
    panels = grid.ravel().tolist()
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(_GREY)
        axes.tick_params(color=_GREY, labelcolor=_INK)
        axes.grid(color=_PALE, linewidth=0.8)
        axes.set_axisbelow(True)
    return figure, panels


def _percent(axis: Any) -> None:
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))


def _legend(axes: Axes, *, corner: tuple[float, float] | None = None) -> None:
    """Show a legend in the panel, or with its upper left corner at a place beside it."""
    axes.legend(
        loc="upper left", bbox_to_anchor=corner, frameon=False, fontsize=9.5, labelcolor=_INK
    )


def _language(code: str) -> str:
    return NAMES.get(Language(code).iso, code)
