"""Encoding, so many descriptions at a time as a device likes best."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from histocoder.model import MixerModel

_ENCODED_AT_ONCE = {"cpu": 64}
"""Descriptions at most: what fits a CPU's caches. Decoding reads all weights at each step, and likes more."""
_ENCODED_AT_ONCE_ELSEWHERE = 4096


def encoded_at_once(device: torch.device) -> int:
    """Return how many descriptions a device encodes fastest together."""
    return _ENCODED_AT_ONCE.get(device.type, _ENCODED_AT_ONCE_ELSEWHERE)


def encode(model: MixerModel, input_ids: Tensor, *, at_once: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Encode as `MixerModel.encode` does, so many descriptions at a time."""
    if len(input_ids) <= at_once:
        return model.encode(input_ids)
    config, tokenizer, num_positions = model.config, model.tokenizer, input_ids.shape[1]
    parts = []
    for ids in input_ids.split(at_once):
        # what is cut off is padding that nobody looks at; where the decoder does, it stays
        longest = int(ids.ne(tokenizer.pad_id).sum(1).max())
        needed = tokenizer.num_positions(longest, config.max_len) if config.mask_memory else num_positions
        parts.append(model.encode(ids[:, : min(num_positions, needed)]))
    memories, pooled, masks = zip(*parts, strict=True)
    width = max(memory.shape[1] for memory in memories)
    memory = torch.cat([F.pad(part, (0, 0, 0, width - part.shape[1])) for part in memories])
    if not config.mask_memory:
        return memory, torch.cat(pooled), None
    return memory, torch.cat(pooled), torch.cat([F.pad(part, (0, width - part.shape[1])) for part in masks])
