"""The mode "combined": decoder, flat head and linear expert vote on each code of a row."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from histocoder.formatters.tokens import BOS, PAD
from histocoder.inference.greedy import greedy
from histocoder.inference.onnx_search import LEAST, NUM_CANDIDATES
from histocoder.inference.stepper import Stepper
from histocoder.inference.trie import CodeTrie
from histocoder.model import Decoder, Prior


class Belief(NamedTuple):
    """Probabilities of codes by an expert other than the decoder."""

    shares: Tensor  # probability that a code is the row's, if it has one; of shape (B, num_codes)
    belongs: Tensor | None = None  # that it is among the row's, however many it has; None: not known

    def of_next(self, candidates: Tensor, number: int) -> Tensor:
        """Return the probability that each candidate (B, K) is one of `number` + 1 codes."""
        if number and self.belongs is not None:
            found = self.belongs.gather(1, candidates)
        else:
            found = self.shares.gather(1, candidates) * (number + 1)
        return found.clamp(LEAST, 1.0)


class CombinedSearch:
    """Decodes by a product of experts (Hinton 2002): their log-probabilities are added up with weights.

    For the first code an expert's vote is the probability of each code; for the k-th, given those before it, the
    decoder's is what it writes next, and the others' is how likely a code belongs to a set of k: at most k times its
    share, where an expert knows no better.

    Parameters
    ----------
    decoder, memory, memory_mask, prior
        See `Decoder.forward`.
    trie : CodeTrie
    beliefs : mapping of str to Belief
        Beliefs of the experts other than the decoder, by their names.
    num_blocks : int
        Maximum number of codes of a row.
    """

    def __init__(
        self,
        decoder: Decoder,
        trie: CodeTrie,
        memory: Tensor,
        memory_mask: Tensor | None,
        prior: Prior | None,
        beliefs: Mapping[str, Belief],
        *,
        num_blocks: int,
    ) -> None:
        self._beliefs, self._num_blocks = beliefs, num_blocks
        self.experts = ("decoder", *beliefs)
        self._blocks = trie.blocks  # (num_codes, block_size)
        size = self._blocks.shape[1]
        length = num_blocks * size
        tokens, _ = greedy(decoder, memory, memory_mask, prior, num_tokens=length, block_size=size, trie=trie)
        written = tokens[:, 1:].unflatten(1, (num_blocks, size))  # (B, num_blocks, size)
        same = (written[:, :, None] == self._blocks).all(-1)  # (B, num_blocks, num_codes)
        by_others = torch.stack([belief.shares.clamp(min=LEAST).log() for belief in beliefs.values()]).sum(0)
        proposed = by_others.topk(min(NUM_CANDIDATES, len(self._blocks))).indices
        own = torch.where(same.any(-1), same.int().argmax(-1), proposed[:, :1])
        self._candidates = torch.cat([proposed, own], dim=1)  # (B, K)
        twice = (self._candidates[:, :, None] == self._candidates[:, None]).tril(-1).any(-1)
        self._taken = twice  # candidates that are chosen already, or repeat an earlier one
        self._stepper = Stepper(decoder, memory, memory_mask, prior)
        self._newest = torch.full_like(self._candidates[:, :1], BOS)
        self._parents = torch.zeros_like(self._newest)
        self._going_on = torch.ones(len(memory), dtype=torch.bool, device=memory.device)

    def votes(self, number: int) -> dict[str, Tensor]:
        """Return each expert's vote on a row's `number`-th code, from 0.

        Votes are log-probabilities of shape (B, K + 1): of the candidates, -inf for those that are taken, and of no
        further code.
        """
        blocks = self._blocks[self._candidates]  # (B, K, size)
        going_on = self._going_on[:, None]
        first = self._stepper.step_tree(self._newest, self._parents, going_on)[:, 0].float().log_softmax(-1)
        written = first.gather(1, blocks[..., 0])
        real = going_on.expand_as(self._candidates) & ~self._taken
        parents = torch.zeros_like(self._candidates)
        for i in range(1, blocks.shape[2]):
            following = self._stepper.step_tree(blocks[..., i - 1], parents, real).float().log_softmax(-1)
            written = written + following.gather(-1, blocks[..., i : i + 1])[..., 0]
            parents = torch.arange(blocks.shape[1], device=blocks.device).expand_as(self._candidates)
        found = {"decoder": (written, first[:, PAD])}
        for name, expert in self._beliefs.items():
            belief = expert.of_next(self._candidates, number)
            stop = (1 - belief.masked_fill(self._taken, 0.0).amax(1)).clamp(min=LEAST).log()
            found[name] = belief.log(), stop
        return {
            name: torch.cat([scores.masked_fill(self._taken, -torch.inf), stop[:, None]], dim=1)
            for name, (scores, stop) in found.items()
        }

    def choose(self, place: Tensor, going_on: Tensor) -> None:
        """Take each row's candidate at an index (B,), if the row has a further code at all."""
        self._going_on = self._going_on & going_on
        chosen = self._candidates.gather(1, place[:, None])
        self._newest = self._blocks[chosen][..., -1]
        self._parents = place[:, None] if self._blocks.shape[1] > 1 else torch.zeros_like(chosen)
        self._taken = self._taken | (self._candidates == chosen)

    def votes_and_truth(self, true: Tensor) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Yield the votes on first codes and, if a row may have several, on second ones, with what is true.

        Parameters
        ----------
        true : Tensor of int, of shape (B, k)
            The rows' codes by their indices in the key; -1 where there is none.

        Yields
        ------
        votes : dict of str to Tensor of shape (B, K + 1)
            See `votes`; of first codes, -inf for no further code.
        is_true : Tensor of bool, of shape (B, K + 1)
            Which candidates are true. Of second codes, only those of rows whose first one is among the candidates.
        """
        votes = self.votes(0)
        for vote in votes.values():
            vote[:, -1] = -torch.inf
        is_true = (self._candidates[:, :, None] == true[:, None]).any(-1)
        has_true = is_true.any(1)
        yield votes, torch.cat([is_true, torch.zeros_like(has_true)[:, None]], dim=1)
        if self._num_blocks == 1:
            return
        self.choose(is_true.int().argmax(1), has_true)
        votes = self.votes(1)
        rest = is_true & ~self._taken & has_true[:, None]
        is_last = has_true & (true >= 0).sum(1).eq(1)
        yield votes, torch.cat([rest, is_last[:, None]], dim=1)

    def decode(self, weights: Mapping[str, float]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the best set of codes by the experts' weights.

        Returns
        -------
        codes, probabilities : Tensor of shape (B, num_blocks)
            Indices in the key, -1 where there is none, and the probability of each code.
        conf : Tensor of shape (B,)
            Probability of the set of codes.
        ranked, shares : Tensor of shape (B, K)
            Candidates for the first code, best first, -1 after the last, and their probabilities.
        """
        batch, num_candidates = self._candidates.shape
        codes = torch.full((batch, self._num_blocks), -1, device=self._candidates.device)
        probabilities = torch.full(codes.shape, torch.nan, device=codes.device)
        conf = torch.ones(batch, device=codes.device)
        ranked = of_ranked = codes  # until the first code is voted on
        for number in range(self._num_blocks):
            scores = torch.stack([weights[name] * vote for name, vote in self.votes(number).items()]).sum(0)
            excluded = torch.cat([self._taken, torch.full_like(self._taken[:, :1], number == 0)], dim=1)
            shares = scores.masked_fill(excluded, -torch.inf).softmax(-1)  # each row has a first code
            if number == 0:
                of_ranked, order = shares[:, :-1].sort(1, descending=True)
                ranked = self._candidates.gather(1, order).masked_fill(self._taken.gather(1, order), -1)
            best = shares.max(1)
            conf = torch.where(self._going_on, conf * best.values, conf)
            goes_on = self._going_on & (best.indices < num_candidates)
            place = best.indices.clamp(max=num_candidates - 1)
            codes[goes_on, number] = self._candidates.gather(1, place[:, None])[goes_on, 0]
            probabilities[goes_on, number] = best.values[goes_on]
            self.choose(place, goes_on)
            if not bool(self._going_on.any()) or len(self._blocks) <= number + 1:
                break
        return codes, probabilities, conf, ranked, of_ranked
