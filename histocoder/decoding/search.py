"""Exact probabilities of a key's codes in the first block, a level of the trie at a time."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from histocoder.decoding.trie import CodeTrie
from histocoder.formatters.tokens import BOS
from histocoder.model import Decoder

_SLACK = 1e-4  # of log-probabilities computed in batches of other shapes


@dataclass
class _Level:
    """For each row of a batch, some nodes of one level of the trie."""

    nodes: Tensor
    """Of shape (B, W); -1 where a row has fewer than W."""
    log_probs: Tensor
    """Of shape (B, W): of the tokens that lead there; -inf where there is no node."""
    parents: Tensor
    """Of shape (B, W): the place of each one's parent among the level before."""
    tokens: Tensor = field(repr=False)
    """Of shape (B, W): the token that leads there."""


@torch.no_grad()
def full_search(decoder: Decoder, memory: Tensor, memory_mask: Tensor | None, trie: CodeTrie) -> Tensor:
    """The probability of every code of the key.

    Parameters
    ----------
    decoder : Decoder
    memory : Tensor of shape (B, S, dim)
    memory_mask : Tensor of bool, of shape (B, S), or None
    trie : CodeTrie

    Returns
    -------
    Tensor of shape (B, num_codes)
        In the key's order; what is missing from a sum of 1 is the model's belief in tokens that make no code.
    """
    floor = torch.full((len(memory),), -torch.inf, device=memory.device)
    leaves = _descend(decoder, memory, memory_mask, trie, floor=floor, width=None)
    probs = torch.zeros(len(memory), trie.num_codes, device=memory.device)
    return probs.scatter_(1, leaves.nodes, leaves.log_probs.exp())  # every row has every code


@torch.no_grad()
def top_k_search(
    decoder: Decoder, memory: Tensor, memory_mask: Tensor | None, trie: CodeTrie, *, k: int
) -> tuple[Tensor, Tensor]:
    """The k most probable codes of the key, exactly: `full_search`'s, without most of its work.

    A beam of width k finds k codes; the least probable of them is a floor that no branch below it can reach, since
    a code is never more probable than its beginning.

    Parameters
    ----------
    k : int
        At most the key's number of codes. For the others see `full_search`.

    Returns
    -------
    codes : Tensor of int, of shape (B, k)
        Places in the key, the most probable first.
    probabilities : Tensor of shape (B, k)
    """
    k = min(k, trie.num_codes)
    floor = torch.full((len(memory),), -torch.inf, device=memory.device)
    beam = _descend(decoder, memory, memory_mask, trie, floor=floor, width=k)
    floor = beam.log_probs.min(dim=1).values - _SLACK  # of k codes, since every node of the trie leads to one
    leaves = _descend(decoder, memory, memory_mask, trie, floor=floor, width=None)
    best = leaves.log_probs.topk(k)
    return leaves.nodes.gather(1, best.indices), best.values.exp()


def _descend(
    decoder: Decoder,
    memory: Tensor,
    memory_mask: Tensor | None,
    trie: CodeTrie,
    *,
    floor: Tensor,
    width: int | None,
) -> _Level:
    """Go down the trie with each row's nodes that are above its floor; with a width, the best so many of them."""
    zeros = torch.zeros(len(memory), 1, dtype=torch.long, device=memory.device)
    level = _Level(zeros, zeros.float(), zeros, torch.full_like(zeros, BOS))
    cache = decoder.start_tree(memory, memory_mask)
    for children, tokens in zip(trie.children, trie.tokens, strict=True):
        logits = decoder.step_tree(level.tokens, level.parents, cache)
        level = _expand(level, logits, children, tokens, floor, width)
    return level


def _expand(
    level: _Level, logits: Tensor, children: Tensor, tokens: Tensor, floor: Tensor, width: int | None
) -> _Level:
    """The children that go on, of all nodes of a level."""
    log_probs = logits.float().log_softmax(-1)  # (B, W, V)
    real = level.nodes.clamp(min=0)
    nodes = children[real].masked_fill(level.nodes[..., None] < 0, -1)  # (B, W, C)
    next_tokens = tokens[real]
    scores = level.log_probs[..., None] + log_probs.gather(-1, next_tokens)
    scores = scores.masked_fill(nodes < 0, -torch.inf).flatten(1)  # (B, W * C)
    going_on = (scores >= floor[:, None]) & (nodes.flatten(1) >= 0)
    count = max(int(going_on.sum(1).max()), 1)
    best = scores.masked_fill(~going_on, -torch.inf).topk(count if width is None else min(width, count))
    chosen = best.indices
    ended = ~going_on.gather(1, chosen)
    return _Level(
        nodes=nodes.flatten(1).gather(1, chosen).masked_fill(ended, -1),
        log_probs=best.values,
        parents=chosen // nodes.shape[2],
        tokens=next_tokens.flatten(1).gather(1, chosen),
    )
