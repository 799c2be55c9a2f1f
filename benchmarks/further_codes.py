"""Further codes of held-out descriptions of two occupations, with and without the probability that
they need.

A share of the English table's rows is joined with another row by "and", "&", a comma or a slash, on
either side of the split of `accuracy.py`, so that test rows are made of unseen descriptions. Prints
JSON lines: the rows given a second code, the precision of first and second codes, the share of true
second codes that are found, and the rows exactly right: all, those with one code, and those with
two.

python benchmarks/further_codes.py --shares 2 12 28 --sizes all --seeds 0 1 2
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
from accuracy import CODE, ROOT, TEXT, read, run, split

from histocoder import Coder

CODES = [CODE, "hisco_2"]
SEPARATORS = {" and ": 0.5, " & ": 0.15, ", ": 0.15, "/": 0.1, " and also ": 0.1}


def joined(table: pd.DataFrame, share: float, rng: np.random.Generator) -> pd.DataFrame:
    """Join a share of the rows with a random one of another code."""
    partners = table[~table[CODE].str.startswith("-")]
    is_joined = (rng.random(len(table)) < share) & ~table[CODE].str.startswith("-")
    rows = []
    for (text, code), joins in zip(table[[TEXT, CODE]].to_numpy(), is_joined, strict=True):
        other, second = (
            partners[[TEXT, CODE]].iloc[rng.integers(len(partners))] if joins else ("", code)
        )
        while joins and second == code:
            other, second = partners[[TEXT, CODE]].iloc[rng.integers(len(partners))]
        between = rng.choice([*SEPARATORS], p=[*SEPARATORS.values()]) if joins else ""
        rows.append((f"{text}{between}{other}", code, second if joins else ""))
    return pd.DataFrame(rows, columns=[TEXT, *CODES])


def scores(coder: Coder, test: pd.DataFrame, langs: str | list[str]) -> dict[str, float]:
    """Return what is right of a table with two codes at most."""
    found = coder.predict(test[TEXT].tolist(), langs, mode="combined")[CODES].fillna("").to_numpy()
    true = test[CODES].fillna("").to_numpy()
    is_true, has_two = (found[:, :, None] == true[:, None]).any(2), true[:, 1] != ""
    given, exact = (
        found[:, 1] != "",
        np.array([set(a) == set(b) for a, b in zip(found, true, strict=True)]),
    )
    values = {
        "first": is_true[:, 0].mean(),
        "second": is_true[given, 1].mean() if given.any() else np.nan,
    }
    values |= {"recall": (is_true[:, 1] & given)[has_two].mean(), "exact": exact.mean()}
    values |= {"exact_one": exact[~has_two].mean(), "exact_two": exact[has_two].mean()}
    return {
        "given": int(given.sum()),
        **{name: round(float(value), 3) for name, value in values.items()},
    }


def compare(folder: Path, test: pd.DataFrame, langs: str | list[str], **which: object) -> None:
    """Print the scores of a model without and with the probability that further codes need."""
    coder = Coder.from_pretrained(folder)
    experts = coder.model.config.experts
    for further in (0.0, experts["further"]):
        coder.model.config = replace(coder.model.config, experts=experts | {"further": further})
        print(
            json.dumps({**which, "further": round(further, 2), **scores(coder, test, langs)}),
            flush=True,
        )


def main() -> None:
    """Train a model for each share, size and seed, or measure that of `--model`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shared", type=Path, default=ROOT.parent / "shared" / "data", help="folder of the table"
    )
    parser.add_argument(
        "--shares", nargs="+", type=int, default=[2, 12, 28], help="percent of rows that are joined"
    )
    parser.add_argument("--sizes", nargs="+", default=["500", "2000", "all"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--model", type=Path, help="measure this model on data/val.csv")
    parser.add_argument(
        "--flags", nargs=argparse.REMAINDER, default=[], help="for finetune.py; these come last"
    )
    args = parser.parse_args()
    if args.model:
        test = pd.read_csv(ROOT / "data" / "val.csv", dtype=str, keep_default_na=False)
        compare(args.model, test, test["lang"].tolist(), data="data/val.csv")
        return
    table = read("english", args.shared)
    for share, size, seed in itertools.product(args.shares, args.sizes, args.seeds):
        parts = split(table, seed=seed, size=None if size == "all" else int(size))
        rng = np.random.default_rng([seed, share, 0 if size == "all" else int(size)])
        train, test = (joined(part, share / 100, rng) for part in parts)
        with tempfile.TemporaryDirectory() as name:
            train.to_csv(Path(name) / "train.csv", index=False)
            command = (
                "finetune.py",
                "--dataset",
                Path(name) / "train.csv",
                "--target-cols",
                *CODES,
                "--language",
            )
            flags = (
                "--encoder",
                "ngram",
                "--titles",
                "none",
                "--no-refit",
                "--no-report",
                "--seed",
                seed,
            )
            run(*command, "en", "--save-path", Path(name) / "out", *flags, *args.flags)
            compare(Path(name) / "out" / "best", test, "en", share=share, size=size, seed=seed)


if __name__ == "__main__":
    main()
