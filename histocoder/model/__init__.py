"""Encoder, decoder, and the model made of both."""

from histocoder.model.decoder import Decoder, DecoderCache
from histocoder.model.encoder import PRESETS, load_encoder, trimmed_length
from histocoder.model.mixer import MixerModel, MixerOutput

__all__ = ["PRESETS", "Decoder", "DecoderCache", "MixerModel", "MixerOutput", "load_encoder", "trimmed_length"]
