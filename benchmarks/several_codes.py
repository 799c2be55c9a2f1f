"""Coding where rows may have several codes: rows per second of the modes, and what it changes that
`combined` does not ask the decoder about everything. Prints a line of JSON for each table.

The model is one of two or more columns of codes, such as that of `make demo`. `different` are
descriptions whose codes are others when the decoder is asked about all candidates of all rows,
`conf_mean` and `conf_max` the differences of confidence. Rates are medians of rounds in which the
modes take turns, on distinct descriptions.

Usage: python benchmarks/several_codes.py --model demo/best [TABLE:LANGUAGE ...] [--rows N]
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
from laptop import rates
from train_step import ROOT

from histocoder import Coder
from histocoder.inference import combined

TABLES = (f"{ROOT / 'data' / 'train.csv'}:lang", f"{ROOT / 'data' / 'val.csv'}:lang")


def differences(coder: Coder, texts: list[str], langs: list[str] | str) -> dict[str, float]:
    """Compare the answers with those of a decoder that is asked about everything."""
    answer = coder.predict(texts, langs, mode="combined", progress=False)
    weights = coder.model.config.experts
    share = combined.MIN_RELATIVE_SHARE
    asks_all = {name: weight for name, weight in weights.items() if name != "sure"}
    try:
        coder.model.config = replace(coder.model.config, experts=asks_all)
        combined.MIN_RELATIVE_SHARE = 1e-30
        full = coder.predict(texts, langs, mode="combined", progress=False)
    finally:
        coder.model.config = replace(coder.model.config, experts=weights)
        combined.MIN_RELATIVE_SHARE = share

    columns = coder.model.config.code_columns(coder.formatter.num_blocks)
    is_other = (answer[columns].fillna("") != full[columns].fillna("")).any(axis=1)
    conf = (answer["conf"] - full["conf"]).abs()
    return {
        "different": int(is_other.sum()),
        "conf_mean": round(float(conf.mean()), 5),
        "conf_max": round(float(conf.max()), 3),
    }


def main() -> None:
    """Measure one table after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="*", default=TABLES, help="table, and language or column")
    parser.add_argument("--model", type=Path, default=ROOT / "demo" / "best")
    parser.add_argument("--rows", type=int, default=3000, help="distinct descriptions at most")
    parser.add_argument("--rounds", type=int, default=3, help="rounds (default: 3)")
    args = parser.parse_args()
    coder = Coder.from_pretrained(args.model)
    for name in args.tables:
        path, _, language = name.rpartition(":")
        table = pd.read_csv(path, dtype=str, keep_default_na=False)
        table = table.drop_duplicates("occ1").head(args.rows)
        texts = table["occ1"].tolist()
        langs = table[language].tolist() if language in table else language
        result = {
            "benchmark": "several_codes",
            "data": Path(path).name,
            "rows": len(texts),
            "rows_per_s": rates(args.model, texts, langs, args.rounds),
            **differences(coder, texts, langs),
        }
        print(json.dumps(result))


if __name__ == "__main__":
    main()
