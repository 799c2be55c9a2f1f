"""Tokenizers by the names of their encoders."""

from __future__ import annotations

import tempfile
from pathlib import Path

from histocoder.errors import UserError
from histocoder.model.canine import Canine
from histocoder.model.encoder import PRESETS, Encoder, loading, read_encoder_config, reads_characters
from histocoder.model.ngram import NgramEncoder
from histocoder.tokenizers import CHARACTERS, PretrainedTokenizer, Tokenizer, auto_tokenizer, contents


def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer of an encoder: a preset, a local folder, or a name on the Hugging Face hub.

    Raises
    ------
    UserError
        Where there is none, or the hub can't be reached.
    """
    if name in PRESETS or reads_characters(read_encoder_config(name)):
        return CHARACTERS
    with loading(name) as options, tempfile.TemporaryDirectory() as folder:
        auto_tokenizer(name, options).save_pretrained(folder)
        return PretrainedTokenizer(contents(Path(folder)))


def check_vocabulary(encoder: Encoder, tokenizer: Tokenizer, *, name: str) -> None:
    """Raise a UserError where a tokenizer gives ids that its encoder has no embedding for."""
    if isinstance(encoder, Canine | NgramEncoder) or not isinstance(tokenizer, PretrainedTokenizer):
        return
    if tokenizer.num_ids > encoder.config.vocab_size:
        raise UserError(
            f"The tokenizer of {name} has {tokenizer.num_ids:,} tokens, its encoder {encoder.config.vocab_size:,}; "
            "they do not belong together. Give a folder in which they do."
        )
