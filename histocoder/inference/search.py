"""Codes that a decoder writes: the most probable token at each position, and exact searches over the codes of a key."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from histocoder.formatters import Formatter
from histocoder.formatters.systems import BOS, PAD
from histocoder.inference.stepper import DecoderInputs, Stepper
from histocoder.model import Decoder

_SLACK = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}
"""Difference of log-probabilities computed again in batches of another shape, by the precision of the decoder."""
_CROWDED = 0.1  # share of a level's most nodes above which computing all nodes, in smaller batches, is faster
_FEW = 64  # number of nodes of a level that is never too many
_NODES_AT_ONCE, _NODES_AT_ONCE_ON_CPU = 1 << 16, 1 << 12  # the latter fit a CPU's caches


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

    def __init__(self, codes: Sequence[str], formatter: Formatter, device: torch.device | str = "cpu") -> None:
        blocks = np.array([formatter.system.to_block(code) for code in codes], dtype=np.int64)
        order = np.lexsort(blocks.T[::-1])
        ordered = blocks[order]
        is_new = np.ones_like(blocks, dtype=bool)  # whether a code's tokens up to here differ from the previous code's
        is_new[1:] = np.logical_or.accumulate(ordered[1:] != ordered[:-1], axis=1)
        if not is_new[:, -1].all():
            raise ValueError("two codes of the key are written in the same tokens")
        child = is_new.cumsum(0) - 1  # of each code, the node behind each of its tokens, numbered within its level
        parent = np.hstack([np.zeros_like(child[:, :1]), child[:, :-1]])
        self.blocks = torch.from_numpy(blocks).to(device)
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
            self.children.append(torch.from_numpy(children).to(device))
            self.tokens.append(torch.from_numpy(tokens).to(device))


@torch.no_grad()
def greedy(
    decoder: Decoder, source: DecoderInputs, *, num_tokens: int, block_size: int, trie: CodeTrie | None = None
) -> tuple[Tensor, Tensor]:
    """Take the most probable token at each position, given those before it.

    A row ends with its first block that begins with PAD, an unused one: what follows is PAD of probability 1. Decoding
    stops when all rows have ended.

    Parameters
    ----------
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
    batch, device = len(source.memory), source.memory.device
    stepper = Stepper(decoder, source)
    tokens = torch.full((batch, 1 + num_tokens), PAD, device=device)
    tokens[:, 0] = BOS
    probabilities = torch.ones(batch, num_tokens, device=device)
    ended = torch.zeros(batch, dtype=torch.bool, device=device)
    nodes, unused = torch.zeros(batch, dtype=torch.long, device=device), ended  # in the trie; whether the block is PAD
    for i in range(num_tokens):
        probs = stepper.step(tokens[:, i : i + 1], real=~ended[:, None])[:, 0].float().softmax(-1)
        level = i % block_size
        if trie is None:
            best = probs.argmax(-1)
        else:
            nodes = torch.zeros_like(nodes) if level == 0 else nodes
            children, following = trie.children[level][nodes], trie.tokens[level][nodes]  # (B, C)
            most, index = probs.gather(1, following).masked_fill(children < 0, -1.0).max(1, keepdim=True)
            if level == 0 and i:
                unused = unused | (probs[:, PAD] >= most[:, 0])
            nodes = children.gather(1, index)[:, 0]
            best = following.gather(1, index)[:, 0].masked_fill(unused, PAD)
        chosen = best.masked_fill(ended, PAD)
        tokens[:, i + 1] = chosen
        probabilities[:, i] = torch.where(ended, 1.0, probs.gather(1, chosen[:, None])[:, 0])
        if level == block_size - 1:
            ended = ended | tokens[:, i + 2 - block_size].eq(PAD)
            if bool(ended.all()):
                break
    return tokens, probabilities


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


class TrieSearch:
    """Finds the probabilities of a key's codes in the first block."""

    def __init__(self, decoder: Decoder, trie: CodeTrie) -> None:
        self._decoder, self._trie = decoder, trie
        self._widest = max(map(len, trie.children))
        self._nodes_at_once = _NODES_AT_ONCE_ON_CPU if trie.blocks.device.type == "cpu" else _NODES_AT_ONCE

    @torch.no_grad()
    def full(self, source: DecoderInputs) -> Tensor:
        """Return the probability of every code of the key, in its order, of shape (B, num_codes).

        The rest of a sum of 1 is the probability of tokens that make no code.
        """
        probs = torch.empty(len(source.memory), len(self._trie.blocks), device=source.memory.device)
        step = max(1, self._nodes_at_once // self._widest)
        for start in range(0, len(probs), step):
            rows = slice(start, start + step)
            codes, scores = self._descend(source.rows(rows))
            probs[rows, codes[0]] = scores.exp()
        return probs

    @torch.no_grad()
    def top_k(self, source: DecoderInputs, *, k: int) -> tuple[Tensor, Tensor]:
        """Return the k most probable codes of the key, exactly: the best of `full`, mostly with a fraction of its work.

        A beam of width k finds k codes; the least probable of them is a floor that no branch below it can reach, since
        a code is never more probable than its prefix.

        Returns
        -------
        codes : Tensor of int, of shape (B, k)
            Indices in the key, the most probable first.
        probabilities : Tensor of shape (B, k)
        """
        k, step = min(k, len(self._trie.blocks)), max(1, self._nodes_at_once // _FEW)
        codes = torch.empty(len(source.memory), k, dtype=torch.long, device=source.memory.device)
        probs = torch.empty(codes.shape, device=codes.device)
        for start in range(0, len(codes), step):
            some = slice(start, start + step)
            part = source.rows(some)
            no_floor = torch.full((len(part.memory), 1), -torch.inf, device=codes.device)
            _, scores = self._descend(part, floor=no_floor, width=k)
            found, scores = self._descend(part, floor=scores[:, -1:] - _SLACK[part.memory.dtype])
            # too few: the row had too many nodes, or its scores differ by more than the slack
            rest = (scores > -torch.inf).sum(1) < k
            if bool(rest.any()):
                probs[some][rest], codes[some][rest] = self.full(part.rows(rest)).topk(k)
            if not bool(rest.all()):
                codes[some][~rest], probs[some][~rest] = found[~rest, :k], scores[~rest, :k].exp()
        return codes, probs

    def _descend(
        self, source: DecoderInputs, *, floor: Tensor | None = None, width: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Go down the trie with each row's nodes that reach its floor (B, 1); with a width, the best so many of them.

        Returns codes (B, W) and their log-probabilities (B, W), the best first, -inf where a row has fewer, and for a
        row that has too many nodes. Without a floor, it is all codes for all rows, codes (1, W), in the trie's order.
        """
        batch, device = len(source.memory), source.memory.device
        stepper = Stepper(self._decoder, source)
        scores = torch.zeros(batch, 1, device=device)
        nodes = parents = torch.zeros(1 if floor is None else batch, 1, dtype=torch.long, device=device)
        tokens, real = torch.full_like(nodes, BOS), None
        for children, child_tokens in zip(self._trie.children, self._trie.tokens, strict=True):
            if floor is not None:
                too_many = (scores > -torch.inf).sum(1, keepdim=True) > max(_FEW, _CROWDED * self._widest)
                scores = scores.masked_fill(too_many, -torch.inf)
                real = scores > -torch.inf
                if not bool(real.any()):
                    break
            log_probs = stepper.step(tokens, parents, real).float().log_softmax(-1)  # (B, W, V)
            next_tokens = child_tokens[nodes]  # (B or 1, W, C)
            candidates = scores[..., None] + log_probs.gather(-1, next_tokens.expand(batch, -1, -1))
            candidates = candidates.masked_fill(children[nodes] < 0, -torch.inf).flatten(1)
            if floor is None:
                indices = (children[nodes] >= 0).flatten().nonzero().t()  # (1, W)
                scores = candidates[:, indices[0]]
            else:
                scores, indices = branches_above(candidates, floor, width=width)
            parents = indices // children.shape[1]
            nodes, tokens = (x.flatten(1).gather(1, indices) for x in (children[nodes].clamp(min=0), next_tokens))
        return nodes, scores
