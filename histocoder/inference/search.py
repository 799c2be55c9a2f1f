"""Codes that a decoder writes: the most probable token at each position and the probability of such
a set of codes, and exact searches over the codes of a key.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from histocoder.formatters import BOS, PAD, Formatter
from histocoder.inference.incremental import DecoderInputs, IncrementalDecoder
from histocoder.model import Decoder
from histocoder.model.layers import MAX_SEQUENCES

MAX_LOG_PROB_ERROR = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.5}
"""Largest difference of log-probabilities computed again in batches of another shape, by the
decoder's precision.
"""
NODES_AT_ONCE = MAX_SEQUENCES
"""Number of nodes of all rows that are computed at once."""
NODES_AT_ONCE_ON_CPU = 1 << 13
"""Number of nodes that fit a CPU's caches."""
USUAL_NODES = 128
"""Number of nodes that a row of `top_k` seldom exceeds on a level."""
MIN_ORDER_PROBABILITY = 1e-6
"""Probability of a beginning, below which orders of codes that begin so are not followed."""


class TrieLevel(NamedTuple):
    """The N nodes of a level, those of one parent side by side."""

    parents: Tensor  # places of their parents in the level before, of shape (N,)
    tokens: Tensor  # tokens that lead to them, of shape (N,)
    nodes: Tensor  # their indices in the level, of shape (N,)


class CodeTrie:
    """All codes of a key, each a path of `block_size` tokens from the root.

    Level by level from the root's, `children` and `tokens`, of shape (nodes of the level, most
    children of a node), are the nodes of the next level that follow each node, -1 where there are
    fewer, and the tokens that lead to them. A node of the last level is a code, by its index in the
    key.

    Examples
    --------
    >>> from histocoder.formatters import build_formatter
    >>> trie = CodeTrie(["120", "110", "200"], build_formatter("occ1950", num_blocks=1))
    >>> [len(level) for level in trie.children]
    [1, 2, 3]
    """

    blocks: Tensor  # tokens of each code, of shape (num_codes, depth)
    paths: Tensor  # nodes of each level on the way to each code, of shape (num_codes, depth)

    def __init__(
        self, codes: Sequence[str], formatter: Formatter, device: torch.device | str = "cpu"
    ) -> None:
        blocks = [tuple(formatter.system.to_block(code)) for code in codes]
        # beginning of a code -> its index within its level
        nodes = {block: i for i, block in enumerate(blocks)}
        if len(nodes) < len(blocks):
            raise ValueError("two codes of the key are written in the same tokens")
        self.blocks = torch.tensor(blocks, device=device)
        self.children: list[Tensor] = []
        self.tokens: list[Tensor] = []

        # From the last level up, since a node is numbered before those that lead to it.
        paths: list[list[int]] = []
        for depth in reversed(range(formatter.block_size)):
            following: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
            for path in sorted(nodes):
                following.setdefault(path[:depth], []).append(path)
            children = []
            tokens = []
            for longer_paths in following.values():
                children.append(torch.tensor([nodes[path] for path in longer_paths]))
                tokens.append(torch.tensor([path[depth] for path in longer_paths]))
            padded_children = pad_sequence(children, batch_first=True, padding_value=-1)
            self.children.insert(0, padded_children.to(device))
            self.tokens.insert(0, pad_sequence(tokens, batch_first=True).to(device))
            nodes = {path: i for i, path in enumerate(following)}
            paths.insert(0, [nodes[block[:depth]] for block in blocks])
        self.paths = torch.tensor(paths, device=device).T

        # All nodes of each level, as a search that computes all of them goes through the levels.
        self.levels: list[TrieLevel] = []
        nodes_in_order = torch.zeros(1, dtype=torch.long, device=device)
        for children_of_level, tokens_of_level in zip(self.children, self.tokens, strict=True):
            following_nodes = children_of_level[nodes_in_order]
            exist = following_nodes >= 0
            parents = exist.nonzero()[:, 0]
            tokens_in_order = tokens_of_level[nodes_in_order][exist]
            nodes_in_order = following_nodes[exist]
            self.levels.append(TrieLevel(parents, tokens_in_order, nodes_in_order))

    def most_probable(
        self, log_probs: Tensor, level: int, nodes: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the most probable child of nodes (N,) of a level, by the log-probabilities (N, V)
        of all tokens: its log-probability, its token and its index, each of shape (N,).
        """
        children = self.children[level][nodes]
        tokens = self.tokens[level][nodes]
        of_children = log_probs.gather(1, tokens).masked_fill(children < 0, -torch.inf)
        most, index = of_children.max(1, keepdim=True)
        return most[:, 0], tokens.gather(1, index)[:, 0], children.gather(1, index)[:, 0]

    def bound_of_greedy(self, codes: Tensor, log_probs: Tensor) -> Tensor:
        """Return an upper bound (N,) of the log-probability of the code that is written by taking
        the most probable token each time, -inf where this is the given one (N,).

        `log_probs` (N, depth, V), or more, are those of what follows the given codes' tokens. Another
        code is at most as probable as its beginning, up to the first token that differs.
        """
        bound = log_probs.new_full(codes.shape, -torch.inf)
        before = torch.zeros_like(bound)
        is_same = torch.ones_like(codes, dtype=torch.bool)
        for level in range(len(self.children)):
            given = log_probs[:, level].gather(1, self.blocks[codes, level, None])[:, 0]
            best = self.most_probable(log_probs[:, level], level, self.paths[codes, level])[0]
            differs = is_same & (given < best)
            bound = (before + best).where(differs, bound)
            is_same = is_same & ~differs
            before = before + given
        return bound


@torch.no_grad()
def greedy(
    decoder: Decoder,
    source: DecoderInputs,
    *,
    num_tokens: int,
    block_size: int,
    trie: CodeTrie | None = None,
) -> tuple[Tensor, Tensor]:
    """Take the most probable token at each position, given those before it.

    A row ends with its first block that begins with PAD, an unused one: what follows is PAD of
    probability 1. Decoding stops when all rows have ended.

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
    batch = len(source.memory)
    device = source.memory.device
    stepper = IncrementalDecoder(decoder, source)
    tokens = torch.full((batch, 1 + num_tokens), PAD, device=device)
    tokens[:, 0] = BOS
    probabilities = torch.ones(batch, num_tokens, device=device)
    ended = torch.zeros(batch, dtype=torch.bool, device=device)
    nodes = torch.zeros(batch, dtype=torch.long, device=device)  # in the trie
    unused = ended  # whether the block is PAD

    for i in range(num_tokens):
        # The best token of all, or of those that lead to a code.
        probs = stepper.step(tokens[:, i : i + 1], real=~ended[:, None])[:, 0].float().softmax(-1)
        level = i % block_size
        if trie is None:
            best = probs.argmax(-1)
        else:
            if level == 0:
                nodes = torch.zeros_like(nodes)
            most, best, nodes = trie.most_probable(probs, level, nodes)
            if level == 0 and i:
                unused = unused | (probs[:, PAD] >= most)
            best = best.masked_fill(unused, PAD)

        # Rows that have ended stay as they are.
        chosen = best.masked_fill(ended, PAD)
        tokens[:, i + 1] = chosen
        probabilities[:, i] = torch.where(ended, 1.0, probs.gather(1, chosen[:, None])[:, 0])
        if level == block_size - 1:
            ended = ended | tokens[:, i + 2 - block_size].eq(PAD)
            if i + 1 < num_tokens and bool(ended.all()):  # for which the host waits, once a code
                break
    return tokens, probabilities


@torch.no_grad()
def set_probability(
    decoder: Decoder,
    source: DecoderInputs,
    tokens: Tensor,
    probabilities: Tensor,
    *,
    is_code: Tensor,
) -> Tensor:
    """Return the probability (B,) of each row's set of codes, summed over the orders in which they
    can be written.

    It includes the first unused block after the codes, and is exact within 1e-6 for each beginning
    of an order. `tokens` (B, num_blocks * block_size) are decoded codes as blocks, without BOS and
    EOS; unused blocks are PAD, and come last. `probabilities`, of the same shape, are those of the
    tokens as they were decoded. `is_code` (B, num_blocks) says which blocks are codes: if a used
    one is none, there is no set, and the sequence itself counts.
    """
    num_blocks = is_code.shape[1]
    blocks = tokens.unflatten(1, (num_blocks, -1))
    is_used = blocks[..., 0].ne(PAD)
    counts = is_used.sum(1)

    # The order in which the codes were decoded is known already.
    is_scored = torch.arange(num_blocks, device=tokens.device) <= counts[:, None]
    by_block = probabilities.unflatten(1, (num_blocks, -1)).prod(-1)
    total = by_block.masked_fill(~is_scored, 1.0).prod(1)
    if num_blocks == 1:  # one code has one order
        return total.clamp(max=1.0)

    # Copies of a repeated code stay in order, or the same sequence would count twice.
    follows_copy = (blocks[:, :, None] == blocks[:, None]).all(-1).tril(-1)
    follows_copy &= is_used[:, None]  # (B, num_blocks, earlier)

    # Other orders grow by a block each time, in the rows in which their beginning is probable.
    is_set = (is_code | ~is_used).all(1)
    rows_of_order: dict[tuple[int, ...], Tensor] = {(): (is_set & counts.gt(1)).nonzero()[:, 0]}
    while rows_of_order:
        rows_of_longer: dict[tuple[int, ...], Tensor] = {}
        for order, order_rows in rows_of_order.items():
            for block in range(num_blocks):
                if block in order:
                    continue

                longer = (*order, block)
                rows = order_rows[_may_follow(order, block, counts, follows_copy, order_rows)]

                # With all codes in place it is the order that was decoded.
                if longer == tuple(range(len(longer))):
                    rows = rows[counts[rows] > len(longer)]
                if not len(rows):
                    continue
                sequence = F.pad(blocks[rows][:, longer].flatten(1), (1, 0), value=BOS)
                logits = decoder(sequence[:, :-1], *source.rows(rows)).float()
                log_probs = logits.log_softmax(-1).gather(-1, sequence[:, 1:, None]).sum((1, 2))
                is_whole = (counts[rows] + 1).clamp(max=num_blocks) == len(longer)
                total[rows[is_whole]] += log_probs[is_whole].exp()
                grows = ~is_whole & (log_probs > math.log(MIN_ORDER_PROBABILITY))
                rows_of_longer[longer] = rows[grows]
        rows_of_order = rows_of_longer
    return total.clamp(max=1.0)


def _may_follow(
    order: tuple[int, ...], block: int, counts: Tensor, follows_copy: Tensor, rows: Tensor
) -> Tensor:
    """Return in which of some rows (R,) a block may come next in an order of blocks.

    A code follows its earlier copies, and the first unused block all codes.
    """
    missing_copies = follows_copy[rows, block]
    missing_copies[:, list(order)] = False
    may_follow = block < counts[rows]
    if block == len(order):
        may_follow = may_follow | (block == counts[rows])
    return may_follow & ~missing_copies.any(1)


class TrieSearch:
    """Finds the probabilities of a key's codes in the first block."""

    def __init__(self, decoder: Decoder, trie: CodeTrie) -> None:
        self._decoder = decoder
        self._trie = trie
        self._widest = max(map(len, trie.children))
        is_on_cpu = trie.blocks.device.type == "cpu"
        self._nodes_at_once = NODES_AT_ONCE_ON_CPU if is_on_cpu else NODES_AT_ONCE

    @torch.no_grad()
    def full(self, source: DecoderInputs) -> Tensor:
        """Return the probability of every code of the key, in its order, of shape (B, num_codes).

        The rest of a sum of 1 is the probability of tokens that make no code.
        """
        trie = self._trie
        num_rows = len(source.memory)
        probs = torch.empty(num_rows, len(trie.blocks), device=source.memory.device)
        shared: list[Tensor] = []
        step = max(1, self._nodes_at_once // self._widest)
        for start in range(0, num_rows, step):
            rows = slice(start, start + step)
            stepper = IncrementalDecoder(
                self._decoder, source.rows(rows), many_nodes=True, shared=shared
            )

            # Every row has all nodes of a level, of which there are W.
            scores = torch.zeros_like(probs[rows, :1])  # (B, W)
            parents = torch.zeros(1, dtype=torch.long, device=probs.device)  # (W,)
            tokens = torch.full_like(parents, BOS)
            for level in trie.levels:
                num_part = len(scores)
                logits = stepper.step(tokens.expand(num_part, -1), parents.expand(num_part, -1))
                log_probs = logits.float().log_softmax(-1)  # (B, W, V)
                parents = level.parents
                tokens = level.tokens
                scores = scores[:, parents] + log_probs[:, parents, tokens]
            probs[rows, level.nodes] = scores.exp()
        return probs

    @torch.no_grad()
    def top_k(self, source: DecoderInputs, *, k: int) -> tuple[Tensor, Tensor]:
        """Return the k most probable codes of the key, exactly: the best of `full`, mostly with a
        fraction of its work.

        A beam of width k finds k codes; the least probable of them is a floor that no branch below
        it can reach, since a code is never more probable than its prefix.

        Returns
        -------
        codes : Tensor of int, of shape (B, k)
            Indices in the key, the most probable first.
        probabilities : Tensor of shape (B, k)
        """
        k = min(k, len(self._trie.blocks))
        step = max(1, self._nodes_at_once // min(USUAL_NODES, self._widest))
        codes_of_parts = []
        scores_of_parts = []
        for start in range(0, len(source.memory), step):
            # The floor is a little lower, since the same numbers come out differently in other shapes.
            part = source.rows(slice(start, start + step))
            codes, scores, _ = self._descend(part, k=k, width=k)
            floor = scores[:, -1:] - MAX_LOG_PROB_ERROR[part.memory.dtype]
            if part.memory.device.type == "cpu":
                codes, scores, _ = self._descend(part, k=k, floor=floor)
            else:
                # With room for the nodes that rows seldom exceed, the host waits once, and not at
                # each level.
                codes, scores, is_whole = self._descend(part, k=k, floor=floor, width=USUAL_NODES)
                if not bool(is_whole):
                    codes, scores, _ = self._descend(part, k=k, floor=floor)
            codes_of_parts.append(codes)
            scores_of_parts.append(scores)
        return torch.cat(codes_of_parts), torch.cat(scores_of_parts).exp()

    def _descend(
        self,
        source: DecoderInputs,
        *,
        k: int,
        floor: Tensor | float = -torch.inf,
        width: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Go down the trie with each row's nodes that reach its floor (B, 1); with a width, the
        best so many of them.

        Return the k best codes (B, k), their log-probabilities (B, k), and whether the width was
        enough, of shape ().
        """
        batch = len(source.memory)
        device = source.memory.device
        depth = len(self._trie.children)
        stepper = IncrementalDecoder(self._decoder, source, many_nodes=True)

        # Every row begins at the root.
        scores = torch.zeros(batch, 1, device=device)
        nodes = parents = torch.zeros(batch, 1, dtype=torch.long, device=device)
        tokens = torch.full_like(nodes, BOS)
        is_whole = torch.ones((), dtype=torch.bool, device=device)
        for level, children in enumerate(self._trie.children):
            logits = stepper.step(tokens, parents, scores > -torch.inf)
            log_probs = logits.float().log_softmax(-1)  # (B, W, V)
            next_nodes = children[nodes]  # (B, W, C)
            next_tokens = self._trie.tokens[level][nodes]
            candidates = scores[..., None] + log_probs.gather(-1, next_tokens)
            candidates = candidates.masked_fill(next_nodes < 0, -torch.inf).flatten(1)

            # Before the last level all that reach the floor stay, at the last the k best.
            if level + 1 < depth:
                candidates = candidates.masked_fill(candidates < floor, -torch.inf)
                counts = (candidates > -torch.inf).sum(1)
                if width is None or device.type == "cpu":
                    most = int(counts.max())  # for which the host waits
                    scores, indices = candidates.topk(min(most, width or most))
                else:
                    scores, indices = candidates.topk(min(candidates.shape[1], width))
                    is_whole = is_whole & (counts <= width).all()
            else:
                scores, indices = candidates.topk(k)
            parents = indices // children.shape[1]
            nodes = next_nodes.clamp(min=0).flatten(1).gather(1, indices)
            tokens = next_tokens.flatten(1).gather(1, indices)
        return nodes, scores, is_whole
