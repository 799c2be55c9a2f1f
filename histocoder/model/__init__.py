"""Encoder, decoder, and the model made of both."""

from histocoder.model.canine import used_together
from histocoder.model.copies import keep_copies
from histocoder.model.decoder import Decoder
from histocoder.model.encoder import (
    PRESETS,
    Encoder,
    check_positions,
    is_canine,
    is_ngram,
    load_encoder,
    reads_characters,
    trimmed_length,
)
from histocoder.model.mixer import MixerModel, MixerOutput
from histocoder.model.ngram import NgramEncoder
from histocoder.model.positions import trim_positions
from histocoder.model.prior import Prior
from histocoder.model.stepper import Stepper
from histocoder.model.tokenizer import CHARACTERS, PretrainedTokenizer, Tokenizer, check_vocabulary, load_tokenizer
from histocoder.model.tree import TreeDecoder
from histocoder.model.unfilled import Unfilled

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
    "Stepper",
    "Tokenizer",
    "TreeDecoder",
    "Unfilled",
    "check_positions",
    "check_vocabulary",
    "is_canine",
    "is_ngram",
    "keep_copies",
    "load_encoder",
    "load_tokenizer",
    "reads_characters",
    "trim_positions",
    "trimmed_length",
    "used_together",
]
