"""A key's trie laid out in bins, each closed under ancestors, so that all its nodes go through a decoder at once."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from histocoder.formatters.tokens import BOS

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
