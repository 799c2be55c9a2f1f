"""Encoders and their tokenizers: presets trained from scratch, and Hugging Face's, from the hub or
a folder.

An encoder is a module whose `config` builds it again: `Canine`, `NgramEncoder`, or a
`PreTrainedModel` such as BERT, XLM-R and the encoders of T5 and ByT5. transformers is imported
where it is needed, since the import takes seconds.
"""

from __future__ import annotations

import socket
import sys
import tempfile
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from histocoder.config.model import MODEL_TYPE
from histocoder.errors import UserError
from histocoder.model.canine import Canine, CanineConfig
from histocoder.model.layers import Dropout, mean_pooled
from histocoder.model.ngram import NgramConfig, NgramEncoder
from histocoder.text.tokenizers import (
    CHARACTERS,
    PretrainedTokenizer,
    Tokenizer,
    auto_tokenizer,
    contents,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_HUB_SECONDS = 5.0  # within which the hub must answer
Encoder: TypeAlias = "Canine | NgramEncoder | PreTrainedModel"


def _canine(hidden_size: int, *, layers: int, heads: int, buckets: int) -> dict[str, Any]:
    """Return the sizes of a CANINE without dropout."""
    return {
        "hidden_size": hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 2 * hidden_size,
        "num_hash_buckets": buckets,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }


PRESETS: dict[str, dict[str, Any]] = {
    # for a laptop: words as hashed n-grams; minutes for tens of thousands of rows
    "ngram": {"model_type": NgramConfig.model_type},
    # for tests: seconds on a laptop, no dropout, so that runs compare exactly
    "tiny": _canine(64, layers=2, heads=4, buckets=256),
    # a CANINE from scratch, for tables of many thousands of rows; without dropout, since
    # augmentation is noise enough
    "small": _canine(192, layers=3, heads=6, buckets=1024),
}


def encoder_type(config: dict[str, Any]) -> str:
    """Return the type of the encoder with a config, by default CANINE's."""
    return str(config.get("model_type", CanineConfig.model_type))


def reads_characters(config: dict[str, Any]) -> bool:
    """Return whether the encoder of a config reads characters instead of tokens."""
    return encoder_type(config) in (CanineConfig.model_type, NgramConfig.model_type)


def encoder_from_config(config: dict[str, Any]) -> Encoder:
    """Build the encoder of a config with random weights in fp32."""
    if encoder_type(config) == NgramConfig.model_type:
        return NgramEncoder(NgramConfig.from_dict(config))
    if encoder_type(config) == CanineConfig.model_type:
        return Canine(CanineConfig.from_dict(config))
    from transformers import AutoConfig

    fields = dict(config)
    model_type = fields.pop("model_type")
    own_config = _without_kernels(AutoConfig.for_model(model_type, **fields))
    with torch.device("cpu"):  # some have buffers that no state dict holds
        model = _auto_class(own_config).from_config(own_config, trust_remote_code=False)
    return _encoder_within(model.float())  # a config may name another precision


def load_encoder(name: str, *, max_len: int, ngram_dropout: float = 0.3) -> Encoder:
    """Load an encoder with its weights in fp32, for inputs of `max_len` tokens; raise a UserError
    if that fails.

    `name` is a preset ("ngram", "small", "tiny": random weights), a local folder, or a name on the
    Hugging Face hub.
    """
    if name in PRESETS:
        sizes = PRESETS[name]
        if name == "ngram":
            return encoder_from_config(sizes | {"ngram_dropout_prob": ngram_dropout})
        # CANINE's table of positions has as many rows as it has hash buckets
        buckets = max(sizes["num_hash_buckets"], max_len)
        tables = {"num_hash_buckets": buckets, "max_position_embeddings": buckets}
        return encoder_from_config(sizes | tables)

    is_own = encoder_type(read_encoder_config(name)) == CanineConfig.model_type
    with _loading(name) as options:
        from transformers import AutoConfig, CanineModel
        from transformers.utils import logging

        # No warnings of weights that an encoder has no use for, such as a head's
        logging.set_verbosity_error()
        options |= {"trust_remote_code": False}  # the default asks on a terminal
        config = _without_kernels(AutoConfig.from_pretrained(name, **options))
        model_class = CanineModel if is_own else _auto_class(config)
        model, loading_info = model_class.from_pretrained(
            name, config=config, output_loading_info=True, **options
        )
        missing = sorted(key for key in loading_info["missing_keys"] if "pooler." not in key)
        if missing and not is_own:
            raise ValueError(f"it has no weights {', '.join(missing[:3])}")
        encoder = Canine.from_transformers(model) if is_own else _encoder_within(model.float())
    check_positions(encoder, max_len, name=name)
    return encoder


def load_tokenizer(name: str) -> Tokenizer:
    """Load the tokenizer of an encoder, named as in `load_encoder`; raise a UserError if that
    fails.
    """
    if name in PRESETS or reads_characters(read_encoder_config(name)):
        return CHARACTERS
    with _loading(name) as options, tempfile.TemporaryDirectory() as folder:
        auto_tokenizer(name, options).save_pretrained(folder)
        return PretrainedTokenizer(contents(Path(folder)))


def read_encoder_config(name: str) -> dict[str, Any]:
    """Read the config of an encoder in a folder or on the hub; raise a UserError if that fails."""
    from transformers import PretrainedConfig

    with _loading(name) as options:
        config: dict[str, Any] = PretrainedConfig.get_config_dict(name, **options)[0]
    if config.get("model_type") == MODEL_TYPE:
        raise UserError(
            f"{name} is a histocoder model; start from its weights with "
            f"--initial-checkpoint {name}."
        )
    return config


@contextmanager
def _loading(name: str) -> Iterator[dict[str, Any]]:
    """Yield the options to load a part of an encoder with; turn failures into UserErrors."""
    is_away = not Path(name).exists() and not hub_answers()
    try:
        yield {"local_files_only": is_away or Path(name).exists()}
    except UserError:
        raise
    except (
        OSError,
        ValueError,
        RuntimeError,
        EOFError,
        ImportError,
        UnpicklingError,
        SafetensorError,
    ) as error:
        first_line = str(error).strip().split("\n")[0]
        where = "the hub can't be reached, and there is no cached copy" if is_away else first_line
        raise UserError(
            f"Could not load the encoder {name!r} ({where}). Name the folder of a pretrained "
            "encoder with --encoder PATH, or train from scratch with --encoder ngram, which needs no network."
        ) from error


def hub_answers() -> bool:
    """Return whether the hub can be reached; its own client would retry for half a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or urllib.request.getproxies():  # a proxy resolves names
        return not constants.HF_HUB_OFFLINE
    url = urllib.parse.urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((url.hostname, url.port or 443), timeout=_HUB_SECONDS).close()
    except OSError:
        return False
    return True


def can_be_fetched(name: str) -> bool:
    """Return whether the hub's cache has an encoder, or the hub says within some seconds that it
    has it.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_NAME

    def is_cached(file: str) -> bool:
        return isinstance(try_to_load_from_cache(name, file), str)

    if is_cached(CONFIG_NAME) and (is_cached(SAFE_WEIGHTS_NAME) or is_cached(WEIGHTS_NAME)):
        return True
    if constants.HF_HUB_OFFLINE:
        return False
    answered = threading.Event()

    def ask() -> None:
        with suppress(Exception):  # whatever it is, the hub has not answered
            get_hf_file_metadata(hf_hub_url(name, CONFIG_NAME), timeout=_HUB_SECONDS)
            answered.set()

    # in a thread, since resolving a name has no deadline of its own
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_HUB_SECONDS)
    return answered.is_set()


def check_positions(encoder: Encoder, max_len: int, *, name: str) -> None:
    """Raise a UserError if an encoder has fewer than `max_len` positions."""
    positions = max_len  # as where positions are relative
    if isinstance(encoder, Canine):
        positions = min(encoder.config.num_hash_buckets, encoder.config.max_position_embeddings)
    for module_name, module in encoder.named_modules():
        if module_name.endswith(".position_embeddings") and isinstance(module, nn.Embedding):
            # RoBERTa's first position follows that of padding
            positions = module.num_embeddings
            if module.padding_idx is not None:
                positions -= module.padding_idx + 1
    if max_len > positions:
        raise UserError(
            f"The encoder of {name} has {positions} positions; set --max-len to that or less."
        )


def encode_pretrained(
    model: PreTrainedModel, input_ids: Tensor, mask: Tensor, *, dtype: torch.dtype, is_cls: bool
) -> tuple[Tensor, Tensor]:
    """Return the encoding (B, L, dim) of a batch by one of Hugging Face's encoders, and the pooled
    encoding (B, dim).

    `mask` (B, L) is False for padding. Matrix products are computed in `dtype`; the weights stay in
    their own. The pooled encoding is the first token's if `is_cls`, else the mean over all tokens.
    """
    is_cast = dtype != next(model.parameters()).dtype
    attention_mask = mask.long()
    if mask.device.type != "cpu" and _takes_whole_masks(model):
        # of a mask (B, L), transformers asks whether all of it is True, for which the host would
        # wait
        attention_mask = mask[:, None, None].expand(-1, 1, mask.shape[1], -1)
    with torch.autocast(input_ids.device.type, dtype=dtype if is_cast else None, enabled=is_cast):
        encoded = model(input_ids=input_ids.long(), attention_mask=attention_mask).last_hidden_state
    pooled = encoded[:, 0] if is_cls else mean_pooled(encoded, mask)
    return encoded.to(dtype), pooled.to(dtype)


def _takes_whole_masks(model: PreTrainedModel) -> bool:
    """Return whether a model takes a mask (B, 1, L, L) as it is, as those do that call
    `create_bidirectional_mask`.
    """
    module = sys.modules[type(model).__module__]
    is_sdpa = model.config._attn_implementation == "sdpa"
    return is_sdpa and hasattr(module, "create_bidirectional_mask")


def _without_kernels(config: PretrainedConfig) -> PretrainedConfig:
    """Set transformers' default attention, since other names can run code from the hub."""
    for name in ("_attn_implementation", "_experts_implementation"):
        if hasattr(config, name):
            setattr(config, name, None)  # also sets that of nested configs
    # transformers 4.50 saves that it has chosen, and a model built from this record would get the
    # slow attention
    if hasattr(config, "_attn_implementation_autoset"):
        config._attn_implementation_autoset = False
    return config


def _auto_class(config: PretrainedConfig) -> Any:
    """Return transformers' auto class for the encoder alone if there is one, as for T5; else for
    the whole model.
    """
    from transformers import MODEL_FOR_TEXT_ENCODING_MAPPING, AutoModel, AutoModelForTextEncoding

    if type(config) in MODEL_FOR_TEXT_ENCODING_MAPPING:
        return AutoModelForTextEncoding
    return AutoModel


def _encoder_within(model: PreTrainedModel) -> PreTrainedModel:
    """Return the encoder without its pooler, which has no influence on the output here."""
    if getattr(model, "pooler", None) is not None:
        model.pooler = None
    for name, module in list(model.named_modules()):
        if type(module) is nn.Dropout:
            model.set_submodule(name, Dropout(module.p))
    # T5's class for its encoder holds the embeddings twice: beside the encoder, and in it
    return model.encoder if isinstance(getattr(model, "shared", None), nn.Embedding) else model
