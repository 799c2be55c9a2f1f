"""Linear machines by themselves: the kernel's after some passes over the rows, and scikit-learn's
LinearSVC.

A fifth of the distinct descriptions is held out, as in accuracy.py; each row counts once, and
titles of codes are left out. Prints a line of JSON for each: seconds, and the share of held-out
rows whose code is right. `--exact` also fits LinearSVC, one class against the rest in one thread,
which takes minutes on large tables.

python benchmarks/linear_svm.py --data english --seed 0 --passes 4 6 12 --exact
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
from accuracy import CODE, ROOT, TABLES, TEXT, read, split
from scipy.sparse import csr_matrix
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.svm import LinearSVC

from histocoder.ops import kernels
from histocoder.ops.linear_svm import MAX_WEIGHTS


def main() -> None:
    """Fit the machines of one split in turns."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shared", type=Path, default=ROOT.parent / "shared" / "data", help="folder of the tables"
    )
    parser.add_argument("--data", default="english", choices=tuple(TABLES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--passes", nargs="+", type=int, default=[4, 6, 12])
    parser.add_argument("--exact", action="store_true", help="fit LinearSVC as well")
    args = parser.parse_args()
    train, test = split(read(args.data, args.shared), seed=args.seed, size=None)
    classes, class_ids = np.unique(train[CODE].to_numpy(dtype=str), return_inverse=True)
    vectorizer = TfidfVectorizer(
        analyzer="char_wb",
        ngram_range=(1, 5),
        sublinear_tf=True,
        max_features=MAX_WEIGHTS // len(classes),
    )
    features, asked = vectorizer.fit_transform(train[TEXT]), vectorizer.transform(test[TEXT])
    ones = np.ones(len(train))
    members = csr_matrix(
        (ones, (class_ids, np.arange(len(train)))), shape=(len(classes), len(train))
    )

    def report(method: str, seconds: float, decisions: np.ndarray) -> None:
        right = (classes[decisions.argmax(1)] == test[CODE].to_numpy()).mean()
        values = {"rows": len(train), "classes": len(classes), "right": round(float(right), 3)}
        print(
            json.dumps(
                {
                    "data": args.data,
                    "seed": args.seed,
                    "method": method,
                    "seconds": seconds,
                    **values,
                }
            )
        )

    for passes in args.passes:
        started = time.monotonic()
        found = kernels.fit_machines(features, members, ones, passes=passes)
        seconds = round(time.monotonic() - started, 1)
        report(
            f"kernel, {passes} passes", seconds, asked.astype(np.float32) @ found[:-1] + found[-1]
        )
    if args.exact:
        started = time.monotonic()
        machines = LinearSVC(tol=0.1, random_state=0).fit(features, train[CODE])
        report("LinearSVC", round(time.monotonic() - started, 1), machines.decision_function(asked))


if __name__ == "__main__":
    main()
