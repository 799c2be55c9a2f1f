"""Encoders, decoder, and the model that holds both."""

from histocoder.model.decoder import Decoder, Prior
from histocoder.model.encoder import (
    PRESETS,
    Encoder,
    encoder_type,
    load_encoder,
    load_tokenizer,
    reads_characters,
)
from histocoder.model.mixer import MixerModel, MixerOutput
from histocoder.model.ngram import NgramEncoder
from histocoder.text.tokenizers import (
    CHARACTERS,
    PretrainedTokenizer,
    Tokenizer,
    trimmed_length,
)
