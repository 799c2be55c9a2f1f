"""The codes of a key as a trie over their tokens: level by level in arrays, laid out in bins, and its best branches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from histocoder.formatters import Formatter
from histocoder.formatters.tokens import BOS


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


_VECTOR = 32
"""Numbers in bf16 that a CPU takes at once: attention to other numbers of nodes than multiples costs up to twice."""
_BIN_SIZE = 2 * _VECTOR
"""Of less, more is taken up by ancestors that several bins need; of more, attention within bins costs more."""


class TreeLayout:
    """The inner nodes of a trie in bins of like sizes: a node and its ancestors always stand in one bin.

    A node that several bins need stands in each of them. Attention from node to ancestors is then attention within
    short sequences, masked, and nothing has to be gathered.

    Parameters
    ----------
    blocks : Tensor of int, of shape (num_codes, depth)
        The tokens of each code.
    bin_size : int
        At most; more where codes are long.

    Attributes
    ----------
    tokens, depths : Tensor of int, of shape (num_bins, bin_size)
        Of each node, the token that leads to it and its place in the sequence, BOS at 0.
    visible : Tensor of bool, of shape (num_bins, bin_size, bin_size)
        Whether the second node is the first one or an ancestor of it.
    places : Tensor of int, of shape (num_codes, depth)
        Where the nodes on each code's path stand among all bins' nodes, the root first.

    Examples
    --------
    >>> layout = TreeLayout(torch.tensor([[6, 7, 5], [6, 6, 5], [7, 5, 5]]))
    >>> layout.tokens.tolist()  # the nodes BOS, 6, 6-6, 6-7, 7, 7-5
    [[2, 6, 6, 7, 7, 5]]
    >>> layout.places.tolist()
    [[0, 1, 3], [0, 1, 2], [0, 4, 5]]
    """

    def __init__(self, blocks: Tensor, bin_size: int = _BIN_SIZE) -> None:
        device = blocks.device
        bins, places = _pack(blocks.cpu().numpy(), max(bin_size, 4 * blocks.shape[1]))
        size = max(len(nodes) for nodes in bins)
        if len(bins) > 1:
            size = _VECTOR * math.ceil(size / _VECTOR)
        tokens, depths = np.full((2, len(bins), size), BOS)  # a bin's rest repeats the root, unseen by others
        depths[:] = 0
        visible = np.tile(np.eye(size, dtype=bool), (len(bins), 1, 1))
        for i, nodes in enumerate(bins):
            for place, prefix in enumerate(nodes):
                tokens[i, place], depths[i, place] = (prefix or (BOS,))[-1], len(prefix)
                visible[i, place, [nodes[prefix[:length]] for length in range(len(prefix))]] = True
        self.tokens, self.depths, self.visible = (torch.from_numpy(x).to(device) for x in (tokens, depths, visible))
        in_bin, of_bin = torch.from_numpy(places).to(device).unbind(-1)
        self.places = of_bin * size + in_bin


def _pack(blocks: np.ndarray, bin_size: int) -> tuple[list[dict[tuple[int, ...], int]], np.ndarray]:
    """Fill bins with the prefixes of codes (num_codes, depth), from left to right through the trie.

    Returns
    -------
    bins : list of dict
        The place of each prefix in its bin.
    places : ndarray of int, of shape (num_codes, depth, 2)
        Of each code's prefixes, the place in the bin and the bin.
    """
    num_codes, depth = blocks.shape
    bins: list[dict[tuple[int, ...], int]] = [{}]
    places = np.empty((num_codes, depth, 2), dtype=np.int64)
    for code in np.lexsort(blocks.T[::-1]):
        prefixes = [tuple(blocks[code, :length].tolist()) for length in range(depth)]
        if len(bins[-1].keys() | set(prefixes)) > bin_size:
            bins.append({})
        nodes = bins[-1]
        for length, prefix in enumerate(prefixes):
            places[code, length] = nodes.setdefault(prefix, len(nodes)), len(bins) - 1
    return bins, places


class Branches(NamedTuple):
    """For each row of a batch, some of its candidates, the best first."""

    places: Tensor
    """Among the candidates, of shape (B, W)."""
    scores: Tensor
    """Of shape (B, W); -inf where a row has fewer than W."""

    @property
    def real(self) -> Tensor:
        """Where there is one at all, of shape (B, W)."""
        return self.scores > -torch.inf


def branches_above(scores: Tensor, floor: Tensor | float, *, width: int | None = None) -> Branches:
    """Select candidates with scores (B, C) that reach their row's floor (B, 1); with a width, the best of them only.

    Examples
    --------
    >>> branches_above(torch.tensor([[-3.0, -1.0, -2.0], [-9.0, -1.0, -9.0]]), -4.0)
    Branches(places=tensor([[1, 2, 0],
            [1, 0, 2]]), scores=tensor([[-1., -2., -3.],
            [-1., -inf, -inf]]))
    """
    above = scores >= floor
    count = max(int((above & (scores > -torch.inf)).sum(1).max()), 1)
    best = scores.masked_fill(~above, -torch.inf).topk(count if width is None else min(width, count))
    return Branches(best.indices, best.values)
