"""The recipe of a run: defaults of settings by what the run starts from."""

from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from histocoder.checkpoints.model_files import is_on_hub, is_own_model, local_folder, read_model_config
from histocoder.config import RECIPES, ModelConfig, RunConfig
from histocoder.model import PRESETS, is_ngram

_Config = TypeVar("_Config", bound=RunConfig)


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
    recipe = dict(RECIPES[kind_of_start(config)])
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
