"""The mode "combined": decoder, flat head and further experts vote on each code of a row."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from histocoder.formatters import BOS, PAD
from histocoder.inference.incremental import DecoderInputs, SequenceScorer
from histocoder.inference.predictions import LEAST, NUM_CANDIDATES
from histocoder.inference.search import CodeTrie
from histocoder.model import Decoder
from histocoder.model.nearest import HIGHEST_VOTES

MIN_DOUBT = 1e-6
"""Least probability on either side of odds."""
MIN_RELATIVE_SHARE = 3e-2
"""Share of a candidate, relative to that of the code written first, from which on the decoder is
asked.
"""


class DecodedCodes(NamedTuple):
    """The codes of rows (B,), by their indices in the key, -1 where there is none."""

    codes: Tensor  # of shape (B, num_blocks)
    probabilities: Tensor  # of each code, of shape (B, num_blocks); NaN where there is none
    conf: Tensor  # of the set, of shape (B,)
    ranked: Tensor  # candidates for the first code, best first, -1 after the last, (B, K)
    ranked_probabilities: Tensor  # of shape (B, K)

    def replaced(self, rows: Tensor, answers: "DecodedCodes", *, where: Tensor) -> "DecodedCodes":
        """Return these codes with the `answers` of some rows (R,), `where` (R,) is True."""
        # The answers may have one more candidate: the decoder's own.
        num_missing = answers.ranked.shape[1] - self.ranked.shape[1]
        padded = self._replace(
            ranked=F.pad(self.ranked, (0, num_missing), value=-1),
            ranked_probabilities=F.pad(self.ranked_probabilities, (0, num_missing)),
        )
        fields = []
        for field, answer in zip(padded, answers, strict=True):
            is_taken = where if answer.dim() == 1 else where[:, None]
            fields.append(field.index_copy(0, rows, answer.where(is_taken, field[rows])))
        return DecodedCodes(*fields)


@dataclass
class Candidates:
    """Codes that may be a row's, and the votes of the experts beside the decoder on them."""

    codes: Tensor  # indices in the key, of shape (B, K)
    votes: dict[str, Tensor]  # log-probabilities by each expert, of shape (B, K)
    is_repeated: Tensor  # whether an earlier candidate is the same code, of shape (B, K)

    def rows(self, rows: Tensor) -> "Candidates":
        """Return the candidates of some rows (R,)."""
        votes = {name: vote[rows] for name, vote in self.votes.items()}
        return Candidates(self.codes[rows], votes, self.is_repeated[rows])

    def joined(self, after: "Candidates") -> "Candidates":
        """Return these candidates, and those that come `after` them in the same rows."""
        votes = {}
        for name, vote in self.votes.items():
            votes[name] = torch.cat([vote, after.votes[name]], dim=1)
        return Candidates(
            torch.cat([self.codes, after.codes], dim=1),
            votes,
            torch.cat([self.is_repeated, after.is_repeated], dim=1),
        )

    def scores(self, weights: Mapping[str, float]) -> Tensor:
        """Return the weighted votes (B, K), -inf where an earlier candidate is the same code."""
        weighted = torch.stack([weights[name] * vote for name, vote in self.votes.items()])
        return weighted.sum(0).masked_fill(self.is_repeated, -torch.inf)


class WrittenCodes(NamedTuple):
    """A code for each of some rows (R,), and what the decoder predicts as it writes the code."""

    rows: Tensor  # indices of the rows in the batch, of shape (R,)
    prefix: Tensor  # tokens before the code, BOS first, of shape (R, L)
    codes: Tensor  # indices in the key, of shape (R,)
    log_probs: Tensor  # of what follows each token, from the prefix's last on, (R, size or more, V)


class CombinedSearch:
    """Decodes by a product of experts (Hinton 2002): their log-probabilities are added up with
    weights.

    An expert's vote is the probability of each code. The decoder alone says how likely a row has no
    further code, since only the decoder knows the codes before it; its log-odds have two weights, a
    factor "end" and a summand "few". That another code than the candidates is right has the score
    "other", without which unsure rows look too sure. A code is given if it is more probable than
    none, and a further one only from the probability "further" on.

    Most of the time is spent in the decoder, which is asked no more than the answer takes. It
    writes the code that the others prefer, which bounds its votes on all others: a code is at most
    as probable as its beginning. It is asked about those whose share may be `MIN_RELATIVE_SHARE` of
    the written one's or more; for the rest its vote is estimated, by the flat head's probability if
    that is its prior. Its own code, which it writes by itself, becomes a candidate where a code
    beside the candidates may have such a share. A further code is sought only in rows that may have
    one according to the odds alone.

    It is not asked at all where the others are sure: its vote could turn the first code only with
    a probability below `LEAST`, and the flat head's log-odds of that code are above "sure", from
    which on the decoder expected no other code in any row of the validation data. There the head's
    probability stands for the decoder's, whose prior it is.

    Parameters
    ----------
    decoder : Decoder
    trie : CodeTrie
        Of the key's codes.
    source : DecoderInputs or None
        None where the other experts vote alone on the one code of a row.
    beliefs : mapping of str to Tensor of shape (B, num_codes)
        Probabilities of the key's codes, by the experts that propose candidates.
    nearest : callable, optional
        Returns votes for candidates (R, K) of some rows (R,) by what is remembered of the nearest
        rows, by name, each of shape (R, K).
    num_blocks : int
        Largest number of codes of a row.
    missing : int, optional
        Token that the decoder begins a row without any code with; by default each row has one.
    """

    def __init__(
        self,
        decoder: Decoder,
        trie: CodeTrie,
        source: DecoderInputs | None,
        beliefs: Mapping[str, Tensor],
        *,
        nearest: Callable[[Tensor, Tensor], dict[str, Tensor]] | None = None,
        num_blocks: int,
        missing: int | None = None,
    ) -> None:
        self._decoder = decoder
        self._trie = trie
        self._source = source
        self._beliefs = beliefs
        self._nearest = nearest
        self._num_blocks = num_blocks
        self._missing = missing

    @cached_property
    def _scorer(self) -> SequenceScorer:
        assert self._source is not None
        return SequenceScorer(self._decoder, self._source)

    def rows(self, rows: Tensor) -> "CombinedSearch":
        """Return the search for some rows (R,) of the batch."""
        source = self._source
        if source is not None:
            source = source.rows(rows)
        nearest = self._nearest
        return CombinedSearch(
            self._decoder,
            self._trie,
            source,
            {name: belief[rows] for name, belief in self._beliefs.items()},
            nearest=None if nearest is None else lambda codes, part: nearest(codes, rows[part]),
            num_blocks=self._num_blocks,
            missing=self._missing,
        )

    def votes_and_truth(self, true: Tensor) -> list[tuple[dict[str, Tensor], Tensor]]:
        """Return the votes on first codes and, if a row may have several, on whether it has, with
        what is true.

        `true` (B, k) are the rows' codes by their indices in the key, -1 where there is none. Votes
        are those on candidates (B, K), -inf for those that repeat an earlier one, and those on one
        code and on several (B, 2), which are true only of rows whose first one is among the
        candidates.
        """
        # All candidates: what the others propose, and what the decoder writes by itself.
        codes = self._proposals()
        written = None
        if self._source is not None:
            written = self._write_first(codes[:, 0])
            bound = self._trie.bound_of_greedy(written.codes, written.log_probs)
            greedy_codes = self._greedy_codes(written, indices_of(bound.isfinite()))
            codes = torch.cat([codes, greedy_codes[:, None]], dim=1)
        candidates = self._candidates(codes)

        # The decoder is asked about each of them, since its weight is not known yet.
        votes = {}
        if written is not None:
            bounds = self._bounds(written, codes)
            votes["decoder"] = self._ask(written, codes, bounds, is_asked=~candidates.is_repeated)
        votes |= candidates.votes
        for name, vote in votes.items():
            votes[name] = vote.masked_fill(candidates.is_repeated, -torch.inf)
        is_true = (codes[:, :, None] == true[:, None]).any(-1)
        if written is None or self._num_blocks == 1 or len(self._trie.blocks) == 1:
            return [(votes, is_true)]

        # Whether a row ends behind its first true code: the alternatives are one code and several.
        first_true = codes.gather(1, is_true.int().argmax(1, keepdim=True))[:, 0]
        log_odds = log_odds_of(self._end_after(written, first_true))[:, None]
        end_votes = {
            "end": F.pad(log_odds, (0, 1)),
            "few": F.pad(torch.ones_like(log_odds), (0, 1)),
        }
        is_one = ((true < 0) | (true == true[:, :1])).all(1)
        is_true_end = torch.stack([is_one, ~is_one], dim=1) & is_true.any(1, keepdim=True)
        return [(votes, is_true), (end_votes, is_true_end)]

    def log_odds_of_one(self) -> tuple[Tensor, Tensor]:
        """Return the log-odds (B,) that a row has the code that the others prefer and no other: the
        flat head's of that code, and the decoder's of one code.
        """
        written = self._write_first(self._proposals()[:, 0])
        head_log_probs = self._log_beliefs["flat"].gather(1, written.codes[:, None])[:, 0]

        # A row has one code if it has no further one, and not none.
        log_odds = log_odds_of(self._end_after(written, written.codes))
        if self._missing is not None:
            log_odds_of_none = log_odds_of(written.log_probs[:, 0, self._missing])
            log_odds = log_odds.minimum(-log_odds_of_none)
        return log_odds_of(head_log_probs), log_odds

    def decode(self, weights: Mapping[str, float]) -> DecodedCodes:
        """Return the best set of codes by the experts' weights, by default equal ones."""
        candidates = self._candidates(self._proposals())
        if self._source is None or "sure" not in weights:
            return self._decode(candidates, weights)

        # The decoder is asked about the rows of which the others are not sure.
        answer, is_sure = self._decode_without_decoder(candidates, weights)
        rows = indices_of(~is_sure)
        if not len(rows):
            return answer
        answers = self.rows(rows)._decode(candidates.rows(rows), weights)
        return answer.replaced(rows, answers, where=~is_sure[rows])

    def _decode_without_decoder(
        self, candidates: Candidates, weights: Mapping[str, float]
    ) -> tuple[DecodedCodes, Tensor]:
        """Return the first codes with the flat head's votes for the decoder's, and whether these
        are the answer (B,).
        """
        scores = candidates.scores(weights)
        head_votes = candidates.votes["flat"]
        total = scores + weights["decoder"] * head_votes
        ended = torch.zeros_like(total[:, 0])
        answer, index = self._first_codes(candidates, total, weights, ended=ended)

        # The set is right if the first code is, and no other follows.
        log_odds = log_odds_of(head_votes.gather(1, index)[:, 0])
        answer.conf.mul_(log_odds_of_end(log_odds, weights).sigmoid())

        # The decoder can't turn a lead that is larger than its vote can be.
        highest = F.pad(scores, (0, 1), value=-torch.inf).topk(2).values
        lead = highest[:, 0] - highest[:, 1]
        cannot_turn = lead >= -weights["decoder"] * math.log(LEAST)
        return answer, cannot_turn & (log_odds > weights["sure"])

    def _decode(self, candidates: Candidates, weights: Mapping[str, float]) -> DecodedCodes:
        """Return the answer of all experts, the decoder among them if there is a source."""
        if not weights:
            names = list(candidates.votes)
            if self._source is not None:
                names.append("decoder")
            weights = dict.fromkeys(names, 1 / len(names))

        scores = candidates.scores(weights)
        ended = torch.zeros_like(scores[:, 0])
        if self._source is None:
            return self._first_codes(candidates, scores, weights, ended=ended)[0]

        # What the others prefer is written first, and what the decoder itself prefers is one more
        # candidate.
        written = self._write_first(candidates.codes[:, 0])
        candidates, scores = self._with_own_codes(
            written, candidates, scores, weights, earlier=candidates.codes[:, :0]
        )
        if self._missing is not None:
            ended = log_odds_of(written.log_probs[:, 0, self._missing]).sigmoid()

        # The first code, by all votes; the codes behind it only where a row may have several.
        total = scores + weights["decoder"] * self._votes(written, candidates, scores, weights)
        answer, index = self._first_codes(candidates, total, weights, ended=ended)
        if self._num_blocks > 1:
            end = self._end_after(written, candidates.codes.gather(1, index)[:, 0])
            self._decode_further(answer, candidates, scores, weights, end=end)
        return answer

    def _first_codes(
        self, candidates: Candidates, scores: Tensor, weights: Mapping[str, float], *, ended: Tensor
    ) -> tuple[DecodedCodes, Tensor]:
        """Return the answer with first codes alone, by the candidates' scores (B, K) and the
        probability (B,) that there is none; and which candidates these are, of shape (B, 1).
        """
        # Candidates, and any other code, share the probability that a row has a code.
        batch = len(scores)
        other_score = scores.new_full((batch, 1), weights.get("other", -torch.inf))
        shares = torch.cat([scores, other_score], dim=1).softmax(-1)[:, :-1]
        shares = shares * (1 - ended[:, None])
        ranked_probabilities, order = shares.sort(1, descending=True)
        ranked = candidates.codes.masked_fill(candidates.is_repeated, -1).gather(1, order)

        # The best one is given if it is more probable than none.
        best, index = shares.max(1, keepdim=True)
        share = best[:, 0]
        is_given = share >= ended
        codes = torch.full((batch, self._num_blocks), -1, device=scores.device)
        codes[:, 0] = candidates.codes.gather(1, index)[:, 0].where(is_given, -1)
        probabilities = scores.new_full(codes.shape, torch.nan)
        probabilities[:, 0] = share.where(is_given, torch.nan)
        conf = share.where(is_given, ended)
        return DecodedCodes(codes, probabilities, conf, ranked, ranked_probabilities), index

    def _decode_further(
        self,
        answer: DecodedCodes,
        candidates: Candidates,
        scores: Tensor,
        weights: Mapping[str, float],
        *,
        end: Tensor,
    ) -> None:
        """Add the codes behind the first to an answer.

        `scores` (B, K) are the weighted votes of all experts but the decoder, and `end` (B,) is the
        decoder's log-probability that a row has no code behind its first.
        """
        further = weights.get("further", 0.0)
        blocks = self._trie.blocks
        is_open = answer.codes[:, 0] >= 0
        prefix = torch.full_like(answer.codes[:, :1], BOS)
        for number in range(1, self._num_blocks):
            # What a row has already is no candidate for its next code.
            chosen = answer.codes[:, number - 1]
            prefix = torch.cat([prefix, blocks[chosen]], dim=1)
            scores = scores.masked_fill(candidates.codes == chosen[:, None], -torch.inf)
            is_open = is_open & scores.isfinite().any(1)

            # No candidate can be as probable as all of them together.
            ended = log_odds_of_end(log_odds_of(end), weights).sigmoid()
            may_follow = 1 - ended >= ended.clamp(min=further)
            answer.conf.copy_(answer.conf.where(~is_open | may_follow, answer.conf * ended))
            is_open = is_open & may_follow
            if not bool(is_open.any()):  # for which the host waits, once a code
                break

            # On a GPU rows that have ended are decoded, too, and keep their answers.
            rows = indices_of(is_open)
            preferred = candidates.codes.gather(1, scores.argmax(1, keepdim=True))[rows, 0]
            has_next = number + 1 < self._num_blocks
            written = self._write(rows, prefix[rows], preferred, has_next=has_next)
            row_candidates, row_scores = self._with_own_codes(
                written, candidates.rows(rows), scores[rows], weights, earlier=answer.codes[rows]
            )
            votes = self._votes(written, row_candidates, row_scores, weights)
            total = row_scores + weights["decoder"] * votes

            # The best candidate is given if it is more probable than the end, and than `further`.
            shares = total.softmax(-1) * (1 - ended[rows, None])
            best, index = shares.max(1, keepdim=True)
            share = best[:, 0]
            chosen = row_candidates.codes.gather(1, index)[:, 0]
            is_given = is_open[rows] & (share >= ended[rows].clamp(min=further))
            answer.conf[rows] *= share.where(is_given, ended[rows]).where(is_open[rows], 1.0)
            answer.codes[rows, number] = chosen.where(is_given, -1)
            answer.probabilities[rows, number] = share.where(is_given, torch.nan)
            is_open = is_open.index_copy(0, rows, is_given)
            if has_next:
                end = end.index_copy(0, rows, self._end_after(written, chosen))

    @cached_property
    def _log_beliefs(self) -> dict[str, Tensor]:
        return {name: belief.clamp(min=LEAST).log() for name, belief in self._beliefs.items()}

    def _proposals(self) -> Tensor:
        """Return the codes (B, K) that the others believe in most, the first one first."""
        together = torch.stack(list(self._log_beliefs.values())).sum(0)
        return together.topk(min(NUM_CANDIDATES, together.shape[1])).indices

    def _candidates(self, codes: Tensor, rows: Tensor | None = None) -> Candidates:
        """Return codes (R, K) of some rows (R,), by default of all, with the votes of the others."""
        if rows is None:
            rows = torch.arange(len(codes), device=codes.device)
        votes = {name: belief[rows].gather(1, codes) for name, belief in self._log_beliefs.items()}
        if self._nearest is not None:
            votes |= self._nearest(codes, rows)
        is_repeated = (codes[:, :, None] == codes[:, None]).tril(-1).any(-1)
        return Candidates(codes, votes, is_repeated)

    def _write_first(self, codes: Tensor) -> WrittenCodes:
        """Have the decoder write a first code (B,)."""
        rows = torch.arange(len(codes), device=codes.device)
        prefix = torch.full_like(codes[:, None], BOS)
        return self._write(rows, prefix, codes, has_next=self._num_blocks > 1)

    def _with_own_codes(
        self,
        written: WrittenCodes,
        candidates: Candidates,
        scores: Tensor,
        weights: Mapping[str, float],
        *,
        earlier: Tensor,
    ) -> tuple[Candidates, Tensor]:
        """Return the candidates (R, K) and their scores by all experts but the decoder, with the
        decoder's own code, which it writes by itself, as one more where that code may count.

        `earlier` (R, n) are codes that rows have already.
        """
        # The highest score of a code beside the candidates, by the most that each expert may say.
        weighted = [
            weights[name] * belief[written.rows] for name, belief in self._log_beliefs.items()
        ]
        beside_candidates = torch.stack(weighted).sum(0).scatter(1, candidates.codes, -torch.inf)
        bound = self._trie.bound_of_greedy(written.codes, written.log_probs)
        highest = beside_candidates.amax(1) + weights["decoder"] * bound
        for name, highest_vote in HIGHEST_VOTES.items():
            highest = highest + weights.get(name, 0.0) * highest_vote

        # Where that does not count, or the decoder's own code is the one written, none is sought.
        least = self._least_score(written, candidates.codes, scores, weights)[:, 0]
        part = indices_of(bound.isfinite() & (highest >= least))
        if not len(part):
            return candidates, scores

        # All rows get one more candidate; it repeats another one in rows where none was sought.
        greedy_codes = self._greedy_codes(written, part)[:, None]
        own_candidates = self._candidates(greedy_codes, written.rows)
        known_codes = torch.cat([candidates.codes, earlier], dim=1)
        own_candidates.is_repeated |= (greedy_codes == known_codes).any(1, keepdim=True)
        own_scores = own_candidates.scores(weights)
        return candidates.joined(own_candidates), torch.cat([scores, own_scores], dim=1)

    def _greedy_codes(self, written: WrittenCodes, part: Tensor) -> Tensor:
        """Return the codes (R,) that were written, replaced in a part (N,) of them by those that the
        decoder writes by itself behind the same prefix.
        """
        if not len(part):
            return written.codes
        trie = self._trie
        rows = written.rows[part]
        tokens = written.prefix[part]
        nodes = torch.zeros_like(rows)
        for level in range(trie.blocks.shape[1]):
            log_probs = self._scorer.log_probs(tokens, rows, num_last=1)[:, 0]
            _, following, nodes = trie.most_probable(log_probs, level, nodes)
            tokens = torch.cat([tokens, following[:, None]], dim=1)
        return written.codes.index_copy(0, part, nodes)

    def _write(
        self, rows: Tensor, prefix: Tensor, codes: Tensor, *, has_next: bool
    ) -> WrittenCodes:
        """Have the decoder write codes (R,) behind prefixes (R, L), and say what follows if another
        code can.
        """
        blocks = self._trie.blocks[codes]
        num_last = blocks.shape[1]
        if has_next:
            num_last += 1
        else:
            blocks = blocks[:, :-1]
        tokens = torch.cat([prefix, blocks], dim=1)
        log_probs = self._scorer.log_probs(tokens, rows, num_last=num_last)
        return WrittenCodes(rows, prefix, codes, log_probs)

    def _end_after(self, written: WrittenCodes, codes: Tensor) -> Tensor:
        """Return the log-probabilities (R,) that no code follows these (R,); those that differ from
        the written ones are written now.
        """
        end = written.log_probs[:, -1, PAD]
        part = indices_of(codes != written.codes)
        if len(part):
            rows = written.rows[part]
            written_part = self._write(rows, written.prefix[part], codes[part], has_next=True)
            end = end.index_copy(0, part, written_part.log_probs[:, -1, PAD])
        return end

    def _votes(
        self,
        written: WrittenCodes,
        candidates: Candidates,
        scores: Tensor,
        weights: Mapping[str, float],
    ) -> Tensor:
        """Return the decoder's votes on candidates (R, K), whose scores by all others are given: it
        is asked where that matters, and else estimated.
        """
        # The decoder is asked about candidates whose share may count.
        codes = candidates.codes
        bounds = self._bounds(written, codes)
        highest = scores + weights["decoder"] * bounds
        is_asked = highest >= self._least_score(written, codes, scores, weights)

        # An estimate is the prior, but not above the bound; what was written needs none.
        estimates = bounds
        if self._source is not None and self._source.prior is not None:
            is_written = codes == written.codes[:, None]
            estimates = bounds.minimum(candidates.votes["flat"]).where(~is_written, bounds)
        return self._ask(written, codes, estimates, is_asked=is_asked & scores.isfinite())

    def _bounds(self, written: WrittenCodes, candidates: Tensor) -> Tensor:
        """Return upper bounds of the decoder's log-probabilities of candidates (R, K).

        They are those of the tokens up to the first in which a candidate differs from the code that
        was written; for that code itself the bound is its log-probability.
        """
        blocks = self._trie.blocks[candidates]  # (R, K, size)
        _, num_candidates, size = blocks.shape
        log_probs = written.log_probs[:, None, :size].expand(-1, num_candidates, -1, -1)
        token_log_probs = log_probs.gather(3, blocks[..., None])[..., 0]

        # A token counts if all before it are the same.
        is_same = blocks == self._trie.blocks[written.codes][:, None]
        begins_alike = F.pad(is_same[..., :-1], (1, 0), value=True).cumprod(-1)
        return token_log_probs.masked_fill(begins_alike == 0, 0.0).sum(-1)

    def _least_score(
        self, written: WrittenCodes, codes: Tensor, scores: Tensor, weights: Mapping[str, float]
    ) -> Tensor:
        """Return the score (R, 1) from which on a code's share counts beside that of the code that
        was written, which is among `codes` (R, K).

        `scores` (R, K) are those by all experts but the decoder.
        """
        is_written = codes == written.codes[:, None]
        score = scores.masked_fill(~is_written, -torch.inf).amax(1, keepdim=True)
        decoder_vote = self._bounds(written, written.codes[:, None])
        return score + weights["decoder"] * decoder_vote + math.log(MIN_RELATIVE_SHARE)

    def _ask(
        self, written: WrittenCodes, candidates: Tensor, estimates: Tensor, *, is_asked: Tensor
    ) -> Tensor:
        """Return the decoder's log-probabilities of candidates (R, K), by estimates where it is not
        asked.
        """
        is_written = candidates == written.codes[:, None]
        index = indices_of((is_asked & ~is_written).flatten())
        votes = estimates.flatten()
        if len(index):
            row = index // candidates.shape[1]
            codes = candidates.flatten()[index]
            asked = self._write(written.rows[row], written.prefix[row], codes, has_next=False)
            token_log_probs = asked.log_probs.gather(2, self._trie.blocks[codes][..., None])
            votes = votes.index_copy(0, index, token_log_probs.sum((1, 2)))
        return votes.view_as(estimates).where(~is_written, estimates)


def log_odds_of_end(log_odds: Tensor, weights: Mapping[str, float]) -> Tensor:
    """Return the log-odds that a row has no further code, by those of an expert."""
    return weights.get("end", 1.0) * log_odds + weights.get("few", 0.0)


def log_odds_of(log_probs: Tensor) -> Tensor:
    """Return the log-odds of log-probabilities, which are finite."""
    return log_probs.exp().logit(eps=MIN_DOUBT)


def indices_of(mask: Tensor) -> Tensor:
    """Return the indices (R,) where a mask (N,) is True; on a GPU all, since the host would wait."""
    if mask.device.type == "cpu":
        return mask.nonzero()[:, 0]
    return torch.arange(len(mask), device=mask.device)
