"""Finish a model of train_starter.py: weigh its experts by language, calibrate it, and measure it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.optimize import minimize
from scipy.special import expit, logit

from histocoder import Coder
from histocoder.config import PredictOptions
from histocoder.config.model import ALL_LANGUAGES
from histocoder.data.dataset import OccupationDataset
from histocoder.data.examples import TRAIN, VAL, Examples
from histocoder.training.encoded_rows import fit_nearest_expert
from histocoder.training.experts import fit_all_weights, set_experts

NUM_LINEAR_WEIGHTS = 1_400_000
"""Weights of the linear expert that are kept, the largest."""
MIN_OWN_ROWS = 250
"""Held-out descriptions of a language from which on it has weights of its own."""
MAX_ROWS = 2_500
"""Held-out descriptions by which a language's weights are fitted, at most."""
NUM_LEARNED = {"en": 8_000}
"""Rows that the experts on a language have learned from, where they are fewer than OTHERWISE."""
OTHERWISE = 60_000
CONF, LOG_ODDS_LIMIT = "conf", 1e-6


def linear_pruned(coder: Coder) -> None:
    """Leave out the small weights of a model's linear expert."""
    model = coder.model
    expert = model.linear_expert
    sizes = expert.values.abs().float().sort(descending=True).values
    if len(sizes) > NUM_LINEAR_WEIGHTS:
        expert = expert.pruned(float(sizes[NUM_LINEAR_WEIGHTS]))
        set_experts(model, expert, None, model.nearest_expert)


def remember(coder: Coder, rows: Examples, is_remembered: np.ndarray) -> None:
    """Let the expert of nearest rows remember some of the rows that a model was trained on."""
    model = coder.model
    data = OccupationDataset(
        rows,
        formatter=coder.formatter,
        classes=model.config.codes,
        max_len=model.config.max_len,
    )
    data.rows = np.flatnonzero(is_remembered).astype(np.int32)
    set_experts(model, model.linear_expert, None, fit_nearest_expert(coder.computing, data))


def weigh_by_language(coder: Coder, val: Examples) -> None:
    """Fit the experts' weights on each language that has enough held-out rows, and on the others
    together.
    """
    model = coder.model
    further = model.config.experts["further"]
    langs = np.array(val.langs)
    is_repeat = pd.DataFrame({"text": val.texts, "lang": langs}).duplicated().to_numpy()
    sizes = pd.Series(langs[~is_repeat]).value_counts()
    own = [lang for lang, size in sizes.items() if size >= MIN_OWN_ROWS]
    groups = {lang: langs == lang for lang in own}
    groups[ALL_LANGUAGES] = ~np.isin(langs, own)
    if groups[ALL_LANGUAGES].sum() < MIN_OWN_ROWS:
        groups[ALL_LANGUAGES] = groups["en"]

    model.config = replace(model.config, experts={}, experts_by_language={})
    weights = {}
    for lang, is_of_group in groups.items():
        indices = np.flatnonzero(is_of_group & ~is_repeat)
        indices = np.sort(np.random.default_rng(0).permutation(indices)[:MAX_ROWS])
        num_learned = NUM_LEARNED.get(lang, 8_000 if lang == ALL_LANGUAGES else OTHERWISE)
        fitted = fit_all_weights(coder, val.take(indices), num_train=num_learned)
        weights[lang] = fitted | {"further": further}
    usual = weights.pop(ALL_LANGUAGES)
    model.config = replace(model.config, experts=usual, experts_by_language=weights)


def scored(coder: Coder, rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows with whether their set of codes is right, and the confidence."""
    given = coder.distinct(rows["occ1"].tolist(), rows["lang"].tolist())
    predicted = coder.code(given, PredictOptions(), progress=False)
    columns = [name for name in ("hisco_1", "hisco_2") if name in rows]
    true_sets = [set(filter(None, codes)) for codes in rows[columns].to_numpy(dtype=object)]
    code_sets = [set(filter(None, codes)) for codes in predicted.codes]
    right = [codes == true for codes, true in zip(code_sets, true_sets, strict=True)]
    return rows.assign(right=right, conf=predicted.conf)


def fit_scale(rows: pd.DataFrame) -> dict[str, float]:
    """Return the slope and the intercept that make the confidence of rows the share that is right."""
    conf = rows[CONF].to_numpy().clip(LOG_ODDS_LIMIT, 1 - LOG_ODDS_LIMIT)
    odds = logit(conf)
    right = rows["right"].to_numpy()

    def loss(parameters: np.ndarray) -> float:
        chance = expit(parameters[0] * odds + parameters[1]).clip(1e-9, 1 - 1e-9)
        return -float(np.where(right, np.log(chance), np.log(1 - chance)).mean())

    slope, intercept = minimize(loss, [1.0, 0.0], method="Nelder-Mead").x
    return {"slope": float(slope), "intercept": float(intercept)}


def finished(run: Path) -> Coder:
    """Return the best model of a run with experts that suit each language."""
    coder = Coder.from_pretrained(run / "best", "cpu", precision="auto")
    linear_pruned(coder)
    train = Examples.open(run / "examples.arrow", TRAIN)
    sources = pd.read_csv(run / "rows" / "train.csv", usecols=["source"], dtype=str)["source"]
    if len(sources) == len(train):
        remember(coder, train, ~sources.isin(["rough", "sample"]).to_numpy())
    weigh_by_language(coder, Examples.open(run / "examples.arrow", VAL))
    return Coder(coder.model, "cpu", precision="auto")


def read_rows(path: Path, lang: str | None = None) -> pd.DataFrame:
    """Read rows to measure on; codes get their leading zeros."""
    rows = pd.read_csv(path, dtype=str, keep_default_na=False)
    for column in ("hisco_1", "hisco_2"):
        if column in rows:
            is_digits = rows[column].str.isdecimal()
            rows[column] = rows[column].where(~is_digits, rows[column].str.zfill(5))
    return rows if lang is None else rows.assign(lang=lang)


def told(name: str, rows: pd.DataFrame) -> None:
    """Print how right rows are, and those that the model is sure of."""
    is_sure = rows[CONF] >= 0.8
    sure_right = 100 * rows["right"][is_sure].mean()
    print(
        f"{name:24} {len(rows):6,} rows  right {100 * rows['right'].mean():5.1f} %  "
        f"mean conf {rows[CONF].mean():.2f}  conf >= .8: {100 * is_sure.mean():5.1f} %, "
        f"right {sure_right:5.1f} %",
        flush=True,
    )


def main() -> None:
    """Finish a run, and print how right it is on its held-out rows and on given files."""
    import argparse

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--output", type=Path, help="folder to write the model to")
    parser.add_argument(
        "--data", nargs="*", default=[], help="files to measure on, FILE or LANG:FILE"
    )
    args = parser.parse_args()
    coder = finished(args.run)
    print(coder.model.config.experts, coder.model.config.experts_by_language)
    if args.output:
        coder.save_pretrained(args.output)
    val = scored(coder, read_rows(args.run / "rows" / "val.csv"))
    for source, rows in val.groupby("source"):
        told(source, rows)
    for lang, rows in val.groupby("lang"):
        told(lang, rows)
    for name in args.data:
        lang, _, path = name.rpartition(":")
        rows = scored(coder, read_rows(Path(path), lang or None))
        told(Path(path).stem, rows)
        for lang, of_lang in rows.groupby("lang"):
            told(f"  {lang}", of_lang)


if __name__ == "__main__":
    main()
