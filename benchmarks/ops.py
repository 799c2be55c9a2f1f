"""What each C kernel is worth where it is used: prediction with an n-gram model, and fitting linear
machines.

Prints a line of JSON: for each kernel the rows per second of a mode with all kernels, those with
PyTorch's operators in its place, and their ratio, as medians of rounds in which both take turns.
`fit_machines` is the fitting of linear machines on the descriptions, beside scikit-learn's. What the
kernels of attention and dropout are worth in training is measured by train_step.py. An n-gram
model's decoder is too narrow for `attend_paths`, which is measured with a model of CANINE-s's sizes,
in the precision that `histocoder predict` takes.

Usage: python benchmarks/ops.py [--model demo/best] [--rows N] [--path-rows N] [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from predict import build_coder, descriptions
from sklearn.feature_extraction.text import TfidfVectorizer
from train_step import ROOT, WithoutKernel

from histocoder import Coder
from histocoder.model import layers, linear_expert, nearest, ngram
from histocoder.model.devices import device_name
from histocoder.ops import kernels, linear_svm

USES: dict[str, tuple[Any, str, str]] = {
    "hash_ngrams": (ngram, "hashed_ngrams", "flat"),
    "sum_weights": (linear_expert, "margins", "combined"),
    "nearest": (nearest, "forward", "combined"),
    "attention": (layers, "attention", "combined"),
}
"""Kernel -> the module and the function that use it, and a mode in which they do."""


def seconds(work: Callable[[], object]) -> float:
    """Return the seconds that a piece of work takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def compare(work: Callable[[], object], module: Any, without: Any, num_rounds: int) -> list[float]:
    """Return the median seconds of some work with a module's kernels, and with others in turn."""
    rounds: tuple[list[float], list[float]] = ([], [])
    for _ in range(num_rounds + 1):
        for used, taken in zip((kernels, without), rounds, strict=True):
            module.kernels = used
            taken.append(seconds(work))
    module.kernels = kernels
    return [statistics.median(taken[1:]) for taken in rounds]  # the first round warms up


def rates(num_rows: int, used: float, without: float) -> dict[str, float]:
    """Return the rows per second with a kernel and without it, and their ratio."""
    return {
        "rows_per_s": round(num_rows / used, 1),
        "without": round(num_rows / without, 1),
        "ratio": round(without / used, 2),
    }


class NoKernels:
    """The kernels of a machine that has none."""

    def library(self) -> None:
        """Return that there is no library."""


def fitting(texts: list[str], codes: pd.Series) -> Callable[[], object]:
    """Return the fitting of linear machines on character n-grams of descriptions."""
    vectorizer = TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 4), sublinear_tf=True)
    features = vectorizer.fit_transform(texts).astype(np.float32)
    class_ids = codes.astype("category").cat.codes.to_numpy()
    rows = np.arange(len(texts))
    return lambda: linear_svm.fit_machines(features, rows, class_ids, np.ones(len(texts)))


def main() -> None:
    """Measure one kernel after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=ROOT / "demo" / "best")
    parser.add_argument("--rows", type=int, default=3000, help="distinct descriptions at most")
    parser.add_argument(
        "--path-rows", type=int, default=48, help="rows for attend_paths (default: 48)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds (default: 3)")
    args = parser.parse_args()
    table = pd.read_csv(ROOT / "data" / "train.csv", dtype=str, keep_default_na=False)
    table = table.drop_duplicates("occ1").head(args.rows)
    texts = table["occ1"].tolist()
    langs = table["lang"].tolist()

    coder = Coder.from_pretrained(args.model)
    figures: dict[str, dict[str, Any]] = {}
    for name, (module, function, mode) in USES.items():

        def code(mode: str = mode) -> object:
            return coder.predict(texts, langs, mode=mode, progress=False)

        used, without = compare(code, module, WithoutKernel(function), args.rounds)
        figures[name] = {"mode": mode} | rates(len(texts), used, without)

    canine = build_coder("auto", tiny=False)
    path_texts = descriptions(args.path_rows)

    def code_paths() -> object:
        return canine.predict(path_texts, "en", mode="topk", progress=False)

    used, without = compare(code_paths, layers, WithoutKernel("attend_to_paths"), args.rounds)
    figures["attend_paths"] = {"mode": "topk"} | rates(len(path_texts), used, without)
    fit = fitting(texts, table["hisco_1"])
    used, without = compare(fit, linear_svm, NoKernels(), args.rounds)
    figures["fit_machines"] = {
        "s": round(used, 2),
        "without": round(without, 2),
        "ratio": round(without / used, 2),
    }
    print(json.dumps({"benchmark": "ops", **figures, "machine": device_name(coder.device)}))


if __name__ == "__main__":
    main()
