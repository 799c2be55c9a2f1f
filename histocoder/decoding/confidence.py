"""How sure a model is of a set of codes, whatever their order."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from histocoder.formatters.tokens import BOS, PAD
from histocoder.model import Decoder


@torch.no_grad()
def set_probability(
    decoder: Decoder,
    memory: Tensor,
    memory_mask: Tensor | None,
    tokens: Tensor,
    probabilities: Tensor,
    *,
    is_code: Tensor,
) -> Tensor:
    """The probability of each row's set of codes, summed over the orders in which they can be written.

    Parameters
    ----------
    decoder : Decoder
    memory : Tensor of shape (B, S, dim)
    memory_mask : Tensor of bool, of shape (B, S), or None
    tokens : Tensor of int, of shape (B, num_blocks * block_size)
        Decoded codes as blocks, without BOS and EOS; unused blocks are PAD, and come last.
    probabilities : Tensor of shape (B, num_blocks * block_size)
        Of each of these tokens, as they were decoded.
    is_code : Tensor of bool, of shape (B, num_blocks)
        Which blocks are codes. Where a used block is none, there is no set, and the sequence itself is what counts.

    Returns
    -------
    Tensor of shape (B,)
        Of whole blocks: the codes in one order or another, and the first unused block behind them.
    """
    num_blocks = is_code.shape[1]
    blocks = tokens.unflatten(1, (num_blocks, -1))
    used = blocks[..., 0].ne(PAD)
    counts = used.sum(1)
    scored = torch.arange(num_blocks, device=tokens.device) <= counts[:, None]
    total = probabilities.unflatten(1, (num_blocks, -1)).prod(-1).masked_fill(~scored, 1.0).prod(1)
    is_set = (is_code | ~used).all(1)
    for count in counts[is_set & counts.gt(1)].unique().tolist():
        among = (is_set & counts.eq(count)).nonzero()[:, 0]
        for order in itertools.islice(itertools.permutations(range(count)), 1, None):  # the first one is as decoded
            rows = among[~_repeats_an_earlier_order(blocks[among], order)]
            if len(rows):
                places = [*order, *range(count, min(count + 1, num_blocks))]
                mask = None if memory_mask is None else memory_mask[rows]
                total[rows] += _sequence_probability(decoder, memory[rows], mask, blocks[rows][:, places].flatten(1))
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
