"""Rows per second of training at CANINE-s's sizes, compared with other ways of training; prints one
line of JSON.

`ours` trains as `finetune.py` does by default, augmentation included; `torch` leaves out the C
kernels, `attention` and `dropout` the one of that name. `reference` trains in fp32 with all inputs
padded to 128 positions, batches in random order, rows tokenized one by one, an unfused AdamW, and
the loss read in each step. `trainer` is Hugging Face's Trainer with bf16, rows grouped by length,
and trimmed batches. All have random weights, the same losses, and the rows of
`english_occupations.csv` (or data/train.csv if that is
missing) with the same noise. They take turns within the run, each in its own process and warmed up;
the figures are medians. The peak is the fastest of several 2048³ products (on a GPU 8192³) in the
precision of `ours`; their median shows how steady the machine was.

Usage: python benchmarks/train_step.py [--batch-size N] [--against reference trainer torch]
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from theirs import canine_of_transformers
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from histocoder import distributed
from histocoder.checkpoints.run_folder import RunFolder
from histocoder.config import ModelConfig, PrepareConfig, TrainConfig
from histocoder.data.augment import Augmenter, WordList
from histocoder.data.dataset import Batch, OccupationDataset
from histocoder.data.example_writer import EXAMPLES_FILE
from histocoder.data.examples import TRAIN, Examples
from histocoder.data.key import read_key
from histocoder.data.prepare import prepare
from histocoder.data.samplers import BatchIndices
from histocoder.formatters import build_formatter
from histocoder.log import log
from histocoder.model import MixerModel, MixerOutput, layers, load_encoder
from histocoder.model.devices import device_name
from histocoder.ops import kernels
from histocoder.text.tokenizers import tokenize
from histocoder.training.losses import mixed_loss
from histocoder.training.trainer import Trainer

log.setLevel("WARNING")
ROOT = Path(__file__).parents[1]
KERNELS = ("attention", "dropout")
"""Layers that have a kernel in C, which a side may leave out."""
ENGLISH = ROOT.parent / "shared" / "data" / "english_occupations.csv"


def train_config(batch_size: int, **changes: Any) -> TrainConfig:
    """Return OccCANINE's settings, with many epochs."""
    recipe = {"num_epochs": 1000, "min_steps": 0, "learning_rate": 2e-5, "warmup_pct": 0.05}
    return TrainConfig(batch_size=batch_size, **{**recipe, **changes})


class Data:
    """Training data, prepared as `finetune.py` prepares them, and the model's sizes; a hundred rows
    if `tiny`.
    """

    def __init__(self, folder: Path, *, tiny: bool = False) -> None:
        source = ENGLISH if ENGLISH.exists() else ROOT / "data" / "train.csv"
        self.encoder = load_encoder("tiny", max_len=128).config.to_diff_dict() if tiny else {}
        if tiny:
            folder.mkdir(exist_ok=True)
            table = folder / "table.csv"
            if not table.exists():  # processes that start together read the first one's
                with source.open(encoding="utf-8") as file:
                    table.write_text("".join(itertools.islice(file, 101)), encoding="utf-8")
            source = table
        config = PrepareConfig(
            str(source), ("hisco_1",), language="en", titles="none", zero_pad_codes=True
        )
        prepare(config, folder)
        self.formatter, self.key = (
            build_formatter("general", num_blocks=1),
            read_key(folder / "key.csv"),
        )
        form: dict[str, Any] = {
            "formatter": self.formatter,
            "classes": self.key.codes,
            "max_len": 128,
        }
        self.plain = OccupationDataset(Examples.open(folder / EXAMPLES_FILE, TRAIN), **form)
        texts = self.plain.descriptions(np.arange(len(self.plain)))
        noise = Augmenter(
            WordList.from_texts(texts),
            augmentation_prob=0.3,
            num_transformations=3,
            unk_lang_prob=0.25,
        )
        self.noisy = replace(self.plain, augmenter=noise)

    def model(self) -> MixerModel:
        """Return a model of CANINE-s's sizes, or a tiny one, with random weights."""
        torch.manual_seed(0)
        return MixerModel(
            ModelConfig(
                encoder=self.encoder,
                formatter=self.formatter.to_config(),
                vocab_size=self.formatter.vocab_size + 1,
                codes=self.key.codes,
                target_cols=("hisco_1",),
            )
        )


class Ours:
    """Training with histocoder's `Trainer`."""

    def __init__(
        self,
        data: Data,
        config: TrainConfig,
        device: torch.device,
        folder: Path,
        *,
        freeze_encoder: bool = False,
    ) -> None:
        model = data.model()
        if freeze_encoder:
            model.freeze_encoder()
        options: dict[str, Any] = {"device": device, "run": RunFolder(folder), "settings": {}}
        self.trainer = Trainer(model, data.noisy, data.noisy, config, **options)
        self.trainer.model.train()
        self.rows = config.batch_size * distributed.world_size()
        self.epochs = self._batches()
        self.taken: list[Batch] = []

    def _batches(self) -> Iterator[Batch]:
        for epoch in range(1000):
            self.trainer.sampler.set_position(epoch, 0)
            for batch in self.trainer.train_loader:
                if batch.num_rows == self.rows:
                    yield batch

    def steps(self, count: int) -> float:
        """Take `count` steps; return rows per second over all processes."""
        started = time.perf_counter()
        for _ in range(count):
            self.taken.append(next(self.epochs))
            loss, _ = self.trainer.learner.train_step(self.taken[-1:])
        float(loss)
        return count * self.rows / (time.perf_counter() - started)

    def gflops(self, count: int) -> list[float]:
        """Measure matrix products in the precision of training; see `gflops`."""
        return gflops(self.trainer.device, self.trainer.model.dtype, count)

    def flops_per_row(self, count: int) -> float:
        """Count the operations of matrix products, forward and backward, by repeating the last
        steps.
        """
        attention = _CountedAttention
        attention.flops, kernels.AttentionKernel = 0, attention
        with FlopCounterMode(display=False) as counter:
            for batch in self.taken[-count:]:
                self.trainer.learner.train_step([batch])
        kernels.AttentionKernel = attention.__base__
        return (counter.get_total_flops() + attention.flops) / (count * self.rows)


class _CountedAttention(kernels.AttentionKernel):
    """Attention that counts its products: two in the forward pass, four in the backward pass."""

    flops = 0

    def forward(self, **kwargs: Any) -> Any:
        _CountedAttention.flops += 2 * self._flops_of_product()
        return super().forward(**kwargs)

    def backward(self, *args: Any) -> Any:
        _CountedAttention.flops += 4 * self._flops_of_product()
        return super().backward(*args)

    def _flops_of_product(self) -> int:
        call = self._call
        return 2 * call.batch * call.heads * call.num_queries * call.num_keys * call.dim


class PlainModel(nn.Module):
    """The same model with transformers' CANINE."""

    def __init__(self, model: MixerModel) -> None:
        super().__init__()
        model.encoder = canine_of_transformers(model.encoder)
        self.model = (
            model  # without an attribute `config`, which transformers' Trainer would change
        )

    def forward(self, input_ids: Tensor, targets: Tensor, *, masked: bool) -> MixerOutput:
        """Compute the logits of decoder and flat head; the decoder attends to padding unless
        `masked`.
        """
        mask = input_ids.ne(0)
        encoded = self.model.encoder(input_ids=input_ids, attention_mask=mask.float())
        logits = self.model.decoder(
            targets[:, :-2], encoded.last_hidden_state, mask if masked else None
        )
        return MixerOutput(logits, self.model.classify(encoded.pooler_output))


class Reference:
    """Training as the reference does it."""

    def __init__(self, data: Data, config: TrainConfig, device: torch.device) -> None:
        self.data, self.config, self.batch_size, self.device = (
            data,
            config,
            config.batch_size,
            device,
        )
        self.model = PlainModel(data.model().to(device)).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-5, foreach=False)
        self.rng = np.random.default_rng(0)

    def steps(self, count: int) -> float:
        """Take `count` steps; return rows per second."""
        started = time.perf_counter()
        for _ in range(count):
            rows = self.rng.permutation(len(self.data.noisy))[: self.batch_size]
            batch = _share(self.data.noisy, rows).to(self.device)
            texts = self.data.noisy.examples.inputs.texts(rows)
            ids = [
                tokenize([text], max_len=128).pad(np.arange(1), max_len=128, num_positions=128)
                for text in texts
            ]
            output = self.model(
                torch.from_numpy(np.concatenate(ids)).to(self.device), batch.targets, masked=False
            )
            loss = mixed_loss(output, batch, self.model.model.config, self.config)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            loss.item()
        return count * self.batch_size / (time.perf_counter() - started)


class HuggingFace:
    """Training with `transformers.Trainer`, as a careful user would set it up."""

    def __init__(self, data: Data, config: TrainConfig, folder: Path, *, bf16: bool) -> None:
        self.data, self.config, self.batch_size = data, config, config.batch_size
        self.folder, self.bf16 = folder, bf16
        self.model = PlainModel(data.model())

    def steps(self, count: int) -> float:
        """Take two steps, then `count`; return rows per second of the latter."""
        from transformers import Trainer, TrainerCallback, TrainingArguments

        marks, config, model_config = list[float](), self.config, self.model.model.config

        class Clock(TrainerCallback):
            def on_step_end(self, *_: Any, **__: Any) -> None:
                marks.append(time.perf_counter())

        class MixerTrainer(Trainer):
            def compute_loss(self, model: nn.Module, inputs: dict[str, Any], **_: Any) -> Tensor:
                batch: Batch = inputs["batch"].to(inputs["device_of"].device)
                return mixed_loss(
                    model(batch.input_ids, batch.targets, masked=True), batch, model_config, config
                )

        noisy = self.data.noisy
        trainer = MixerTrainer(
            model=self.model,
            args=TrainingArguments(
                output_dir=str(self.folder),
                per_device_train_batch_size=self.batch_size,
                max_steps=count + 2,
                learning_rate=2e-5,
                bf16=self.bf16,
                use_cpu=not torch.cuda.is_available(),
                train_sampling_strategy="group_by_length",
                logging_strategy="no",
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                remove_unused_columns=False,
                dataloader_drop_last=True,
                seed=random.randrange(1000),
            ),
            train_dataset=_Lengths(noisy),
            data_collator=lambda items: {
                "batch": _share(noisy, np.array([item["row"] for item in items])),
                "device_of": torch.zeros(1),
            },
            callbacks=[Clock()],
        )
        trainer.train()
        return count * self.batch_size / (marks[-1] - marks[1])


class _Lengths(torch.utils.data.Dataset):
    """Row numbers with lengths, for the Trainer's sampler."""

    def __init__(self, data: OccupationDataset) -> None:
        self.lengths = data.lengths().tolist()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"row": row, "input_ids": range(self.lengths[row])}


def _share(data: OccupationDataset, rows: np.ndarray) -> Batch:
    """Return rows as a batch."""
    return data[
        BatchIndices(rows=rows, epoch=0, num_rows=len(rows), num_target_blocks=1, weight=1.0)
    ]


def gflops(device: torch.device, dtype: torch.dtype, count: int) -> list[float]:
    """Return the GFLOP/s of `count` matrix products."""
    size = (
        8192 if device.type == "cuda" else 2048
    )  # large, so that the launch takes a negligible part
    a = torch.randn(size, size, device=device).to(dtype)

    def once() -> float:
        started = time.perf_counter()
        (a @ a)[0, 0].item()
        return time.perf_counter() - started

    return [2 * size**3 / once() / 1e9 for _ in range(count)]


class WithoutKernel:
    """The kernels as the model's layers see them, of which one layer's is left out."""

    def __init__(self, layer: str) -> None:
        self.layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(kernels, name)

    def supports(self, x: Tensor) -> bool:
        """Return whether there is a kernel for a tensor, for another layer than the one."""
        return sys._getframe(1).f_code.co_name != self.layer and kernels.supports(x)


class Side:
    """One of the ways of training in its own process, since memory allocation differs between
    processes.
    """

    def __init__(self, name: str, args: argparse.Namespace, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._end, other = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(other, name, args, folder), daemon=True
        )
        self._process.start()

    def ask(self, what: str, count: int) -> Any:
        """Call a method of the side with a number of steps; return the result."""
        self._end.send((what, count))
        return self._end.recv()


def _serve(end: Connection, name: str, args: argparse.Namespace, folder: Path) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = Data(folder / name, tiny=args.tiny)
    config = train_config(args.batch_size, precision=args.precision)
    if name == "torch":
        kernels.library = lambda: None
    if name in KERNELS:
        layers.kernels = WithoutKernel(name)  # type: ignore[assignment]
    side: Any
    if name == "reference":
        side = Reference(data, config, device)
    elif name == "trainer":
        side = HuggingFace(data, config, folder / name / "trainer", bf16=args.precision != "fp32")
    else:
        side = Ours(data, config, device, folder / name)
    while True:
        try:
            what, count = end.recv()
        except EOFError:  # the other side has ended
            return
        end.send(
            torch.cuda.max_memory_allocated() / 1e9
            if what == "peak_gpu_gb"
            else getattr(side, what)(count)
        )


def main() -> None:
    """Measure all sides in turns."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch-size", type=int, default=64, help="rows per step (default: 64)")
    parser.add_argument(
        "--steps",
        type=int,
        default=16,
        help="steps per side and round, 1 of the reference (default: 16)",
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds (default: 3)")
    parser.add_argument("--precision", default="auto", help="precision of `ours` (default: auto)")
    parser.add_argument(
        "--against",
        nargs="*",
        default=["reference", "trainer"],
        choices=("reference", "trainer", "torch", *KERNELS),
    )
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny model on a hundred rows, to try the program"
    )
    args = parser.parse_args()
    counts = {"ours": args.steps} | {
        side: 1 if side == "reference" else args.steps for side in args.against
    }
    rates: dict[str, list[float]] = {name: [] for name in counts}
    first_s: dict[str, float] = {}
    products: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        sides = {side: Side(side, args, Path(name)) for side in counts}
        for side, count in counts.items():
            started = time.perf_counter()
            sides[side].ask("steps", min(count, 2))
            first_s[side] = time.perf_counter() - started
            sides[side].ask("steps", count)
        for _ in range(args.rounds):
            for side, count in counts.items():
                rates[side].append(sides[side].ask("steps", count))
            products += sides["ours"].ask("gflops", 10)
        flops = sides["ours"].ask("flops_per_row", args.rounds * args.steps)
        memory = {side: sides[side].ask("peak_gpu_gb", 0) for side in counts}
    median = {side: statistics.median(values) for side, values in rates.items()}
    result = {
        "benchmark": "train_step",
        "batch_size": args.batch_size,
        "rows_per_s": {side: round(rate, 1) for side, rate in median.items()},
        "ratio": {
            side: round(median["ours"] / rate, 2) for side, rate in median.items() if side != "ours"
        },
        "first_two_steps_s": {side: round(seconds, 1) for side, seconds in first_s.items()},
        "gflop_per_row": round(flops / 1e9, 2),
        "gpu_memory_gb": {side: round(gb, 2) for side, gb in memory.items()},
        "kernels": kernels.library() is not None,
        "peak_gflops": round(max(products)),
        "share_of_peak": round(median["ours"] * flops / 1e9 / max(products), 3),
        "median_gflops": round(statistics.median(products)),
        "machine": device_name(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "torch": torch.__version__,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
