"""Trainers of tiny models on small tables, in the process of a test."""

from pathlib import Path
from typing import Any

import torch
from models import config_of

from histocoder.checkpoints.run_folder import RunFolder
from histocoder.config import TrainConfig
from histocoder.data.augment import Augmenter, WordList
from histocoder.data.dataset import OccupationDataset
from histocoder.data.example_writer import EXAMPLES_FILE, store_examples
from histocoder.data.examples import TRAIN, Examples
from histocoder.data.key import Key
from histocoder.data.labelled_files import LabelledFiles
from histocoder.data.prepared_folder import forget_earlier
from histocoder.formatters import build_formatter
from histocoder.model import MixerModel, load_encoder
from histocoder.training.trainer import Trainer

MAX_LEN = 64
CPU = torch.device("cpu")


def stored(folder: Path, files: LabelledFiles, *, text_normalization: str = "none") -> Examples:
    """Files' rows, all of them to train on."""
    store_examples(folder, {TRAIN: files}, text_normalization=text_normalization)
    forget_earlier(folder)
    return Examples.open(folder / EXAMPLES_FILE, TRAIN)


def dataset(
    folder: Path, source: Path, *target_cols: str, noise: bool = False
) -> OccupationDataset:
    """A table's rows, by default with the codes of its column `hisco_1`."""
    target_cols = target_cols or ("hisco_1",)
    formatter = build_formatter("hisco", num_blocks=len(target_cols))
    examples = stored(
        folder / "examples" / source.stem, LabelledFiles((source,), target_cols, formatter)
    )
    key = Key.from_codes(examples.code_table)
    words, how = (
        WordList({"journeyman": 1.0, "of": 2.0}),
        {"num_transformations": 3, "unk_lang_prob": 0.25},
    )
    augmenter = Augmenter(words, augmentation_prob=0.3, **how) if noise else None
    return OccupationDataset(
        examples, formatter=formatter, classes=key.codes, max_len=MAX_LEN, augmenter=augmenter
    )


def begin(
    folder: Path, data: OccupationDataset, encoder: str = "tiny", device: Any = CPU, **options: Any
) -> Trainer:
    """A run in fp32, unless it is said, that is validated on the data that it is trained on."""
    torch.manual_seed(0)
    model, formatter = (
        load_encoder(encoder, max_len=MAX_LEN),
        build_formatter("hisco", num_blocks=1),
    )
    model = MixerModel(config_of(model, formatter, data.classes, target_cols=("hisco_1",)), model)
    defaults = {
        "batch_size": 16,
        "num_epochs": 100,
        "min_steps": 0,
        "learning_rate": 3e-4,
        "warmup_pct": 0.05,
    }
    config = TrainConfig(**{**defaults, "precision": "fp32", **options})
    return Trainer(model, data, data, config, device=device, run=RunFolder(folder), settings={})
