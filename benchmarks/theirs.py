"""CANINE as transformers computes it, with the weights of ours."""

from __future__ import annotations

from transformers import CanineConfig, CanineModel

from histocoder.model.canine_weights import Canine


def canine_of_transformers(encoder: Canine) -> CanineModel:
    """A `CanineModel` with copies of an encoder's weights."""
    model = CanineModel(CanineConfig(**encoder.config.to_diff_dict()))
    model.load_state_dict(encoder.state_dict())
    return model.train(encoder.training)
