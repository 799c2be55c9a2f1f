"""The decoder's prior: the probability of each next token, from the flat head's probabilities of whole codes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from histocoder.formatters import PAD, build_formatter

_NUM_CLASSES = 64  # number of classes of a row that the prior knows, the most probable ones
_LEAST = 1e-4  # share that is added to each token's, so that the decoder can always disagree


class Prior(NamedTuple):
    """The K most probable classes of each row of a batch, before its codes are decoded."""

    shares: Tensor  # softmax of the flat logits, of shape (B, K)
    classes: Tensor  # classes, of shape (B, K)
    blocks: Tensor  # tokens of each class, of shape (B, K, block_size)
    vocab_size: int

    @classmethod
    def from_logits(cls, logits: Tensor, blocks: Tensor, vocab_size: int) -> Prior:
        """Build the prior from flat logits (B, num_classes) and the classes' blocks (num_classes, block_size)."""
        best = logits.float().softmax(-1).topk(min(_NUM_CLASSES, logits.shape[1]))
        return cls(best.values, best.indices, blocks[best.indices], vocab_size)

    def rows(self, rows: Tensor | slice) -> Prior:
        return Prior(self.shares[rows], self.classes[rows], self.blocks[rows], self.vocab_size)

    def following(self, tokens: Tensor) -> Tensor:
        """Return the log shares (B, L, vocab_size) of what follows each target token (B, L), BOS first."""
        steps = PriorSteps(self)
        return torch.cat([steps.step(token, torch.zeros_like(token)) for token in tokens.split(1, dim=1)], dim=1)


class PriorSteps:
    """The prior along growing sequences, from BOS on, in step with `Stepper`.

    Within a block, a token's share is that of the classes that begin with the block's tokens so far. Behind a code, the
    classes written so far make up the share of PAD, which ends the row; the others compete for the next code.
    """

    def __init__(self, prior: Prior) -> None:
        self._shares, self._blocks = prior.shares[:, None], prior.blocks[:, None]  # (B, 1, K), (B, 1, K, size)
        self._vocab_size = prior.vocab_size
        self._left = torch.ones_like(self._shares, dtype=torch.bool)  # not written yet, of shape (B, W, K)
        self._fits = self._left  # those of them that begin with the block's tokens
        self._ended = torch.zeros_like(self._shares[..., 0], dtype=torch.bool)  # by an unused block, (B, W)
        self._depth = 0

    def step(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Return the log shares (B, W, vocab_size) of what follows each node of the next level; see `Stepper`."""
        position = self._depth % self._blocks.shape[3]
        if self._depth:
            index = parents.long()[..., None].expand(-1, -1, self._fits.shape[2])
            self._left, self._fits = self._left.gather(1, index), self._fits.gather(1, index)
            self._ended = self._ended.gather(1, parents.long()) | tokens.eq(PAD)
            self._fits = self._fits & (self._blocks[..., position - 1] == tokens[..., None])
        is_behind_code = self._depth > 0 and position == 0
        if is_behind_code:
            self._left = self._left & ~self._fits
            self._fits = self._left
        masses = self._shares.new_zeros(*tokens.shape, self._vocab_size)
        following = self._blocks[..., position].expand(self._fits.shape)
        masses.scatter_add_(2, following, self._shares * self._fits)
        if is_behind_code:
            masses[..., PAD] += (self._shares * ~self._left).sum(-1)
        masses[..., PAD] = masses[..., PAD].masked_fill(self._ended, 1.0)
        self._depth += 1
        return log_shares(masses)


def class_blocks(codes: Sequence[str], formatter: dict[str, Any]) -> Tensor:
    """Return the tokens of each class, of shape (num_classes, block_size); PAD for a blank one."""
    system = build_formatter(**formatter).system
    return torch.tensor([system.to_block(code) if code else [PAD] * system.block_size for code in codes])


def log_shares(masses: Tensor) -> Tensor:
    """Normalize the masses of tokens (…, vocab_size) to shares, and return their logarithms."""
    return (masses / masses.sum(-1, keepdim=True).clamp(min=_LEAST) + _LEAST).log()
