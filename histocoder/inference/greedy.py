"""Greedy decoding of target sequences."""

import torch
from torch import Tensor

from histocoder.formatters.systems import BOS, PAD
from histocoder.inference.stepper import Stepper
from histocoder.inference.trie import CodeTrie
from histocoder.model import Decoder, Prior


@torch.no_grad()
def greedy(
    decoder: Decoder,
    memory: Tensor,
    memory_mask: Tensor | None,
    prior: Prior | None = None,
    *,
    num_tokens: int,
    block_size: int,
    trie: CodeTrie | None = None,
) -> tuple[Tensor, Tensor]:
    """Take the most probable token at each position, given those before it.

    A row ends with its first block that begins with PAD, an unused one: what follows is PAD of probability 1. Decoding
    stops when all rows have ended.

    Parameters
    ----------
    decoder, memory, memory_mask, prior
        See `Decoder.forward`.
    num_tokens, block_size : int
        Number of tokens to decode after BOS, and of tokens in a block.
    trie : CodeTrie, optional
        Restricts blocks to its codes; those after the first may also be unused.

    Returns
    -------
    tokens : Tensor of int, of shape (B, 1 + num_tokens)
        BOS first.
    probabilities : Tensor of shape (B, num_tokens)
        Probability of each decoded token, among all tokens.
    """
    batch, device = len(memory), memory.device
    stepper = Stepper(decoder, memory, memory_mask, prior)
    tokens = torch.full((batch, 1 + num_tokens), PAD, device=device)
    tokens[:, 0] = BOS
    probabilities = torch.ones(batch, num_tokens, device=device)
    ended = torch.zeros(batch, dtype=torch.bool, device=device)
    path = _TriePath(trie, batch) if trie is not None else None
    for i in range(num_tokens):
        probs = stepper.step(tokens[:, i : i + 1], real=~ended[:, None])[:, 0].float().softmax(-1)
        chosen = torch.where(ended, PAD, probs.argmax(-1) if path is None else path.choose(probs, i))
        tokens[:, i + 1] = chosen
        probabilities[:, i] = torch.where(ended, 1.0, probs.gather(1, chosen[:, None])[:, 0])
        if (i + 1) % block_size == 0:
            ended |= tokens[:, i + 2 - block_size].eq(PAD)
            if bool(ended.all()):
                break
    return tokens, probabilities


class _TriePath:
    """Each row's node in the trie, within the current block."""

    def __init__(self, trie: CodeTrie, batch: int) -> None:
        self._trie = trie
        self._node = torch.zeros(batch, dtype=torch.long, device=trie.blocks.device)
        self._unused = torch.zeros(batch, dtype=torch.bool, device=trie.blocks.device)  # whether the block is PAD

    def choose(self, probs: Tensor, position: int) -> Tensor:
        """Return the most probable tokens (B,) that the trie allows, by probabilities (B, V), and follow them."""
        level = position % len(self._trie.children)
        if level == 0:
            self._node = torch.zeros_like(self._node)
        children, tokens = self._trie.children[level][self._node], self._trie.tokens[level][self._node]  # (B, C)
        best = probs.gather(1, tokens).masked_fill(children < 0, -1.0).max(1, keepdim=True)
        if level == 0 and position:
            self._unused |= probs[:, PAD] >= best.values[:, 0]
        self._node = children.gather(1, best.indices)[:, 0]
        return torch.where(self._unused, PAD, tokens.gather(1, best.indices)[:, 0])
