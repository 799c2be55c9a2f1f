"""Exact probabilities of a key's codes in the first block."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from histocoder.formatters.tokens import BOS
from histocoder.inference.stepper import Stepper
from histocoder.inference.tree import TreeDecoder
from histocoder.inference.trie import Branches, CodeTrie, branches_above
from histocoder.model import Decoder, Prior

_SLACK = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}
"""Of log-probabilities that are computed once more in batches of another shape, by the precision of the decoder."""
_CROWDED = 0.125
"""Of the trie's nodes: where a search has to look at more, it is faster to compute all of them, in one shape."""
_FEW = 64
"""Nodes that are never too many."""
_NODES_AT_ONCE = {"cpu": 1 << 12}  # what fits a CPU's caches
_NODES_AT_ONCE_ELSEWHERE = 1 << 16


class TrieSearch:
    """Finds the probabilities of a key's codes.

    Parameters
    ----------
    decoder : Decoder
        Its weights must not change while this is in use: what all rows share is computed once.
    trie : CodeTrie
    """

    def __init__(self, decoder: Decoder, trie: CodeTrie) -> None:
        self._decoder = decoder
        self._trie = trie
        self._nodes_at_once = _NODES_AT_ONCE.get(trie.blocks.device.type, _NODES_AT_ONCE_ELSEWHERE)

    @cached_property
    def _tree(self) -> TreeDecoder:
        layout = self._trie.layout
        return TreeDecoder(self._decoder, layout.tokens, layout.depths, layout.visible)

    @cached_property
    def _node_of_place(self) -> Tensor:
        """The trie's node at each place of the layout; the root where nothing stands."""
        places = torch.zeros(self._tree.num_nodes, dtype=torch.long, device=self._trie.nodes.device)
        places[self._trie.layout.places.flatten()] = self._trie.nodes.flatten()
        return places

    @torch.no_grad()
    def full(self, memory: Tensor, memory_mask: Tensor | None, prior: Prior | None = None) -> Tensor:
        """Return the probability of every code of the key.

        Parameters
        ----------
        memory : Tensor of shape (B, S, dim)
        memory_mask : Tensor of bool, of shape (B, S), or None
        prior : Prior, optional
            What the decoder starts from.

        Returns
        -------
        Tensor of shape (B, num_codes)
            In the key's order; what is missing from a sum of 1 is the model's belief in tokens that make no code.
        """
        probs = torch.empty(len(memory), self._trie.num_codes, device=memory.device)
        step = 16 * max(1, self._nodes_at_once // self._tree.num_nodes)
        for start in range(0, len(memory), step):
            rows = slice(start, start + step)
            mask = None if memory_mask is None else memory_mask[rows]
            logits = self._tree(memory[rows], mask, nodes_at_once=self._nodes_at_once)
            if prior is not None:
                of_nodes = prior.rows(rows).of_nodes(self._trie.nodes, self._trie.num_nodes)
                logits = logits.float() + of_nodes[:, self._node_of_place]
            following = logits.float().log_softmax(-1)  # (rows, nodes, vocab_size)
            steps = self._trie.layout.places * following.shape[2] + self._trie.blocks  # (num_codes, depth)
            log_probs = following.flatten(1)[:, steps.flatten()].unflatten(1, steps.shape).sum(-1)
            probs[rows] = log_probs.exp()
        return probs

    @torch.no_grad()
    def top_k(
        self, memory: Tensor, memory_mask: Tensor | None, prior: Prior | None = None, *, k: int
    ) -> tuple[Tensor, Tensor]:
        """Return the k most probable codes of the key, exactly: `full`'s, mostly without most of its work.

        A beam of width k finds k codes; the least probable of them is a floor that no branch below it can reach, since
        a code is never more probable than its beginning.

        Parameters
        ----------
        k : int
            At most the key's number of codes. For the others see `full`.

        Returns
        -------
        codes : Tensor of int, of shape (B, k)
            Places in the key, the most probable first.
        probabilities : Tensor of shape (B, k)
        """
        step = max(1, self._nodes_at_once // 64)
        parts = [
            self._top_k(
                memory[start : start + step],
                None if memory_mask is None else memory_mask[start : start + step],
                None if prior is None else prior.rows(slice(start, start + step)),
                min(k, self._trie.num_codes),
            )
            for start in range(0, len(memory), step)
        ]
        codes, probabilities = zip(*parts, strict=True)
        return torch.cat(codes), torch.cat(probabilities)

    def _top_k(self, memory: Tensor, memory_mask: Tensor | None, prior: Prior | None, k: int) -> tuple[Tensor, Tensor]:
        floor = torch.full((len(memory), 1), -torch.inf, device=memory.device)
        beam, crowded = self._descend(memory, memory_mask, prior, floor=floor, width=k)
        floor = beam.scores[:, -1:] - _SLACK[memory.dtype]  # of k codes, since every node of the trie leads to one
        floor = floor.masked_fill(crowded[:, None], torch.inf)
        leaves, also_crowded = self._descend(memory, memory_mask, prior, floor=floor, width=None)
        rest = crowded | also_crowded | (leaves.real.sum(1) < k)  # too few: scores differ by more than the slack
        codes = torch.empty(len(memory), k, dtype=torch.long, device=memory.device)
        probs = torch.empty(len(memory), k, device=memory.device)
        if bool(rest.any()):
            mask = None if memory_mask is None else memory_mask[rest]
            best = self.full(memory[rest], mask, None if prior is None else prior.rows(rest)).topk(k)
            codes[rest], probs[rest] = best.indices, best.values
        if not bool(rest.all()):
            codes[~rest], probs[~rest] = leaves.places[~rest, :k], leaves.scores[~rest, :k].exp()
        return codes, probs

    def _descend(
        self,
        memory: Tensor,
        memory_mask: Tensor | None,
        prior: Prior | None,
        *,
        floor: Tensor,
        width: int | None,
    ) -> tuple[Branches, Tensor]:
        """Go down the trie with each row's nodes that reach its floor (B, 1); with a width, the best so many of them.

        Returns
        -------
        leaves : Branches
            Their places are codes.
        crowded : Tensor of bool, of shape (B,)
            Where there are so many nodes that the row was given up.
        """
        batch, device = len(memory), memory.device
        stepper = Stepper(self._decoder, memory, memory_mask, prior)
        nodes = parents = torch.zeros(batch, 1, dtype=torch.long, device=device)
        level = Branches(nodes, torch.zeros(batch, 1, device=device))
        tokens, seen = torch.full_like(nodes, BOS), torch.zeros(batch, dtype=torch.long, device=device)
        limit = max(_FEW, _CROWDED * sum(len(children) for children in self._trie.children))
        for children, child_tokens in zip(self._trie.children, self._trie.tokens, strict=True):
            seen += level.real.sum(1)
            level = Branches(level.places, level.scores.masked_fill((seen > limit)[:, None], -torch.inf))
            if not bool(level.real.any()):
                break
            log_probs = stepper.step_tree(tokens, parents, level.real).float().log_softmax(-1)  # (B, W, V)
            candidates = level.scores[..., None] + log_probs.gather(-1, child_tokens[nodes])  # (B, W, C)
            candidates = candidates.masked_fill(children[nodes] < 0, -torch.inf).flatten(1)
            level = branches_above(candidates, floor, width=width)
            parents = level.places // children.shape[1]
            nodes, tokens = (x[nodes].flatten(1).gather(1, level.places).clamp(min=0) for x in (children, child_tokens))
        return Branches(nodes, level.scores), seen > limit
