"""Time and memory of coding on Ray and Spark without a model, by number of rows: python benchmarks/scale.py

The rows pass through Arrow twice: to find the distinct descriptions, and to add their codes. Each size runs in its own
process, which reads the rows in blocks as workers do. Times are processor time of all threads.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa

from histocoder.config import PredictConfig
from histocoder.inference.engines import Distinct, Job, by_key

BLOCK_ROWS = 1_000_000
SIZES = (
    (1_000_000, 20_000),
    (4_000_000, 20_000),
    (4_000_000, 200_000),
    (4_000_000, 2_000_000),
    (16_000_000, 2_000_000),
)
CODES = {
    "hisco_1": pa.string(),
    "prob_1": pa.float64(),
    "hisco_2": pa.string(),
    "prob_2": pa.float64(),
    "conf": pa.float64(),
}


def block(number: int, rows: int, distinct: int) -> pa.Table:
    """Return a block of rows with descriptions of 25 characters in two languages."""
    places = np.random.default_rng(number).integers(0, distinct, rows)
    texts = pa.array([f"occupation number {place:07d}" for place in places.tolist()])
    return pa.table({"occ1": texts, "lang": pa.array(np.array(["da", "en"])[places % 2])})


def coded(pairs: pa.Table) -> pa.Table:
    """Return descriptions with codes, as `Job.code` does with a model."""
    for name, kind in CODES.items():
        column = pa.repeat(pa.scalar("61110" if kind == pa.string() else 0.5, kind), len(pairs))
        pairs = pairs.append_column(name, column)
    return pairs


def measure(rows: int, distinct: int) -> None:
    """Print time and memory of one size as a row of a Markdown table."""
    job = Job("", PredictConfig(language_col="lang"), "cpu", "fp32", CODES, 10_000)
    found, seconds, block_rows = Distinct(job.chunk_rows), np.zeros(3), min(rows, BLOCK_ROWS)
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(rows // block_rows):
        table = block(number, block_rows, distinct)
        times = [time.process_time()]
        pairs = job.distinct(table)
        times.append(time.process_time())
        found.add(pairs)
        times.append(time.process_time())
        seconds[:2] += np.diff(times)
    before = time.process_time()
    codes = by_key(pa.concat_tables(map(coded, found.chunks())))
    seconds[1] += time.process_time() - before
    for number in range(rows // block_rows):
        table = block(number, block_rows, distinct)
        before = time.process_time()
        job.add(table, codes)
        seconds[2] += time.process_time() - before
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) / 1e6
    print(
        f"| {rows / 1e6:g} million | {len(codes):,} | {rows / seconds[0] / 1e6:.2f} | {seconds[1]:.1f} | "
        f"{rows / seconds[2] / 1e6:.2f} | {codes.nbytes / len(codes):.0f} | {memory:.1f} |",
        flush=True,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", nargs=2, type=int, metavar=("ROWS", "DISTINCT"))
    size = parser.parse_args().size
    if size:
        measure(*size)
    else:
        print(
            "| rows | distinct | finding, million rows/s | merging, s | joining, million rows/s | bytes of one | GB |"
        )
        print("|---|---|---|---|---|---|---|")
        for rows, distinct in SIZES:
            subprocess.run([sys.executable, __file__, "--size", str(rows), str(distinct)], check=True)
