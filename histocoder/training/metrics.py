"""Accuracies over token blocks and flat logits: one value a row, so that sums add up over batches and ranks."""

from __future__ import annotations

from torch import Tensor

from histocoder.formatters.tokens import EOS, PAD
from histocoder.inference.flat import chosen_classes
from histocoder.training.losses import multi_hot


def _blocks(tokens: Tensor, num_blocks: int) -> Tensor:
    """Return token blocks in one spelling: EOS behind a block's first EOS, PAD in a block that begins with PAD."""
    blocks = tokens.unflatten(1, (num_blocks, -1))
    ended = blocks.eq(EOS).cumsum(-1).gt(0)
    unused = blocks[..., :1].eq(PAD)
    return blocks.masked_fill(ended, EOS).masked_fill(unused, PAD)


def exact_set(target: Tensor, predicted: Tensor, *, num_blocks: int) -> Tensor:
    """Return whether the predicted codes are the target's codes in any order, of shape (B,); one too many is wrong.

    Tokens are of shape (B, num_blocks * block_size), without BOS and EOS around them.

    Examples
    --------
    >>> import torch
    >>> exact_set(torch.tensor([[5, 6, 1]]), torch.tensor([[6, 5, 1]]), num_blocks=3)
    tensor([True])
    >>> exact_set(torch.tensor([[5, 1, 1]]), torch.tensor([[5, 6, 1]]), num_blocks=3)
    tensor([False])
    """
    true, guess = _blocks(target, num_blocks), _blocks(predicted, num_blocks)
    same = (true[:, :, None] == guess[:, None]).all(-1)  # (B, true, guess)
    found = same.any(2) | true[..., 0].eq(PAD)
    right = same.any(1) | guess[..., 0].eq(PAD)
    return found.all(1) & right.all(1)


def token_matches(target: Tensor, predicted: Tensor, *, num_blocks: int) -> tuple[Tensor, Tensor]:
    """Return the numbers of correct and of real tokens of each row, of shape (B,); tokens as in `exact_set`.

    As in the block loss, each of k target blocks is compared with the one of the first k predicted blocks that fits it
    best.
    """
    true, guess = target.unflatten(1, (num_blocks, -1)), predicted.unflatten(1, (num_blocks, -1))
    real = true.ne(PAD)
    used = real.any(-1)
    hits = (true[:, :, None].eq(guess[:, None]) & real[:, :, None]).sum(-1)  # (B, true, guess)
    best = hits.masked_fill(~used[:, None, :], 0).max(-1).values
    return best.sum(1), real.sum((1, 2))


def flat_exact_set(probabilities: Tensor, class_ids: Tensor, *, threshold: float) -> Tensor:
    """Return whether the flat head's answer is exactly the target's classes, of shape (B,).

    Probabilities are of shape (B, num_classes); class ids of shape (B, num_blocks), -1 where there is none. See
    `chosen_classes` for the threshold.
    """
    guess = chosen_classes(probabilities, threshold, most=class_ids.shape[1])
    return guess.eq(multi_hot(class_ids, probabilities.shape[1]).bool()).all(1)
