"""Encoders of Hugging Face's that are no CANINE: BERT, XLM-R, the encoder of T5 and ByT5, and their like."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_MISSING_SHOWN = 3


def pretrained_from_config(config: dict[str, Any]) -> PreTrainedModel:
    """Build an encoder with random weights, in fp32, from the fields of its config, `model_type` among them."""
    found = full_config(config)
    with torch.device("cpu"):  # some have buffers that are in no state dict
        model = _auto_class(found).from_config(found, trust_remote_code=False)
    return _encoder_within(model.float())  # a config may name another precision


def load_pretrained(name: str, options: dict[str, Any]) -> PreTrainedModel:
    """Load an encoder with its weights, in fp32.

    Parameters
    ----------
    name : str
        A folder, or a name on the hub.
    options : dict
        For `from_pretrained`.

    Raises
    ------
    ValueError
        Where there is no such architecture, or some of its weights are missing.
    """
    from transformers.utils import logging

    options = {**options, "trust_remote_code": False}  # else it asks on a terminal whether to run a model's own code
    config = read_config(name, options)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # it lists the weights of other heads, which nobody asks for here
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
    """Encode a batch.

    Parameters
    ----------
    model : PreTrainedModel
        In training mode its dropout applies.
    input_ids : Tensor of int, of shape (B, L)
    mask : Tensor of bool, of shape (B, L)
        Where there are tokens; what is padded has no influence on them.
    dtype : torch.dtype
        Precision of matrix products; the weights stay in their own.
    pooling : {"cls", "mean"}
        What stands for the whole text: the first token, where the encoder was trained so, or the mean over all.

    Returns
    -------
    encoding : Tensor of shape (B, L, dim)
    pooled : Tensor of shape (B, dim)
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
    """Tokens that an encoder can read; no limit where positions are relative."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            # RoBERTa counts positions from behind the padding's own
            return module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
    return sys.maxsize


def transformer_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the layers that follow each other, all alike."""
    return next(module for module in model.modules() if isinstance(module, nn.ModuleList))


def full_config(config: dict[str, Any]) -> PretrainedConfig:
    """Return the config with these fields, `model_type` among them, under the names that all configs share."""
    from transformers import AutoConfig

    fields = dict(config)
    return _without_kernels(AutoConfig.for_model(fields.pop("model_type"), **fields))


def read_config(name: str, options: dict[str, Any]) -> PretrainedConfig:
    """Return the config in a folder or on the hub."""
    from transformers import AutoConfig

    return _without_kernels(AutoConfig.from_pretrained(name, **options))


def _without_kernels(config: PretrainedConfig) -> PretrainedConfig:
    """Return the config with transformers' default attention: another could run code from the hub."""
    for name in ("_attn_implementation", "_experts_implementation"):
        if hasattr(config, name):
            setattr(config, name, None)  # which does the same to the configs within it
    return config


def _auto_class(config: PretrainedConfig) -> Any:
    """Return transformers' class for an encoder alone, if it has one, as for T5; else its general class."""
    from transformers import MODEL_FOR_TEXT_ENCODING_MAPPING, AutoModel, AutoModelForTextEncoding

    return AutoModelForTextEncoding if type(config) in MODEL_FOR_TEXT_ENCODING_MAPPING else AutoModel


def _encoder_within(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model without what no output here depends on, or what it holds twice."""
    if getattr(model, "pooler", None) is not None:
        model.pooler = None
    # T5's class for its encoder holds the embeddings beside the encoder, which holds them as well
    return model.encoder if isinstance(getattr(model, "shared", None), nn.Embedding) else model
