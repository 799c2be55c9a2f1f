"""How much too high a report is, since the vote's weights, the mode and thresholds are chosen on
the rows it scores.

A run is trained as in `accuracy.py`, and a part of the rows that it has not seen, as large as its
validation data, is scored twice, each description once: with weights and mode as the run chose
them, on its validation data, and with weights and mode chosen on these rows themselves. The
difference is what a report's figure has too much. Likewise the share of right ones among those
coded above a threshold for 95 %, which is 95 % on the rows that it is chosen on.

Usage: python benchmarks/chosen.py [--data english swedish dutch] [--size 2000] [--seeds 0 1 2]
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from accuracy import CODE, KEY, ROOT, TABLES, TEXT, lowest_confidence, read, run, split

from histocoder import Coder
from histocoder.config import NUM_GREEDY
from histocoder.data.examples import Examples
from histocoder.evaluation.evaluator import right_rows
from histocoder.training.expert_weights import best_mode, fit_all_weights

MODES = ("combined", "flat")


def chosen_mode(coder: Coder, examples: Examples) -> tuple[str, float]:
    """Return the mode that a run would choose on examples, and its accuracy on them."""
    right = {
        mode: float(right_rows(coder, examples, mode=mode, progress=False).mean()) for mode in MODES
    }
    mode = best_mode(right, num_rows=len(examples))
    return mode, right[mode]


def examples_of(rows: pd.DataFrame, language: str) -> Examples:
    """Return each description once, at most as many as a run chooses by."""
    rows = rows.drop_duplicates(KEY)[:NUM_GREEDY]
    return Examples.of(rows[TEXT].tolist(), [language] * len(rows), rows[[CODE]])


def measure(table: pd.DataFrame, language: str, *, size: int, seed: int) -> dict[str, float]:
    """Train on some rows, and score others with what was chosen there and with what is chosen on
    themselves.
    """
    train, test = split(table, seed=seed, size=size, by=KEY)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train.drop(columns=KEY).to_csv(folder / "train.csv", index=False)
        data = (
            "--dataset",
            folder / "train.csv",
            "--target-cols",
            CODE,
            "--language",
            language,
            "--zero-pad-codes",
        )
        flags = (
            "--titles",
            "none",
            "--seed",
            seed,
            "--no-report",
            "--no-refit",
            "--save-path",
            folder / "out",
        )
        run("finetune.py", *data, "--encoder", "ngram", *flags)
        coder = Coder.from_pretrained(folder / "out")
        val = pd.read_csv(folder / "out" / "data_val.csv", dtype=str, keep_default_na=False)
        num_train = len(train) - len(val)
        val = val.drop_duplicates(TEXT, ignore_index=True)
        found = coder.predict(val[TEXT].tolist(), language)
        threshold = lowest_confidence(
            found["conf"].to_numpy(), (found[CODE] == val[CODE]).to_numpy()
        )
    asked = examples_of(test.sample(frac=1, random_state=seed), language).take(
        np.arange(min(len(val), NUM_GREEDY))
    )
    answers = coder.predict(asked.texts, language)
    is_coded = answers["conf"].to_numpy() >= threshold
    is_right = answers[CODE].to_numpy() == asked.codes[CODE].to_numpy()
    set_aside = float(right_rows(coder, asked, progress=False).mean())
    weights = fit_all_weights(coder, asked, num_train=num_train)
    coder.model.config = replace(coder.model.config, experts=weights)
    return {
        "descriptions": len(asked),
        "chosen_elsewhere": set_aside,
        "chosen_on_them": chosen_mode(coder, asked)[1],
        "above_the_threshold": float(is_right[is_coded].mean()) if is_coded.any() else 1.0,
    }


def main() -> None:
    """Print a line of JSON for each table and seed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shared", type=Path, default=ROOT.parent / "shared" / "data", help="folder of the tables"
    )
    parser.add_argument("--data", nargs="+", choices=tuple(TABLES), default=list(TABLES))
    parser.add_argument("--size", type=int, default=2_000, help="rows to train and validate on")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    args = parser.parse_args()
    for data, seed in itertools.product(args.data, args.seeds):
        found = measure(read(data, args.shared), TABLES[data][1], size=args.size, seed=seed)
        rounded = {name: round(value, 4) for name, value in found.items()}
        print(
            json.dumps({"benchmark": "chosen", "data": data, "seed": seed, **rounded}), flush=True
        )


if __name__ == "__main__":
    main()
