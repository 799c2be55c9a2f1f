"""Write the report of an evaluation: what a person looks at after training."""

import base64
import io
import json
import platform
import shlex
import sys
from collections.abc import Iterator
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jinja2 import Environment
from matplotlib.figure import Figure

from histocoder import __version__
from histocoder.checkpoints.run_folder import FIGURES_FOLDER, METRICS_FILE, REPORT_FILE
from histocoder.config import ALL_LANGUAGES
from histocoder.evaluation import plots
from histocoder.evaluation.evaluate import Evaluation
from histocoder.evaluation.plots import ANSWER, FLAT
from histocoder.evaluation.summary import Metrics, num_descriptions, percent, summary
from histocoder.files import make_folder, replacing
from histocoder.formatters import MISSING
from histocoder.inference.coder import Coder

_TEMPLATE = Path(__file__).with_name("report.html.jinja")
_DPI = 170
_MAX_CODES, _MAX_ERRORS = 100, 30  # maximum number of rows of tables


def write_report(folder: Path, evaluation: Evaluation, coder: Coder, *, title: str, logs: Path | None = None) -> Path:
    """Write `metrics.json`, figures as `report/*.png`, and `report.html`, which holds all it shows; return its path.

    Without a run's `logs`, or where there is no such file, there are no training curves.
    """
    make_folder(folder / FIGURES_FOLDER)
    metrics = evaluation.metrics
    drawings = dict(_figures(metrics, logs))
    figures = {name: _png(drawing) for name, drawing in drawings.items() if drawing is not None}
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"percent": percent, "count": "{:,}".format}
    page = environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        metrics=metrics,
        figures={name: base64.b64encode(png).decode() for name, png in figures.items()},
        errors=_confident_errors(evaluation.rows),
        coder=coder,
        title=title,
        descriptions=num_descriptions(metrics),
        summary=summary(metrics),
        max_codes=_MAX_CODES,
        all_languages=ALL_LANGUAGES,
        date=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        versions=f"histocoder {__version__}, torch {torch.__version__}, Python {platform.python_version()}",
    )
    for name in drawings.keys() - figures.keys():
        (folder / FIGURES_FOLDER / f"{name}.png").unlink(missing_ok=True)  # an earlier report's
    numbers = json.dumps(metrics, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    files = {METRICS_FILE: numbers.encode(), REPORT_FILE: page.encode()}
    files |= {f"{FIGURES_FOLDER}/{name}.png": png for name, png in figures.items()}
    for name, content in files.items():
        with replacing(folder / name) as temporary:
            temporary.write_bytes(content)
    return folder / REPORT_FILE


def _figures(metrics: Metrics, logs: Path | None) -> Iterator[tuple[str, Figure | None]]:
    """Yield all figures by name; None for one without data to show."""
    answer = metrics["answer"]

    def both(part: str) -> dict[str, Any]:
        return {ANSWER: answer[part], FLAT: metrics["flat"][part]}

    log = pd.read_csv(logs) if logs is not None and logs.exists() else pd.DataFrame()
    yield "training", plots.training_curves(log) if len(log) else None
    yield "production", plots.production_curve(both("production"))
    yield "calibration", plots.reliability(both("calibration"))
    languages = answer["by_language"]
    yield "languages", plots.accuracy_by_language(languages) if len(languages) > 1 else None
    bars = partial(plots.accuracy_by_group, xlabel="digits compared", show_n=False)
    yield "digits", bars(both("by_digits")) if len(answer["by_digits"]) > 1 else None
    for part, what in (("code_seen", "the rarest code"), ("text_seen", "the description")):
        xlabel = f"times that {what} occurs in the training data"
        several = len(answer.get(f"by_{part}", ())) > 1
        yield part, plots.accuracy_by_group(both(f"by_{part}"), xlabel=xlabel) if several else None


def _png(drawing: Figure) -> bytes:
    buffer = io.BytesIO()
    drawing.savefig(buffer, format="png", dpi=_DPI)
    return buffer.getvalue()


def _confident_errors(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the wrong descriptions of which the model is surest, with lists of their `true` and `predicted` codes."""
    wrong = rows[~rows["right"].astype(bool)].sort_values("conf", ascending=False, kind="stable")
    wrong = wrong.drop_duplicates(["text", "lang"]).head(_MAX_ERRORS)
    for side in ("true", "predicted"):
        codes = wrong.filter(regex=rf"^{side}_(?!prob_|desc_)")
        wrong[side] = [[code for code in row if pd.notna(code) and code != MISSING] for row in codes.to_numpy()]
    return wrong[["text", "lang", "conf", "true", "predicted"]].to_dict("records")
