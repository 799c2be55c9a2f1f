"""What some decisions on the output of the model in the box bring: trains on so many rows of a
table from the box, and codes the others with both models. Prints a line of JSON.

`right` is the share of descriptions whose first code is right, in %: of the table's others, of those
that were decided, and of the descriptions in many languages that the box is tested on.

Usage: python benchmarks/own_model.py [--table tests/starter/danish_census.csv] [--language da]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import pandas as pd
from laptop import seconds
from train_step import ROOT

from histocoder import Coder

STARTER_TESTS = ROOT / "tests" / "starter"


def right(coder: Coder, rows: pd.DataFrame) -> float:
    """Return the share of rows whose first code is right, in %."""
    coded = coder.predict(rows["occ1"], rows["lang"], progress=False)
    return round(100 * float((coded["hisco_1"].to_numpy() == rows["hisco_1"].to_numpy()).mean()), 1)


def main() -> None:
    """Train on the decisions, and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", default=STARTER_TESTS / "danish_census.csv")
    parser.add_argument("--language", default="da")
    parser.add_argument("--decisions", type=int, default=200, help="rows that are decided")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="after --: of histocoder finetune")
    args = parser.parse_args()
    table = pd.read_csv(args.table, dtype=str).dropna(subset="hisco_1")
    if "lang" in table:
        table = table[table["lang"] == args.language]
    table = table[["occ1", "hisco_1"]].drop_duplicates("occ1").assign(lang=args.language)
    elsewhere = pd.read_csv(STARTER_TESTS / "descriptions.csv", dtype=str)
    decided = table.sample(args.decisions, random_state=args.seed)
    others = table.drop(decided.index)
    with tempfile.TemporaryDirectory() as name:
        corrections = Path(name) / "review.csv"
        decided.assign(checked="x").to_csv(corrections, index=False)
        folder = Path(name) / "own"
        flags = ["--corrections", corrections, "--save-path", folder, *args.flags[1:]]
        taken = seconds("-m", "histocoder", "finetune", *flags)
        box = Coder.from_pretrained()
        own = Coder.from_pretrained(folder / "best")
        result = {
            "benchmark": "own_model",
            "decisions": len(decided),
            "others": len(others),
            "right_box": right(box, others),
            "right_own": right(own, others),
            "right_own_decided": right(own, decided),
            "elsewhere": len(elsewhere),
            "right_box_elsewhere": right(box, elsewhere),
            "right_own_elsewhere": right(own, elsewhere),
            "train_s": round(taken, 1),
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
