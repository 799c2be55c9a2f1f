"""How sure a model is of a set of codes, whatever their order."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from histocoder.formatters.tokens import BOS, PAD
from histocoder.model import Decoder


@torch.no_grad()
def set_probability(
    decoder: Decoder, memory: Tensor, memory_mask: Tensor | None, tokens: Tensor, *, num_blocks: int
) -> Tensor:
    """The probability of each row's set of codes, summed over the orders in which they can be written.

    Parameters
    ----------
    decoder : Decoder
    memory : Tensor of shape (B, S, dim)
    memory_mask : Tensor of bool, of shape (B, S), or None
    tokens : Tensor of int, of shape (B, num_blocks * block_size)
        Codes as blocks, without BOS and EOS; unused blocks are PAD.
    num_blocks : int

    Returns
    -------
    Tensor of shape (B,)
        Of whole sequences: the codes in one order or another, and PAD in every block behind them.
    """
    blocks = tokens.unflatten(1, (num_blocks, -1))
    used = blocks[..., 0].ne(PAD)
    blocks = blocks.gather(1, used.logical_not().int().argsort(dim=1, stable=True)[..., None].expand_as(blocks))
    counts = used.sum(1)
    total = torch.zeros(len(tokens), device=tokens.device)
    for count in counts.unique().tolist():
        rows = (counts == count).nonzero()[:, 0]
        mask = None if memory_mask is None else memory_mask[rows]
        chosen = blocks[rows]
        for order in itertools.permutations(range(count)):
            places = [*order, *range(count, num_blocks)]
            repeated = _repeats_an_earlier_order(chosen, order)
            probability = _sequence_probability(decoder, memory[rows], mask, chosen[:, places].flatten(1))
            total[rows] += probability.masked_fill(repeated, 0.0)
    return total.clamp(max=1.0)


def _repeats_an_earlier_order(blocks: Tensor, order: tuple[int, ...]) -> Tensor:
    """Where a code stands twice, only the orders that keep its copies in place count; of shape (B,)."""
    repeated = torch.zeros(len(blocks), dtype=torch.bool, device=blocks.device)
    place = {code: i for i, code in enumerate(order)}
    for a, b in itertools.combinations(range(len(order)), 2):
        if place[a] > place[b]:
            repeated |= (blocks[:, a] == blocks[:, b]).all(-1)
    return repeated


def _sequence_probability(decoder: Decoder, memory: Tensor, memory_mask: Tensor | None, tokens: Tensor) -> Tensor:
    """The probability of whole sequences of shape (B, L), of shape (B,)."""
    begun = torch.cat([torch.full_like(tokens[:, :1], BOS), tokens[:, :-1]], dim=1)
    log_probs = decoder(begun, memory, memory_mask).float().log_softmax(-1)
    return log_probs.gather(-1, tokens[..., None])[..., 0].sum(-1).exp()
