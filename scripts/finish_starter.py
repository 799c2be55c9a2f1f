"""Finish a model of train_starter.py: weigh its experts by language, calibrate it, and measure it."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pandas as pd
import torch
from scipy.optimize import minimize
from scipy.special import expit, logit

from histocoder import Coder
from histocoder.checkpoints.model_files import load_model, save_model
from histocoder.checkpoints.starter import ABOUT_FILE
from histocoder.config import PredictOptions
from histocoder.config.model import ALL_LANGUAGES
from histocoder.data.dataset import OccupationDataset
from histocoder.data.examples import TRAIN, VAL, Examples
from histocoder.inference.confidence import MAX_AGREEMENT, MIN_KNOWN_TITLES
from histocoder.text.languages import NAMES, Language
from histocoder.text.normalize import description_keys
from histocoder.training.encoded_rows import fit_nearest_expert
from histocoder.training.expert_weights import fit_all_weights
from histocoder.training.experts import set_experts

VERSION = "1.1"
"""Version of the model that is made."""
FURTHER = 0.4
"""Probability from which on a further code is given; single occupations get none down to it."""
SHARE_BEFORE_PAIRS = 0.4
"""Weight of a model before it is trained on pairs, in the mean of both."""
NUM_LINEAR_WEIGHTS = 690_000
"""Weights of the linear expert that are kept, the largest."""
MIN_OWN_ROWS = 250
"""Held-out descriptions of a language from which on it has weights of its own."""
MAX_ROWS = 2_500
"""Held-out descriptions by which a language's weights are fitted, at most."""
NUM_LEARNED = {"en": 8_000, "nl": 100_000, "se": 60_000}
"""Rows of tables that the experts on a language have learned from; few of others."""
OTHERWISE = 60_000
MAX_REMEMBERED = 199_000
"""Rows that the expert of nearest rows remembers: those of tables, and of own titles in languages
without a large table as many as there is room for.
"""
MIN_LEFT_OUT_ROWS, MAX_LEFT_OUT_ROWS = 600, 3_000
"""Rows of a language from which on it has a calibration of its own; rows of a table that calibrate,
at most.
"""
LITTLE = "little"  # the calibration of languages of which little was learned
SURE = 0.8
MADE = ("rough", "plain")
"""Sources of rows that train_starter.py makes of others."""
OWN = ("titles", "lexicon", "two")
"""Sources that the project has written."""
MIN_SHOWN_ROWS = 10
CARD = Path(__file__).with_name("starter_card.md")
SCALES = Path(__file__).with_name("starter_confidence.json")
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
        num_learned = NUM_LEARNED.get(lang, 8_000)
        fitted = fit_all_weights(coder, val.take(indices), num_train=num_learned)
        weights[lang] = fitted | {"further": FURTHER}
    ends = weights_of_ends(coder, val)
    weights = {lang: of_lang | ends for lang, of_lang in weights.items()}
    usual = weights.pop(ALL_LANGUAGES)
    model.config = replace(model.config, experts=usual, experts_by_language=weights)


def with_pairs(val: Examples) -> Examples:
    """Return a sample of held-out rows, of which one in six is joined with another occupation, as
    registers do.
    """
    from train_starter import JOINTS, joined

    rng = random.Random(0)
    indices = np.sort(np.random.default_rng(1).permutation(len(val))[:MAX_ROWS])
    sample = val.take(indices)
    codes = sample.codes.to_numpy(dtype=object)[:, 0]
    texts, langs = list(sample.texts), list(sample.langs)
    rows = [[code, None] for code in codes]
    is_occupation = [not code.startswith("-") for code in codes]
    for row in range(0, len(texts), 6):
        lang = langs[row]
        others = [
            other
            for other in rng.sample(range(len(texts)), 200)
            if langs[other] == lang and is_occupation[other] and codes[other] != codes[row]
        ]
        if lang in JOINTS and others and is_occupation[row]:
            other = others[0]
            texts[row] = joined(texts[row], rng.choice(JOINTS[lang]), sample.texts[other])
            rows[row][1] = codes[other]
    frame = pd.DataFrame(rows, columns=["hisco_1", "hisco_2"], dtype=object)
    return Examples.of(texts, langs, frame)


def weights_of_ends(coder: Coder, val: Examples) -> dict[str, float]:
    """Return the weights of the decoder's opinion whether a row has a further code; rows of tables
    have none.
    """
    weights = fit_all_weights(coder, with_pairs(val), num_train=OTHERWISE)
    return {name: weights[name] for name in ("end", "few", "sure") if name in weights}


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
        chance = MAX_AGREEMENT * expit(parameters[0] * odds + parameters[1]).clip(1e-9)
        return -float(np.where(right, np.log(chance), np.log(1 - chance)).mean())

    slope, intercept = minimize(loss, [1.0, 0.0], method="Nelder-Mead").x
    return {"slope": float(slope), "intercept": float(intercept)}


def with_experts_of(coder: Coder, folder: Path) -> Coder:
    """Return the mean of a model and of one in a folder, which was trained further from it, with
    the first one's experts.

    The mean has learned what the second has, and forgets less than it (Wortsman et al. 2022,
    "Robust fine-tuning of zero-shot models").
    """
    before = coder.model
    model = load_model(folder)
    earlier = before.state_dict()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.lerp_(earlier[name], SHARE_BEFORE_PAIRS)
    set_experts(model, before.linear_expert, None, before.nearest_expert)
    votes = {"experts": before.config.experts, "mode": before.config.mode}
    model.config = replace(model.config, **votes)
    return Coder(model, "cpu", precision="auto")


def prepared(run: Path) -> Coder:
    """Return the best model of a run with what its experts are to keep."""
    coder = Coder.from_pretrained(run / "best", "cpu", precision="auto")
    if (run / "pairs").is_dir():
        coder = with_experts_of(coder, run / "pairs")
    linear_pruned(coder)
    train = Examples.open(run / "examples.arrow", TRAIN)
    rows = pd.read_csv(run / "rows" / "train.csv", dtype=str, keep_default_na=False)
    is_table = ~rows["source"].isin(MADE + OWN)
    is_own = rows["source"].isin(OWN) & ~rows["lang"].isin(NUM_LEARNED)
    room = MAX_REMEMBERED - is_table.sum() + rows[is_table].duplicated().sum()
    own = rows[is_own].sample(min(max(room, 0), is_own.sum()), random_state=0).index
    remember(coder, train, (is_table | rows.index.isin(own)).to_numpy())
    return coder


def finished(run: Path) -> Coder:
    """Return the best model of a run with experts that suit each language."""
    coder = prepared(run)
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


def measure_elsewhere(coder: Coder, tables: list[str], path: Path) -> None:
    """Add to a file how the confidence holds in tables that a model has not learned from, by
    language: those that have enough rows, the others that the model knows, and those that it
    does not know.
    """
    scales = json.loads(path.read_text()) if path.is_file() else {}
    parts = []
    for name in tables:
        lang, _, table = name.rpartition(":")
        rows = read_rows(Path(table), lang or None).drop_duplicates("occ1")
        parts.append(rows.sample(min(len(rows), MAX_LEFT_OUT_ROWS), random_state=0))
    rows = scored(coder, pd.concat(parts, ignore_index=True))
    sizes = rows["lang"].value_counts()
    is_large = rows["lang"].map(sizes) >= MIN_LEFT_OUT_ROWS
    is_known = rows["lang"].isin(coder.model.config.languages)
    groups = rows["lang"].where(is_large, is_known.map({True: ALL_LANGUAGES, False: LITTLE}))
    for group, of_group in rows.groupby(groups):
        told(f"left out: {group}", of_group)
        if len(of_group) >= MIN_OWN_ROWS:
            scales[group] = fit_scale(of_group)
    path.write_text(json.dumps(scales, indent=2, sort_keys=True) + "\n")


def calibrate(coder: Coder, num_titles: pd.Series) -> None:
    """Set the confidence of each language to what held elsewhere; `num_titles` is how many titles
    of each the model has learned.
    """
    scales = json.loads(SCALES.read_text())
    little = scales.pop(LITTLE)
    confidence = {}
    for lang in coder.model.config.languages:
        if lang in scales:
            confidence[lang] = dict(scales[lang])
        elif num_titles.get(lang, 0) < MIN_KNOWN_TITLES:
            confidence[lang] = dict(little)
        else:
            confidence[lang] = dict(scales[ALL_LANGUAGES])
        confidence[lang]["titles"] = float(num_titles.get(lang, 0))
    confidence[ALL_LANGUAGES] = dict(little)
    # that of the Dutch titles, from which it has learned
    coder.model.config = replace(coder.model.config, confidence=confidence, license="cc-by-sa-4.0")


def half_of(texts: Sequence[str]) -> np.ndarray:
    """Return 0 or 1 for each description, the same for its spellings, of shape (n,)."""
    return np.array([sum(key.encode()) % 2 for key in description_keys(list(texts))])


def halves(run: Path, confidence: dict[str, dict[str, float]]) -> pd.DataFrame:
    """Return the held-out rows of a run as they are scored with weights that were fitted to the
    other half of their descriptions.
    """
    val = Examples.open(run / "examples.arrow", VAL)
    rows = read_rows(run / "rows" / "val.csv")
    half_of_rows = half_of(rows["occ1"])
    half_of_val = half_of(val.texts)
    parts = []
    coder = prepared(run)
    usual = replace(coder.model.config, confidence=confidence)
    for number in (0, 1):
        coder.model.config = usual
        weigh_by_language(coder, val.take(np.flatnonzero(half_of_val != number)))
        parts.append(scored(coder, rows[half_of_rows == number]))
    return pd.concat(parts)


def row_of_figures(name: str, rows: pd.DataFrame) -> str:
    """Return a row of the card's tables."""
    if len(rows) < MIN_SHOWN_ROWS:
        return f"| {name} | {len(rows):,} | too few to tell | |"
    is_sure = rows[CONF] >= SURE
    of_sure = (
        "–" if is_sure.sum() < MIN_SHOWN_ROWS else f"{100 * rows['right'][is_sure].mean():.0f}"
    )
    right = f"{100 * rows['right'].mean():.1f}"
    return f"| {name} | {len(rows):,} | {right} | {100 * is_sure.mean():.0f}, of which {of_sure} |"


def card(
    coder: Coder, about: dict[str, str], learned: pd.Series, val: pd.DataFrame, elsewhere: list[str]
) -> str:
    """Return the model card: what each language learned from, and how right it is."""
    own = {lang: rows for lang, rows in val.groupby("lang")}
    languages = []
    for lang in sorted(own, key=lambda lang: -learned.get(lang, 0)):
        name = f"{NAMES.get(Language(lang).iso, lang)} ({lang})"
        figures = row_of_figures(f"{name} | {learned.get(lang, 0):,}", own[lang])
        languages.append(figures)
    isos = sorted(Language(lang).iso for lang in coder.model.config.languages if lang != "unk")
    return CARD.read_text(encoding="utf-8").format(
        iso="\n".join(f"- {iso}" for iso in isos),
        num_codes=len(coder.codes),
        num_languages=len(isos),
        languages="\n".join(languages),
        elsewhere="\n".join(elsewhere),
        **about,
    )


def saved(coder: Coder) -> Coder:
    """Return a model as it is when it is read from its files, which have its table in 4 bits."""
    model = coder.model
    with TemporaryDirectory() as folder:
        save_model(Path(folder), model.config, model.state_dict(), tokenizer=model.tokenizer)
        return Coder.from_pretrained(folder, "cpu", precision="auto")


def finish(run: Path, *, output: Path | None, data: Sequence[str], version: str) -> None:
    """Finish the model of a run, print how right it is on its held-out rows and on files, FILE or
    LANG:FILE, and write it with its card into a folder.
    """
    coder = finished(run)
    titles = pd.read_csv(run / "rows" / "train.csv", dtype=str, keep_default_na=False)
    titles = titles[~titles["source"].isin(MADE)].drop_duplicates(["occ1", "lang"])
    learned = titles["lang"].value_counts()
    calibrate(coder, learned)
    coder = saved(coder)
    val = halves(run, coder.model.config.confidence)
    for column in ("source", "lang"):
        for name, rows in val.groupby(column):
            told(name, rows)
    elsewhere = []
    for name in data:
        lang, _, path = name.rpartition(":")
        rows = scored(coder, read_rows(Path(path), lang or None))
        for lang, of_lang in rows.groupby("lang"):
            told(f"{Path(path).stem} {lang}", of_lang)
            elsewhere.append(row_of_figures(f"{Path(path).stem}, {lang}", of_lang))
        told(Path(path).stem, rows)
        elsewhere.append(row_of_figures(f"{Path(path).stem}, all", rows))
    if output is not None:
        about = {"version": version, "made": str(date.today())}
        text = card(coder, about, learned, val, elsewhere)
        model = coder.model
        save_model(output, model.config, model.state_dict(), tokenizer=model.tokenizer, card=text)
        (output / ABOUT_FILE).write_text(json.dumps(about) + "\n", encoding="utf-8")


def main() -> None:
    """Finish a run, or measure how its confidence holds in tables that it has not learned from."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--output", type=Path, help="folder to write the model to")
    parser.add_argument("--version", default=VERSION, help="of the model")
    parser.add_argument(
        "--data", nargs="*", default=[], help="files to measure on, FILE or LANG:FILE"
    )
    parser.add_argument("--left-out", nargs="*", help="tables that were left out, to calibrate by")
    args = parser.parse_args()
    if args.left_out:
        measure_elsewhere(finished(args.run), args.left_out, SCALES)
    else:
        finish(args.run, output=args.output, data=args.data, version=args.version)


if __name__ == "__main__":
    main()
