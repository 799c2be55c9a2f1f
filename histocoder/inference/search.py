"""Exact probabilities of a key's codes in the first block."""

import torch
from torch import Tensor

from histocoder.formatters.systems import BOS
from histocoder.inference.stepper import Stepper, select_rows
from histocoder.inference.trie import CodeTrie, branches_above
from histocoder.model import Decoder, Prior

_SLACK = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}
"""Difference of log-probabilities computed again in batches of another shape, by the precision of the decoder."""
_CROWDED = 0.1  # share of a level's most nodes above which computing all nodes, in smaller batches, is faster
_FEW = 64  # number of nodes of a level that is never too many
_NODES_AT_ONCE = {"cpu": 1 << 12}  # what fits a CPU's caches
_NODES_AT_ONCE_ELSEWHERE = 1 << 16


class TrieSearch:
    """Finds the probabilities of a key's codes.

    For memory (B, S, dim), its mask (B, S) and the prior see `Decoder.forward`.
    """

    def __init__(self, decoder: Decoder, trie: CodeTrie) -> None:
        self._decoder = decoder
        self._trie = trie
        self._widest = max(map(len, trie.children))
        self._nodes_at_once = _NODES_AT_ONCE.get(trie.blocks.device.type, _NODES_AT_ONCE_ELSEWHERE)

    @torch.no_grad()
    def full(self, memory: Tensor, memory_mask: Tensor | None, prior: Prior | None = None) -> Tensor:
        """Return the probability of every code of the key, in its order, of shape (B, num_codes).

        The rest of a sum of 1 is the probability of tokens that make no code.
        """
        probs = torch.empty(len(memory), len(self._trie.blocks), device=memory.device)
        step = max(1, self._nodes_at_once // self._widest)
        for start in range(0, len(memory), step):
            rows = slice(start, start + step)
            codes, scores = self._descend(*select_rows(rows, memory, memory_mask, prior))
            probs[rows, codes[0]] = scores.exp()
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
        step = max(1, self._nodes_at_once // _FEW)
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
        no_floor = torch.full((len(memory), 1), -torch.inf, device=memory.device)
        _, scores = self._descend(memory, memory_mask, prior, floor=no_floor, width=k)
        floor = scores[:, -1:] - _SLACK[memory.dtype]
        found, scores = self._descend(memory, memory_mask, prior, floor=floor)
        codes = torch.empty(len(memory), k, dtype=torch.long, device=memory.device)
        probs = torch.empty(len(memory), k, device=memory.device)
        # too few: the row had too many nodes, or its scores differ by more than the slack
        rest = (scores > -torch.inf).sum(1) < k
        if bool(rest.any()):
            best = self.full(*select_rows(rest, memory, memory_mask, prior)).topk(k)
            codes[rest], probs[rest] = best.indices, best.values
        if not bool(rest.all()):
            codes[~rest], probs[~rest] = found[~rest, :k], scores[~rest, :k].exp()
        return codes, probs

    def _descend(
        self,
        memory: Tensor,
        memory_mask: Tensor | None,
        prior: Prior | None,
        *,
        floor: Tensor | None = None,
        width: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Go down the trie with each row's nodes that reach its floor (B, 1); with a width, the best so many of them.

        Returns codes (B, W) and their log-probabilities (B, W), the best first, -inf where a row has fewer, and for a
        row that has too many nodes. Without a floor, it is all codes for all rows, codes (1, W), in the trie's order.
        """
        batch, device = len(memory), memory.device
        stepper = Stepper(self._decoder, memory, memory_mask, prior)
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
