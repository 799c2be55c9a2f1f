"""Two ranks with one thread each against one process with two threads; prints one line of JSON.

Both run `Trainer.train_step` at CANINE-s's sizes, with random weights, over the same global batches
of `english_occupations.csv` (or data/train.csv if that is missing). They take turns within the run;
the figures are medians. `communication_s` is the time by which a step exceeds one without gradient
synchronization (DDP's `no_sync`): the communication that does not overlap with the backward pass.

The efficiency of N GPUs is computed. Each GPU computes for T = rows × operations per row /
(utilisation × peak) seconds per step. A ring all-reduce sends the V bytes of gradients 2 (N - 1) /
N times over a link of B bytes per second, with 2 log2(N) messages in sequence for each bucket of 25
MB:

    C = 2 (N - 1) / N × V / B + V / 25 MB × 2 log2(N) × latency

DDP overlaps it with the backward pass, two thirds of T. The efficiency, N GPUs' rows per second
divided by N times one GPU's, is therefore T / (T + max(0, C - 2/3 T)). B is the bandwidth of NVLink
within a node of 8 GPUs, and of the node's network beyond it. Waiting for the slowest rank is not
modelled. The output lists the assumptions.

Usage: python benchmarks/ddp.py [--batch-size N] [--steps N] [--rounds N] [--networks GB/s ...]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from train_step import Data, Ours, train_config

from histocoder import distributed

BUCKET_BYTES, GPUS_PER_NODE = 25e6, 8


class Side:
    """Processes that train together, on command."""

    def __init__(
        self, folder: Path, args: argparse.Namespace, *, num_ranks: int, num_threads: int
    ) -> None:
        common = {
            "WORLD_SIZE": num_ranks,
            "LOCAL_WORLD_SIZE": num_ranks,
            "OMP_NUM_THREADS": num_threads,
        }
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        self._batch_size = args.batch_size
        self._workers = []
        for rank in range(num_ranks):
            env = {
                name: str(value)
                for name, value in {**common, "RANK": rank, "LOCAL_RANK": rank}.items()
            }
            sizes = (
                "--batch-size",
                str(args.batch_size // num_ranks),
                *(["--tiny"] if args.tiny else []),
            )
            command = [sys.executable, __file__, "--worker", str(folder), *sizes]
            pipes: dict[str, Any] = {
                "stdin": subprocess.PIPE,
                "stdout": subprocess.PIPE,
                "text": True,
            }
            self._workers.append(subprocess.Popen(command, env={**os.environ, **env}, **pipes))
        self.gradient_bytes = max(
            self._answer(worker)["gradient_bytes"] for worker in self._workers
        )

    def seconds(self, num_steps: int, *, alone: bool = False) -> float:
        """Return the seconds per step; with `alone`, gradients are not synchronized."""
        for worker in self._workers:
            print(num_steps, int(alone), file=worker.stdin, flush=True)
        return self._batch_size / min(
            self._answer(worker)["rows_per_s"] for worker in self._workers
        )

    def close(self) -> None:
        """End the processes, together: they stop as soon as one of them has ended."""
        for worker in self._workers:
            worker.stdin.close()
        if any([worker.wait() for worker in self._workers]):
            raise SystemExit("a process failed")

    @staticmethod
    def _answer(worker: subprocess.Popen) -> dict[str, Any]:
        for line in worker.stdout:  # other lines are notices
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit(f"a process ended with {worker.wait()}")


def work(folder: Path, args: argparse.Namespace) -> None:
    """Run a process of a side: read the number of steps, and whether to take them alone, from each
    line of input.
    """
    device = distributed.start(device="cpu")
    ours = Ours(Data(folder, tiny=args.tiny), train_config(args.batch_size), device, folder)
    learner = ours.trainer.learner
    num_bytes = sum(4 * p.numel() for p in ours.trainer.model.parameters() if p.requires_grad)
    print(json.dumps({"gradient_bytes": num_bytes}), flush=True)
    for line in sys.stdin:
        num_steps, alone = map(int, line.split())
        with learner.strategy.accumulating() if alone else nullcontext():
            print(json.dumps({"rows_per_s": ours.steps(num_steps)}), flush=True)
    distributed.stop()


def free_port() -> int:
    """Return a free port of the loopback interface."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure both sides in turns."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        Data(folder, tiny=args.tiny)  # prepared once, before the processes start
        one = Side(folder, args, num_ranks=1, num_threads=2)
        two = Side(folder, args, num_ranks=2, num_threads=1)
        measures: dict[str, Callable[[int], float]] = {
            "one process": one.seconds,
            "two ranks": two.seconds,
            "two ranks alone": partial(two.seconds, alone=True),
        }
        for measure_seconds in measures.values():
            measure_seconds(2)
        found: dict[str, list[float]] = {side: [] for side in measures}
        for _ in range(args.rounds):
            for side, measure_seconds in measures.items():
                found[side].append(measure_seconds(args.steps))
        one.close()
        two.close()
    seconds = {side: statistics.median(values) for side, values in found.items()}
    return {
        "rows_per_s": {side: round(args.batch_size / value, 2) for side, value in seconds.items()},
        "ratio": round(seconds["one process"] / seconds["two ranks"], 3),
        "communication_s": round(seconds["two ranks"] - seconds["two ranks alone"], 3),
        "communication_share": round(1 - seconds["two ranks alone"] / seconds["two ranks"], 3),
        "gradient_mb": round(two.gradient_bytes / 1e6),
    }


def efficiency(
    num_gpus: int, num_bytes: float, args: argparse.Namespace, *, network: float
) -> float:
    """Return the computed efficiency; see the module's docstring."""
    compute = args.rows_per_gpu * args.gflop_per_row * 1e9 / (args.utilisation * args.peak * 1e12)
    bandwidth = 1e9 * (args.nvlink if num_gpus <= GPUS_PER_NODE else network)
    ring = 2 * (num_gpus - 1) / num_gpus * num_bytes / bandwidth
    waits = num_bytes / BUCKET_BYTES * 2 * math.log2(num_gpus) * args.latency * 1e-6
    return compute / (compute + max(0.0, ring + waits - 2 / 3 * compute))


def on_paper(gradient_mb: float, args: argparse.Namespace) -> dict[str, Any]:
    """Return the computed efficiency by network and number of GPUs, with gradients in fp32 and in
    bf16.
    """
    assumed = ("rows_per_gpu", "gflop_per_row", "peak", "utilisation", "nvlink", "latency")
    return {
        "assumed": {name: getattr(args, name) for name in assumed},
        "efficiency": {
            f"network of {network:g} GB/s a node": {
                f"{num_gpus} GPUs": {
                    form: round(
                        efficiency(num_gpus, share * gradient_mb * 1e6, args, network=network), 3
                    )
                    for form, share in (("fp32", 1.0), ("bf16", 0.5))
                }
                for num_gpus in (8, 64, 1024)
            }
            for network in args.networks
        },
    }


def main() -> None:
    """Measure two ranks, and compute the efficiency of GPUs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--batch-size", type=int, default=64, help="rows per global step (default: 64)"
    )
    parser.add_argument(
        "--steps", type=int, default=4, help="steps per side and round (default: 4)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds (default: 3)")
    parser.add_argument(
        "--rows-per-gpu", type=int, default=512, help="rows per step and GPU (default: 512)"
    )
    parser.add_argument(
        "--gflop-per-row",
        type=float,
        default=13.0,
        help="GFLOP per row, as train_step.py counts them (default: 13)",
    )
    parser.add_argument(
        "--peak",
        type=float,
        default=790.0,
        help="peak of a GPU in bf16, TFLOP/s (default: 790, an H200)",
    )
    parser.add_argument(
        "--utilisation", type=float, default=0.35, help="reached share of the peak (default: 0.35)"
    )
    parser.add_argument(
        "--nvlink", type=float, default=400.0, help="GB/s in a node of 8 GPUs (default: 400)"
    )
    parser.add_argument(
        "--networks",
        type=float,
        nargs="+",
        default=[25.0, 400.0],
        help="GB/s between nodes (default: 25 and 400)",
    )
    parser.add_argument(
        "--latency", type=float, default=5.0, help="microseconds per message (default: 5)"
    )
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny model on a hundred rows, to try the program"
    )
    args = parser.parse_args()
    if args.worker is not None:
        work(args.worker, args)
        return
    measured = measure(args)
    result = {
        "benchmark": "ddp",
        "batch_size": args.batch_size,
        **measured,
        "on_paper": on_paper(measured["gradient_mb"], args),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
