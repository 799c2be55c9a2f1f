"""Weights of experts and the mode of a model, chosen on descriptions whose codes are known."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from histocoder.config import PredictOptions
from histocoder.data.examples import Examples
from histocoder.inference.coder import Coder
from histocoder.inference.decoding import Encoded
from histocoder.inference.descriptions import Descriptions, Inputs
from histocoder.training.svm import attribute_truth

_USUAL_WEIGHTS = {
    "decoder": 0.15,
    "flat": 0.1,
    "linear": 0.45,
    "nearest": 0.6,
    "begins": 0.6,
    "ends": 0.2,
    "end": 1.0,
    "few": 0.5,
}
_ROWS_FOR_HALF_WEIGHT = {
    "decoder": 500,
    "flat": 500,
    "linear": 0,
    "nearest": 50_000,
    "begins": 50_000,
    "ends": 50_000,
    "end": 500,
    "few": 500,
}
"""Training rows at which an expert has half of its usual weight: the denser the rows, the nearer is
the nearest one.
"""
_USUAL_OTHER = -3.0  # score of all codes that are no candidates
_FLAT_SHARE = 0.25  # weight of the head on an attribute, where that of the linear expert is 1
# strength of the penalties on unusual weights and on an unusual score of others, in validation rows
_PENALTY_OF_WEIGHTS = 50.0
_PENALTY_OF_OTHER = 2.0
_MIN_PROB_OF_ONE = 0.9  # least probability that a row has one code, where the decoder is not asked
_MIN_EXAMPLES = 200  # of which `least_sure` can be told

_Result = TypeVar("_Result")


def _on_batches(
    coder: Coder, examples: Examples, work: Callable[[Encoded], _Result]
) -> Iterator[tuple[np.ndarray, _Result]]:
    """Yield the rows of each batch of examples, and a function's result on their encodings."""

    def encode_and_work(inputs: Inputs) -> _Result:
        return work(coder.decoding.encode(inputs))

    descriptions = Descriptions(examples.texts, examples.langs, np.arange(len(examples)))
    return coder.each_batch(encode_and_work, descriptions, PredictOptions())


@torch.inference_mode()
def votes_on(coder: Coder, examples: Examples) -> Iterator[list[tuple[dict[str, Tensor], Tensor]]]:
    """Yield `CombinedSearch.votes_and_truth` of descriptions whose codes are known, batch by
    batch.

    Those without any code are left out, unless there are no others: they say nothing of which code
    is the first, and would be rows in which another code is right.
    """
    coded = examples.coded()
    if len(coded):
        examples = coded
    class_of = {code: i for i, code in enumerate(coder.codes)}
    codes = examples.codes.to_numpy(dtype=object)
    class_ids = np.full(codes.shape, -1)
    for position, code in np.ndenumerate(codes):
        class_ids[position] = class_of.get(code, -1)

    for rows, search in _on_batches(coder, examples, coder.decoding.combined_search):
        yield search.votes_and_truth(torch.from_numpy(class_ids[rows]).to(coder.device))


def fit_weights(
    votes: Sequence[dict[str, Tensor]],
    is_true: Sequence[Tensor],
    *,
    num_train: int,
    may_be_other: bool = False,
) -> dict[str, float]:
    """Return the experts' weights, 0 or more, that make the true codes most likely among the
    candidates.

    They are those of a conditional logit model (McFadden 1974), drawn to the usual ones where there
    are few rows. `votes` and `is_true` come from `votes_on`. In rows without any true candidate
    another code is right, whose score is fitted as "other" if it `may_be_other`; else they are left
    out. The model was trained on `num_train` rows.
    """
    names = list(votes[0])
    usual = _usual_weights(names, num_train=num_train)

    # on the CPU, whatever the model's device: the numbers are few, and GPUs of Macs have no fp64
    parts = []
    for vote in votes:
        parts.append(torch.stack([vote[name] for name in names], dim=-1).cpu().double())
    scores = torch.cat(parts)  # (n, K, num_experts)
    truth = torch.cat([rows.cpu() for rows in is_true])  # (n, K)

    # a candidate that repeats an earlier one has no finite score
    is_candidate = scores.isfinite().all(-1)
    truth &= is_candidate
    has_true = truth.any(1)
    if not has_true.any():
        return dict(zip(names, usual.tolist(), strict=True))
    scores = scores.masked_fill(~is_candidate[..., None], 0.0)
    if not may_be_other:
        scores = scores[has_true]
        truth = truth[has_true]
        is_candidate = is_candidate[has_true]

    # another code is one more candidate, which is true where no other one is
    truth = torch.cat([truth, ~truth.any(1, keepdim=True)], dim=1)
    is_candidate = F.pad(is_candidate, (0, 1), value=may_be_other)
    fitted, other_score = _fit_logit_model(scores, truth, is_candidate, usual)
    weights = dict(zip(names, fitted.tolist(), strict=True))
    if may_be_other:
        weights["other"] = float(other_score)
    return weights


def _usual_weights(names: Sequence[str], *, num_train: int) -> Tensor:
    """Return the weights that experts usually have in a model trained on some rows, in fp64."""
    usual = torch.tensor([_USUAL_WEIGHTS[name] for name in names], dtype=torch.float64)
    grown = [num_train / (num_train + _ROWS_FOR_HALF_WEIGHT[name]) for name in names]
    return usual * torch.tensor(grown)


def _fit_logit_model(
    scores: Tensor, truth: Tensor, is_candidate: Tensor, usual: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the weights (num_experts,) that make the true candidates most likely, and the score of
    the last candidate, which is no code's.

    `scores` are of shape (n, K, num_experts), `truth` and `is_candidate` (n, K + 1).
    """
    # weights are squares, so that none is negative
    usual_roots = usual.sqrt()
    roots = usual_roots.clone().requires_grad_()
    other_score = torch.tensor([_USUAL_OTHER], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([roots, other_score], max_iter=100, line_search_fn="strong_wolfe")

    def penalized_loss() -> Tensor:
        """Return the mean negative log-likelihood of rows, with a penalty on unusual weights."""
        optimizer.zero_grad()
        logits = torch.cat([scores @ roots.square(), other_score.expand(len(scores), 1)], dim=1)
        logits = logits.masked_fill(~is_candidate, -torch.inf)
        true_logits = logits.masked_fill(~truth, -torch.inf)
        loss = (logits.logsumexp(1) - true_logits.logsumexp(1)).mean()

        # the penalty counts for as many rows, however many there are
        penalty = _PENALTY_OF_WEIGHTS * (roots - usual_roots).square().sum()
        penalty = penalty + _PENALTY_OF_OTHER * (other_score - _USUAL_OTHER).square().sum()
        loss = loss + penalty / len(scores)
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(penalized_loss)
    return roots.detach().square(), other_score.detach()


@torch.inference_mode()
def least_sure(coder: Coder, examples: Examples) -> float:
    """Return the flat head's log-odds of a code, above which the decoder says of each example that
    the row has no other one, with a probability of `_MIN_PROB_OF_ONE` at least.

    See "sure" in `CombinedSearch`.
    """

    def log_odds(batch: Encoded) -> tuple[Tensor, Tensor]:
        by_head, by_decoder = coder.decoding.combined_search(batch).log_odds_of_one()
        return by_head.cpu(), by_decoder.cpu()

    head_parts = []
    decoder_parts = []
    for _, (by_head, by_decoder) in _on_batches(coder, examples, log_odds):
        head_parts.append(by_head)
        decoder_parts.append(by_decoder)
    by_head = torch.cat(head_parts)
    is_doubted = torch.cat(decoder_parts).sigmoid() < _MIN_PROB_OF_ONE
    if not is_doubted.any():
        return float(by_head.min())
    return float(by_head[is_doubted].max())


def fit_all_weights(coder: Coder, examples: Examples, *, num_train: int) -> dict[str, float]:
    """Return the weights of all votes on a description's codes, fitted to examples; see
    `fit_weights`.
    """
    # votes on first codes, of all batches, and then those on whether there are further ones
    weights: dict[str, float] = {}
    batches = list(votes_on(coder, examples))
    for number in range(len(batches[0])):
        votes = [batch[number][0] for batch in batches]
        is_true = [batch[number][1] for batch in batches]
        weights |= fit_weights(votes, is_true, num_train=num_train, may_be_other=number == 0)

    has_prior = coder.model.config.decoder_prior
    if "end" in weights and has_prior and len(examples) >= _MIN_EXAMPLES:
        weights["sure"] = least_sure(coder, examples)
    return weights


def fit_attributes(
    coder: Coder, examples: Examples, *, num_train: int
) -> dict[str, dict[str, float]]:
    """Return the weights of the two experts on each attribute; without a linear expert there is
    nothing to weigh.

    Their sum is fitted as `fit_weights` does, to rows where the attribute is known; their ratio is
    the usual one, since fitted ones neglect rare categories, of which a thousand rows have few.
    """
    if coder.model.attribute_expert is None:
        return {}
    batches = list(_on_batches(coder, examples, coder.decoding.attribute_votes))
    truth = attribute_truth(examples, coder.attributes)
    weights = {}
    for name, is_true in zip(coder.attributes, truth, strict=True):
        votes = []
        truth_of_batches = []
        for rows, by_attribute in batches:
            log_odds = by_attribute[name]
            votes.append({"linear": log_odds["linear"] + _FLAT_SHARE * log_odds["flat"]})
            truth_of_batches.append(is_true[rows])
        weight = fit_weights(votes, truth_of_batches, num_train=num_train)["linear"]
        weights[name] = {"linear": weight, "flat": _FLAT_SHARE * weight}
    return weights


def least_probability(probs: np.ndarray, is_true: np.ndarray) -> float:
    """Return the probability, a half or more, from which further codes are as often true as first
    codes are, or 95 %.

    `probs` (n, num_blocks) are those of mode combined, NaN where there is no code; `is_true` is
    whether it is one of the row's. The share of true ones has to be a standard error higher, which
    takes some codes to show; if it never is, a further code has to be as probable as first codes
    are often true.
    """
    is_given = ~np.isnan(probs)
    share_of_first = is_true[:, 0][is_given[:, 0]].mean()
    goal = min(share_of_first, 0.95)

    # the share of true ones among further codes, from the most probable one on
    further = probs[:, 1:][is_given[:, 1:]]
    order = np.argsort(-further)
    counts = np.arange(1, len(order) + 1)
    shares = is_true[:, 1:][is_given[:, 1:]][order].cumsum() / counts
    is_enough = shares >= goal + np.sqrt(goal * (1 - goal) / counts)
    return float(max(0.5, min(further[order][is_enough], default=goal)))


def best_mode(right: dict[str, float], *, num_rows: int) -> str:
    """Return the mode with the largest share of rows right; "combined" unless another is better by
    more than chance.

    Chance is two standard errors of the share, since combined is better on most tables.

    Examples
    --------
    >>> best_mode({"combined": 0.80, "greedy": 0.81, "flat": 0.7}, num_rows=500)
    'combined'
    >>> best_mode({"combined": 0.80, "greedy": 0.85, "flat": 0.7}, num_rows=500)
    'greedy'
    """
    best = max(right, key=lambda mode: right[mode])
    standard_error = math.sqrt(right[best] * (1 - right[best]) / num_rows)
    if right[best] > right["combined"] + 2 * standard_error:
        return best
    return "combined"
