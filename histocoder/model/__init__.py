"""Encoder, decoder, and the model made of both."""

from histocoder.model.canine import used_together
from histocoder.model.decoder import Decoder
from histocoder.model.encoder import PRESETS, check_positions, load_encoder, trimmed_length
from histocoder.model.layers import keep_copies
from histocoder.model.mixer import MixerModel, MixerOutput
from histocoder.model.positions import trim_positions
from histocoder.model.stepper import Stepper
from histocoder.model.tree import TreeDecoder

__all__ = [
    "PRESETS",
    "Decoder",
    "MixerModel",
    "MixerOutput",
    "Stepper",
    "TreeDecoder",
    "check_positions",
    "keep_copies",
    "load_encoder",
    "trim_positions",
    "trimmed_length",
    "used_together",
]
