"""Settings that work, for each kind of start: what is not given on the command line comes from here."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path

from histocoder.config import ModelConfig
from histocoder.data.normalize import DEFAULT_NORMALIZATION
from histocoder.model import PRESETS, is_ngram


@dataclass(frozen=True)
class Recipe:
    """Defaults of the flags that depend on what a run starts from."""

    learning_rate: float
    """Peak of new weights: decoder and flat head."""
    encoder_learning_rate: float | None
    """Peak of the encoder; None: `learning_rate`."""
    table_learning_rate: float | None
    """Peak of an n-gram encoder's table; None: the encoder's."""
    batch_size: int | None
    """None: the script's."""
    num_epochs: int | None
    """None: the script's."""
    min_steps: int
    """Small tables are gone through more often than `num_epochs`, until there have been so many steps."""
    warmup_pct: float
    flat_loss: str
    pooling: str
    augmentation_prob: float
    unk_lang_prob: float
    text_normalization: str = DEFAULT_NORMALIZATION


REFERENCE = Recipe(
    learning_rate=2e-5,
    encoder_learning_rate=None,
    table_learning_rate=None,
    batch_size=None,
    num_epochs=None,
    min_steps=0,
    warmup_pct=0.05,
    flat_loss="bce-mean",
    pooling="auto",
    augmentation_prob=0.3,
    unk_lang_prob=0.25,
)
"""OccCANINE's own numbers, made for training on from its published model."""

RECIPES = {
    "reference": REFERENCE,
    "ngram": Recipe(
        learning_rate=1e-3,
        encoder_learning_rate=None,
        table_learning_rate=3e-3,
        batch_size=64,
        num_epochs=6,
        min_steps=600,
        warmup_pct=0.05,
        flat_loss="softmax",
        pooling="auto",
        augmentation_prob=0.0,
        unk_lang_prob=0.1,
        text_normalization="lower",
    ),
    "scratch": Recipe(
        learning_rate=1e-3,
        encoder_learning_rate=None,
        table_learning_rate=None,
        batch_size=64,
        num_epochs=15,
        min_steps=1000,
        warmup_pct=0.05,
        flat_loss="softmax",
        pooling="auto",
        augmentation_prob=0.3,
        unk_lang_prob=0.1,
    ),
    "pretrained": Recipe(
        learning_rate=1e-3,
        encoder_learning_rate=1e-4,
        table_learning_rate=None,
        batch_size=64,
        num_epochs=8,
        min_steps=600,
        warmup_pct=0.1,
        flat_loss="softmax",
        pooling="mean",
        augmentation_prob=0.0,
        unk_lang_prob=0.1,
    ),
    "frozen": Recipe(
        learning_rate=1e-3,
        encoder_learning_rate=None,
        table_learning_rate=None,
        batch_size=64,
        num_epochs=30,
        min_steps=2000,
        warmup_pct=0.05,
        flat_loss="softmax",
        pooling="mean",
        augmentation_prob=0.0,
        unk_lang_prob=0.0,
    ),
    "continued": Recipe(
        learning_rate=5e-5,
        encoder_learning_rate=None,
        table_learning_rate=None,
        batch_size=None,
        num_epochs=None,
        min_steps=0,
        warmup_pct=0.05,
        flat_loss="bce-mean",
        pooling="auto",
        augmentation_prob=0.3,
        unk_lang_prob=0.25,
    ),
}
"""By kind of start: an n-gram encoder, another preset from scratch, a bare pretrained encoder with new heads, a frozen
one, a trained model whose heads are kept, and the reference's numbers whatever the start."""


def kind_of_start(args: argparse.Namespace) -> str:
    """Which of the recipes a run's flags ask for."""
    if args.recipe == "reference":
        return "reference"
    if args.initial_checkpoint is not None and not args.only_encoder:
        return "continued"
    if args.freeze_encoder:
        return "frozen"
    own = _own_config(args.initial_checkpoint)
    if args.encoder == "ngram" or (own is not None and is_ngram(own.encoder)):
        return "ngram"
    if args.encoder in PRESETS and args.initial_checkpoint is None:
        return "scratch"
    return "pretrained"


def fill_in(args: argparse.Namespace) -> None:
    """Give the flags that were left out the values of their recipe.

    A model that is continued goes on being read and trained as it was, and its folder is the encoder that is named.
    """
    from histocoder.checkpoints.model_files import is_own_model

    recipe = asdict(RECIPES[kind_of_start(args)])
    own = _own_config(args.initial_checkpoint)
    if own is not None and own.fitted_to_validation and is_own_model(Path(args.initial_checkpoint).parent):
        args.initial_checkpoint = str(Path(args.initial_checkpoint).parent)  # which has not seen validation data
    if own is not None:
        args.encoder = args.initial_checkpoint
        names = ("text_normalization",) if args.only_encoder else ("flat_loss", "pooling", "text_normalization")
        recipe |= {name: getattr(own, name) for name in names}
    if hasattr(args, "train_data"):  # prepared files are large: train_mixer.py has batches and epochs of its own
        recipe |= {"batch_size": None, "num_epochs": None, "min_steps": 0}
    script = {"batch_size": args.script_batch_size, "num_epochs": args.script_num_epochs}
    if args.learning_rate is not None:  # one that is given is that of all weights
        recipe |= {"encoder_learning_rate": None, "table_learning_rate": None}
    if args.num_epochs is not None or args.max_steps is not None:
        recipe["min_steps"] = 0
    for name, value in recipe.items():
        if getattr(args, name, None) is None:
            setattr(args, name, script[name] if value is None and name in script else value)
    del args.script_batch_size, args.script_num_epochs


def _own_config(path: str | None) -> ModelConfig | None:
    """The config of a model of this program's."""
    from histocoder.checkpoints.model_files import (  # here, for histocoder.cli.parser imports this
        is_own_model,
        read_model_config,
    )

    return read_model_config(Path(path)) if path is not None and is_own_model(Path(path)) else None
