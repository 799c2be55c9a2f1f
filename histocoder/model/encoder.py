"""CANINE encoders: from the hub, from a folder, or one of two presets trained from scratch."""

from __future__ import annotations

import math
import socket
import urllib.parse
import urllib.request
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from histocoder.errors import UserError

if TYPE_CHECKING:
    from transformers import CanineModel

PRESETS: dict[str, dict[str, Any]] = {
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
    # for a laptop: minutes; no dropout, which costs time, and of noise there is enough in augmentation
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


def trimmed_length(length: int, max_len: int) -> int:
    """The number of positions that a batch needs whose longest row has `length` tokens, CLS and SEP included.

    CANINE reads characters in molecules of 4, drops the last molecule when it samples down, and looks two characters
    ahead when it samples up: with one molecule to spare behind that, the encoding of real characters and the pooled
    output are those of a row padded to any length.

    Examples
    --------
    >>> [trimmed_length(n, 128) for n in (2, 3, 6, 7, 128)]
    [8, 12, 12, 16, 128]
    """
    return min(max_len, 4 * (math.ceil((length + 2) / 4) + 1))


def encoded_length(num_positions: int, max_len: int) -> int:
    """Of a batch's positions, by `trimmed_length` or more, those that are encoded: the rest was there to look at.

    Examples
    --------
    >>> encoded_length(28, 128), encoded_length(128, 128)
    (22, 128)
    """
    return num_positions if num_positions == max_len else num_positions - 6


def encoder_from_config(config: dict[str, Any]) -> CanineModel:
    """Build an encoder with random weights from the fields of a `CanineConfig`."""
    from transformers import CanineConfig, CanineModel  # here and below: it takes seconds, and --help needs none of it

    return CanineModel(CanineConfig(**config))


def load_encoder(name: str, *, max_len: int) -> CanineModel:
    """Load an encoder with its weights.

    Parameters
    ----------
    name : str
        A preset ("tiny", "small": random weights), a local folder, or a name on the Hugging Face hub.
    max_len : int
        Tokens of the longest input, CLS and SEP included.

    Raises
    ------
    UserError
        Where there is no such encoder, the hub can't be reached, or it has too few positions for `max_len`.
    """
    from transformers import CanineModel

    if name in PRESETS:
        sizes = PRESETS[name]
        # CANINE's table of positions has as many rows as it has hash buckets
        buckets = max(sizes["num_hash_buckets"], max_len)
        return encoder_from_config({**sizes, "num_hash_buckets": buckets, "max_position_embeddings": buckets})
    if Path(name).exists() and not (Path(name) / "config.json").is_file():
        raise UserError(f"The encoder folder {name} has no config.json; name a folder saved by transformers.")
    try:
        encoder = CanineModel.from_pretrained(name, local_files_only=not hub_answers())
    except (OSError, ValueError, RuntimeError, EOFError, UnpicklingError, SafetensorError) as error:
        where = "the hub can't be reached and has left no copy here" if not hub_answers() else _first_line(error)
        raise UserError(
            f"Could not load the encoder {name!r} ({where}). Give a local folder with --encoder PATH, or train from "
            "scratch with --encoder small."
        ) from error
    check_positions(encoder.config.to_dict(), max_len, name=name)
    return encoder


def check_positions(config: dict[str, Any], max_len: int, *, name: str) -> None:
    """Raise a UserError where an encoder with these fields of a `CanineConfig` can't read so many tokens."""
    positions = min(config.get("num_hash_buckets", 16384), config.get("max_position_embeddings", 16384))
    if max_len > positions:
        raise UserError(f"The encoder of {name} has {positions} positions; set --max-len to that or less.")


def hub_answers() -> bool:
    """Whether the hub can be asked at all; without this its client retries for half a minute."""
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
