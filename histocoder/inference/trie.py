"""The codes of a key as a trie over their tokens, level by level in arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from histocoder.formatters import Formatter


class CodeTrie:
    """All codes of a key, each a path of `block_size` tokens from the root.

    Level by level from the root's, `children` and `tokens`, of shape (nodes of the level, most children of a node), are
    the nodes of the next level that follow each node, -1 where there are fewer, and the tokens that lead to them. A
    node of the last level is a code, by its index in the key.

    Examples
    --------
    >>> from histocoder.formatters import build_formatter
    >>> trie = CodeTrie(["120", "110", "200"], build_formatter("occ1950", num_blocks=1))
    >>> [len(level) for level in trie.children]
    [1, 2, 3]
    """

    blocks: Tensor  # tokens of each code, of shape (num_codes, depth)

    def __init__(self, codes: Sequence[str], formatter: Formatter) -> None:
        blocks = np.array([formatter.system.to_block(code) for code in codes], dtype=np.int64)
        order = np.lexsort(blocks.T[::-1])
        ordered = blocks[order]
        is_new = np.ones_like(blocks, dtype=bool)  # whether a code's tokens up to here differ from the previous code's
        is_new[1:] = np.logical_or.accumulate(ordered[1:] != ordered[:-1], axis=1)
        if not is_new[:, -1].all():
            raise ValueError("two codes of the key are written in the same tokens")
        child = is_new.cumsum(0) - 1  # of each code, the node behind each of its tokens, numbered within its level
        parent = np.hstack([np.zeros_like(child[:, :1]), child[:, :-1]])
        self.blocks = torch.from_numpy(blocks)
        self.children: list[Tensor] = []
        self.tokens: list[Tensor] = []
        for level, size in enumerate(parent.max(0) + 1):
            first = np.flatnonzero(is_new[:, level])  # one code for each child
            row = parent[first, level]
            column = np.arange(len(first)) - np.searchsorted(row, row)
            children = np.full((size, column.max() + 1), -1, dtype=np.int64)
            tokens = np.zeros_like(children)
            children[row, column] = order if level == blocks.shape[1] - 1 else np.arange(len(first))
            tokens[row, column] = ordered[first, level]
            self.children.append(torch.from_numpy(children))
            self.tokens.append(torch.from_numpy(tokens))

    def to(self, device: torch.device) -> CodeTrie:
        """Move the tables to a device, in place."""
        self.blocks = self.blocks.to(device)
        self.children = [table.to(device) for table in self.children]
        self.tokens = [table.to(device) for table in self.tokens]
        return self


def branches_above(scores: Tensor, floor: Tensor | float, *, width: int | None = None) -> torch.return_types.topk:
    """Select candidates with scores (B, C) that reach their row's floor (B, 1); with a width, the best of them only.

    Returns their scores (B, W), the best first, -inf where a row has fewer than W, and their indices (B, W).

    Examples
    --------
    >>> branches_above(torch.tensor([[-3.0, -1.0, -2.0], [-9.0, -1.0, -9.0]]), -4.0).values
    tensor([[-1., -2., -3.],
            [-1., -inf, -inf]])
    """
    above = scores >= floor
    count = max(int((above & (scores > -torch.inf)).sum(1).max()), 1)
    return scores.masked_fill(~above, -torch.inf).topk(count if width is None else min(width, count))
