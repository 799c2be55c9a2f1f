"""Encoders: any CANINE, or another of Hugging Face's, from the hub or a folder; presets trained from scratch.

What an encoder is to the rest of the program: a module, `Canine`, `NgramEncoder` or a `PreTrainedModel`, whose
`config` builds it again; what makes encodings of token ids, its `forward` or `pretrained.pretrained`; and a
`tokenizer.Tokenizer`, which makes token ids of texts and knows how many positions a batch of them needs.
"""

from __future__ import annotations

import socket
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from safetensors import SafetensorError

from histocoder.config import MODEL_TYPE
from histocoder.errors import UserError
from histocoder.model.canine import Canine, CanineConfig
from histocoder.model.ngram import NgramConfig, NgramEncoder
from histocoder.model.pretrained import (
    full_config,
    load_pretrained,
    num_positions,
    pretrained_from_config,
    read_config,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Encoder: TypeAlias = "Canine | NgramEncoder | PreTrainedModel"
_NAMES = {"bert": "BERT", "roberta": "RoBERTa", "xlm-roberta": "XLM-R", "t5": "T5", "mt5": "mT5"}

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
    """Return whether the fields of an encoder's config are a `CanineConfig`'s, as are those that name no type."""
    return config.get("model_type", CanineConfig.model_type) == CanineConfig.model_type


def is_ngram(config: dict[str, Any]) -> bool:
    """Return whether the fields of an encoder's config are an `NgramConfig`'s."""
    return config.get("model_type") == NgramConfig.model_type


def reads_characters(config: dict[str, Any]) -> bool:
    """Return whether an encoder with these fields of its config reads characters instead of tokens."""
    return is_canine(config) or is_ngram(config)


class EncoderSizes(NamedTuple):
    """What to say of an encoder."""

    name: str
    num_layers: int
    hidden_size: int


def encoder_sizes(config: dict[str, Any]) -> EncoderSizes:
    """Return the sizes of an encoder with these fields of its config."""
    if is_canine(config):
        sizes = CanineConfig.of(config)
        return EncoderSizes("CANINE", sizes.num_hidden_layers, sizes.hidden_size)
    if is_ngram(config):
        words = NgramConfig.of(config)
        return EncoderSizes("word n-grams", words.num_hidden_layers, words.hidden_size)
    found = full_config(config)
    return EncoderSizes(_NAMES.get(found.model_type, found.model_type), found.num_hidden_layers, found.hidden_size)


def encoder_from_config(config: dict[str, Any]) -> Encoder:
    """Build an encoder with random weights from the fields of its config."""
    if is_ngram(config):
        return NgramEncoder(NgramConfig.of(config))
    return Canine(CanineConfig.of(config)) if is_canine(config) else pretrained_from_config(config)


def load_encoder(name: str, *, max_len: int, ngram_dropout: float = 0.3) -> Encoder:
    """Load an encoder with its weights.

    Parameters
    ----------
    name : str
        A preset ("ngram", "small", "tiny": random weights), a local folder, or a name on the Hugging Face hub.
    max_len : int
        Tokens of the longest input, special ones included.
    ngram_dropout : float
        See `NgramConfig`; for the preset "ngram".

    Raises
    ------
    UserError
        Where there is no such encoder, the hub can't be reached, or it has too few positions for `max_len`.
    """
    if name in PRESETS:
        sizes = PRESETS[name]
        if is_ngram(sizes):
            return encoder_from_config({**sizes, "ngram_dropout_prob": ngram_dropout})
        # CANINE's table of positions has as many rows as it has hash buckets
        buckets = max(sizes["num_hash_buckets"], max_len)
        return encoder_from_config({**sizes, "num_hash_buckets": buckets, "max_position_embeddings": buckets})
    config = read_encoder_config(name)
    with loading(name) as options:
        encoder = _load_canine(name, options) if is_canine(config) else load_pretrained(name, options)
    check_positions(encoder, max_len, name=name)
    return encoder


def _load_canine(name: str, options: dict[str, Any]) -> Canine:
    from transformers import CanineModel  # here and below: it takes seconds, and most runs need none of it

    return Canine.of(CanineModel.from_pretrained(name, config=read_config(name, options), **options))


def read_encoder_config(name: str) -> dict[str, Any]:
    """Return the config of an encoder, a preset's excepted, by its name; raises UserError where there is none."""
    from transformers import PretrainedConfig

    if Path(name).exists() and not (Path(name) / "config.json").is_file():
        raise UserError(f"The encoder folder {name} has no config.json; name a folder saved by transformers.")
    with loading(name) as options:
        config: dict[str, Any] = PretrainedConfig.get_config_dict(name, **options)[0]
    if config.get("model_type") == MODEL_TYPE:
        raise UserError(f"{name} is a model of histocoder's; begin with its weights by --initial-checkpoint {name}.")
    return config


@contextmanager
def loading(name: str) -> Iterator[dict[str, Any]]:
    """Give the options to load a part of an encoder with; turn its failure into a UserError."""
    try:
        yield {"local_files_only": Path(name).exists() or not hub_answers()}
    except UserError:
        raise
    except (OSError, ValueError, RuntimeError, EOFError, ImportError, UnpicklingError, SafetensorError) as error:
        is_away = not Path(name).exists() and not hub_answers()
        where = "the hub can't be reached and has left no copy here" if is_away else _first_line(error)
        raise UserError(
            f"Could not load the encoder {name!r} ({where}). Give a local folder with --encoder PATH, or train from "
            "scratch with --encoder small."
        ) from error


def check_positions(encoder: Encoder, max_len: int, *, name: str) -> None:
    """Raise a UserError where an encoder can't read so many tokens."""
    if isinstance(encoder, NgramEncoder):
        return
    if isinstance(encoder, Canine):
        positions = min(encoder.config.num_hash_buckets, encoder.config.max_position_embeddings)
    else:
        positions = num_positions(encoder)
    if max_len > positions:
        raise UserError(f"The encoder of {name} has {positions} positions; set --max-len to that or less.")


def hub_answers() -> bool:
    """Return whether the hub can be asked at all; without this its client retries for half a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    if urllib.request.getproxies():  # then names are resolved elsewhere
        return True
    url = urllib.parse.urlsplit(constants.ENDPOINT)
    try:
        with socket.create_connection((url.hostname, url.port or 443), timeout=5):
            return True
    except OSError:
        return False


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
