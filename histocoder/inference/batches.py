"""Batches of descriptions of like lengths, and their encodings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

from histocoder.inference.reading import readings
from histocoder.model import MixerModel

_ENCODED_AT_ONCE = {"cpu": 64}
"""Descriptions at most: what fits a CPU's caches. Decoding reads all weights at each step, and likes more."""
_ENCODED_AT_ONCE_ELSEWHERE = 4096


class Batch(NamedTuple):
    """Some of a table's descriptions."""

    rows: np.ndarray
    """Their places in the table, of shape (B,)."""
    ids: Tensor
    """Tokens, of shape (B, S)."""
    characters: Tensor | None
    """For the linear expert, of shape (B, L); None where the model has none."""


def encoded_at_once(device: torch.device) -> int:
    """Return how many descriptions a device encodes fastest together."""
    return _ENCODED_AT_ONCE.get(device.type, _ENCODED_AT_ONCE_ELSEWHERE)


def batches(
    table: pd.DataFrame, model: MixerModel, device: torch.device, *, at_least: int, at_most: int
) -> Iterator[Batch]:
    """Yield the descriptions of a table in batches of like lengths, the shortest first.

    Parameters
    ----------
    table : DataFrame
        `text` and `lang`.
    model : MixerModel
    device : torch.device
    at_least : int
        Descriptions of a batch, where there are so many, even if their lengths differ.
    at_most : int
    """
    read = readings(
        table["text"].tolist(),
        table["lang"].tolist(),
        model.config,
        model.tokenizer,
        at_least=at_least,
        at_most=at_most,
    )
    for rows, ids, characters in read:
        of_linear = None if characters is None else torch.from_numpy(characters).to(device)
        yield Batch(rows, torch.from_numpy(ids).to(device), of_linear)


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
