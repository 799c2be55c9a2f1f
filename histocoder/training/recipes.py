"""Recipes: defaults of settings for each kind of start."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

from histocoder.checkpoints.hub import is_on_hub, local_folder
from histocoder.checkpoints.model_files import is_own_model, read_model_config
from histocoder.config import ModelConfig, RunConfig
from histocoder.data.normalize import DEFAULT_NORMALIZATION
from histocoder.model import PRESETS, is_ngram

_Config = TypeVar("_Config", bound=RunConfig)


@dataclass(frozen=True)
class Recipe:
    """Defaults of settings that depend on what a run starts from; those of the fields are OccCANINE's own."""

    learning_rate: float = 2e-5  # peak learning rate of new weights: decoder and flat head
    encoder_learning_rate: float | None = None  # that of the encoder; None: `learning_rate`
    table_learning_rate: float | None = None  # that of an n-gram encoder's table; None: the encoder's
    batch_size: int = 128
    num_epochs: int = 5
    min_steps: int = 0  # epochs are repeated on small tables
    max_epoch_steps: int = 0  # most steps of an epoch: batches grow on large tables; 0: no limit
    warmup_pct: float = 0.05
    flat_loss: str = "bce-mean"
    pooling: str = "auto"
    augmentation_prob: float = 0.3
    unk_lang_prob: float = 0.25
    text_normalization: str = DEFAULT_NORMALIZATION


_NEW_HEADS = Recipe(
    learning_rate=1e-3,
    batch_size=64,
    num_epochs=8,
    min_steps=600,
    flat_loss="softmax",
    augmentation_prob=0.0,
    unk_lang_prob=0.1,
)
RECIPES = {
    "reference": Recipe(),
    "ngram": replace(
        _NEW_HEADS, num_epochs=5, max_epoch_steps=200, table_learning_rate=3e-3, text_normalization="lower"
    ),
    "scratch": replace(_NEW_HEADS, num_epochs=15, min_steps=1000, augmentation_prob=0.3),
    "pretrained": replace(_NEW_HEADS, encoder_learning_rate=1e-4, warmup_pct=0.1, pooling="mean"),
    "frozen": replace(_NEW_HEADS, num_epochs=30, min_steps=2000, pooling="mean", unk_lang_prob=0.0),
    "continued": Recipe(learning_rate=5e-5),
    "continued n-gram": replace(_NEW_HEADS, learning_rate=3e-4, table_learning_rate=1e-3, num_epochs=5, min_steps=0),
}
"""Recipes by kind of start: the reference's numbers whatever the start, an n-gram encoder, another preset from scratch,
a pretrained encoder with new heads, a frozen one, a trained model whose heads are kept, and one with n-grams."""


def kind_of_start(config: RunConfig) -> str:
    """Return the recipe that a run's settings ask for."""
    if config.recipe == "reference":
        return "reference"
    own = _own_config(config.initial_checkpoint)
    has_ngrams = is_ngram(own.encoder) if own is not None else config.encoder == "ngram"
    if config.initial_checkpoint is not None and not config.only_encoder:
        return "continued n-gram" if has_ngrams else "continued"
    if config.freeze_encoder:
        return "frozen"
    if has_ngrams:
        return "ngram"
    if config.encoder in PRESETS and config.initial_checkpoint is None:
        return "scratch"
    return "pretrained"


def fill_in(config: _Config) -> _Config:
    """Return a run's settings, with the recipe's values for those that are not given.

    A model that is fine-tuned further keeps its input form and its training settings; its folder becomes the encoder.
    """
    if config.initial_checkpoint is not None and is_on_hub(config.initial_checkpoint):
        config = replace(config, initial_checkpoint=str(local_folder(config.initial_checkpoint)))
    recipe = asdict(RECIPES[kind_of_start(config)])
    own = _own_config(config.initial_checkpoint)
    if own is not None:
        path = Path(str(config.initial_checkpoint))
        if own.fitted_to_validation and is_own_model(path.parent):
            path = path.parent  # which has not seen validation data
        config = replace(config, initial_checkpoint=str(path), encoder=str(path))
        names = ("text_normalization",) if config.only_encoder else ("flat_loss", "pooling", "text_normalization")
        recipe |= {name: getattr(own, name) for name in names}
    if config.learning_rate is not None:  # one that is given is that of all weights
        recipe |= {"encoder_learning_rate": None, "table_learning_rate": None}
    if config.num_epochs is not None or config.max_steps is not None:
        recipe["min_steps"] = 0
    fixing = (config.batch_size, config.learning_rate, config.tokens_per_batch)
    if any(value is not None for value in fixing) or config.scale_lr:
        recipe["max_epoch_steps"] = 0
    missing = {name: value for name, value in recipe.items() if getattr(config, name) is None}
    return replace(config, **missing, by_recipe=(*dict.fromkeys((*(config.by_recipe or ()), *missing)),))


def _own_config(path: str | None) -> ModelConfig | None:
    """Return the config of a model that histocoder trained, else None."""
    return read_model_config(Path(path)) if path is not None and is_own_model(Path(path)) else None
