"""Training data at scale: speed and memory of each stage on a generated file; prints one line of
JSON.

Each stage runs in its own process. `anonymous_mb` is its peak of anonymous memory (RssAnon,
sampled), which includes `imported_mb`, used by torch and the package before the stage began.
`max_rss_mb` also counts memory-mapped files.

Usage: python benchmarks/data.py [--rows N] [--dir DIR]
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from histocoder.config import PrepareConfig
from histocoder.data.augment import Augmenter, WordList
from histocoder.data.dataset import OccupationDataset
from histocoder.data.example_writer import EXAMPLES_FILE, store_examples
from histocoder.data.examples import TRAIN, Examples
from histocoder.data.key import read_key
from histocoder.data.labelled_files import LabelledFiles
from histocoder.data.labels import LabelRules
from histocoder.data.prepare import KEY_FILE, TRAIN_FILE, prepare
from histocoder.data.samplers import BucketSampler
from histocoder.formatters import build_formatter
from histocoder.formatters.classifications import HISCO_TITLES
from histocoder.log import log
from histocoder.training.data import some_descriptions

log.setLevel("WARNING")
GENERATED_AT_ONCE = 200_000
BATCH_SIZE, NUM_BATCHES, MAX_LEN = 128, 500, 128


def main() -> None:
    """Generate a file, and run each stage on it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows",
        type=int,
        default=1_000_000,
        help="rows of the generated file (default: 1,000,000)",
    )
    parser.add_argument(
        "--dir", help="where to put it, 250 bytes a row (default: the system's temporary folder)"
    )
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stage is not None:
        print(json.dumps(measured(lambda: STAGES[args.stage](args.folder))))
        return
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        generate(Path(name) / "table.csv", args.rows)
        stages = {stage: run_stage(stage, Path(name)) for stage in STAGES}
    machine = platform.processor() or platform.machine()
    print(
        json.dumps({"benchmark": "data", "rows": args.rows, "stages": stages, "machine": machine})
    )


def generate(path: Path, num_rows: int) -> None:
    """Write a table of titles from the sample data, with a different number in each row."""
    titles = pd.read_csv(HISCO_TITLES, dtype=str)
    titles = titles[titles["hisco"].str.len() == 5]
    rng = np.random.default_rng(0)
    for start in range(0, num_rows, GENERATED_AT_ONCE):
        numbers = np.arange(start, min(start + GENERATED_AT_ONCE, num_rows))
        part = titles.iloc[rng.integers(len(titles), size=len(numbers))]
        texts = part["title"].to_numpy() + " no " + numbers.astype(str).astype(object)
        frame = pd.DataFrame({"occ1": texts, "hisco_1": part["hisco"].to_numpy()})
        frame.to_csv(path, mode="a", header=start == 0, index=False)


def run_stage(stage: str, folder: Path) -> dict[str, float]:
    """Run a stage in a new process; return its figures."""
    command = [sys.executable, __file__, "--stage", stage, "--folder", str(folder)]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(result.stdout.splitlines()[-1])


def measured(stage: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Run a stage; return its figures and its memory."""
    imported = peak = anonymous_mb()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, anonymous_mb())

    watcher = threading.Thread(target=watch)
    watcher.start()
    figures = stage()
    done.set()
    watcher.join()
    max_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    memory = {"imported_mb": imported, "anonymous_mb": peak, "max_rss_mb": max_rss}
    return {**figures, **{name: round(value) for name, value in memory.items()}}


def anonymous_mb() -> float:
    """Return this process's anonymous memory in MB."""
    status = Path("/proc/self/status").read_text().split()
    return int(status[status.index("RssAnon:") + 1]) / 1024


def rate(num_rows: int, started: tuple[float, float]) -> dict[str, float]:
    """Return rows per second of wall-clock time and of processor time since `started`."""
    wall, cpu = time.perf_counter() - started[0], time.process_time() - started[1]
    return {"rows_per_second": round(num_rows / wall), "rows_per_cpu_second": round(num_rows / cpu)}


def now() -> tuple[float, float]:
    """Return the wall-clock time and the processor time."""
    return time.perf_counter(), time.process_time()


def config(folder: Path) -> PrepareConfig:
    """Return the settings to prepare the table with."""
    return PrepareConfig(str(folder / "table.csv"), ("hisco_1",), language="en", titles="none")


def training_files(folder: Path) -> LabelledFiles:
    """Return the prepared training rows, as finetune.py reads them."""
    rules, key = LabelRules(allow_short=True), read_key(folder / "out" / KEY_FILE)
    formatter = build_formatter("general", num_blocks=1)
    return LabelledFiles(
        (folder / "out" / TRAIN_FILE,), ("hisco_1",), formatter, key=key, rules=rules
    )


def prepare_table(folder: Path) -> dict[str, float]:
    """Prepare the table."""
    started = now()
    record = prepare(config(folder), folder / "out")
    return rate(sum(record["rows"].values()), started)


def store(folder: Path) -> dict[str, float]:
    """Read and check the prepared rows, and write them to `examples.arrow`, as train_mixer.py
    does.
    """
    started = now()
    store_examples(folder / "stored", {TRAIN: training_files(folder)}, text_normalization="none")
    path = folder / "stored" / EXAMPLES_FILE
    num_rows, num_bytes = len(Examples.open(path, TRAIN)), path.stat().st_size
    return {
        **rate(num_rows, started),
        "examples_mb": round(num_bytes / 1e6),
        "bytes_per_row": num_bytes // num_rows,
    }


def start_again(folder: Path) -> dict[str, float]:
    """Do what a second run does before its first batch: find and check the prepared data and the
    arrays.
    """
    started = time.perf_counter()
    prepare(config(folder), folder / "out")
    data = dataset(folder, augment=True)
    share = next(iter(sampler(data)))
    data[share]
    return {"seconds": round(time.perf_counter() - started, 2)}


def sample_an_epoch(folder: Path) -> dict[str, float]:
    """Draw the batches of an epoch, without their content, for rank 0 of 2."""
    data = dataset(folder, augment=True)
    started = time.perf_counter()
    batches = sampler(data, num_replicas=2)
    first = time.perf_counter()
    num_steps = sum(1 for _ in batches)
    return {
        "steps": num_steps,
        "setup_seconds": round(first - started, 2),
        "epoch_seconds": round(time.perf_counter() - first, 2),
    }


def collate(folder: Path, *, augment: bool) -> dict[str, float]:
    """Make batches of 128 rows."""
    data = dataset(folder, augment=augment)
    shares = [share for share, _ in zip(sampler(data), range(NUM_BATCHES), strict=False)]
    started = time.perf_counter()
    for share in shares:
        data[share]
    return {"ms_per_batch": round(1000 * (time.perf_counter() - started) / len(shares), 2)}


def dataset(folder: Path, *, augment: bool) -> OccupationDataset:
    """Return the training data, with the scripts' default noise if asked for."""
    examples = Examples.open(folder / "out" / EXAMPLES_FILE, TRAIN)
    form: dict[str, Any] = {
        "formatter": build_formatter("general", num_blocks=1),
        "max_len": MAX_LEN,
    }
    data = OccupationDataset(examples, classes=read_key(folder / "out" / KEY_FILE).codes, **form)
    if augment:
        words = WordList.from_texts(some_descriptions(data))
        data.augmenter = Augmenter(
            words, augmentation_prob=0.3, num_transformations=3, unk_lang_prob=0.25
        )
    return data


def sampler(data: OccupationDataset, *, num_replicas: int = 1) -> BucketSampler:
    """Return rank 0's sampler of batches of 128 rows per rank."""
    size = BATCH_SIZE * num_replicas
    return BucketSampler(
        data.lengths,
        data.num_target_blocks,
        batch_size=size,
        seed=0,
        rows=data.rows,
        num_replicas=num_replicas,
    )


STAGES: dict[str, Callable[[Path], dict[str, float]]] = {
    "prepare": prepare_table,
    "store": store,
    "start again": start_again,
    "sample an epoch": sample_an_epoch,
    "collate": lambda folder: collate(folder, augment=False),
    "collate with augmentation": lambda folder: collate(folder, augment=True),
}


if __name__ == "__main__":
    main()
