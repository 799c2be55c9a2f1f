"""The model to train, with new weights or another model's, and the recipe of a run: defaults by
what it starts from.
"""

import difflib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from histocoder import distributed
from histocoder.checkpoints.model_files import (
    HUB_PREFIX,
    WEIGHTS_FILE,
    is_own_model,
    local_folder,
    read_model_config,
    read_tokenizer,
)
from histocoder.checkpoints.occcanine import initial_weights, unpublishable
from histocoder.checkpoints.run_folder import run_of, run_settings
from histocoder.checkpoints.training_state import Checkpoint
from histocoder.config import (
    AUTO,
    LANG_SEP,
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
from histocoder.data.labelled_files import LabelledFiles
from histocoder.errors import UserError, misfit
from histocoder.formatters import build_formatter
from histocoder.formatters.classifications import titles_of
from histocoder.model import (
    CHARACTERS,
    PRESETS,
    Encoder,
    MixerModel,
    NgramEncoder,
    encoder_type,
)
from histocoder.model.encoder import can_be_fetched, check_positions, load_encoder, load_tokenizer
from histocoder.text.tokenizers import UNKNOWN, tokenize
from histocoder.training.learner import is_table

_Config = TypeVar("_Config", bound=RunConfig)
_Loaded = TypeVar("_Loaded")


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
        _refuse_misspelt_preset(config.encoder)
        if config.encoder != AUTO:
            return EncoderChoice(config.encoder)
        if (
            config.initial_checkpoint is not None
        ):  # `fill_in` names a model's own; OccCANINE's files have CANINE-s
            return EncoderChoice(PRETRAINED_ENCODER)
        if (own := _encoder_to_resume(config)) is not None:
            return EncoderChoice(own, "as this run has begun")
        return _suitable_encoder(config, device)

    return distributed.broadcast_from_primary(choose, doing="choosing the encoder")


def _refuse_misspelt_preset(encoder: str) -> None:
    """Raise a UserError for a name that is nearly a preset's, before a table is prepared for it."""
    presets = (AUTO, *PRESETS)
    if encoder in presets or Path(encoder).exists():
        return
    near = difflib.get_close_matches(encoder, presets, n=1, cutoff=0.75)
    if near:
        raise UserError(
            f"There is no encoder {encoder!r}. Did you mean --encoder {near[0]}?", encoder=near[0]
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
        why = "no GPU here" if config.device == "auto" else "no GPU is to be used"
        return EncoderChoice(
            "ngram", f"{why}; --encoder {PRETRAINED_ENCODER} for the pretrained one"
        )
    if can_be_fetched(PRETRAINED_ENCODER):
        return EncoderChoice(
            PRETRAINED_ENCODER, "pretrained, for the GPU; --encoder ngram for one from scratch"
        )
    reason = f"the hub can't be reached, and its cache here has no {PRETRAINED_ENCODER}"
    return EncoderChoice("ngram", f"{reason}; --encoder PATH for a pretrained one in a folder")


def _encoder_to_resume(config: FinetuneConfig | MixerConfig) -> str | None:
    """Return the encoder of the run that is to be resumed, if there is one."""
    is_restarted = distributed.restarts() > 0
    is_new = config.resume == "never" or (config.overwrite and config.resume == "auto")
    if is_new and not is_restarted:
        return None
    is_own = is_restarted or config.resume == "auto"
    settings = run_settings(config.folder if is_own else run_of(Path(config.resume)))
    # of a run with --initial-checkpoint, it is a model's folder
    return settings.get("encoder") if settings.get("initial_checkpoint") is None else None


def kind_of_start(config: RunConfig) -> str:
    """Return the recipe that a run's settings ask for."""
    if config.recipe == "reference":
        return "reference"
    own = _own_config(config.initial_checkpoint)
    has_ngrams = (
        encoder_type(own.encoder) == "ngram" if own is not None else config.encoder == "ngram"
    )
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

    A model that is fine-tuned further keeps its input form and its training settings; its folder
    becomes the encoder. `choose_encoder` has chosen the encoder.
    """
    assert config.encoder != AUTO
    if (
        config.freeze_encoder
        and config.initial_checkpoint is None
        and config.encoder in PRESETS.keys() - {"tiny"}
    ):
        raise UserError(
            f"--freeze-encoder: --encoder {config.encoder} is trained from scratch; "
            "frozen, it stays random. Omit "
            "--freeze-encoder, or name a pretrained encoder or --initial-checkpoint."
        )
    if (start := config.initial_checkpoint) is not None and start.startswith(HUB_PREFIX):
        config = replace(config, initial_checkpoint=str(local_folder(start)))
    recipe = dict(RECIPES[kind_of_start(config)])
    own = _own_config(config.initial_checkpoint)
    if own is not None:
        path = Path(str(config.initial_checkpoint))
        if own.fitted_to_validation and is_own_model(path.parent):
            path = path.parent  # which has not seen validation data
        config = replace(config, initial_checkpoint=str(path), encoder=str(path))
        names: tuple[str, ...] = ("text_normalization",)
        if not config.only_encoder:
            names = ("flat_loss", "flat_head", "pooling", "text_normalization")
        recipe |= {name: getattr(own, name) for name in names}
    if config.save_format == "occcanine":
        recipe["flat_head"] = "linear"
    if config.learning_rate is not None:  # one that is given is that of all weights
        recipe |= {"encoder_learning_rate": None, "table_learning_rate": None}
    if config.num_epochs is not None or config.max_steps is not None:
        recipe["min_steps"] = 0
    if config.learning_rate is not None:
        recipe["max_epoch_steps"] = 0
    missing = {name: value for name, value in recipe.items() if getattr(config, name) is None}
    return replace(
        config, **missing, by_recipe=(*dict.fromkeys((*(config.by_recipe or ()), *missing)),)
    )


def _own_config(path: str | None) -> ModelConfig | None:
    """Return the config of a model that histocoder trained, else None."""
    return read_model_config(Path(path)) if path is not None and is_own_model(Path(path)) else None


def seeded_model(
    config: RunConfig, files: LabelledFiles, checkpoint: Checkpoint | None, **of_data: Any
) -> MixerModel:
    """Build a new model, or one of a checkpoint's configuration; later draws differ between ranks,
    for dropout.

    `of_data` are the last parameters of `build_model`.
    """
    torch.manual_seed(config.seed)
    if checkpoint is not None:
        model = MixerModel(checkpoint.model_config, tokenizer=checkpoint.tokenizer)
    else:
        model = build_model(config, files, **of_data)
    if config.save_format == "occcanine" and (reason := unpublishable(model.config)):
        raise UserError(
            f"--save-format occcanine: OccCANINE has no format for this model: {reason}. "
            "Omit the flag, or start a new "
            "run, in another folder, with a CANINE encoder and new heads (--only-encoder)."
        )
    if any(map(is_table, model.parameters())) and config.fsdp:
        raise UserError("--fsdp does not support n-gram encoders, which are small; omit it.")
    if config.freeze_encoder:
        model.freeze_encoder()
    elif encoder_type(model.config.encoder) != "canine":
        _freeze_unused(model)
    torch.manual_seed(config.seed + 1 + distributed.rank())
    return model


def _freeze_unused(model: MixerModel) -> None:
    """Freeze weights of an encoder that no output depends on, such as Longformer's for global
    attention.

    DDP would wait for their gradients.
    """
    trained = [p for p in model.encoder.parameters() if p.requires_grad]
    tokens = tokenize([UNKNOWN + LANG_SEP], max_len=model.config.max_len, tokenizer=model.tokenizer)
    ids = torch.from_numpy(tokens.pad(np.arange(1), max_len=model.config.max_len))
    model.eval()  # so that no layer is left out at random
    memory, pooled, _ = model.encode(ids)
    model.train()
    used = memory.sum() + pooled.sum() if model.config.decoder_learns else pooled.sum()
    found = torch.autograd.grad(used, trained, allow_unused=True)
    for parameter, gradient in zip(trained, found, strict=True):
        parameter.requires_grad_(gradient is not None)


def build_model(
    config: RunConfig,
    files: LabelledFiles,
    *,
    key: Key,
    languages: tuple[str, ...],
    attributes: dict[str, tuple[str, ...]],
) -> MixerModel:
    """Return a new model for the codes of some files, with the weights of `--encoder` or
    `--initial-checkpoint`.
    """
    decoder_prior = config.flat_loss != "bce-mean" and config.save_format != "occcanine"
    is_new = config.initial_checkpoint is None or config.only_encoder
    formatter = files.formatter.without_numbers() if is_new and decoder_prior else files.formatter
    model_config = ModelConfig(
        encoder={},
        formatter=formatter.to_config(),
        vocab_size=formatter.vocab_size
        + 1,  # one to spare, as in published models, so that weights can be exchanged
        codes=key.codes,
        target_cols=files.target_cols,
        descriptions=titles_of(key.codes) | key.descriptions,
        languages=languages,
        decoder_num_layers=2
        if config.encoder == "ngram" and config.initial_checkpoint is None
        else 3,
        decoder_dim_feedforward=config.decoder_dim_feedforward,
        dropout=config.dropout,
        max_len=config.max_len,
        text_normalization=config.text_normalization,
        pooling=config.pooling,
        flat_loss=config.flat_loss,
        flat_head=config.flat_head,
        decoder_prior=decoder_prior,
        attributes=attributes,
    )
    if config.initial_checkpoint is not None:
        return _from_initial_checkpoint(Path(config.initial_checkpoint), config, model_config)
    tokenizer = _first_on_primary(partial(load_tokenizer, config.encoder))
    encoder = _load_encoder(config)
    model_config = _as_needed(replace(model_config, encoder=encoder.config.to_diff_dict()))
    return MixerModel(model_config, encoder, tokenizer=tokenizer)


def _as_needed(config: ModelConfig) -> ModelConfig:
    """Return the config of a new model that does what its data need.

    If there is one language, pretrained encoders read descriptions alone, as they were trained. If
    rows have one code, the decoder does not learn: its prior says all. With CANINE it does, since
    encodings of characters learn from it.
    """
    kind = encoder_type(config.encoder)
    if kind not in ("canine", "ngram") and len({*config.languages} - {UNKNOWN}) < 2:
        config = replace(config, reads_language=False)
    if kind != "canine" and config.decoder_prior and config.formatter["num_blocks"] == 1:
        config = replace(config, decoder_learns=False, mode="flat")
    return config


def _load_encoder(config: RunConfig) -> Encoder:
    if config.encoder not in PRESETS and not distributed.is_primary():
        from transformers.utils import logging

        logging.disable_progress_bar()
    return _first_on_primary(
        partial(
            load_encoder, config.encoder, max_len=config.max_len, ngram_dropout=config.ngram_dropout
        )
    )


def _first_on_primary(load: Callable[[], _Loaded]) -> _Loaded:
    """Load something on rank 0 first, so that one process alone downloads."""
    found = distributed.run_on_primary(load, doing="loading")
    return load() if found is None else found


def _from_initial_checkpoint(
    path: Path, config: RunConfig, model_config: ModelConfig
) -> MixerModel:
    """Return a model with the weights of a checkpoint or of another model, or with those of its
    encoder.
    """
    weights, codes = initial_weights(path)
    weights = {
        name: tensor
        for name, tensor in weights.items()
        if "_expert." not in name and name != "trained_on"
    }
    own = _own_config(str(path))
    tokenizer = CHARACTERS if own is None else read_tokenizer(path)
    if own is not None:
        dropout = (
            {"ngram_dropout_prob": config.ngram_dropout}
            if encoder_type(own.encoder) == "ngram"
            else {}
        )
        encoder_config = own.encoder | dropout
        model_config = replace(model_config, decoder_num_layers=own.decoder_num_layers)
    elif config.encoder in PRESETS or Path(config.encoder).exists():
        encoder_config = _load_encoder(config).config.to_diff_dict()
    else:
        encoder_config = {}  # CANINE-s's sizes are the defaults
    if not config.only_encoder:
        names = ("mask_memory", "pad_to", "decoder_prior", "decoder_learns", "reads_language")
        kept: dict[str, Any] = {"decoder_prior": False}
        kept |= {} if own is None else {name: getattr(own, name) for name in names}
        model_config = replace(model_config, **kept)
        labels = own.attribute_labels if own else (), model_config.attribute_labels
        weights = _with_classes(weights, "attribute_head", *labels) if any(labels) else weights
        if codes is not None and (extra := sorted(set(codes) - set(model_config.codes))):
            raise UserError(
                f"--initial-checkpoint: {path} has {len(extra):,} codes that these data "
                f"lack, such as {extra[0]}. Pass "
                "its key with --key, or load only its encoder with --only-encoder."
            )
        if codes is not None and codes != model_config.codes:
            weights = _with_classes(weights, "linear_decoder", codes, model_config.codes)
        head = weights.get("decoder.head.weight")
        form = model_config.formatter if own is None else own.formatter
        if "labels" in form:
            form = form | {"labels": [*dict.fromkeys((*form["labels"], *model_config.codes))]}
        if (
            head is None
            or not _writes(form, model_config)
            or len(head) < build_formatter(**form).vocab_size
        ):
            raise UserError(
                f"--initial-checkpoint: the decoder of {path} writes codes in another form "
                f"({form['name']}, "
                f"{form['num_blocks']} of {form['block_size']} tokens). Load only its "
                "encoder with --only-encoder."
            )
        model_config = replace(model_config, formatter=form, vocab_size=len(head))
    model_config = replace(model_config, encoder=encoder_config)
    try:
        if config.only_encoder:
            model = MixerModel(_as_needed(model_config), tokenizer=tokenizer)
            if isinstance(model.encoder, NgramEncoder):
                model.encoder.has_drawn_rows = False
            rest = {
                name: tensor
                for name, tensor in model.state_dict().items()
                if not name.startswith("encoder.")
            }
            model.load_state_dict(
                {**rest, **{k: v for k, v in weights.items() if k.startswith("encoder.")}}
            )
        else:
            model = MixerModel.from_weights(model_config, weights, tokenizer=tokenizer)
    except RuntimeError as error:
        raise UserError(
            f"--initial-checkpoint: the weights in {path} do not fit this model ({misfit(error)}). "
            "Check --encoder, or load only its encoder with --only-encoder."
        ) from error
    check_positions(model.encoder, config.max_len, name=str(path))
    return model


def _writes(form: dict[str, Any], model_config: ModelConfig) -> bool:
    """Return whether a decoder of codes in some form can write those of a model, its labels among
    them.
    """
    names = ("name", "num_blocks", "use_within_block_sep")
    if any(form.get(name) != model_config.formatter.get(name) for name in names):
        return False
    if "labels" in form:
        return len(form["labels"]) <= 10 ** form["block_size"]
    return not any(map(build_formatter(**form).system.problem, model_config.codes))


def _with_classes(
    weights: dict[str, Tensor], head: str, old: Sequence[Any], new: Sequence[Any]
) -> dict[str, Tensor]:
    """Return weights whose linear head has the new classes: old ones keep theirs, others are
    improbable.
    """
    width = weights["linear_decoder.weight"].shape[1]
    found = {
        "weight": torch.zeros(len(new), width),
        "bias": torch.full((len(new),), -math.log(max(len(new), 1))),
    }
    if both := [(i, new.index(code)) for i, code in enumerate(old) if code in new]:
        before, now = map(list, zip(*both, strict=True))
        for name, values in found.items():
            values[now] = weights[f"{head}.{name}"][before].to(values)
    found = {f"{head}.{name}": values for name, values in found.items()}
    return {name: weight for name, weight in weights.items() if name not in found} | (
        found if new else {}
    )


def trained_before(config: RunConfig) -> np.ndarray | None:
    """Return hashes of the descriptions that the model of `--initial-checkpoint` was trained on;
    see `key_hashes`.

    A model of an earlier version has none, but its run's folder may have the data. None if there is
    no such model, or it is not known.
    """
    own = _own_config(config.initial_checkpoint)
    if config.initial_checkpoint is None or own is None:
        return None
    path = Path(config.initial_checkpoint)
    if own.num_trained_on:
        with safe_open(path / WEIGHTS_FILE, "np") as file:
            return np.asarray(file.get_tensor("trained_on"))
    examples = run_of(path) / EXAMPLES_FILE
    if not examples.is_file():
        return None
    splits = SPLITS if own.fitted_to_validation else (TRAIN, TITLES)
    return hashes_of(Examples.open(examples, *splits))


def initial_key(config: RunConfig) -> Key | None:
    """Return the codes of the model that `--initial-checkpoint` names; None if they are not
    taken.
    """
    if config.initial_checkpoint is None or config.only_encoder:
        return None
    if (own := _own_config(config.initial_checkpoint)) is not None:
        usual = titles_of(own.codes)  # a key or a later version may have better ones
        return Key(
            own.codes,
            {code: title for code, title in own.descriptions.items() if title != usual.get(code)},
        )
    codes = initial_weights(Path(config.initial_checkpoint))[1]
    return None if codes is None else Key(codes)
