"""Wrong labels that are planted in a table, found by `histocoder audit` and by cleanlab's rankings.

A share of the labels is replaced by others, which are drawn at random from the table's (`random`),
or from those with the same first two digits (`near`). Prints JSON lines: the share of planted ones
among the first 2 % of labels in each order (precision), the share of all planted ones that are
there (recall), the average precision of the whole order, and the share of wrong labels that `audit`
estimates. `cleanlab` ranks the same out-of-fold probabilities; where it is not installed, its first
two scores are computed by their definitions. What was wrong before counts as false alarms.

python benchmarks/audit.py --seeds 1 2 3
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
from accuracy import CODE, ROOT, TEXT, read
from sklearn.metrics import average_precision_score

from histocoder.evaluation import suspects
from histocoder.text.normalize import description_keys


def planted(table: pd.DataFrame, share: float, how: str, rng: np.random.Generator) -> pd.DataFrame:
    """Return distinct descriptions with their codes, of which a share of the rows has a wrong
    one.
    """
    codes = table[CODE].to_numpy(dtype=object)
    group = table[CODE].str[:2].to_numpy(dtype=object) if how == "near" else np.full(len(codes), "")
    members = {name: np.flatnonzero(group == name) for name in pd.unique(group)}
    new, is_planted = codes.copy(), rng.random(len(codes)) < share
    for row in np.flatnonzero(is_planted):
        own = members[group[row]]
        if (codes[own] == codes[row]).all():
            is_planted[row] = False
        while is_planted[row] and new[row] == codes[row]:
            new[row] = codes[rng.choice(own)]
    rows = pd.DataFrame(
        {"key": description_keys(table[TEXT].tolist()), "lang": "unk", "codes": [(c,) for c in new]}
    )
    rows["planted"] = is_planted
    same = rows.groupby(["key", "lang", "codes"], sort=False)["planted"]
    return same.agg(times="size", planted="max").reset_index()


def orders(rows: pd.DataFrame, seed: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the names of orders, and how suspect each label is in them."""
    found = suspects.suspects(rows, seed=seed)
    yield (
        f"histocoder, {100 * (1 - found['conf']).mean():.1f} % estimated",
        found["doubt"].to_numpy(),
    )
    label, other = found["probs"].str[0].to_numpy(), found["alt_probs"].str[0].to_numpy()
    yield "self-confidence", -label.astype(float)
    yield "normalized margin", (other - label).astype(float)
    try:
        from cleanlab.rank import get_label_quality_scores
    except ImportError:
        return
    labels = suspects.Labels.of(rows)
    classes = labels.class_id
    probs = np.empty((len(rows), len(labels.codes)), np.float32)
    for fold in suspects.held_out_folds(rows, seed=seed):
        probs[fold.rows] = np.exp(fold.log_probs)
    for method in ("self_confidence", "normalized_margin", "confidence_weighted_entropy"):
        for adjusts in (False, True) if method != "confidence_weighted_entropy" else (False,):
            score = get_label_quality_scores(
                classes, probs, method=method, adjust_pred_probs=adjusts
            )
            yield f"cleanlab {method}{' adjusted' * adjusts}", -score


def main() -> None:
    """Plant, rank and count for each seed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shared", type=Path, default=ROOT.parent / "shared" / "data", help="folder of the table"
    )
    parser.add_argument("--data", default="dutch", choices=("dutch", "swedish", "english"))
    parser.add_argument("--rows", type=int, help="random rows of the table (default: all)")
    parser.add_argument(
        "--share", type=float, default=2, help="percent of labels that are replaced"
    )
    parser.add_argument("--how", nargs="+", default=["random", "near"], choices=("random", "near"))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    args = parser.parse_args()
    table = read(args.data, args.shared)
    table = table.sample(args.rows, random_state=0).reset_index(drop=True) if args.rows else table
    for how, seed in itertools.product(args.how, args.seeds):
        rows = planted(table, args.share / 100, how, np.random.default_rng(seed))
        first, number, started = round(0.02 * len(rows)), rows["planted"].sum(), time.monotonic()
        for name, suspicion in orders(rows, seed):
            hits = rows["planted"].to_numpy()[np.argsort(-suspicion, kind="stable")[:first]].sum()
            values = {"precision": hits / first, "recall": hits / number}
            values["average_precision"] = average_precision_score(rows["planted"], suspicion)
            which = {
                "data": args.data,
                "labels": len(rows),
                "planted": int(number),
                "how": how,
                "seed": seed,
            }
            rounded = {name: round(float(value), 3) for name, value in values.items()}
            seconds = round(time.monotonic() - started)
            print(json.dumps({**which, "order": name, **rounded, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
