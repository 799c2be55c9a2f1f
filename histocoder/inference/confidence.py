"""Probability of a set of codes, in whatever order they are written."""

import math

import torch
from torch import Tensor

from histocoder.formatters.systems import BOS, PAD
from histocoder.inference.stepper import Stepper, select_rows
from histocoder.inference.trie import branches_above
from histocoder.model import Decoder, Prior

_NEGLIGIBLE = 1e-8  # probability below which an order, never more probable than its beginning, is not followed


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
    decoder, memory, memory_mask, prior
        See `Decoder.forward`.
    tokens : Tensor of int, of shape (B, num_blocks * block_size)
        Decoded codes as blocks, without BOS and EOS; unused blocks are PAD, and come last.
    probabilities : Tensor of shape (B, num_blocks * block_size)
        Probability of each of these tokens, as they were decoded.
    is_code : Tensor of bool, of shape (B, num_blocks)
        Which blocks are codes. If a used block is not one, there is no set, and the sequence itself is what counts.

    Returns
    -------
    Tensor of shape (B,)
        Includes the first unused block after the codes; exact within 1e-8 for each order of the codes, 1.2e-6 for five
        codes.
    """
    num_blocks = is_code.shape[1]
    blocks = tokens.unflatten(1, (num_blocks, -1))
    used = blocks[..., 0].ne(PAD)
    counts = used.sum(1)
    scored = torch.arange(num_blocks, device=tokens.device) <= counts[:, None]
    total = probabilities.unflatten(1, (num_blocks, -1)).prod(-1).masked_fill(~scored, 1.0).prod(1)
    rows = ((is_code | ~used).all(1) & counts.gt(1)).nonzero()[:, 0]
    if len(rows):
        stepper = Stepper(decoder, *select_rows(rows, memory, memory_mask, prior))
        total[rows] += _other_orders(stepper, blocks[rows], counts[rows])
    return total.clamp(max=1.0)


def _other_orders(stepper: Stepper, blocks: Tensor, counts: Tensor) -> Tensor:
    """Return the probability of all orders but the given one, of shape (B,); common beginnings are computed once.

    `blocks` (B, num_blocks, block_size) are each row's codes, 2 or more as `counts` (B,) says, then its unused blocks.
    """
    batch, num_blocks, block_size = blocks.shape
    device = blocks.device
    row, indices = torch.arange(batch, device=device)[:, None], torch.arange(num_blocks, device=device)
    same_as_earlier = (blocks[:, :, None] == blocks[:, None]).all(-1).tril(-1)[:, None]
    total = torch.zeros(batch, device=device)
    parents = current = torch.zeros(batch, 1, dtype=torch.long, device=device)  # (B, W), as all below
    tokens, scores = torch.full_like(parents, BOS), torch.zeros(batch, 1, device=device)
    used, as_given = torch.zeros(batch, 1, num_blocks, dtype=torch.bool, device=device), parents.eq(0)
    for position in range(num_blocks * block_size):
        num_used, offset = divmod(position, block_size)
        log_probs = stepper.step(tokens, parents, scores > -torch.inf).float().log_softmax(-1)
        choices = indices.expand(*scores.shape, -1) if offset == 0 else current[..., None]
        next_tokens = blocks[row[..., None], choices, offset]  # (B, W, choices)
        candidates = scores[..., None] + log_probs.gather(-1, next_tokens)
        if offset == 0:
            # codes come first, then an unused block; the copies of a repeated code stay in order, or the same sequence
            # would count twice
            may_follow = ~used & (indices < (counts + (counts <= num_used))[:, None, None])
            may_follow &= ~(same_as_earlier & ~used[:, :, None]).any(-1)
            # the last choice there is: it makes the given order
            may_follow &= ~((as_given & (counts[:, None] <= num_used + 2))[..., None] & (indices == num_used))
            candidates = candidates.masked_fill(~may_follow, -torch.inf)
        scores, best = branches_above(candidates.flatten(1), math.log(_NEGLIGIBLE))
        parents = best // choices.shape[2]
        current, tokens = (x.flatten(1).gather(1, best) for x in (choices, next_tokens))
        used, as_given = used[row, parents], as_given[row, parents]
        if offset == 0:
            used = used.scatter(2, current[..., None], True)
            as_given = as_given & (current == num_used)
        if offset == block_size - 1:
            complete = (counts + 1).clamp(max=num_blocks) == num_used + 1
            total += scores.exp().sum(1).masked_fill(~complete, 0.0)
            scores = scores.masked_fill(complete[:, None], -torch.inf)
        if not bool((scores > -torch.inf).any()):
            break
    return total
