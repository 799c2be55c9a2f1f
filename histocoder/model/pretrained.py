"""Hugging Face's encoders other than CANINE: BERT, XLM-R, the encoders of T5 and ByT5, and others."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_MISSING_SHOWN = 3


def pretrained_from_config(config: dict[str, Any]) -> PreTrainedModel:
    """Build the encoder of a config with random weights in fp32."""
    found = full_config(config)
    with torch.device("cpu"):  # some have buffers that no state dict holds
        model = _auto_class(found).from_config(found, trust_remote_code=False)
    return _encoder_within(model.float())  # a config may name another precision


def load_pretrained(name: str, options: dict[str, Any]) -> PreTrainedModel:
    """Load an encoder in fp32 by `from_pretrained(name, **options)`; raise a ValueError if weights are missing."""
    from transformers.utils import logging

    options = {**options, "trust_remote_code": False}  # the default asks on a terminal
    config = read_config(name, options)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # no warnings of unused weights of heads
    try:
        model, found = _auto_class(config).from_pretrained(name, config=config, output_loading_info=True, **options)
    finally:
        logging.set_verbosity(verbosity)
    if missing := sorted(key for key in found["missing_keys"] if "pooler." not in key):
        raise ValueError(f"it has no weights {', '.join(missing[:_MISSING_SHOWN])}")
    return _encoder_within(model.float())


def pretrained(
    model: PreTrainedModel, input_ids: Tensor, mask: Tensor, *, dtype: torch.dtype, pooling: str
) -> tuple[Tensor, Tensor]:
    """Return the encoding (B, L, dim) of a batch, and the pooled encoding (B, dim).

    Parameters
    ----------
    model : PreTrainedModel
    input_ids : Tensor of int, of shape (B, L)
    mask : Tensor of bool, of shape (B, L)
        False for padding.
    dtype : torch.dtype
        Precision of matrix products; the weights stay in their own.
    pooling : {"cls", "mean"}
        Pooled encoding: the first token's, or the mean over all tokens.
    """
    is_cast = dtype != next(model.parameters()).dtype
    with torch.autocast(input_ids.device.type, dtype=dtype if is_cast else None, enabled=is_cast):
        encoded = model(input_ids=input_ids.long(), attention_mask=mask.long()).last_hidden_state
    if pooling == "cls":
        pooled = encoded[:, 0]
    else:
        real = mask[..., None]
        pooled = encoded.float().masked_fill(~real, 0.0).sum(1) / real.sum(1)
    return encoded.to(dtype), pooled.to(dtype)


def num_positions(model: PreTrainedModel) -> int:
    """Return the number of tokens that an encoder can read; no limit if positions are relative."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            # RoBERTa's first position follows that of padding
            return module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
    return sys.maxsize


def full_config(config: dict[str, Any]) -> PretrainedConfig:
    """Return transformers' config with these fields, `model_type` among them."""
    from transformers import AutoConfig

    fields = dict(config)
    return _without_kernels(AutoConfig.for_model(fields.pop("model_type"), **fields))


def read_config(name: str, options: dict[str, Any]) -> PretrainedConfig:
    from transformers import AutoConfig

    return _without_kernels(AutoConfig.from_pretrained(name, **options))


def _without_kernels(config: PretrainedConfig) -> PretrainedConfig:
    """Set transformers' default attention, since other names can run code from the hub."""
    for name in ("_attn_implementation", "_experts_implementation"):
        if hasattr(config, name):
            setattr(config, name, None)  # also sets that of nested configs
    return config


def _auto_class(config: PretrainedConfig) -> Any:
    """Return transformers' auto class for the encoder alone if there is one, as for T5; else for the whole model."""
    from transformers import MODEL_FOR_TEXT_ENCODING_MAPPING, AutoModel, AutoModelForTextEncoding

    return AutoModelForTextEncoding if type(config) in MODEL_FOR_TEXT_ENCODING_MAPPING else AutoModel


def _encoder_within(model: PreTrainedModel) -> PreTrainedModel:
    """Return the encoder without its pooler, which has no influence on the output here."""
    if getattr(model, "pooler", None) is not None:
        model.pooler = None
    # T5's class for its encoder holds the embeddings twice: beside the encoder, and in it
    return model.encoder if isinstance(getattr(model, "shared", None), nn.Embedding) else model
