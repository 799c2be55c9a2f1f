"""What the flat head leads the decoder to expect: the probability of each next token, from those of whole codes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from histocoder.formatters import PAD, formatter_from_config

_NUM_CLASSES = 64
"""Of a row, the most probable ones; others count as nothing."""
_LEAST = 1e-4
"""Added to each token's share, so that the decoder can always disagree."""


class Prior(NamedTuple):
    """What is known of a batch before its codes are decoded: the K most probable classes of each row."""

    shares: Tensor
    """Of shape (B, K): the flat head's softmax."""
    classes: Tensor
    """Of int, of shape (B, K)."""
    blocks: Tensor
    """Of int, of shape (B, K, block_size): the tokens of each class."""
    vocab_size: int

    @classmethod
    def of(cls, logits: Tensor, blocks: Tensor, vocab_size: int) -> Prior:
        """Build the prior from flat logits (B, num_classes) and the blocks (num_classes, block_size) of classes."""
        best = logits.float().softmax(-1).topk(min(_NUM_CLASSES, logits.shape[1]))
        return cls(best.values, best.indices, blocks[best.indices], vocab_size)

    def rows(self, rows: Tensor | slice) -> Prior:
        """Return the prior of some rows of the batch."""
        return Prior(self.shares[rows], self.classes[rows], self.blocks[rows], self.vocab_size)

    def steps(self) -> PriorSteps:
        """Begin to follow sequences, from BOS on."""
        return PriorSteps(self)

    def following(self, tokens: Tensor) -> Tensor:
        """Return what follows each token of sequences.

        Parameters
        ----------
        tokens : Tensor of int, of shape (B, L)
            Target tokens, BOS first.

        Returns
        -------
        Tensor of shape (B, L, vocab_size)
            Logarithms of shares.
        """
        steps = self.steps()
        return torch.stack([steps.step(tokens[:, i]) for i in range(tokens.shape[1])], dim=1)

    def of_nodes(self, nodes: Tensor, num_nodes: int) -> Tensor:
        """Return what follows each node of a trie over the classes, in the first block.

        Parameters
        ----------
        nodes : Tensor of int, of shape (num_classes, block_size)
            The nodes on the path of each class, the root first.
        num_nodes : int

        Returns
        -------
        Tensor of shape (B, num_nodes, vocab_size)
            Logarithms of shares.
        """
        masses = self.shares.new_zeros(len(self.shares), num_nodes * self.vocab_size)
        places = nodes[self.classes] * self.vocab_size + self.blocks  # (B, K, block_size)
        masses.scatter_add_(1, places.flatten(1), self.shares.repeat_interleave(places.shape[2], dim=1))
        return log_shares(masses.unflatten(1, (num_nodes, self.vocab_size)))


class PriorSteps:
    """The prior along sequences that grow, in step with `Stepper`.

    Within a block, a token's share is that of the classes that the tokens so far can still become. Behind a code, the
    classes written already make up the share of PAD, which ends the row; the others compete for the next code.

    Parameters
    ----------
    prior : Prior
    """

    def __init__(self, prior: Prior) -> None:
        self._shares, self._blocks = prior.shares[:, None], prior.blocks[:, None]  # (B, 1, K), (B, 1, K, size)
        self._vocab_size = prior.vocab_size
        self._left = torch.ones_like(self._shares, dtype=torch.bool)  # not written yet, of shape (B, W, K)
        self._fits = self._left  # of these, those that the block's tokens so far can become
        self._ended = torch.zeros_like(self._shares[..., 0], dtype=torch.bool)  # by an unused block, (B, W)
        self._depth = 0

    def step(self, tokens: Tensor) -> Tensor:
        """Return what follows `tokens` (B,), each row's newest, of shape (B, vocab_size)."""
        return self.step_tree(tokens[:, None], torch.zeros_like(tokens)[:, None])[:, 0]

    def step_tree(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Return what follows each node of the next level, of shape (B, W, vocab_size); see `Stepper.step_tree`."""
        place = self._depth % self._blocks.shape[3]
        if self._depth:
            index = parents.long()[..., None].expand(-1, -1, self._fits.shape[2])
            self._left, self._fits = self._left.gather(1, index), self._fits.gather(1, index)
            self._ended = self._ended.gather(1, parents.long()) | tokens.eq(PAD)
            self._fits = self._fits & (self._blocks[..., place - 1] == tokens[..., None])
        is_behind_code = self._depth > 0 and place == 0
        if is_behind_code:
            self._left = self._left & ~self._fits
            self._fits = self._left
        masses = self._shares.new_zeros(*tokens.shape, self._vocab_size)
        following = self._blocks[..., place].expand(self._fits.shape)
        masses.scatter_add_(2, following, self._shares * self._fits)
        if is_behind_code:
            masses[..., PAD] += (self._shares * ~self._left).sum(-1)
        masses[..., PAD] = masses[..., PAD].masked_fill(self._ended, 1.0)
        self._depth += 1
        return log_shares(masses)

    def keep(self, rows: Tensor) -> None:
        """Continue with some rows of the batch only, by their places."""
        self._shares, self._blocks = self._shares[rows], self._blocks[rows]
        self._left, self._fits, self._ended = self._left[rows], self._fits[rows], self._ended[rows]


def class_blocks(codes: Sequence[str], formatter: dict[str, Any]) -> Tensor:
    """Return the tokens of each class, of shape (num_classes, block_size); of a blank one, PAD."""
    system = formatter_from_config(formatter).system
    return torch.tensor([system.to_block(code) if code else [PAD] * system.block_size for code in codes])


def log_shares(masses: Tensor) -> Tensor:
    """Return the logarithms of shares from the masses of tokens (…, vocab_size)."""
    return (masses / masses.sum(-1, keepdim=True).clamp(min=_LEAST) + _LEAST).log()
