"""Rows per second of prediction, compared with the same model run as OccCANINE runs it; prints one
line of JSON.

The model has CANINE-s's sizes, random weights and 1,919 codes; all descriptions are distinct. The
reference pads inputs to 128 positions, computes in fp32, decodes the whole prefix again at each
step, and searches the trie one node at a time. Both sides take turns within the run; the figures
are medians. `with_repeats` uses the rows of the file with their repeats: histocoder computes each
distinct description once, the reference all rows.

Usage: python benchmarks/predict.py [--precision fp32] [--rows N] [--modes flat greedy topk full]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from theirs import canine_of_transformers

from histocoder import Coder
from histocoder.config import PRECISIONS, ModelConfig
from histocoder.formatters import BOS, build_formatter
from histocoder.model import MixerModel, load_encoder
from histocoder.model.devices import device_name
from histocoder.text.tokenizers import join_language, tokenize

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared"
NUM_CODES, REFERENCE_BATCH = 1919, 32


def codes() -> tuple[str, ...]:
    """Return 1,919 codes: HISCO's if its list is available, else generated ones of a similar
    distribution.
    """
    path = SHARED / "reference" / "hisco_codes.csv"
    if path.exists():
        return tuple(pd.read_csv(path, dtype=str)["hisco"])
    groups = [f"{i:03}" for i in range(10, 999, 4)]
    return tuple(f"{groups[i % len(groups)]}{i // len(groups) * 5:02}" for i in range(NUM_CODES))


def descriptions(num_rows: int, *, distinct: bool = True) -> list[str]:
    """Return real descriptions, or those of the sample data; only distinct ones, or with
    repeats.
    """
    path = SHARED / "data" / "english_occupations.csv"
    texts = pd.read_csv(path if path.exists() else ROOT / "data" / "train.csv", dtype=str)["occ1"]
    texts = texts.drop_duplicates() if distinct else texts
    return texts.sample(min(num_rows, len(texts)), random_state=0).tolist()


def build_coder(precision: str, *, tiny: bool) -> Coder:
    """Return a coder with a model of CANINE-s's sizes, or a tiny one with a hundred codes, and
    random weights.
    """
    torch.manual_seed(0)
    formatter = build_formatter("hisco", num_blocks=5)
    config = ModelConfig(
        encoder=load_encoder("tiny", max_len=128).config.to_diff_dict() if tiny else {},
        formatter=formatter.to_config(),
        vocab_size=formatter.vocab_size + 1,
        codes=codes()[: 100 if tiny else None],
        target_cols=tuple(f"hisco_{i + 1}" for i in range(5)),
    )
    return Coder(MixerModel(config), precision=precision)


class Reference:
    """The same model, run as the reference runs it."""

    def __init__(self, coder: Coder) -> None:
        self.model, self.device = coder.model, coder.device
        self.encoder = canine_of_transformers(coder.model.encoder)
        self.blocks = [coder.formatter.system.to_block(code) for code in coder.codes]

    def encode(self, texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode texts, padded to 128 positions."""
        tokens = tokenize(join_language(texts, ["en"] * len(texts)), max_len=128)
        ids = tokens.pad(np.arange(len(texts)), max_len=128, num_positions=128)
        input_ids = torch.from_numpy(ids).to(self.device)
        output = self.encoder(input_ids=input_ids, attention_mask=input_ids.ne(0).float())
        return output.last_hidden_state, output.pooler_output

    @torch.no_grad()
    def flat(self, texts: list[str]) -> None:
        """Predict with the flat head."""
        for i in range(0, len(texts), REFERENCE_BATCH):
            self.model.linear_decoder(
                self.encode(texts[i : i + REFERENCE_BATCH])[1]
            ).sigmoid().cpu()

    @torch.no_grad()
    def greedy(self, texts: list[str]) -> None:
        """Decode greedily in 26 steps, each from the whole prefix."""
        for i in range(0, len(texts), REFERENCE_BATCH):
            memory, _ = self.encode(texts[i : i + REFERENCE_BATCH])
            tokens = torch.full((len(memory), 1), BOS, device=self.device)
            for _ in range(26):
                best = (
                    self.model.decoder(tokens, memory)[:, -1].softmax(-1).argmax(-1, keepdim=True)
                )
                tokens = torch.cat([tokens, best], dim=1)
            tokens.cpu()

    @torch.no_grad()
    def full(self, texts: list[str]) -> None:
        """Compute each node of the trie, one after the other."""
        memory, _ = self.encode(texts)
        nodes = sorted(
            {tuple(block[:depth]) for block in self.blocks for depth in range(len(block))}
        )
        for prefix in nodes:
            tokens = torch.tensor([[BOS, *prefix]], device=self.device).expand(len(memory), -1)
            self.model.decoder(tokens, memory)[:, -1].softmax(-1).cpu()


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that `work` takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def compare(coder: Coder, mode: str, args: argparse.Namespace) -> dict[str, float]:
    """Measure both sides in turns, then histocoder on rows with repeats."""
    reference, texts = Reference(coder), descriptions(args.rows)
    searches = mode in ("topk", "full")
    their_texts = texts[: args.full_rows if searches else args.rows // 4]
    our_texts = texts[: 32 * args.full_rows] if searches else texts
    run_theirs = partial(reference.full if searches else getattr(reference, mode), their_texts)
    predict = partial(coder.predict, lang="en", mode=mode, progress=False)
    predict(texts[:8])  # to warm up
    ours, theirs = [], []
    for _ in range(1 if searches else args.rounds):
        theirs.append(len(their_texts) / timed(run_theirs))
        if coder.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(coder.device)
        ours.append(len(our_texts) / timed(partial(predict, our_texts)))
    mine, their = statistics.median(ours), statistics.median(theirs)
    repeating = descriptions(args.repeating_rows, distinct=False)
    with_repeats = len(repeating) / timed(partial(predict, repeating))
    return {
        "rows_per_s": round(mine, 2),
        "gpu_memory_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2),
        "reference": round(their, 4),
        "ratio": round(mine / their, 1),
        "rows_per_s_with_repeats": round(with_repeats, 2),
        "ratio_with_repeats": round(with_repeats / their, 1),
    }


def main() -> None:
    """Compare both sides in each mode."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows", type=int, default=256, help="descriptions per round (default: 256)"
    )
    parser.add_argument(
        "--full-rows", type=int, default=2, help="rows of the reference's full search (default: 2)"
    )
    parser.add_argument(
        "--repeating-rows",
        type=int,
        default=12_000,
        help="rows with repeats (default: 12,000, all)",
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds (default: 3)")
    parser.add_argument(
        "--precision",
        default="auto",
        choices=PRECISIONS,
        help="histocoder's precision (default: auto)",
    )
    parser.add_argument("--modes", nargs="+", default=["flat", "greedy", "topk", "full"])
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny model with a hundred codes, to try the program"
    )
    args = parser.parse_args()
    coder = build_coder(args.precision, tiny=args.tiny)
    results = {mode: compare(coder, mode, args) for mode in args.modes}
    print(
        json.dumps(
            {
                "benchmark": "predict",
                "precision": coder.precision,
                "modes": results,
                "machine": device_name(coder.device),
                "torch": torch.__version__,
            }
        )
    )


if __name__ == "__main__":
    main()
