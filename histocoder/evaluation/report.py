"""The report of an evaluation: what a person looks at after training."""

from __future__ import annotations

import io
import json
import platform
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure

from histocoder import __version__
from histocoder.checkpoints.run_folder import FIGURES_FOLDER, METRICS_FILE, REPORT_FILE
from histocoder.config import ALL_LANGUAGES
from histocoder.evaluation import plots
from histocoder.evaluation.evaluate import Evaluation
from histocoder.evaluation.page import Markup, figure, page, table, tag, tiles
from histocoder.evaluation.plots import ANSWER, FLAT
from histocoder.evaluation.summary import Metrics, comparison, num_descriptions, percent, summary, would_answer
from histocoder.files import make_folder, replacing
from histocoder.formatters import MISSING
from histocoder.inference.coder import Coder

_DPI = 170
_MAX_CODES, _MAX_ERRORS = 100, 30
"""Rows of tables at most."""
_SHARES_LEFT = (0, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90)


def write_report(folder: Path, evaluation: Evaluation, coder: Coder, *, title: str, logs: Path | None = None) -> Path:
    """Write `metrics.json`, figures as `report/*.png`, and `report.html`, a page that holds all it shows.

    Parameters
    ----------
    folder : Path
        Made if it is not there.
    evaluation : Evaluation
    coder : Coder
        That was evaluated; it says what codes mean.
    title : str
    logs : Path, optional
        A run's `logs.csv`; without such a file there are no training curves.

    Returns
    -------
    Path
        Of `report.html`.

    Raises
    ------
    UserError
        Where the folder can't be written to.
    """
    metrics = evaluation.metrics
    make_folder(folder / FIGURES_FOLDER)
    with replacing(folder / METRICS_FILE) as temporary:
        content = json.dumps(metrics, indent=2, ensure_ascii=False, allow_nan=False)
        temporary.write_text(content + "\n", encoding="utf-8")
    pngs: dict[str, bytes] = {}
    for name, drawing in _figures(metrics, logs).items():
        path = folder / FIGURES_FOLDER / f"{name}.png"
        if drawing is None:
            path.unlink(missing_ok=True)  # an earlier report's
            continue
        pngs[name] = _png(drawing)
        with replacing(path) as temporary:
            temporary.write_bytes(pngs[name])
    with replacing(folder / REPORT_FILE) as temporary:
        temporary.write_text(_page(evaluation, pngs, coder, title), encoding="utf-8")
    return folder / REPORT_FILE


def _figures(metrics: Metrics, logs: Path | None) -> dict[str, Figure | None]:
    """Return all figures by name; None for one without data to show."""
    heads = {ANSWER: metrics["answer"], FLAT: metrics["flat"]}
    log = pd.read_csv(logs) if logs is not None and logs.exists() else pd.DataFrame()

    def of(part: str) -> dict[str, Any]:
        return {name: head[part] for name, head in heads.items()}

    def seen(part: str, what: str) -> Figure | None:
        if len(metrics["answer"].get(part, ())) < 2:
            return None
        return plots.accuracy_by_group(of(part), xlabel=f"times that {what} occurs in the training data")

    several = len(metrics["answer"]["by_language"]) > 1
    return {
        "training": plots.training_curves(log) if len(log) else None,
        "production": plots.production_curve(of("production")),
        "calibration": plots.reliability(of("calibration")),
        "languages": plots.accuracy_by_language(metrics["answer"]["by_language"]) if several else None,
        "digits": plots.accuracy_by_group(of("by_digits"), xlabel="digits compared", show_n=False),
        "code_seen": seen("by_code_seen", "the rarest code"),
        "text_seen": seen("by_text_seen", "the description"),
    }


def _png(drawing: Figure) -> bytes:
    buffer = io.BytesIO()
    drawing.savefig(buffer, format="png", dpi=_DPI)
    return buffer.getvalue()


def _page(evaluation: Evaluation, pngs: Mapping[str, bytes], coder: Coder, title: str) -> str:
    metrics = evaluation.metrics
    answer, topk = metrics["answer"], metrics["topk"]["overall"]
    last = str(len(topk))
    first, *others = summary(metrics)
    lead = [
        tag("p", f"How well a model of {len(coder.codes):,} codes codes {num_descriptions(metrics)}.", class_="quiet"),
        tiles(
            [
                (percent(answer["overall"]["accuracy"]), "exactly right"),
                (percent(answer["overall"]["f1"]), "F1"),
                (percent(topk[last]), f"have a true code among the {last} most probable"),
                (percent(answer["production"]["accuracy"][80]), "right without the least certain 20\u00a0%"),
            ]
        ),
        tag("p", first, class_="lead"),
        tag("ul", *(tag("li", line) for line in others)),
    ]

    def picture(name: str) -> Markup:
        alt, caption = _CAPTIONS[name]
        return figure(pngs[name], alt=alt, caption=caption) if name in pngs else Markup("")

    def seen_table(name: str) -> Markup:
        what = {"code_seen": "Rarest code seen", "text_seen": "Description seen"}[name]
        return _scores_table(what, metrics, f"by_{name}")

    seen = [name for name in ("code_seen", "text_seen") if name in pngs]
    several = len(metrics["answer"]["by_num_codes"]) > 1
    sections = [
        ("Beside simple methods", _baselines(metrics) if "baselines" in metrics else []),
        ("Training", [picture("training")] if "training" in pngs else []),
        ("Languages", [picture("languages"), _language_table(metrics)] if "languages" in pngs else []),
        ("Digits", [picture("digits"), _scores_table("Digits", metrics, "by_digits")]),
        ("Number of codes", [_scores_table("True codes", metrics, "by_num_codes")] if several else []),
        ("Times seen in training", [part for name in seen for part in (picture(name), seen_table(name))]),
        ("Calibration", [picture("calibration")]),
        ("What to leave to a person", [picture("production"), _production_table(metrics), *_suggestions(topk)]),
        ("Codes", [_codes_table(metrics, coder)]),
        ("Commonest confusions", _confusions(metrics, coder)),
        ("Most confident errors", _confident_errors(evaluation, coder)),
        ("The flat head\u2019s threshold", _thresholds(metrics, coder)),
        ("What the numbers mean", [_definitions(topk)]),
        ("How this report was made", [_provenance(coder)]),
    ]
    return page(title, lead, [(name, parts) for name, parts in sections if parts])


_CAPTION_OF_SCORES = "Scores of the model\u2019s answers, or of the flat head where that is said."
_CAPTIONS = {
    "training": (
        "Losses and validation accuracies by step",
        "Loss of training (on descriptions altered on the fly) and of validation, and accuracies on validation data.",
    ),
    "languages": ("Bars of accuracy by language", "Descriptions with exactly the right codes."),
    "digits": (
        "Bars of accuracy by number of digits compared",
        "Descriptions with exactly the right codes where codes are compared by their first digits only.",
    ),
    "code_seen": (
        "Bars of accuracy by how often the code occurs in the training data",
        "By how often the rarest of a description\u2019s true codes occurs in the training data.",
    ),
    "text_seen": (
        "Bars of accuracy by how often the description occurs in the training data",
        "By how often the same description, letter by letter, occurs in the training data.",
    ),
    "calibration": (
        "Accuracy by confidence, and numbers of descriptions",
        "Above the dashed line the model is right more often than it says, below it less often. Each point is a tenth "
        "of the scale of confidence; the bars count its descriptions. The answer\u2019s confidence is the "
        "probability of the set of codes, the flat head\u2019s that of its best code.",
    ),
    "production": (
        "Accuracy of the automatically coded descriptions by the share left to a person",
        "Descriptions ordered by confidence: how right the rest is when the least certain are left to a person.",
    ),
}


def _language_table(metrics: Metrics) -> Markup:
    topk = metrics["topk"]["by_language"]
    header = ["Language", "n", "Exactly right", "Precision", "Recall", "F1", "Flat: right", "First", "In best"]
    rows = []
    for lang, scores in sorted(metrics["answer"]["by_language"].items(), key=lambda item: -item[1]["n"]):
        best = list(topk[lang].values())
        flat = metrics["flat"]["by_language"][lang]["accuracy"]
        rows.append([lang, *_score_cells(scores), *map(percent, (flat, best[0], best[-1]))])
    header[-1] += f" {len(metrics['topk']['overall'])}"
    return table(header, rows, caption=_CAPTION_OF_SCORES)


def _scores_table(what: str, metrics: Metrics, part: str) -> Markup:
    flat = metrics["flat"][part]
    rows = [
        [group, *_score_cells(scores), percent(flat[group]["accuracy"])]
        for group, scores in metrics["answer"][part].items()
    ]
    header = [what, "n", "Exactly right", "Precision", "Recall", "F1", "Flat: right"]
    return table(header, rows, caption=_CAPTION_OF_SCORES)


def _score_cells(scores: Metrics) -> list[str]:
    return [f"{scores['n']:,}", *(percent(scores[name]) for name in ("accuracy", "precision", "recall", "f1"))]


def _baselines(metrics: Metrics) -> list[Markup]:
    found = metrics["baselines"]
    methods = {"Linear model on character n-grams": found.get("svc"), "Exact match": found["exact_match"]}
    rows = [[f"This model ({metrics['mode']})", *(percent(found["model"][of]) for of in ("rows", "texts")), ""]]
    for name, method in methods.items():
        if method is not None:
            mean, low, high = (100 * method["difference"]["texts"][end] for end in ("mean", "low", "high"))
            interval = f"{mean:+.1f} ({low:+.1f} to {high:+.1f})"
            rows.append([name, *(percent(method[of]) for of in ("rows", "texts")), interval])
    header = ["Method", "Rows", "Distinct descriptions", "Model\u2019s lead in points (95\u00a0% interval)"]
    return [
        tag(
            "p",
            "Exactly right, of the same descriptions. Exact match gives a description the codes that it has in the "
            "training data, after case and blanks; the linear model (TF-IDF of 1 to 5 characters, LinearSVC) was "
            "fitted on the training data. Intervals are the bootstrap\u2019s over distinct descriptions.",
        ),
        table(header, rows),
        tag("ul", *(tag("li", line) for line in [*comparison(metrics)[1:], would_answer(metrics)])),
    ]


def _production_table(metrics: Metrics) -> Markup:
    curve, flat = metrics["answer"]["production"], metrics["flat"]["production"]
    rows = []
    for left in _SHARES_LEFT:
        i = len(curve["share"]) - 1 - left
        if curve["accuracy"][i] is not None:
            cells = (curve["accuracy"][i], flat["accuracy"][i])
            rows.append([f"{left}\u00a0%", f"{curve['conf'][i]:.2f}", *map(percent, cells)])
    header = ["Left to a person", "Confidence from", "Others right", "Flat: others right"]
    caption = "How right the rest is when so many of the least certain are left to a person."
    return table(header, rows, caption=caption, num_text=0)


def _suggestions(topk: Metrics) -> list[Markup]:
    caption = "A person who is shown the most probable codes finds a true one among them so often."
    return [table(["Codes shown", *topk], [["True one among them", *map(percent, topk.values())]], caption=caption)]


def _confusions(metrics: Metrics, coder: Coder) -> list[Markup]:
    if not metrics["confusions"]:
        return [tag("p", "None: every description got exactly the right codes.")]

    rows = []
    for c in metrics["confusions"]:
        codes = (_named([c[which]] if c[which] else [], coder) for which in ("true", "predicted"))
        rows.append([str(c["count"]), f"{c['of']:,}" if c["of"] else "", *codes, c["example"]])
    caption = (
        f"The {len(rows)} that cost most descriptions (n), beside the number of descriptions that have the true code. "
        "None stands where a code is missing, or one too many is given."
    )
    header = ["n", "of", "True code", "Predicted", "For example"]
    return [table(header, rows, caption=caption, num_text=0, last_text=3)]


def _named(codes: Sequence[str], coder: Coder) -> Markup:
    """Codes with what they mean."""
    if not codes:
        return tag("span", "none", class_="quiet")
    return Markup("".join(tag("div", tag("code", code), tag("small", coder.describe(code) or "")) for code in codes))


def _codes_table(metrics: Metrics, coder: Coder) -> Markup:
    by_code = metrics["by_code"]
    rows = [
        [_named([c["code"]], coder), f"{c['n']:,}", f"{c['predicted']:,}"]
        + [percent(c[name]) for name in ("recall", "precision", "f1")]
        for c in by_code[:_MAX_CODES]
    ]
    which = f"the {_MAX_CODES} commonest" if len(by_code) > _MAX_CODES else "all"
    caption = (
        f"How well the model finds each of {len(by_code):,} true codes ({which}; {METRICS_FILE} has them "
        "all): the share of the n descriptions with the code that is given it, and the share of those given it that "
        "has it."
    )
    return table(["Code", "n", "Given to", "Found", "Rightly given", "F1"], rows, caption=caption)


def _confident_errors(evaluation: Evaluation, coder: Coder) -> list[Markup]:
    wrong = evaluation.rows[~evaluation.rows["right"].astype(bool)].sort_values("conf", ascending=False, kind="stable")
    wrong = wrong.drop_duplicates(["text", "lang"]).head(_MAX_ERRORS)
    if not len(wrong):
        return []
    truth, predicted = (
        [name for name in wrong if re.fullmatch(rf"{side}_(?!prob_|desc_).*", str(name))]
        for side in ("true", "predicted")
    )
    rows = [
        [row["text"], row["lang"], f"{row['conf']:.2f}"]
        + [
            _named([row[name] for name in names if pd.notna(row[name]) and row[name] != MISSING], coder)
            for names in (truth, predicted)
        ]
        for _, row in wrong.iterrows()
    ]
    caption = "Wrong descriptions of which the model is surest; some show that the true code is the wrong one."
    header = ["Description", "Language", "Confidence", "True codes", "Predicted"]
    return [table(header, rows, caption=caption, num_text=2, last_text=2)]


def _provenance(coder: Coder) -> Markup:
    """Date, command and versions."""
    terms = {
        "Date": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        "Command": tag("code", shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])),
        "Versions": f"histocoder {__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        "Computed in": f"{coder.precision}, on {coder.device.type}",
    }
    return tag("dl", *(part for term, meaning in terms.items() for part in (tag("dt", term), tag("dd", meaning))))


def _thresholds(metrics: Metrics, coder: Coder) -> list[Markup]:
    own = coder.model.config.thresholds
    rows = [
        ["all" if lang == ALL_LANGUAGES else lang, f"{best['n']:,}", f"{best['threshold']:.2f}", percent(best["f1"])]
        for lang, best in metrics["thresholds"].items()
    ]
    applied = "the model\u2019s own thresholds" if own else "a threshold of 0.50"
    return [
        tag(
            "p",
            f"With {applied}, the flat head\u2019s F1 is {percent(metrics['flat']['overall']['f1'])}. The thresholds "
            "below would have been best; having been chosen on these very descriptions, they flatter a little.",
        ),
        table(["Language", "n", "Best threshold", "F1 with it"], rows, caption="Thresholds of the flat head."),
    ]


def _definitions(topk: Metrics) -> Markup:
    terms = {
        "Exactly right": "The set of predicted codes is the set of true codes, in any order; one too many is wrong.",
        "Precision, recall, F1": "For each description: the share of predicted codes that are true, the share of true "
        "codes that are predicted, and their harmonic mean; then the mean over descriptions.",
        "Answer and flat head": "The answer is what the model gives by default, in the mode that validated best: its "
        "experts combined (the decoder, which writes codes digit by digit, the flat head, which gives each code a "
        "probability, and a linear model of n-grams), or one of them. Numbers are the answer\u2019s unless "
        "\u201cflat\u201d is written beside them.",
        f"First, in best {len(topk)}": "One of the true codes is the most probable code, or among so many.",
        "Confidence": "The probability that the model gives its own prediction.",
        "Calibration": "The mean distance of confidence and accuracy in ten equal parts of the scale, weighted by "
        "their descriptions (expected calibration error).",
        "n": "Descriptions, each as often as it occurs.",
    }
    return tag("dl", *(part for term, meaning in terms.items() for part in (tag("dt", term), tag("dd", meaning))))
