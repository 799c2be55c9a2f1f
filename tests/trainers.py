"""Trainers of tiny models on small tables, in the process of a test."""

from pathlib import Path
from typing import Any

import torch
from models import config_of

from histocoder.checkpoints.run_folder import RunFolder
from histocoder.config import TrainConfig
from histocoder.data.augment import Augmenter, WordList
from histocoder.data.dataset import OccupationDataset
from histocoder.data.example_files import ExampleFiles
from histocoder.data.examples import TRAIN, Examples
from histocoder.data.key import Key
from histocoder.data.store import EXAMPLES_FILE, store_examples
from histocoder.formatters import build_formatter
from histocoder.model import MixerModel, load_encoder
from histocoder.training.trainer import Trainer

MAX_LEN = 64
CPU = torch.device("cpu")


def stored(folder: Path, files: ExampleFiles, *, text_normalization: str = "none") -> Examples:
    """Files' rows, all of them to train on."""
    store_examples(folder, {TRAIN: files}, text_normalization=text_normalization)
    return Examples.open(folder / EXAMPLES_FILE, TRAIN)


def dataset(folder: Path, source: Path, target_cols: tuple[str, ...], *, noise: bool = False) -> OccupationDataset:
    formatter = build_formatter("hisco", num_blocks=len(target_cols))
    files = ExampleFiles((source,), target_cols, formatter)
    examples = stored(folder / "examples" / source.stem, files)
    key = Key.from_codes(examples.code_table)
    words = WordList({"journeyman": 1.0, "of": 2.0})
    augmenter = Augmenter(words, augmentation_prob=0.3, num_transformations=3, unk_lang_prob=0.25) if noise else None
    return OccupationDataset(examples, formatter=formatter, classes=key.codes, max_len=MAX_LEN, augmenter=augmenter)


def begin(
    folder: Path,
    data: OccupationDataset,
    *,
    precision: str,
    num_classes: int,
    device: torch.device = CPU,
    encoder_name: str = "tiny",
    **options: Any,
) -> Trainer:
    torch.manual_seed(0)
    encoder, formatter = load_encoder(encoder_name, max_len=MAX_LEN), build_formatter("hisco", num_blocks=1)
    config = config_of(encoder, formatter, [*map(str, range(num_classes))], target_cols=("hisco_1",))
    defaults = {"batch_size": 16, "num_epochs": 100, "min_steps": 0, "learning_rate": 3e-4, "warmup_pct": 0.05}
    train = TrainConfig(**{**defaults, "precision": precision, **options})
    run = RunFolder(folder)
    return Trainer(MixerModel(config, encoder), data, data, train, device=device, run=run, settings={})
