"""Exact probabilities of a key's codes in the first block."""

from functools import cached_property

import torch
from torch import Tensor

from histocoder.formatters.tokens import BOS
from histocoder.inference.stepper import Stepper, select_rows
from histocoder.inference.tree import TreeDecoder
from histocoder.inference.trie import CodeTrie, branches_above
from histocoder.model import Decoder, Prior

_SLACK = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}
"""Difference of log-probabilities computed again in batches of another shape, by the precision of the decoder."""
_CROWDED = 0.125  # share of the trie's nodes above which computing all, in one shape, is faster than searching
_FEW = 64  # number of nodes that is never too many
_NODES_AT_ONCE = {"cpu": 1 << 12}  # what fits a CPU's caches
_NODES_AT_ONCE_ELSEWHERE = 1 << 16


class TrieSearch:
    """Finds the probabilities of a key's codes; a decoder's weights must not change while it is in use.

    For memory (B, S, dim), its mask (B, S) and the prior see `Decoder.forward`.
    """

    def __init__(self, decoder: Decoder, trie: CodeTrie) -> None:
        self._decoder = decoder
        self._trie = trie
        self._nodes_at_once = _NODES_AT_ONCE.get(trie.blocks.device.type, _NODES_AT_ONCE_ELSEWHERE)

    @cached_property
    def _tree(self) -> TreeDecoder:
        return TreeDecoder(self._decoder, self._trie.layout)

    @torch.no_grad()
    def full(self, memory: Tensor, memory_mask: Tensor | None, prior: Prior | None = None) -> Tensor:
        """Return the probability of every code of the key, in its order, of shape (B, num_codes).

        The rest of a sum of 1 is the probability of tokens that make no code.
        """
        layout = self._trie.layout
        probs = torch.empty(len(memory), len(self._trie.blocks), device=memory.device)
        step = 16 * max(1, self._nodes_at_once // layout.tokens.numel())
        for start in range(0, len(memory), step):
            rows = slice(start, start + step)
            some_memory, mask, some_prior = select_rows(rows, memory, memory_mask, prior)
            logits = self._tree(some_memory, mask, nodes_at_once=self._nodes_at_once)
            if some_prior is not None:
                logits = logits.float() + some_prior.of_nodes(self._trie.nodes, self._trie.num_nodes)[:, layout.nodes]
            following = logits.float().log_softmax(-1)  # (rows, nodes, vocab_size)
            steps = layout.places * following.shape[2] + self._trie.blocks  # (num_codes, depth)
            log_probs = following.flatten(1)[:, steps.flatten()].unflatten(1, steps.shape).sum(-1)
            probs[rows] = log_probs.exp()
        return probs

    @torch.no_grad()
    def top_k(
        self, memory: Tensor, memory_mask: Tensor | None, prior: Prior | None = None, *, k: int
    ) -> tuple[Tensor, Tensor]:
        """Return the k most probable codes of the key, exactly: the best of `full`, mostly with a fraction of its work.

        A beam of width k finds k codes; the least probable of them is a floor that no branch below it can reach, since
        a code is never more probable than its prefix.

        Returns
        -------
        codes : Tensor of int, of shape (B, k)
            Indices in the key, the most probable first.
        probabilities : Tensor of shape (B, k)
        """
        step = max(1, self._nodes_at_once // 64)
        parts = [
            self._top_k(*select_rows(slice(start, start + step), memory, memory_mask, prior), k=k)
            for start in range(0, len(memory), step)
        ]
        codes, probabilities = zip(*parts, strict=True)
        return torch.cat(codes), torch.cat(probabilities)

    def _top_k(
        self, memory: Tensor, memory_mask: Tensor | None, prior: Prior | None, *, k: int
    ) -> tuple[Tensor, Tensor]:
        k = min(k, len(self._trie.blocks))
        floor = torch.full((len(memory), 1), -torch.inf, device=memory.device)
        _, scores, crowded = self._descend(memory, memory_mask, prior, floor=floor, width=k)
        floor = scores[:, -1:] - _SLACK[memory.dtype]  # of k codes, since every node of the trie leads to one
        floor = floor.masked_fill(crowded[:, None], torch.inf)
        found, scores, also_crowded = self._descend(memory, memory_mask, prior, floor=floor, width=None)
        # too few: scores differ by more than the slack
        rest = crowded | also_crowded | ((scores > -torch.inf).sum(1) < k)
        codes = torch.empty(len(memory), k, dtype=torch.long, device=memory.device)
        probs = torch.empty(len(memory), k, device=memory.device)
        if bool(rest.any()):
            best = self.full(*select_rows(rest, memory, memory_mask, prior)).topk(k)
            codes[rest], probs[rest] = best.indices, best.values
        if not bool(rest.all()):
            codes[~rest], probs[~rest] = found[~rest, :k], scores[~rest, :k].exp()
        return codes, probs

    def _descend(
        self, memory: Tensor, memory_mask: Tensor | None, prior: Prior | None, *, floor: Tensor, width: int | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Go down the trie with each row's nodes that reach its floor (B, 1); with a width, the best so many of them.

        Returns codes (B, W), their log-probabilities (B, W), the best first, -inf where a row has fewer, and whether a
        row (B,) was given up because it had too many nodes.
        """
        batch, device = len(memory), memory.device
        stepper = Stepper(self._decoder, memory, memory_mask, prior)
        nodes = parents = torch.zeros(batch, 1, dtype=torch.long, device=device)
        scores, tokens = torch.zeros(batch, 1, device=device), torch.full_like(nodes, BOS)
        num_seen = torch.zeros(batch, dtype=torch.long, device=device)
        limit = max(_FEW, _CROWDED * self._trie.num_nodes)
        for children, child_tokens in zip(self._trie.children, self._trie.tokens, strict=True):
            num_seen += (scores > -torch.inf).sum(1)
            scores = scores.masked_fill((num_seen > limit)[:, None], -torch.inf)
            real = scores > -torch.inf
            if not bool(real.any()):
                break
            log_probs = stepper.step_tree(tokens, parents, real).float().log_softmax(-1)  # (B, W, V)
            candidates = scores[..., None] + log_probs.gather(-1, child_tokens[nodes])  # (B, W, C)
            candidates = candidates.masked_fill(children[nodes] < 0, -torch.inf).flatten(1)
            scores, places = branches_above(candidates, floor, width=width)
            parents = places // children.shape[1]
            nodes, tokens = (
                table[nodes].flatten(1).gather(1, places).clamp(min=0) for table in (children, child_tokens)
            )
        return nodes, scores, num_seen > limit
