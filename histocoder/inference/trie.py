"""The codes of a key as a trie over their tokens: level by level in arrays, and laid out in bins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from histocoder.formatters import Formatter
from histocoder.formatters.tokens import BOS


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
    nodes: Tensor  # inner nodes on each code's path, the root first, of shape (num_codes, depth)
    num_nodes: int  # number of inner nodes

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
        level_sizes = parent.max(0) + 1
        nodes = np.empty_like(blocks)
        nodes[order] = parent + level_sizes.cumsum() - level_sizes
        self.blocks, self.nodes = torch.from_numpy(blocks), torch.from_numpy(nodes)
        self.num_nodes = int(level_sizes.sum())
        self.children: list[Tensor] = []
        self.tokens: list[Tensor] = []
        for level, size in enumerate(level_sizes):
            first = np.flatnonzero(is_new[:, level])  # one code for each child
            row = parent[first, level]
            column = np.arange(len(first)) - np.searchsorted(row, row)
            children = np.full((size, column.max() + 1), -1, dtype=np.int64)
            tokens = np.zeros_like(children)
            children[row, column] = order if level == blocks.shape[1] - 1 else np.arange(len(first))
            tokens[row, column] = ordered[first, level]
            self.children.append(torch.from_numpy(children))
            self.tokens.append(torch.from_numpy(tokens))

    @cached_property
    def layout(self) -> TreeLayout:
        """All inner nodes, laid out for a decoder."""
        return TreeLayout(self)

    def to(self, device: torch.device) -> CodeTrie:
        """Move the tables to a device, in place."""
        self.blocks, self.nodes = self.blocks.to(device), self.nodes.to(device)
        self.children = [table.to(device) for table in self.children]
        self.tokens = [table.to(device) for table in self.tokens]
        return self


_VECTOR = 32  # bf16 values that a CPU processes at once: attention to no multiple of it costs up to twice as much
_BIN_SIZE = 2 * _VECTOR  # smaller bins repeat more ancestors; attention within larger ones costs more


class TreeLayout:
    """The inner nodes of a trie in bins of at most `bin_size`, more if codes are long.

    A node and its ancestors are always in one bin; a node that several bins need is in each of them. Attention from
    node to ancestors is then masked attention within short sequences, and nothing has to be gathered.

    Examples
    --------
    >>> from histocoder.formatters import build_formatter
    >>> layout = TreeLayout(CodeTrie(["120", "110", "200"], build_formatter("occ1950", num_blocks=1)))
    >>> layout.tokens.tolist()  # the nodes BOS, 6, 6-6, 6-7, 7, 7-5
    [[2, 6, 6, 7, 7, 5]]
    >>> layout.places.tolist()
    [[0, 1, 3], [0, 1, 2], [0, 4, 5]]
    """

    tokens: Tensor  # token that leads to each node, of shape (num_bins, bin_size)
    depths: Tensor  # its position in the sequence, BOS at 0, of the same shape
    visible: Tensor  # whether the second node is the first or its ancestor, of shape (num_bins, bin_size, bin_size)
    places: Tensor  # nodes on each code's path by index among all bins', the root first, of shape (num_codes, depth)
    nodes: Tensor  # node of the trie at each of these indices; the root where a bin is not filled

    def __init__(self, trie: CodeTrie, bin_size: int = _BIN_SIZE) -> None:
        paths, blocks = trie.nodes.cpu().numpy(), trie.blocks.cpu().numpy()
        depth = paths.shape[1]
        bins: list[dict[int, int]] = [{}]  # node of the trie -> its index in the bin
        in_bin, bin_of_code = np.empty_like(paths), np.empty_like(paths[:, :1])
        for code in np.lexsort(paths.T[::-1]):  # from left to right through the trie
            path = paths[code].tolist()
            if len(bins[-1].keys() | set(path)) > max(bin_size, 4 * depth):
                bins.append({})
            in_bin[code] = [bins[-1].setdefault(node, len(bins[-1])) for node in path]
            bin_of_code[code] = len(bins) - 1
        size = max(map(len, bins))
        if len(bins) > 1:
            size = _VECTOR * math.ceil(size / _VECTOR)
        places = bin_of_code * size + in_bin
        tokens, depths = np.full((len(bins), size), BOS), np.zeros((len(bins), size), dtype=np.int64)
        visible = np.tile(np.eye(size, dtype=bool), (len(bins), 1, 1))
        nodes = np.zeros(len(bins) * size, dtype=np.int64)
        tokens.put(places[:, 1:], blocks[:, :-1])
        depths.put(places, np.broadcast_to(np.arange(depth), places.shape))
        nodes.put(places, paths)
        node, ancestor = np.tril_indices(depth)
        visible.reshape(-1, size)[places[:, node], in_bin[:, ancestor]] = True
        self.tokens, self.depths, self.visible, self.places, self.nodes = (
            torch.from_numpy(table).to(trie.nodes.device) for table in (tokens, depths, visible, places, nodes)
        )


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
