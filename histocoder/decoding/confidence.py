"""How sure a model is of a set of codes, whatever their order."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from histocoder.formatters.tokens import BOS, PAD
from histocoder.model import Decoder, DecoderCache

_NEGLIGIBLE = 1e-8
"""Orders whose first blocks are less probable are left out: an order is never more probable than its beginning."""
_BEGINNING = 2
"""So many blocks are looked at for that."""


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
        Of whole blocks: the codes in one order or another, and the first unused block behind them; exact within 1.2e-6.
    """
    num_blocks = is_code.shape[1]
    blocks = tokens.unflatten(1, (num_blocks, -1))
    used = blocks[..., 0].ne(PAD)
    counts = used.sum(1)
    scored = torch.arange(num_blocks, device=tokens.device) <= counts[:, None]
    total = probabilities.unflatten(1, (num_blocks, -1)).prod(-1).masked_fill(~scored, 1.0).prod(1)
    is_set = (is_code | ~used).all(1)
    for count in counts[is_set & counts.gt(1)].unique().tolist():
        rows = (is_set & counts.eq(count)).nonzero()[:, 0]
        mask = None if memory_mask is None else memory_mask[rows]
        total[rows] += _other_orders(decoder, decoder.start(memory[rows], mask), blocks[rows], count)
    return total.clamp(max=1.0)


def _other_orders(decoder: Decoder, cache: DecoderCache, blocks: Tensor, count: int) -> Tensor:
    """The probability of all orders but the given one of the first `count` blocks of (B, num_blocks, block_size)."""

    def probability(places: Sequence[int], rows: Tensor) -> Tensor:
        begun = cache if len(rows) == len(blocks) else cache.begun(rows)
        return _sequence_probability(decoder, begun, blocks[rows][:, list(places)].flatten(1))

    everything = torch.arange(len(blocks), device=blocks.device)
    beginnings = {
        begun: probability(begun, everything)
        for length in range(1, min(count, _BEGINNING + 1))
        for begun in itertools.permutations(range(count), length)
    }
    total = torch.zeros(len(blocks), device=blocks.device)
    for order in itertools.islice(itertools.permutations(range(count)), 1, None):  # the first one is the given one
        likely = beginnings[order[: min(count - 1, _BEGINNING)]] >= _NEGLIGIBLE
        rows = everything[likely & ~_repeats_an_earlier_order(blocks, order)]
        if len(rows):
            unused = range(count, min(count + 1, blocks.shape[1]))
            total[rows] += probability([*order, *unused], rows)
    return total


def _repeats_an_earlier_order(blocks: Tensor, order: tuple[int, ...]) -> Tensor:
    """Where a code stands twice, only the orders that keep its copies in place count; of shape (B,)."""
    repeated = torch.zeros(len(blocks), dtype=torch.bool, device=blocks.device)
    place = {code: i for i, code in enumerate(order)}
    for a, b in itertools.combinations(range(len(order)), 2):
        if place[a] > place[b]:
            repeated |= (blocks[:, a] == blocks[:, b]).all(-1)
    return repeated


def _sequence_probability(decoder: Decoder, cache: DecoderCache, tokens: Tensor) -> Tensor:
    """The probability of whole sequences of shape (B, L), of shape (B,)."""
    before = torch.cat([torch.full_like(tokens[:, :1], BOS), tokens[:, :-1]], dim=1)
    log_probs = decoder.score(before, cache).float().log_softmax(-1)
    return log_probs.gather(-1, tokens[..., None])[..., 0].sum(-1).exp()
