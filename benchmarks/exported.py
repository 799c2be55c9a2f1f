"""Rows per second of CPU time of a model in torch, and exported; prints one line of JSON.

The sides take turns on the same distinct descriptions; the figures are medians of the rounds.
`right` is the percentage of rows of --data for which exactly the right codes are predicted.

Usage: python benchmarks/exported.py --model out/best --data test.csv [--language en] [--rounds N]
[--threads N]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from histocoder import Coder
from histocoder.checkpoints.model_files import local_folder
from histocoder.data.examples import Examples
from histocoder.inference.onnx_coder import MODES, OnnxCoder
from histocoder.inference.onnx_export import export
from histocoder.inference.predictions import code_columns
from histocoder.model.devices import device_name


def read(path: str, coder: Coder, language: str) -> Examples:
    """Read the rows of a table with descriptions and codes."""
    table = pd.read_csv(path, dtype=str, keep_default_na=False)
    codes = table.reindex(columns=list(coder.model.config.target_cols)).replace("", None)
    return Examples.of(table["occ1"].tolist(), [language] * len(table), codes)


def right(side: Any, examples: Examples, mode: str) -> float:
    """Return the percentage of rows with exactly the right codes."""
    table = side.predict(examples.texts, examples.langs, mode=mode)
    found = table[list(code_columns(table))].to_numpy(dtype=object)
    pairs = zip(found, examples.codes.to_numpy(dtype=object), strict=True)
    same = [
        {c for c in ours if isinstance(c, str)} == {c for c in true if isinstance(c, str)}
        for ours, true in pairs
    ]
    return round(100 * sum(same) / len(same), 2)


def main() -> None:
    """Export the model, then measure all sides."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder of a run or a checkpoint")
    parser.add_argument("--data", required=True, help="CSV of descriptions (occ1) and codes")
    parser.add_argument(
        "--language", default="en", help="language of all descriptions (default: en)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default: 5)")
    parser.add_argument("--threads", type=int, default=1, help="threads per side (default: 1)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    coder = Coder.from_pretrained(local_folder(args.model), "cpu")
    examples = read(args.data, coder, args.language)
    texts = list(dict.fromkeys(examples.texts))
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder, "exported")
        export(coder, plain, examples.texts, examples.langs)
        size = sum(one.stat().st_size for one in plain.rglob("*") if one.is_file())
        sides: dict[str, Any] = {
            "torch": coder,
            "exported": OnnxCoder(plain, num_threads=args.threads),
        }
        modes = {}
        for mode in MODES:
            rates: dict[str, list[float]] = {name: [] for name in sides}
            for side in sides.values():
                side.predict(texts[:64], args.language, mode=mode)  # to warm up
            for _ in range(args.rounds):
                for name, side in sides.items():
                    started = time.process_time()
                    side.predict(texts, args.language, mode=mode)
                    rates[name].append(len(texts) / (time.process_time() - started))
            modes[mode] = {
                "rows_per_cpu_s": {
                    name: round(statistics.median(found), 1) for name, found in rates.items()
                },
                "right": {name: right(side, examples, mode) for name, side in sides.items()},
            }
    print(
        json.dumps(
            {
                "benchmark": "exported",
                "texts": len(texts),
                "threads": args.threads,
                "modes": modes,
                "megabytes": round(size / 1e6, 1),
                "machine": device_name(coder.device),
                "torch": torch.__version__,
            }
        )
    )


if __name__ == "__main__":
    main()
