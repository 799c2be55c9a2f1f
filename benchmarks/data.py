"""Rows a second of preparing labels, reading prepared files, and turning them into arrays; prints one line of JSON.

Usage: python benchmarks/data.py [--rows N]
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from pathlib import Path

import pandas as pd

from histocoder.config import PrepareConfig
from histocoder.data.dataset import OccupationDataset, TokenizedTexts, join_language
from histocoder.data.examples import read_examples
from histocoder.data.key import read_key
from histocoder.data.labels import LabelRules, check_labels
from histocoder.data.prepare import formatter_of, prepare
from histocoder.data.table import read_table

TITLES = Path(__file__).parents[1] / "data" / "titles.csv"


def main() -> None:
    """Grow a file of the wanted size from the sample titles, and time each stage on it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the generated file (default: 1,000,000)")
    num_rows = parser.parse_args().rows
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        titles = pd.read_csv(TITLES, dtype=str)
        titles = titles[titles["hisco"].str.len() == 5].sample(num_rows, replace=True, random_state=0)
        numbers = pd.Series(range(num_rows), index=titles.index).astype(str)
        table = pd.DataFrame({"occ1": titles["title"] + " no " + numbers, "hisco_1": titles["hisco"]})
        table.to_csv(folder / "table.csv", index=False)
        config = PrepareConfig(str(folder / "table.csv"), ("hisco_1",), language="en")
        formatter = formatter_of(config)
        rates = {}

        def timed(stage: str, started: float) -> None:
            rates[stage] = round(num_rows / (time.perf_counter() - started))

        started = time.perf_counter()
        read = read_table(config.dataset, ["occ1", "hisco_1"])
        timed("read table", started)
        started = time.perf_counter()
        check_labels(read, ["hisco_1"], formatter, LabelRules())
        timed("check labels", started)
        started = time.perf_counter()
        prepare(config, folder / "out", say=lambda _: None)
        timed("prepare, all of it", started)

        key = read_key(folder / "out" / "key.csv")
        files = [folder / "out" / f"data_{part}.csv" for part in ("train", "val")]
        started = time.perf_counter()
        examples = read_examples(files, config.target_cols, formatter, key=key)
        timed("read prepared files", started)
        started = time.perf_counter()
        TokenizedTexts(join_language(examples.texts, examples.langs), max_len=128)
        timed("tokenise", started)
        started = time.perf_counter()
        OccupationDataset(
            examples.texts, examples.langs, examples.codes, formatter=formatter, classes=key.codes, max_len=128
        )
        timed("build dataset, all of it", started)
    print(
        json.dumps(
            {
                "benchmark": "data",
                "rows": num_rows,
                "rows_per_second": rates,
                "machine": platform.processor() or platform.machine(),
            }
        )
    )


if __name__ == "__main__":
    main()
