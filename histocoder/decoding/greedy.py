"""Greedy decoding of target sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from histocoder.formatters.tokens import BOS
from histocoder.model import Decoder


@torch.no_grad()
def greedy(decoder: Decoder, memory: Tensor, memory_mask: Tensor | None, *, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Take the most probable token at each position, given those before it.

    Parameters
    ----------
    decoder : Decoder
    memory : Tensor of shape (B, S, dim)
        The encoder's output.
    memory_mask : Tensor of bool, of shape (B, S), or None
        True where memory may be attended to.
    num_tokens : int
        Tokens to decode behind BOS.

    Returns
    -------
    tokens : Tensor of int, of shape (B, 1 + num_tokens)
        BOS first.
    probabilities : Tensor of shape (B, num_tokens)
        Of each decoded token.
    """
    cache = decoder.start(memory, memory_mask)
    tokens = [torch.full((len(memory),), BOS, device=memory.device)]
    probabilities = []
    for _ in range(num_tokens):
        best = decoder.step(tokens[-1], cache).float().softmax(-1).max(-1)
        tokens.append(best.indices)
        probabilities.append(best.values)
    return torch.stack(tokens, dim=1), torch.stack(probabilities, dim=1)
