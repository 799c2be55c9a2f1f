"""Greedy decoding of target sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from histocoder.formatters.tokens import BOS, PAD
from histocoder.inference.stepper import Stepper
from histocoder.inference.trie import CodeTrie
from histocoder.model import Decoder, Prior

_WORTH_COPYING = 0.75
"""Rows that have ended are dropped where no more than this share goes on: copying the others then costs less."""


@torch.no_grad()
def greedy(
    decoder: Decoder,
    memory: Tensor,
    memory_mask: Tensor | None,
    prior: Prior | None = None,
    *,
    num_tokens: int,
    block_size: int | None = None,
    trie: CodeTrie | None = None,
) -> tuple[Tensor, Tensor]:
    """Take the most probable token at each position, given those before it.

    Parameters
    ----------
    decoder : Decoder
    memory, memory_mask, prior
        Of B rows; see `Decoder.forward`.
    num_tokens : int
        Tokens to decode behind BOS.
    block_size : int, optional
        Tokens of a block. Where it is given, a row ends with its first block that begins with PAD, an unused one: what
        follows is unused as well, and counts as PAD of probability 1. Decoding stops when all rows have ended.
    trie : CodeTrie, optional
        The only codes to follow, the first block being one of them; needs `block_size`.

    Returns
    -------
    tokens : Tensor of int, of shape (B, 1 + num_tokens)
        BOS first.
    probabilities : Tensor of shape (B, num_tokens)
        Of each decoded token, among all tokens.
    """
    batch, device = len(memory), memory.device
    stepper = Stepper(decoder, memory, memory_mask, prior, room=num_tokens)
    tokens = torch.full((batch, 1 + num_tokens), PAD, device=device)
    tokens[:, 0] = BOS
    probabilities = torch.ones(batch, num_tokens, device=device)
    rows = torch.arange(batch, device=device)  # those that the stepper still has
    ended = torch.zeros(batch, dtype=torch.bool, device=device)  # of these
    path = _TriePath(trie, batch) if trie is not None else None
    for i in range(num_tokens):
        probs = stepper.step(tokens[rows, i]).float().softmax(-1)
        chosen = torch.where(ended, PAD, (probs if path is None else path.restrict(probs, i)).argmax(-1))
        tokens[rows, i + 1] = chosen
        probabilities[rows, i] = torch.where(ended, 1.0, probs.gather(1, chosen[:, None])[:, 0])
        if path is not None:
            path.follow(chosen)
        if block_size is not None and (i + 1) % block_size == 0:
            ended |= tokens[rows, i + 2 - block_size].eq(PAD)
            going_on = (~ended).nonzero()[:, 0]
            if not len(going_on):
                break
            if len(going_on) <= _WORTH_COPYING * len(rows):
                rows, ended = rows[going_on], ended[going_on]
                stepper.keep(going_on)
                if path is not None:
                    path.keep(going_on)
    return tokens, probabilities


class _TriePath:
    """Each row's node in the trie, within the current block; every block but the first may also be PAD."""

    def __init__(self, trie: CodeTrie, batch: int) -> None:
        self._trie = trie
        self._node = torch.zeros(batch, dtype=torch.long, device=trie.blocks.device)
        self._unused = torch.zeros(batch, dtype=torch.bool, device=trie.blocks.device)
        self._level = 0

    def restrict(self, probs: Tensor, position: int) -> Tensor:
        """Return the probabilities of shape (B, V), -1 for tokens that lead out of the trie."""
        if self._level == 0:
            self._node = torch.zeros_like(self._node)
        children, tokens = self._trie.children[self._level][self._node], self._trie.tokens[self._level][self._node]
        allowed = torch.full_like(probs, -1.0)
        inside = probs.gather(1, tokens).masked_fill(children < 0, -1.0)
        allowed.scatter_reduce_(1, tokens, inside, "amax")
        if self._level == 0 and position:
            allowed[:, PAD] = probs[:, PAD]
        allowed[self._unused] = -1.0
        allowed[self._unused, PAD] = 1.0
        return allowed

    def follow(self, chosen: Tensor) -> None:
        """Advance by the chosen tokens of shape (B,)."""
        if self._level == 0:
            self._unused |= chosen.eq(PAD)
        children, tokens = self._trie.children[self._level][self._node], self._trie.tokens[self._level][self._node]
        place = (tokens.eq(chosen[:, None]) & children.ge(0)).int().argmax(1)
        self._node = children.gather(1, place[:, None])[:, 0].clamp(min=0)
        self._level = (self._level + 1) % self._trie.depth

    def keep(self, rows: Tensor) -> None:
        """Keep only some rows of the batch, by their indices."""
        self._node, self._unused = self._node[rows], self._unused[rows]
