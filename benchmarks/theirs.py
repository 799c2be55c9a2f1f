"""CANINE of transformers, with the weights of histocoder's encoder."""

from __future__ import annotations

from transformers import CanineConfig, CanineModel

from histocoder.model.canine import POSITIONS, Canine


def canine_of_transformers(encoder: Canine) -> CanineModel:
    """Return a `CanineModel` with copies of an encoder's weights."""
    model = CanineModel(CanineConfig(**encoder.config.to_diff_dict()))
    weights = encoder.state_dict()
    positions = model.state_dict()[POSITIONS]
    positions[: len(weights[POSITIONS])] = weights[POSITIONS]
    model.load_state_dict({**weights, POSITIONS: positions})
    return model.train(encoder.training)
