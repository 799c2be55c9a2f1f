"""The model to train, for the codes of some data, with new weights or those of another model."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from histocoder import distributed
from histocoder.checkpoints.model_files import read_tokenizer
from histocoder.checkpoints.occcanine import initial_weights, unpublishable
from histocoder.checkpoints.training_state import Checkpoint
from histocoder.config import LANG_SEP, ModelConfig, RunConfig
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
    Tokenizer,
    encoder_type,
)
from histocoder.model.encoder import check_positions, load_encoder, load_tokenizer
from histocoder.text.tokenizers import UNKNOWN, tokenize
from histocoder.training.optimizer import is_table
from histocoder.training.start import Start

_Loaded = TypeVar("_Loaded")


@dataclass(frozen=True)
class Task:
    """Facts that a model learns from the data of a run."""

    files: LabelledFiles  # those to train on, with the form of their codes
    key: Key
    languages: tuple[str, ...]
    attributes: dict[str, tuple[str, ...]]  # column -> categories


def seeded_model(
    config: RunConfig, task: Task, start: Start, checkpoint: Checkpoint | None
) -> MixerModel:
    """Build a new model, or one of a checkpoint's configuration; later draws differ between ranks,
    for dropout.
    """
    torch.manual_seed(config.seed)
    if checkpoint is not None:
        model = MixerModel(checkpoint.model_config, tokenizer=checkpoint.tokenizer)
    else:
        model = build_model(config, task, start)

    if config.save_format == "occcanine" and (reason := unpublishable(model.config)):
        raise UserError(
            f"--save-format occcanine: OccCANINE has no format for this model: {reason}. "
            "Omit the flag, or start a new "
            "run, in another folder, with a CANINE encoder and new heads (--only-encoder)."
        )
    if config.fsdp and any(map(is_table, model.parameters())):
        raise UserError("--fsdp does not support n-gram encoders, which are small; omit it.")

    # n-grams that the initial model does not know are told apart by random values
    if checkpoint is None and start.path is not None and isinstance(model.encoder, NgramEncoder):
        _fill_empty_rows(model.encoder, config)

    # DDP must know what is trained when it wraps the model
    if config.freeze_encoder:
        model.freeze_encoder()
    elif encoder_type(model.config.encoder) != "canine":
        _freeze_unused(model)
    torch.manual_seed(config.seed + 1 + distributed.rank())
    return model


def _fill_empty_rows(encoder: NgramEncoder, config: RunConfig) -> None:
    """Give rows that the initial model's table lacks the random values of a new table.

    Other n-grams than those that it knows are told apart by them, until they are trained. They are
    those that the model has where this run is resumed.
    """
    values = torch.zeros_like(encoder.table)
    if not config.freeze_encoder:
        torch.manual_seed(config.seed)
        values = NgramEncoder(encoder.config).table
    encoder.fill_empty_rows(values)


def _freeze_unused(model: MixerModel) -> None:
    """Freeze weights of an encoder that no output depends on, such as Longformer's for global
    attention.

    DDP would wait for their gradients.
    """
    tokens = tokenize([UNKNOWN + LANG_SEP], max_len=model.config.max_len, tokenizer=model.tokenizer)
    ids = torch.from_numpy(tokens.pad(np.arange(1), max_len=model.config.max_len))
    model.eval()  # so that no layer is left out at random
    memory, pooled, _ = model.encode(ids)
    model.train()
    output = pooled.sum()
    if model.config.decoder_learns:
        output = memory.sum() + output

    trained = [p for p in model.encoder.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(output, trained, allow_unused=True)
    for parameter, gradient in zip(trained, gradients, strict=True):
        parameter.requires_grad_(gradient is not None)


def build_model(config: RunConfig, task: Task, start: Start) -> MixerModel:
    """Return a new model for a task, with the weights of `--encoder` or of an initial model."""
    decoder_prior = config.flat_loss != "bce-mean" and config.save_format != "occcanine"
    formatter = task.files.formatter
    if decoder_prior and not start.keeps_heads:
        formatter = formatter.without_numbers()
    is_new_ngram = config.encoder == "ngram" and start.path is None
    model_config = ModelConfig(
        encoder={},
        formatter=formatter.to_config(),
        # one to spare, as in published models, so that weights can be exchanged
        vocab_size=formatter.vocab_size + 1,
        codes=task.key.codes,
        target_cols=task.files.target_cols,
        descriptions=titles_of(task.key.codes) | task.key.descriptions,
        languages=tuple(sorted(set(task.languages + start.languages))),
        decoder_num_layers=2 if is_new_ngram else 3,
        decoder_dim_feedforward=config.decoder_dim_feedforward,
        dropout=config.dropout,
        max_len=config.max_len,
        text_normalization=config.text_normalization,
        pooling=config.pooling,
        flat_loss=config.flat_loss,
        flat_head=config.flat_head,
        decoder_prior=decoder_prior,
        attributes=task.attributes,
    )
    if start.path is not None:
        return _with_initial_weights(model_config, config, start)

    # the encoder's own sizes complete the config
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

    # a prefix of one language says nothing
    if kind not in ("canine", "ngram") and len(set(config.languages) - {UNKNOWN}) < 2:
        config = replace(config, reads_language=False)
    if kind != "canine" and config.decoder_prior and config.formatter["num_blocks"] == 1:
        config = replace(config, decoder_learns=False, mode="flat")
    return config


def _load_encoder(config: RunConfig) -> Encoder:
    """Load the encoder that the settings name, or draw the weights of a preset."""
    # rank 0 alone shows how far a download is
    if config.encoder not in PRESETS and not distributed.is_primary():
        from transformers.utils import logging

        logging.disable_progress_bar()
    load = partial(
        load_encoder, config.encoder, max_len=config.max_len, ngram_dropout=config.ngram_dropout
    )
    return _first_on_primary(load)


def _first_on_primary(load: Callable[[], _Loaded]) -> _Loaded:
    """Load something on rank 0 first, so that one process alone downloads."""
    loaded = distributed.run_on_primary(load, doing="loading")
    if loaded is None:
        return load()
    return loaded


def _with_initial_weights(model_config: ModelConfig, config: RunConfig, start: Start) -> MixerModel:
    """Return a model with the weights of an initial model, or with those of its encoder."""
    assert start.path is not None
    weights, codes = initial_weights(start.path)
    tokenizer: Tokenizer = CHARACTERS
    model_config = replace(model_config, encoder=_encoder_sizes(config, start))
    if start.config is not None:
        tokenizer = read_tokenizer(start.path)
        num_layers = start.config.decoder_num_layers
        model_config = replace(
            model_config, decoder_num_layers=num_layers, license=start.config.license
        )

    # experts are fitted to the new data, and hashes of descriptions are recorded later
    for name in list(weights):
        if "_expert." in name or name == "trained_on":
            del weights[name]

    try:
        if start.keeps_heads:
            _give_classes(weights, codes, model_config, start)
            model_config = _with_decoder_of(start, model_config, weights)
            model = MixerModel.from_weights(model_config, weights, tokenizer=tokenizer)
        else:
            model = MixerModel(_as_needed(model_config), tokenizer=tokenizer)
            encoder = {name: weights[name] for name in weights if name.startswith("encoder.")}
            model.load_state_dict(model.state_dict() | encoder)
    except RuntimeError as error:
        raise UserError(
            f"--initial-checkpoint: the weights in {start.path} do not fit this model "
            f"({misfit(error)}). "
            "Check --encoder, or load only its encoder with --only-encoder."
        ) from error
    check_positions(model.encoder, config.max_len, name=str(start.path))
    return model


def _encoder_sizes(config: RunConfig, start: Start) -> dict[str, Any]:
    """Return the config of an initial model's encoder; that of `--encoder` for OccCANINE's."""
    if start.config is not None:
        sizes = dict(start.config.encoder)
        if encoder_type(sizes) == "ngram":
            sizes["ngram_dropout_prob"] = config.ngram_dropout
        return sizes
    if config.encoder in PRESETS or Path(config.encoder).exists():
        return _load_encoder(config).config.to_diff_dict()
    return {}  # CANINE-s's are the defaults


def _with_decoder_of(
    start: Start, model_config: ModelConfig, weights: dict[str, Tensor]
) -> ModelConfig:
    """Return the config of a model with the decoder of the initial one, whose form of codes and
    whose input it keeps.

    Raises a UserError if that decoder can't write the codes.
    """
    form = model_config.formatter
    model_config = replace(model_config, decoder_prior=False)  # as OccCANINE's have none
    if start.config is not None:
        form = start.config.formatter
        names = ("mask_memory", "pad_to", "decoder_prior", "decoder_learns", "reads_language")
        settings: dict[str, Any] = {name: getattr(start.config, name) for name in names}
        model_config = replace(model_config, **settings)
    if "labels" in form:
        labels = dict.fromkeys(form["labels"])
        labels.update(dict.fromkeys(model_config.codes))
        form = form | {"labels": list(labels)}

    # the decoder's tokens have to do for the codes; OccCANINE's first version has none
    head = weights.get("decoder.head.weight")
    if (
        head is None
        or not _writes(form, model_config)
        or len(head) < build_formatter(**form).vocab_size
    ):
        raise UserError(
            f"--initial-checkpoint: the decoder of {start.path} writes codes in another form "
            f"({form['name']}, "
            f"{form['num_blocks']} of {form['block_size']} tokens). Load only its "
            "encoder with --only-encoder."
        )
    return replace(model_config, formatter=form, vocab_size=len(head))


def _writes(form: dict[str, Any], model_config: ModelConfig) -> bool:
    """Return whether a decoder of codes in some form can write those of a model, its labels among
    them.
    """
    for name in ("name", "use_within_block_sep"):
        if form.get(name) != model_config.formatter.get(name):
            return False
    if form["num_blocks"] < model_config.formatter["num_blocks"]:
        return False
    if "labels" in form:
        return len(form["labels"]) <= 10 ** form["block_size"]
    return not any(map(build_formatter(**form).system.problem, model_config.codes))


def _give_classes(
    weights: dict[str, Tensor],
    codes: tuple[str, ...] | None,
    model_config: ModelConfig,
    start: Start,
) -> None:
    """Give the heads in an initial model's weights the classes of a model.

    Raises a UserError if the model lacks some of the initial one's `codes`, which may be unknown.
    """
    labels = () if start.config is None else start.config.attribute_labels
    if labels or model_config.attribute_labels:
        _set_classes(weights, "attribute_head", labels, model_config.attribute_labels)

    # the classifier keeps what it knows of each code, whatever the order of the codes
    if codes is None or codes == model_config.codes:
        return
    lacking = sorted(set(codes) - set(model_config.codes))
    if lacking:
        raise UserError(
            f"--initial-checkpoint: {start.path} has {len(lacking):,} codes that these data "
            f"lack, such as {lacking[0]}. Pass "
            "its key with --key, or load only its encoder with --only-encoder."
        )
    _set_classes(weights, "linear_decoder", codes, model_config.codes)


def _set_classes(
    weights: dict[str, Tensor], head: str, old: Sequence[Any], new: Sequence[Any]
) -> None:
    """Give a linear head new classes: old ones keep their weights, others are improbable."""
    dim = weights["linear_decoder.weight"].shape[1]
    weight = torch.zeros(len(new), dim)
    bias = torch.full((len(new),), -math.log(max(len(new), 1)))

    # a head that the initial model lacks has no old classes
    old_weight = weights.pop(f"{head}.weight", weight)
    old_bias = weights.pop(f"{head}.bias", bias)
    old_index = {label: i for i, label in enumerate(old)}
    for i, label in enumerate(new):
        if label in old_index:
            weight[i] = old_weight[old_index[label]]
            bias[i] = old_bias[old_index[label]]
    if new:
        weights[f"{head}.weight"] = weight
        weights[f"{head}.bias"] = bias
