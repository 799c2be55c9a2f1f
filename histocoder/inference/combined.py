"""The mode "combined": decoder, flat head and further experts vote on each code of a row; the
probability of a set.
"""

import itertools
import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from histocoder.formatters import BOS, PAD
from histocoder.inference.predictions import LEAST, NUM_CANDIDATES
from histocoder.inference.search import CodeTrie, greedy
from histocoder.inference.stepper import DecoderInputs, Stepper
from histocoder.model import Decoder

_NEGLIGIBLE = 1e-6  # probability of a beginning, below which orders that begin so are not followed
_LEAST_DOUBT = 1e-6  # least probability on either side of odds


class CombinedSearch:
    """Decodes by a product of experts (Hinton 2002): their log-probabilities are added up with
    weights.

    An expert's vote is the probability of each code. The decoder alone says how likely a row has no
    further code, since only the decoder knows the codes before it; its log-odds have two weights, a
    factor "end" and a summand "few". That another code than the candidates is right has the score
    "other", without which unsure rows look too sure. A code is given if it is more probable than
    none, and a further one only from the probability "further" on.

    `source` is None where the other experts vote alone on the one code of a row. `beliefs` are the
    probabilities of the key's codes by the experts that propose candidates, each of shape (B,
    num_codes); `nearest` returns votes for candidates (B, K) by what is remembered of the nearest
    rows, by name, each (B, K). A row has up to `num_blocks` codes; `missing` is the token that the
    decoder begins a row without any code with, by default each row has one.
    """

    def __init__(
        self,
        decoder: Decoder,
        trie: CodeTrie,
        source: DecoderInputs | None,
        beliefs: Mapping[str, Tensor],
        *,
        nearest: Callable[[Tensor], dict[str, Tensor]] | None = None,
        num_blocks: int,
        missing: int | None = None,
    ) -> None:
        self._num_blocks, self._end = num_blocks, missing
        self._blocks = trie.blocks  # (num_codes, block_size)
        of_others = {name: belief.clamp(min=LEAST).log() for name, belief in beliefs.items()}
        proposed = (
            torch.stack([*of_others.values()])
            .sum(0)
            .topk(min(NUM_CANDIDATES, len(self._blocks)))
            .indices
        )
        self._candidates = proposed  # (B, K)
        if source is not None:
            size = self._blocks.shape[1]
            tokens, _ = greedy(
                decoder, source, num_tokens=num_blocks * size, block_size=size, trie=trie
            )
            written = tokens[:, 1:].unflatten(1, (num_blocks, size))  # (B, num_blocks, size)
            same = (written[:, :, None] == self._blocks).all(-1)  # (B, num_blocks, num_codes)
            own = torch.where(same.any(-1), same.int().argmax(-1), proposed[:, :1])
            self._candidates = torch.cat([proposed, own], dim=1)
        self._of_others = {
            name: vote.gather(1, self._candidates) for name, vote in of_others.items()
        }
        if nearest is not None:
            self._of_others |= nearest(self._candidates)
        self.experts = (*(("decoder",) if source is not None else ()), *self._of_others)
        twice = (self._candidates[:, :, None] == self._candidates[:, None]).tril(-1).any(-1)
        self._taken = twice  # candidates that are chosen already, or repeat an earlier one
        self._stepper = Stepper(decoder, source) if source is not None else None
        self._newest = torch.full_like(self._candidates[:, :1], BOS)
        self._parents = torch.zeros_like(self._newest)
        self._unfinished = torch.ones_like(self._newest[:, 0], dtype=torch.bool)

    def votes(self) -> tuple[dict[str, Tensor], Tensor]:
        """Return each expert's vote on a row's next code, and the decoder's log-odds that there is
        none.

        Votes are log-probabilities of the candidates, of shape (B, K); log-odds are of shape (B,).
        """
        if self._stepper is None:
            return self._of_others, torch.full(
                self._candidates.shape[:1], -torch.inf, device=self._candidates.device
            )
        blocks = self._blocks[self._candidates]  # (B, K, size)
        unfinished = self._unfinished[:, None]
        first = (
            self._stepper.step(self._newest, self._parents, unfinished)[:, 0]
            .float()
            .log_softmax(-1)
        )
        written = first.gather(1, blocks[..., 0])
        real = unfinished.expand_as(self._candidates) & ~self._taken
        parents = torch.zeros_like(self._candidates)
        for i in range(1, blocks.shape[2]):
            following = (
                self._stepper.step(blocks[..., i - 1], parents, real).float().log_softmax(-1)
            )
            written = written + following.gather(-1, blocks[..., i : i + 1])[..., 0]
            parents = torch.arange(blocks.shape[1], device=blocks.device).expand_as(
                self._candidates
            )
        if self._end is None:
            return {"decoder": written, **self._of_others}, torch.full_like(first[:, 0], -torch.inf)
        return {"decoder": written, **self._of_others}, first[:, self._end].exp().logit(
            eps=_LEAST_DOUBT
        )

    def choose(self, index: Tensor, unfinished: Tensor) -> None:
        """Take each row's candidate at an index (B,), if the row has a further code at all."""
        chosen, self._end = self._candidates.gather(1, index[:, None]), PAD
        self._newest = self._blocks[chosen][..., -1]
        self._parents = index[:, None] if self._blocks.shape[1] > 1 else torch.zeros_like(chosen)
        self._taken = self._taken | (self._candidates == chosen)
        self._unfinished = self._unfinished & unfinished & ~self._taken.all(1)

    def votes_and_truth(self, true: Tensor) -> list[tuple[dict[str, Tensor], Tensor]]:
        """Return the votes on first codes and, if a row may have several, on whether it has, with
        what is true.

        `true` (B, k) are the rows' codes by their indices in the key, -1 where there is none. Votes
        are those on candidates (B, K), -inf for those that repeat an earlier one, and those on one
        code and on several (B, 2), which are true only of rows whose first one is among the
        candidates.
        """
        votes = {
            name: vote.masked_fill(self._taken, -torch.inf)
            for name, vote in self.votes()[0].items()
        }
        is_true = (self._candidates[:, :, None] == true[:, None]).any(-1)
        if self._num_blocks == 1 or len(self._blocks) == 1:
            return [(votes, is_true)]
        has_true = is_true.any(1)
        self.choose(is_true.int().argmax(1), torch.ones_like(has_true))
        log_odds = self.votes()[1]
        on_end = {
            "end": F.pad(log_odds[:, None], (0, 1)),
            "few": F.pad(torch.ones_like(log_odds)[:, None], (0, 1)),
        }
        is_one = ((true < 0) | (true == true[:, :1])).all(1)
        return [
            (votes, is_true),
            (on_end, torch.stack([is_one, ~is_one], dim=1) & has_true[:, None]),
        ]

    def decode(self, weights: Mapping[str, float]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the best set of codes by the experts' weights, and the candidates for the first
        code.

        Codes (B, num_blocks) are indices in the key, -1 where there is none; their probabilities
        and that of the set (B,) follow, then candidates (B, K), best first, -1 after the last, and
        their probabilities.
        """
        codes = torch.full(
            (len(self._candidates), self._num_blocks), -1, device=self._candidates.device
        )
        probabilities = torch.full(codes.shape, torch.nan, device=codes.device)
        conf = torch.ones(len(codes), device=codes.device)
        ranked = of_ranked = codes  # until the first code is voted on
        for number in range(self._num_blocks):
            votes, log_odds = self.votes()
            scores = torch.stack([weights[name] * vote for name, vote in votes.items()]).sum(0)
            other = -torch.inf if number else weights.get("other", -torch.inf)
            scores = F.pad(scores.masked_fill(self._taken, -torch.inf), (0, 1), value=other)
            shares = scores.softmax(-1)[:, :-1]
            if number:
                log_odds = weights.get("end", 1.0) * log_odds + weights.get("few", 0.0)
            ended = log_odds.sigmoid()
            shares = shares * (1 - ended[:, None])
            if number == 0:
                of_ranked, order = shares.sort(1, descending=True)
                ranked = self._candidates.gather(1, order).masked_fill(
                    self._taken.gather(1, order), -1
                )
            best, index = shares.max(1)
            unfinished = self._unfinished & (
                best >= ended.clamp(min=weights.get("further", 0.0) if number else 0.0)
            )
            conf = torch.where(self._unfinished, conf * torch.where(unfinished, best, ended), conf)
            chosen = self._candidates.gather(1, index[:, None])[:, 0]
            codes[:, number] = torch.where(unfinished, chosen, -1)
            probabilities[:, number] = torch.where(unfinished, best, torch.nan)
            self.choose(index, unfinished)
            if number + 1 < self._num_blocks and not bool(
                self._unfinished.any()
            ):  # the host waits, once a code
                break
        return codes, probabilities, conf, ranked, of_ranked


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
    used = blocks[..., 0].ne(PAD)
    counts = used.sum(1)
    scored = torch.arange(num_blocks, device=tokens.device) <= counts[:, None]
    total = probabilities.unflatten(1, (num_blocks, -1)).prod(-1).masked_fill(~scored, 1.0).prod(1)
    if num_blocks == 1:  # one code has one order
        return total.clamp(max=1.0)
    is_set = (is_code | ~used).all(1)
    # the copies of a repeated code stay in order, or the same sequence would count twice
    follows_copy = (blocks[:, :, None] == blocks[:, None]).all(-1).tril(-1) & used[
        :, None
    ]  # (B, num_blocks, earlier)
    last = counts.clamp(
        max=num_blocks - 1
    )  # index of the first unused block, which follows all codes
    # beginning of an order -> rows in which it is probable
    begun: dict[tuple[int, ...], Tensor] = {(): (is_set & counts.gt(1)).nonzero()[:, 0]}
    while begun:
        longer: dict[tuple[int, ...], Tensor] = {}
        for order, block in itertools.product(begun, range(num_blocks)):
            rows, is_last = begun[order], block == len(order)
            if block in order or not len(rows):
                continue
            copies = follows_copy[rows, block]
            copies[:, [*order]] = False
            may_follow = (block < counts[rows]) | (is_last & (block == last[rows]))
            rows = rows[may_follow & ~copies.any(1)]
            if order == tuple(range(len(order))) and is_last:
                rows = rows[counts[rows] > block + 1]  # else it makes the given order
            if not len(rows):
                continue
            extended = (*order, block)
            ordered = F.pad(blocks[rows][:, extended].flatten(1), (1, 0), value=BOS)
            logits = decoder(ordered[:, :-1], *source.rows(rows))
            log_probs = logits.float().log_softmax(-1).gather(-1, ordered[:, 1:, None]).sum((1, 2))
            is_whole = (counts[rows] + 1).clamp(max=num_blocks) == len(order) + 1
            total[rows[is_whole]] += log_probs[is_whole].exp()
            longer[extended] = rows[~is_whole & (log_probs > math.log(_NEGLIGIBLE))]
        begun = longer
    return total.clamp(max=1.0)
