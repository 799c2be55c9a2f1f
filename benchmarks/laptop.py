"""What people wait for on a laptop: a first run, an n-gram model of a large table, and coding with it.

Prints a line of JSON. The table is the Dutch one, 107,749 distinct titles with 1,180 codes, a tenth of them for
validation; without it, data/train.csv. `train_s` is the whole command, with the experts and the refit.
`file_rows_per_s` is for the table's titles, start included. The rates of the modes are medians of rounds in which they
take turns. `peak_gflops` is that of matrix products in fp32.

Usage: python benchmarks/laptop.py [--epochs N] [--rows N] [--demo]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pandas as pd
import torch
from train_step import ROOT, gflops

from histocoder import Coder

DUTCH = ROOT.parent / "shared" / "data" / "dutch_titles.csv"
MODES = ("flat", "greedy", "combined")
DEMO = ("--language-col", "lang", "--target-cols", "hisco_1", "hisco_2", "--key", ROOT / "data" / "key.csv")


def seconds(*command: object) -> float:
    """Run a command with this Python; return the seconds that it takes."""
    started = time.perf_counter()
    done = subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}")
    return time.perf_counter() - started


def rates(model: Path, texts: list[str], language: str, num_rounds: int) -> dict[str, int]:
    """Return the rows per second of each mode."""
    coder = Coder.from_pretrained(model)
    found: dict[str, list[float]] = {mode: [] for mode in MODES}
    for _ in range(num_rounds + 1):
        for mode in MODES:
            started = time.perf_counter()
            coder.predict(texts, language, mode=mode, progress=False)
            found[mode].append(len(texts) / (time.perf_counter() - started))
    return {mode: round(statistics.median(rounds[1:])) for mode, rounds in found.items()}  # the first one warms up


def main() -> None:
    """Measure one thing after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5, help="epochs on the table (default: 5)")
    parser.add_argument("--max-steps", type=int, help="steps on the table (default: all of the epochs)")
    parser.add_argument("--rows", type=int, default=10_000, help="descriptions per round of a mode (default: 10,000)")
    parser.add_argument("--file-rows", type=int, default=100_000, help="rows of the file (default: 100,000)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds (default: 3)")
    parser.add_argument("--demo", action="store_true", help="also the training of make demo")
    args = parser.parse_args()
    source, language = (DUTCH, "nl") if DUTCH.exists() else (ROOT / "data" / "train.csv", "en")
    found: dict[str, object] = {"benchmark": "laptop", "data": source.name}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flags = {"dataset": source, "target-cols": "hisco_1", "language": language, "save-path": folder / "run"}
        flags |= {"encoder": "ngram", "num-epochs": args.epochs}
        flags |= {} if args.max_steps is None else {"max-steps": args.max_steps}
        train = [word for name, value in flags.items() for word in (f"--{name}", value)]
        found["train_s"] = round(seconds("finetune.py", *train, "--zero-pad-codes"), 1)
        model, predict = folder / "run" / "best", ("-m", "histocoder", "predict", "--model")
        starts = [seconds(*predict, model, "--language", language, "farmer") for _ in range(args.rounds)]
        found["start_s"] = round(statistics.median(starts), 2)
        texts = pd.read_csv(source, dtype=str, keep_default_na=False)["occ1"].drop_duplicates()
        table = folder / "table.csv"
        texts[: args.file_rows].to_csv(table, index=False)
        files = ("--input", table, "--output", folder / "coded.csv", "--language", language)
        found["file_rows_per_s"] = round(len(texts[: args.file_rows]) / seconds(*predict, model, *files))
        found["rows_per_s"] = rates(model, texts[: args.rows].tolist(), language, args.rounds)
        if args.demo:
            demo = ("--encoder", "ngram", "--num-epochs", 10, "--no-refit", "--titles", "none", *DEMO)
            data = ("--dataset", ROOT / "data" / "train.csv", "--save-path", folder / "demo")
            found["demo_s"] = round(seconds("finetune.py", *data, *demo), 1)
    found["peak_gflops"] = round(max(gflops(torch.device("cpu"), torch.float32, 5)))
    print(json.dumps({**found, "machine": f"{platform.processor()} ({torch.get_num_threads()} threads)"}))


if __name__ == "__main__":
    main()
