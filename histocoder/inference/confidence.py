"""How sure a model is of a set of codes, whatever their order."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from histocoder.formatters.tokens import BOS, PAD
from histocoder.inference.stepper import Stepper
from histocoder.inference.trie import branches_above
from histocoder.model import Decoder, Prior

_NEGLIGIBLE = 1e-8
"""Orders that begin in a less probable way are left out: an order is never more probable than its beginning."""


@torch.no_grad()
def set_probability(
    decoder: Decoder,
    memory: Tensor,
    memory_mask: Tensor | None,
    tokens: Tensor,
    probabilities: Tensor,
    prior: Prior | None = None,
    *,
    is_code: Tensor,
) -> Tensor:
    """Return the probability of each row's set of codes, summed over the orders in which they can be written.

    Parameters
    ----------
    decoder : Decoder
    memory : Tensor of shape (B, S, dim)
    memory_mask : Tensor of bool, of shape (B, S), or None
    tokens : Tensor of int, of shape (B, num_blocks * block_size)
        Decoded codes as blocks, without BOS and EOS; unused blocks are PAD, and come last.
    probabilities : Tensor of shape (B, num_blocks * block_size)
        Of each of these tokens, as they were decoded.
    prior : Prior, optional
        What the decoder starts from.
    is_code : Tensor of bool, of shape (B, num_blocks)
        Which blocks are codes. Where a used block is none, there is no set, and the sequence itself is what counts.

    Returns
    -------
    Tensor of shape (B,)
        Of whole blocks: the codes in one order or another, and the first unused block behind them; exact within 1e-8
        for each order of the codes, 1.2e-6 where there are five.
    """
    num_blocks = is_code.shape[1]
    blocks = tokens.unflatten(1, (num_blocks, -1))
    used = blocks[..., 0].ne(PAD)
    counts = used.sum(1)
    scored = torch.arange(num_blocks, device=tokens.device) <= counts[:, None]
    total = probabilities.unflatten(1, (num_blocks, -1)).prod(-1).masked_fill(~scored, 1.0).prod(1)
    rows = ((is_code | ~used).all(1) & counts.gt(1)).nonzero()[:, 0]
    if len(rows):
        mask = None if memory_mask is None else memory_mask[rows]
        stepper = Stepper(decoder, memory[rows], mask, None if prior is None else prior.rows(rows))
        total[rows] += _other_orders(stepper, _Orders(blocks[rows], counts[rows]))
    return total.clamp(max=1.0)


class _Orders:
    """The orders of each row's codes but the given one, as a tree of blocks; its nodes are beginnings of orders.

    Parameters
    ----------
    blocks : Tensor of int, of shape (B, num_blocks, block_size)
        Each row's codes, then its unused blocks.
    counts : Tensor of int, of shape (B,)
        Codes of each row: 2 or more.
    """

    def __init__(self, blocks: Tensor, counts: Tensor) -> None:
        self.blocks = blocks
        num_blocks = blocks.shape[1]
        self.lengths = (counts + 1).clamp(max=num_blocks)
        """Blocks that count: the codes and an unused one behind them, of shape (B,)."""
        self._counts = counts[:, None, None]
        self._places = torch.arange(num_blocks, device=blocks.device)
        same = (blocks[:, :, None] == blocks[:, None]).all(-1)
        self._same_as_earlier = same.tril(-1)[:, None]  # (B, 1, num_blocks, num_blocks)

    def next_blocks(self, used: Tensor, as_given: Tensor) -> Tensor:
        """Which blocks may come next.

        Parameters
        ----------
        used : Tensor of bool, of shape (B, W, num_blocks)
            Which blocks each of W beginnings has.
        as_given : Tensor of bool, of shape (B, W)
            Whether it has them in the given order.

        Returns
        -------
        Tensor of bool, of shape (B, W, num_blocks)
        """
        num_used = used.sum(-1, keepdim=True)
        codes_before_unused = self._places < torch.maximum(self._counts, num_used + (num_used == self._counts))
        # the copies of a repeated code stay in order, or the same sequence would count twice
        earlier_copy = (self._same_as_earlier & ~used[:, :, None]).any(-1)
        # the last choice there is: it makes the given order
        last_choice = as_given[..., None] & (num_used == self._places) & (num_used >= self._counts - 2)
        return ~used & codes_before_unused & ~earlier_copy & ~last_choice


def _other_orders(stepper: Stepper, orders: _Orders) -> Tensor:
    """Return the probability of all orders but the given one, of shape (B,); common prefixes are computed once."""
    batch, num_blocks, block_size = orders.blocks.shape
    device = orders.blocks.device
    row = torch.arange(batch, device=device)[:, None]
    total = torch.zeros(batch, device=device)
    parents = current = torch.zeros(batch, 1, dtype=torch.long, device=device)  # (B, W), as all below
    tokens, scores = torch.full_like(parents, BOS), torch.zeros(batch, 1, device=device)
    used, as_given = torch.zeros(batch, 1, num_blocks, dtype=torch.bool, device=device), parents.eq(0)
    for place in range(num_blocks * block_size):
        block, offset = divmod(place, block_size)
        log_probs = stepper.step_tree(tokens, parents, scores > -torch.inf).float().log_softmax(-1)
        choices = (
            torch.arange(num_blocks, device=device).expand(*scores.shape, -1) if offset == 0 else current[..., None]
        )
        next_tokens = orders.blocks[row[..., None], choices, offset]  # (B, W, choices)
        candidates = scores[..., None] + log_probs.gather(-1, next_tokens)
        if offset == 0:
            candidates = candidates.masked_fill(~orders.next_blocks(used, as_given), -torch.inf)
        branches = branches_above(candidates.flatten(1), math.log(_NEGLIGIBLE))
        parents, scores = branches.places // choices.shape[2], branches.scores
        current, tokens = (x.flatten(1).gather(1, branches.places) for x in (choices, next_tokens))
        used, as_given = used[row, parents], as_given[row, parents]
        if offset == 0:
            used = used.scatter(2, current[..., None], True)
            as_given = as_given & (current == block)
        if offset == block_size - 1:
            complete = orders.lengths == block + 1
            total += scores.exp().sum(1).masked_fill(~complete, 0.0)
            scores = scores.masked_fill(complete[:, None], -torch.inf)
        if not bool((scores > -torch.inf).any()):
            break
    return total
