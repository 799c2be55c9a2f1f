"""Encoder, decoder, and the model made of both."""

from histocoder.model.decoder import Decoder
from histocoder.model.encoder import (
    PRESETS,
    Encoder,
    check_positions,
    is_canine,
    is_ngram,
    load_encoder,
    reads_characters,
)
from histocoder.model.mixer import MixerModel, MixerOutput
from histocoder.model.ngram import NgramEncoder
from histocoder.model.prior import Prior
from histocoder.model.tokenizer import check_vocabulary, load_tokenizer
from histocoder.tokenizers import CHARACTERS, PretrainedTokenizer, Tokenizer, trimmed_length

__all__ = [
    "CHARACTERS",
    "PRESETS",
    "Decoder",
    "Encoder",
    "MixerModel",
    "MixerOutput",
    "NgramEncoder",
    "PretrainedTokenizer",
    "Prior",
    "Tokenizer",
    "check_positions",
    "check_vocabulary",
    "is_canine",
    "is_ngram",
    "load_encoder",
    "load_tokenizer",
    "reads_characters",
    "trimmed_length",
]
