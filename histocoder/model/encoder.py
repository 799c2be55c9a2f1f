"""Encoders and their tokenizers: presets trained from scratch, and Hugging Face's, from the hub or a folder.

An encoder is a module, `Canine`, `NgramEncoder` or a `PreTrainedModel`, whose `config` builds it again.
"""

from __future__ import annotations

import socket
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, TypeAlias

from safetensors import SafetensorError

from histocoder.config import MODEL_TYPE
from histocoder.errors import UserError
from histocoder.formatters.tokenizers import CHARACTERS, PretrainedTokenizer, Tokenizer, auto_tokenizer, contents
from histocoder.model.canine import Canine, CanineConfig
from histocoder.model.ngram import NgramConfig, NgramEncoder
from histocoder.model.pretrained import full_config, load_pretrained, num_positions, pretrained_from_config, read_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Encoder: TypeAlias = "Canine | NgramEncoder | PreTrainedModel"
_NAMES = {
    **{"canine": "CANINE", "ngram": "word n-grams"},
    **{"bert": "BERT", "roberta": "RoBERTa", "xlm-roberta": "XLM-R", "t5": "T5", "mt5": "mT5"},
}

PRESETS: dict[str, dict[str, Any]] = {
    # for a laptop: words as hashed n-grams; minutes for tens of thousands of rows
    "ngram": {"model_type": NgramConfig.model_type},
    # for tests: seconds on a laptop, no dropout, so that runs compare exactly
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "num_hash_buckets": 256,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
    # a CANINE from scratch, for tables of many thousands of rows; without dropout, since augmentation is noise enough
    "small": {
        "hidden_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "intermediate_size": 384,
        "num_hash_buckets": 1024,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
}


def is_canine(config: dict[str, Any]) -> bool:
    """Return whether an encoder's config is a `CanineConfig`, the default if it names no type."""
    return config.get("model_type", CanineConfig.model_type) == CanineConfig.model_type


def is_ngram(config: dict[str, Any]) -> bool:
    """Return whether an encoder's config is an `NgramConfig`."""
    return config.get("model_type") == NgramConfig.model_type


def reads_characters(config: dict[str, Any]) -> bool:
    """Return whether the encoder of a config reads characters instead of tokens."""
    return is_canine(config) or is_ngram(config)


def encoder_sizes(config: dict[str, Any]) -> dict[str, Any]:
    """Return `name`, `num_layers` and `hidden_size` of the encoder of a config."""
    build = CanineConfig.from_dict if is_canine(config) else NgramConfig.from_dict if is_ngram(config) else full_config
    sizes: Any = build(config)
    name = _NAMES.get(sizes.model_type, sizes.model_type)
    return {"name": name, "num_layers": sizes.num_hidden_layers, "hidden_size": sizes.hidden_size}


def encoder_from_config(config: dict[str, Any]) -> Encoder:
    """Build the encoder of a config with random weights."""
    if is_ngram(config):
        return NgramEncoder(NgramConfig.from_dict(config))
    return Canine(CanineConfig.from_dict(config)) if is_canine(config) else pretrained_from_config(config)


def load_encoder(name: str, *, max_len: int, ngram_dropout: float = 0.3) -> Encoder:
    """Load an encoder with its weights; raise a UserError if that fails.

    Parameters
    ----------
    name : str
        A preset ("ngram", "small", "tiny": random weights), a local folder, or a name on the Hugging Face hub.
    max_len : int
        Tokens of the longest input, special ones included.
    ngram_dropout : float
        See `NgramConfig`; for the preset "ngram".
    """
    if name in PRESETS:
        sizes = PRESETS[name]
        if is_ngram(sizes):
            return encoder_from_config({**sizes, "ngram_dropout_prob": ngram_dropout})
        # CANINE's table of positions has as many rows as it has hash buckets
        buckets = max(sizes["num_hash_buckets"], max_len)
        return encoder_from_config({**sizes, "num_hash_buckets": buckets, "max_position_embeddings": buckets})
    config = read_encoder_config(name)
    with _loading(name) as options:
        encoder = _load_canine(name, options) if is_canine(config) else load_pretrained(name, options)
    check_positions(encoder, max_len, name=name)
    return encoder


def _load_canine(name: str, options: dict[str, Any]) -> Canine:
    from transformers import CanineModel  # here and below: the import takes seconds, and most runs don't need it

    return Canine.from_transformers(CanineModel.from_pretrained(name, config=read_config(name, options), **options))


def load_tokenizer(name: str) -> Tokenizer:
    """Load the tokenizer of an encoder, named as in `load_encoder`; raise a UserError if that fails."""
    if name in PRESETS or reads_characters(read_encoder_config(name)):
        return CHARACTERS
    with _loading(name) as options, tempfile.TemporaryDirectory() as folder:
        auto_tokenizer(name, options).save_pretrained(folder)
        return PretrainedTokenizer(contents(Path(folder)))


def check_vocabulary(encoder: Encoder, tokenizer: Tokenizer, *, name: str) -> None:
    """Raise a UserError if a tokenizer has ids that its encoder has no embedding for."""
    if isinstance(encoder, Canine | NgramEncoder) or not isinstance(tokenizer, PretrainedTokenizer):
        return
    if tokenizer.num_ids > encoder.config.vocab_size:
        raise UserError(
            f"The tokenizer of {name} has {tokenizer.num_ids:,} tokens, its encoder has {encoder.config.vocab_size:,}; "
            "they do not match. Name a folder in which they do."
        )


def read_encoder_config(name: str) -> dict[str, Any]:
    """Read the config of an encoder in a folder or on the hub; raise a UserError if that fails."""
    from transformers import PretrainedConfig

    if Path(name).exists() and not (Path(name) / "config.json").is_file():
        raise UserError(f"The encoder folder {name} has no config.json; name a folder saved by transformers.")
    with _loading(name) as options:
        config: dict[str, Any] = PretrainedConfig.get_config_dict(name, **options)[0]
    if config.get("model_type") == MODEL_TYPE:
        raise UserError(f"{name} is a histocoder model; start from its weights with --initial-checkpoint {name}.")
    return config


@contextmanager
def _loading(name: str) -> Iterator[dict[str, Any]]:
    """Yield the options to load a part of an encoder with; turn failures into UserErrors."""
    try:
        yield {"local_files_only": Path(name).exists() or not hub_answers()}
    except UserError:
        raise
    except (OSError, ValueError, RuntimeError, EOFError, ImportError, UnpicklingError, SafetensorError) as error:
        is_away = not Path(name).exists() and not hub_answers()
        first_line = str(error).strip().split("\n")[0]
        where = "the hub can't be reached, and there is no cached copy" if is_away else first_line
        raise UserError(
            f"Could not load the encoder {name!r} ({where}). Name the folder of a pretrained encoder with "
            "--encoder PATH, or train from scratch with --encoder ngram, which needs no network."
        ) from error


def check_positions(encoder: Encoder, max_len: int, *, name: str) -> None:
    """Raise a UserError if an encoder has fewer than `max_len` positions."""
    if isinstance(encoder, NgramEncoder):
        return
    if isinstance(encoder, Canine):
        positions = min(encoder.config.num_hash_buckets, encoder.config.max_position_embeddings)
    else:
        positions = num_positions(encoder)
    if max_len > positions:
        raise UserError(f"The encoder of {name} has {positions} positions; set --max-len to that or less.")


def hub_answers() -> bool:
    """Return whether the hub can be reached; its own client would retry for half a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    if urllib.request.getproxies():  # the proxy resolves names
        return True
    url = urllib.parse.urlsplit(constants.ENDPOINT)
    try:
        with socket.create_connection((url.hostname, url.port or 443), timeout=5):
            return True
    except OSError:
        return False
