"""The codes of a key as a trie over their tokens, level by level in arrays."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from histocoder.decoding.layout import TreeLayout
from histocoder.formatters import Formatter


class CodeTrie:
    """All codes of a key, each a path of `block_size` tokens from the root.

    Parameters
    ----------
    codes : sequence of str
        In the order of the key.
    formatter : Formatter
        How codes are written in tokens.

    Attributes
    ----------
    depth : int
        Tokens of a code.
    children : list of Tensor of int, of shape (nodes of the level, most children of a node)
        By level, from the root's: the nodes of the next level that follow each node; -1 where there are fewer. A node
        of the last level is a code, by its place in the key.
    tokens : list of Tensor of int, of the same shapes
        The token that leads to each child; 0 where there is none.

    Examples
    --------
    >>> from histocoder.formatters import build_formatter
    >>> trie = CodeTrie(["120", "110", "200"], build_formatter("occ1950", num_blocks=1))
    >>> [len(level) for level in trie.children]
    [1, 2, 3]
    """

    def __init__(self, codes: Sequence[str], formatter: Formatter) -> None:
        blocks = np.array([formatter.system.to_block(code) for code in codes], dtype=np.int64)
        self.num_codes = len(blocks)
        self.depth = formatter.block_size
        self.blocks = torch.from_numpy(blocks)
        """The tokens of each code, of shape (num_codes, depth)."""
        self.nodes = torch.empty_like(self.blocks)
        """The inner nodes on each code's path, the root first, of shape (num_codes, depth)."""
        self.num_nodes = 0
        self.children: list[Tensor] = []
        self.tokens: list[Tensor] = []
        parents = np.zeros(self.num_codes, dtype=np.int64)  # of each code, its node on the level at hand
        for level in range(self.depth):
            self.nodes[:, level] = torch.from_numpy(self.num_nodes + parents)
            self.num_nodes += int(parents.max()) + 1
            edges = np.stack([parents, blocks[:, level]], axis=1)
            distinct, nodes = np.unique(edges, axis=0, return_inverse=True)
            nodes = nodes.ravel()
            if level == self.depth - 1:
                if len(distinct) < self.num_codes:
                    raise ValueError("two codes of the key are written in the same tokens")
                names = np.empty(len(distinct), dtype=np.int64)
                names[nodes] = np.arange(self.num_codes)
            else:
                names = np.arange(len(distinct))
            self._add_level(distinct, names, num_nodes=int(parents.max()) + 1)
            parents = nodes

    def _add_level(self, edges: np.ndarray, names: np.ndarray, *, num_nodes: int) -> None:
        """Add a table of children from edges (parent, token), sorted by parent."""
        counts = np.bincount(edges[:, 0], minlength=num_nodes)
        column = np.arange(len(edges)) - np.repeat(np.cumsum(counts) - counts, counts)
        children = np.full((num_nodes, counts.max()), -1, dtype=np.int64)
        tokens = np.zeros_like(children)
        children[edges[:, 0], column] = names
        tokens[edges[:, 0], column] = edges[:, 1]
        self.children.append(torch.from_numpy(children))
        self.tokens.append(torch.from_numpy(tokens))

    @cached_property
    def layout(self) -> TreeLayout:
        """All inner nodes, laid out for a decoder."""
        return TreeLayout(self.blocks)

    def to(self, device: torch.device) -> CodeTrie:
        """Move the tables to a device, in place."""
        self.blocks, self.nodes = self.blocks.to(device), self.nodes.to(device)
        self.children = [table.to(device) for table in self.children]
        self.tokens = [table.to(device) for table in self.tokens]
        return self
