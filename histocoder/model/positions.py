"""Keeps only those rows of CANINE's table of positions that inputs reach, out of 16,384."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from histocoder.model.canine_weights import Canine


def trim_positions(encoder: nn.Module, max_len: int) -> None:
    """Take the positions beyond `max_len` out of training, so that they need no gradients and no optimizer state.

    State dicts have the table's full shape as before, in both directions. Other encoders than CANINE, which have few
    positions or none, stay as they are.
    """
    if not isinstance(encoder, Canine):
        return
    table = encoder.char_embeddings.char_position_embeddings
    if len(table.weight) <= max_len:
        return
    rest = table.weight.detach()[max_len:].clone()
    requires_grad = table.weight.requires_grad
    table.weight = nn.Parameter(table.weight.detach()[:max_len].clone(), requires_grad=requires_grad)

    def join(_module: nn.Module, state: dict[str, Tensor], prefix: str, _metadata: Any) -> None:
        kept = state[prefix + "weight"]
        state[prefix + "weight"] = torch.cat([kept, rest.to(kept)])

    def split(_module: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
        full = state[prefix + "weight"]
        rest.copy_(full[max_len:])
        state[prefix + "weight"] = full[:max_len]

    table.register_state_dict_post_hook(join)
    table.register_load_state_dict_pre_hook(split)
