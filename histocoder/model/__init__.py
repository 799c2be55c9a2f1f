"""Encoder, decoder, and the model made of both."""

from histocoder.model.decoder import Decoder, DecoderCache
from histocoder.model.encoder import PRESETS, check_positions, load_encoder, trimmed_length
from histocoder.model.mixer import MixerModel, MixerOutput
from histocoder.model.positions import trim_positions

__all__ = [
    "PRESETS",
    "Decoder",
    "DecoderCache",
    "MixerModel",
    "MixerOutput",
    "check_positions",
    "load_encoder",
    "trim_positions",
    "trimmed_length",
]
