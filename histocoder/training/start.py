"""Start of a run: its encoder, another model's weights, and the recipe that suits both."""

import difflib
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors import safe_open

from histocoder import distributed
from histocoder.checkpoints.model_files import (
    HUB_PREFIX,
    WEIGHTS_FILE,
    is_own_model,
    local_folder,
    read_model_config,
)
from histocoder.checkpoints.occcanine import initial_weights
from histocoder.checkpoints.run_files import was_restarted
from histocoder.checkpoints.run_folder import run_of, run_settings
from histocoder.checkpoints.starter import BOX
from histocoder.config import (
    AUTO,
    PRETRAINED_ENCODER,
    RECIPES,
    FinetuneConfig,
    MixerConfig,
    ModelConfig,
    RunConfig,
)
from histocoder.data.example_writer import EXAMPLES_FILE
from histocoder.data.examples import SPLITS, TITLES, TRAIN, Examples
from histocoder.data.hashes import hashes_of
from histocoder.data.key import Key
from histocoder.errors import UserError
from histocoder.formatters.classifications import titles_of
from histocoder.model import PRESETS, encoder_type
from histocoder.model.encoder import can_be_fetched

_Config = TypeVar("_Config", bound=RunConfig)


@dataclass(frozen=True)
class EncoderChoice:
    """The encoder of a run, and why `--encoder auto` chose it."""

    name: str
    reason: str = ""  # empty if the settings name it


def choose_encoder(config: FinetuneConfig | MixerConfig, device: torch.device) -> EncoderChoice:
    """Return the encoder that a run's settings name or, for `--encoder auto`, the one that suits
    the machine of rank 0.

    A run that resumes keeps its own. Settings that only a pretrained encoder can follow have one,
    on any machine.
    """

    def choose() -> EncoderChoice:
        """Return the encoder, as rank 0 chooses it."""
        _refuse_misspelt_preset(config.encoder)
        if config.encoder != AUTO:
            return EncoderChoice(config.encoder)
        # `fill_in` names a model's own instead; OccCANINE's files have CANINE-s
        if config.initial_checkpoint is not None:
            return EncoderChoice(PRETRAINED_ENCODER)
        encoder = _encoder_to_resume(config)
        if encoder is not None:
            return EncoderChoice(encoder, "as this run has begun")
        return _suitable_encoder(config, device)

    return distributed.broadcast_from_primary(choose, doing="choosing the encoder")


def _refuse_misspelt_preset(encoder: str) -> None:
    """Raise a UserError for a name that is nearly a preset's, before a table is prepared for it."""
    presets = (AUTO, *PRESETS)
    if encoder in presets or Path(encoder).exists():
        return
    for name in difflib.get_close_matches(encoder, presets, n=1, cutoff=0.75):
        raise UserError(
            f"There is no encoder {encoder!r}. Did you mean --encoder {name}?", encoder=name
        )


def _suitable_encoder(config: RunConfig, device: torch.device) -> EncoderChoice:
    """Return the encoder that suits a new run on a device."""
    for_pretrained = {
        "--recipe reference": config.recipe == "reference",
        "--save-format occcanine": config.save_format == "occcanine",
        "--freeze-encoder": config.freeze_encoder,
        "--fsdp": config.fsdp is not None,
    }
    for flag, is_set in for_pretrained.items():
        if is_set:
            return EncoderChoice(PRETRAINED_ENCODER, f"for {flag}")

    if device.type == "cpu":
        reason = "no GPU here" if config.device == "auto" else "no GPU is to be used"
        advice = f"--encoder {PRETRAINED_ENCODER} for the pretrained one"
        return EncoderChoice("ngram", f"{reason}; {advice}")
    if can_be_fetched(PRETRAINED_ENCODER):
        return EncoderChoice(
            PRETRAINED_ENCODER, "pretrained, for the GPU; --encoder ngram for one from scratch"
        )
    reason = f"the hub can't be reached, and its cache here has no {PRETRAINED_ENCODER}"
    return EncoderChoice("ngram", f"{reason}; --encoder PATH for a pretrained one in a folder")


def _encoder_to_resume(config: FinetuneConfig | MixerConfig) -> str | None:
    """Return the encoder of the run that is to be resumed, if there is one."""
    # processes that their launcher has restarted resume their own run, whatever the settings
    run = config.folder
    if not was_restarted(run):
        if config.resume == "never" or (config.overwrite and config.resume == "auto"):
            return None
        if config.resume != "auto":
            run = run_of(Path(config.resume))
    settings = run_settings(run)
    # with --initial-checkpoint it is a model's folder
    if settings.get("initial_checkpoint") is not None:
        return None
    return settings.get("encoder")


@dataclass(frozen=True)
class Start:
    """The weights that a run starts from: new ones, or those of `--initial-checkpoint`."""

    path: Path | None = None  # of the initial model
    config: ModelConfig | None = None  # its config.json, which OccCANINE's models lack
    keeps_heads: bool = False  # whether its decoder and classifier are used, beside its encoder

    @classmethod
    def of(cls, config: RunConfig) -> "Start":
        """Read what the settings of a run name: `box` is the model in the box, `hf://…` is
        downloaded.
        """
        if config.initial_checkpoint is None:
            return cls()
        path = Path(config.initial_checkpoint)
        is_named = config.initial_checkpoint == BOX
        if is_named or config.initial_checkpoint.startswith(HUB_PREFIX):
            path = local_folder(config.initial_checkpoint)
        keeps_heads = not config.only_encoder
        if not is_own_model(path):
            return cls(path, keeps_heads=keeps_heads)

        # a refitted best/ has learned the validation data; the run's last model has not
        model_config = read_model_config(path)
        if model_config.fitted_to_validation and is_own_model(path.parent):
            path = path.parent
            model_config = read_model_config(path)
        return cls(path, model_config, keeps_heads)

    @cached_property
    def trained_on(self) -> np.ndarray | None:
        """Hashes of the descriptions that the model was trained on, see `key_hashes`; None for a
        new model, or if it is not known.
        """
        if self.path is None or self.config is None:
            return None
        if self.config.num_trained_on:
            with safe_open(self.path / WEIGHTS_FILE, "np") as file:
                return np.asarray(file.get_tensor("trained_on"))

        # a model of an earlier version has none, but its run's folder may have the data
        examples = run_of(self.path) / EXAMPLES_FILE
        if not examples.is_file():
            return None
        splits = SPLITS if self.config.fitted_to_validation else (TRAIN, TITLES)
        return hashes_of(Examples.open(examples, *splits))

    def hashes_with(self, examples: Examples) -> np.ndarray:
        """Return the hashes of the descriptions of examples, and of those that the model was trained
        on.
        """
        hashes = hashes_of(examples)
        if self.trained_on is not None:
            hashes = np.concatenate([hashes, self.trained_on])
        return hashes

    @property
    def languages(self) -> tuple[str, ...]:
        """The languages that the model knows, and still knows when it is trained further."""
        if self.config is None or not self.keeps_heads:
            return ()
        return self.config.languages

    def key(self) -> Key | None:
        """Return the codes of the model; None if they are not used, or not known."""
        if self.path is None or not self.keeps_heads:
            return None
        if self.config is None:
            _, codes = initial_weights(self.path)
            if codes is None:
                return None
            return Key(codes)

        # histocoder's own titles are left out: a key or a later version may have better ones
        titles = titles_of(self.config.codes).items()
        return Key(self.config.codes, dict(self.config.descriptions.items() - titles))


def kind_of_start(config: RunConfig, start: Start) -> str:
    """Return the recipe that a run's settings ask for."""
    if config.recipe == "reference":
        return "reference"
    has_ngrams = config.encoder == "ngram"
    if start.config is not None:
        has_ngrams = encoder_type(start.config.encoder) == "ngram"
    if start.keeps_heads:
        return "continued n-gram" if has_ngrams else "continued"
    if config.freeze_encoder:
        return "frozen"
    if has_ngrams:
        return "ngram"
    if config.encoder in PRESETS and start.path is None:
        return "scratch"
    return "pretrained"


def fill_in(config: _Config, start: Start) -> _Config:
    """Return a run's settings, with the recipe's values for those that are not given.

    A model that is fine-tuned further keeps its input form and its training settings; its folder
    becomes the encoder. `choose_encoder` has chosen the encoder.
    """
    assert config.encoder != AUTO
    is_from_scratch = start.path is None and config.encoder in PRESETS
    if config.freeze_encoder and is_from_scratch and config.encoder != "tiny":
        raise UserError(
            f"--freeze-encoder: --encoder {config.encoder} is trained from scratch; "
            "frozen, it stays random. Omit "
            "--freeze-encoder, or name a pretrained encoder or --initial-checkpoint."
        )
    recipe: dict[str, Any] = dict(RECIPES[kind_of_start(config, start)])

    # a model that is trained further is read, and answers, as before
    if start.path is not None:
        config = replace(config, initial_checkpoint=str(start.path))
    if start.config is not None:
        config = replace(config, encoder=str(start.path))
        names = ["text_normalization"]
        if start.keeps_heads:
            names += ["flat_loss", "flat_head", "pooling"]
        for name in names:
            recipe[name] = getattr(start.config, name)
    if config.save_format == "occcanine":
        recipe["flat_head"] = "linear"

    # a rate that is given is that of all weights, and a length is not exceeded
    if config.learning_rate is not None:
        recipe["encoder_learning_rate"] = None
        recipe["table_learning_rate"] = None
        recipe["max_epoch_steps"] = 0
    if config.num_epochs is not None or config.max_steps is not None:
        recipe["min_steps"] = 0

    missing = {name: value for name, value in recipe.items() if getattr(config, name) is None}
    by_recipe = dict.fromkeys(config.by_recipe or ())
    by_recipe.update(dict.fromkeys(missing))
    return replace(config, **missing, by_recipe=tuple(by_recipe))
