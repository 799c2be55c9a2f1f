"""Accuracy without any coded row: a model of HISCO's titles alone, then after 100 decisions; prints
one line of JSON.

Each description of a table counts once (`distinct`) or as often as it occurs (`rows`), with its
most frequent code. The decisions are the codes of descriptions drawn at random, which are then left
out of the measure.

Usage: python benchmarks/titles.py [--data english] [--decisions 100] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
from accuracy import CODE, ROOT, TABLES, TEXT, read, run

from histocoder import Coder
from histocoder.desk.domain.sample import titles
from histocoder.evaluation.checked_file import words_to_correct

MOST = 8_000  # distinct descriptions that are coded


def measure(model: Path, asked: pd.DataFrame, language: str) -> dict[str, float]:
    """Return the shares of descriptions whose code comes first, and is among five."""
    answers, ranked = Coder.from_pretrained(model).predict_ranked(asked[TEXT].tolist(), language)
    true = asked[CODE].to_numpy()
    found = {
        "first": answers.codes[:, 0] == true,
        "five": (ranked.codes[:, :5] == true[:, None]).any(1),
    }
    weights = {"distinct": np.ones(len(asked)), "rows": asked["count"].to_numpy()}
    shares = {
        f"{name}_{of}": np.average(right, weights=w)
        for name, right in found.items()
        for of, w in weights.items()
    }
    return {name: round(float(share), 3) for name, share in shares.items()}


def main() -> None:
    """Train, measure, decide, train again, and measure the others."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shared", type=Path, default=ROOT.parent / "shared" / "data", help="folder of the tables"
    )
    parser.add_argument("--data", choices=tuple(TABLES), default="english")
    parser.add_argument(
        "--decisions", type=int, default=100, help="descriptions that are decided (default: 100)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw (default: 0)")
    parser.add_argument(
        "--flags", nargs=argparse.REMAINDER, default=[], help="for finetune.py; these come last"
    )
    args = parser.parse_args()
    table, language = read(args.data, args.shared), TABLES[args.data][1]
    asked = (
        table.groupby(TEXT)[CODE]
        .agg([lambda codes: codes.mode()[0], "size"])
        .set_axis([CODE, "count"], axis=1)
    )
    asked = asked.reset_index().sample(frac=1, random_state=args.seed)[:MOST]
    decided, others = asked[: args.decisions], asked[args.decisions :]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        titles().to_csv(folder / "titles.csv", index=False)
        decided.assign(lang=language, checked="x").to_csv(folder / "checked.csv", index=False)
        data = (
            "--dataset",
            folder / "titles.csv",
            "--target-cols",
            CODE,
            "--language-col",
            "lang",
            "--titles",
            "none",
        )
        one, two = folder / "one", folder / "two"
        run("finetune.py", "--encoder", "ngram", *data, "--save-path", one, *args.flags)
        again = words_to_correct(one / "best", [folder / "checked.csv"], one)
        run("finetune.py", *again, "--save-path", two, *args.flags)
        found = {
            "before": measure(one / "best", others, language),
            "after": measure(two / "best", others, language),
        }
    print(
        json.dumps({"benchmark": "titles", "data": args.data, "descriptions": len(others), **found})
    )


if __name__ == "__main__":
    main()
