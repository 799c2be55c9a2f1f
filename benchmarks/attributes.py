"""Status, relation and product of held-out Dutch titles, and HISCLASS from what is predicted.

A fifth of the distinct titles is held out, as in `accuracy.py`. One model learns codes and
attributes together. Prints JSON lines: accuracy and mean F1 of each attribute, by the model, by
always none, and by a linear support vector machine for each attribute; then, of the titles that the
table of classes gives a HISCLASS by their true code, status, relation and product, the share to
which each way gives the same one, and the share of all titles that it gives any.

python benchmarks/attributes.py
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd
from accuracy import CODE, ROOT, TEXT, read, run, split
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.svm import LinearSVC

from histocoder import Coder
from histocoder.classes.crosswalk import Crosswalk
from histocoder.config.prediction import ClassOptions
from histocoder.evaluation.scores import attribute_scores

ATTRIBUTES = ["status", "relation", "product"]


def print_attributes(train: pd.DataFrame, test: pd.DataFrame, found: pd.DataFrame) -> None:
    """Print how right each attribute is, by the model, by always none, and by a support vector
    machine.
    """
    vectorizer = TfidfVectorizer(analyzer="char_wb", ngram_range=(1, 5), sublinear_tf=True)
    features, others = vectorizer.fit_transform(train[TEXT]), vectorizer.transform(test[TEXT])
    for name in ATTRIBUTES:
        true = test[name].to_numpy()
        answers = {"model": found[name].fillna("").to_numpy(), "none": np.full(len(test), "")}
        answers["svm"] = LinearSVC(random_state=0).fit(features, train[name]).predict(others)
        of_stated = {
            way: float((answer == true)[true != ""].mean()) for way, answer in answers.items()
        }
        for way, answer in answers.items():
            values = {
                **vars(attribute_scores(true, answer)),
                "accuracy_where_stated": of_stated[way],
            }
            print_line(attribute=name, categories=len(set(true) - {""}), by=way, **values)


def print_classes(table: Path, test: pd.DataFrame, found: pd.DataFrame) -> None:
    """Print how right HISCLASS is by predicted and by true codes, with and without attributes."""
    crosswalk = Crosswalk(table, ClassOptions(value_cols=("hisclass",)))

    def classes(codes: pd.DataFrame, of_attributes: pd.DataFrame, names: list[str]) -> np.ndarray:
        columns = [
            of_attributes[name] if name in names else [None] * len(test) for name in ATTRIBUTES
        ]
        rows = zip(codes[CODE], *columns, strict=True)
        return np.array([crosswalk.find(*row)[0].value for row in rows], dtype=object)

    found = found.astype(object).where(found.notna(), None)
    true, no_class = classes(test, test, ATTRIBUTES), np.array(None, dtype=object)
    has_class, ways = true != no_class, ([], ATTRIBUTES[:1], ATTRIBUTES)
    for codes, name in ((found, "predicted"), (test, "true")):
        for of_attributes, kind in ((found, "predicted"), (test, "true")):
            for names in ways[int(kind == "true") :]:
                given = classes(codes, of_attributes, names)
                same = float((given == true)[has_class].mean())
                without = (
                    float((given == no_class)[~has_class].mean()) if not has_class.all() else None
                )
                coverage = {
                    "given": float((given != no_class).mean()),
                    "given_by_truth": float(has_class.mean()),
                }
                said = f"{kind} {', '.join(names)}" if names else "none"
                print_line(
                    hisclass_by=f"{name} code",
                    attributes=said,
                    same=same,
                    none_where_none=without,
                    **coverage,
                )


def print_line(**values: object) -> None:
    shown = {
        name: round(value, 4) if isinstance(value, float) else value
        for name, value in values.items()
    }
    print(json.dumps(shown), flush=True)


def main() -> None:
    """Train a model, and measure it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shared", type=Path, default=ROOT.parent / "shared" / "data", help="folder of the table"
    )
    parser.add_argument(
        "--classes", type=Path, default=ROOT.parent / "shared" / "reference" / "hsn_classes.csv"
    )
    parser.add_argument("--size", type=int, help="titles to train on (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, help="measure this model, instead of training one")
    parser.add_argument(
        "--flags", nargs=argparse.REMAINDER, default=[], help="for finetune.py; these come last"
    )
    args = parser.parse_args()
    train, test = split(read("dutch", args.shared), seed=args.seed, size=args.size)
    with tempfile.TemporaryDirectory() as name:
        folder, started = Path(name), time.monotonic()
        if args.model is None:
            train.to_csv(folder / "train.csv", index=False)
            command = (
                "finetune.py",
                "--dataset",
                folder / "train.csv",
                "--target-cols",
                CODE,
                "--language",
                "nl",
            )
            flags = (
                "--encoder",
                "ngram",
                "--no-report",
                "--seed",
                args.seed,
                "--save-path",
                folder / "out",
            )
            run(*command, "--attribute-cols", *ATTRIBUTES, *flags, *args.flags)
            print_line(rows=len(train), held_out=len(test), seconds=time.monotonic() - started)
        found = Coder.from_pretrained(args.model or folder / "out" / "best").predict(
            test[TEXT].tolist(), "nl"
        )
    print_line(codes_right=float((found[CODE].to_numpy() == test[CODE].to_numpy()).mean()))
    print_attributes(train, test, found)
    print_classes(args.classes, test, found)


if __name__ == "__main__":
    main()
