"""Weights of a trained model's experts, and the mode that it predicts in."""

import filecmp
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

from histocoder.checkpoints.model_files import (
    CARD_FILE,
    WEIGHTS_FILE,
    load_model,
    read_model_config,
    save_model,
)
from histocoder.checkpoints.training_state import BEST_FOLDER
from histocoder.config import NUM_GREEDY, PredictOptions
from histocoder.data.dataset import category_ids
from histocoder.data.examples import Examples
from histocoder.evaluation.scores import code_sets, score_sets
from histocoder.inference.coder import Coder
from histocoder.inference.combined import CombinedSearch
from histocoder.inference.descriptions import Descriptions, Inputs
from histocoder.inference.predictions import Prediction
from histocoder.inference.table_coder import USUAL_SHARE
from histocoder.log import log
from histocoder.model import MixerModel
from histocoder.model.linear_expert import LinearExpert
from histocoder.model.nearest import NearestExpert
from histocoder.text.tokenizers import lower_characters
from histocoder.training.encoded_rows import fit_nearest_expert
from histocoder.training.svm import fit_attribute_expert, fit_linear_expert
from histocoder.training.trainer import Trainer

_USUAL_WEIGHTS = {
    **{"decoder": 0.15, "flat": 0.1, "linear": 0.45, "nearest": 0.6, "begins": 0.6, "ends": 0.2},
    **{"end": 1.0, "few": 0.5},
}
_USUAL_OTHER = -3.0  # score of all codes that are no candidates
_FLAT_SHARE = 0.25  # weight of the head on an attribute, where that of the linear expert is 1
_HALF_GROWN = dict.fromkeys(_USUAL_WEIGHTS, 500) | {
    "linear": 0,
    "nearest": 50_000,
    "begins": 50_000,
    "ends": 50_000,
}
"""Training rows at which an expert has half of its usual weight: the denser the rows, the nearer is
the nearest one.
"""
_SHARES_OF_WEIGHTS = (0.02, 0.05, 0.1)
"""Shares of a linear expert's weights, zeros included, that are tried, the smallest first."""
_BATCH = 128  # descriptions that a linear expert reads at once, since many weights are looked up
_MIN_WEIGHTS = 100_000  # of a linear expert, which has all of its weights if they are fewer
_SURE_OF_ONE = 0.9  # least probability that a row has one code, where the decoder is not asked
_MIN_EXAMPLES = 200  # of which `least_sure` can be told
_TRUST, _TRUST_OTHER = (
    50.0,
    2.0,
)  # strength of the penalty on values other than the usual ones, in validation rows


@torch.inference_mode()
def votes_on(coder: Coder, examples: Examples) -> Iterator[list[tuple[dict[str, Tensor], Tensor]]]:
    """Yield `CombinedSearch.votes_and_truth` of descriptions whose codes are known, batch by
    batch.
    """

    def search(inputs: Inputs) -> CombinedSearch:
        return coder.decoding.combined_search(coder.decoding.encode(inputs))

    class_of = {code: i for i, code in enumerate(coder.codes)}
    true = np.array(
        [[class_of.get(code, -1) for code in row] for row in examples.codes.to_numpy(dtype=object)]
    )
    given = Descriptions(examples.texts, examples.langs, np.arange(len(examples)))
    for rows, found in coder.each_batch(search, given, PredictOptions()):
        yield found.votes_and_truth(torch.from_numpy(true[rows]).to(coder.device))


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
    # on the CPU, whatever the model's device: the numbers are few, and GPUs of Macs have no fp64
    scores = torch.cat(
        [torch.stack([vote[name] for name in names], dim=-1).cpu().double() for vote in votes]
    )
    truth = torch.cat([rows.cpu() for rows in is_true])
    finite = scores.isfinite().all(-1)
    truth &= finite
    real = truth.any(1)
    if not may_be_other:
        scores = scores[real]
        truth = truth[real]
        finite = finite[real]
        real = real[real]

    # the usual weights, to which few rows draw
    grown = [num_train / (num_train + _HALF_GROWN[name]) for name in names]
    usual = torch.tensor(
        [_USUAL_WEIGHTS[name] for name in names], dtype=torch.float64
    ) * torch.tensor(grown)
    if not real.any():
        return dict(zip(names, usual.tolist(), strict=True))
    scores = scores.masked_fill(~finite[..., None], 0.0)
    raw, other = (
        usual.sqrt().requires_grad_(),
        torch.tensor([_USUAL_OTHER], dtype=torch.float64, requires_grad=True),
    )
    truth = torch.cat([truth, ~real[:, None]], dim=1)
    finite = F.pad(finite, (0, 1), value=may_be_other)
    optimizer = torch.optim.LBFGS([raw, other], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        total = torch.cat([scores @ raw.square(), other.expand(len(scores), 1)], dim=1).masked_fill(
            ~finite, -torch.inf
        )
        loss = (total.logsumexp(1) - total.masked_fill(~truth, -torch.inf).logsumexp(1)).mean()
        doubt = (
            _TRUST * (raw - usual.sqrt()).square().sum()
            + _TRUST_OTHER * (other - _USUAL_OTHER).square().sum()
        )
        loss = loss + doubt / len(scores)
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)
    fitted = {
        name: float(weight) for name, weight in zip(names, raw.detach().square(), strict=True)
    }
    return {**fitted, "other": float(other.detach())} if may_be_other else fitted


@torch.inference_mode()
def least_sure(coder: Coder, examples: Examples) -> float:
    """Return the flat head's log-odds of a code, above which the decoder says of each example that
    the row has no other one, with a probability of `_SURE_OF_ONE` at least.

    See "sure" in `CombinedSearch`.
    """

    def log_odds(inputs: Inputs) -> tuple[Tensor, Tensor]:
        search = coder.decoding.combined_search(coder.decoding.encode(inputs))
        by_head, by_decoder = search.log_odds_of_one()
        return by_head.cpu(), by_decoder.cpu()

    given = Descriptions(examples.texts, examples.langs, np.arange(len(examples)))
    batches = [both for _, both in coder.each_batch(log_odds, given, PredictOptions())]
    by_head, by_decoder = (torch.cat(parts) for parts in zip(*batches, strict=True))
    is_doubted = by_decoder.sigmoid() < _SURE_OF_ONE
    return float(by_head[is_doubted].max()) if is_doubted.any() else float(by_head.min())


def fit_all_weights(coder: Coder, examples: Examples, *, num_train: int) -> dict[str, float]:
    """Return the weights of all votes on a description's codes, fitted to examples; see
    `fit_weights`.
    """
    weights: dict[str, float] = {}
    for number, batches in enumerate(zip(*votes_on(coder, examples), strict=True)):
        votes, is_true = zip(*batches, strict=True)
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

    @torch.inference_mode()
    def votes_of(inputs: Inputs) -> dict[str, dict[str, Tensor]]:
        return coder.decoding.attribute_votes(coder.decoding.encode(inputs))

    given = Descriptions(examples.texts, examples.langs, np.arange(len(examples)))
    batches, found = (
        list(coder.each_batch(votes_of, given, PredictOptions())),
        dict[str, dict[str, float]](),
    )
    for name, categories in coder.attributes.items():
        ids = torch.from_numpy(category_ids(examples.attributes[name], categories))
        is_true = ids[:, None] == torch.arange(1 + len(categories))
        votes = [
            {"linear": of[name]["linear"] + _FLAT_SHARE * of[name]["flat"]} for _, of in batches
        ]
        weight = fit_weights(votes, [is_true[rows] for rows, _ in batches], num_train=num_train)[
            "linear"
        ]
        found[name] = {"linear": weight, "flat": _FLAT_SHARE * weight}
    return found


def least_probability(probs: np.ndarray, is_true: np.ndarray) -> float:
    """Return the probability, a half or more, from which further codes are as often true as first
    codes are, or 95 %.

    `probs` (n, num_blocks) are those of mode combined, NaN where there is no code; `is_true` is
    whether it is one of the row's. The share of true ones has to be a standard error higher, which
    takes some codes to show; if it never is, a further code has to be as probable as first codes
    are often true.
    """
    is_given = ~np.isnan(probs)
    goal = min(is_true[:, 0][is_given[:, 0]].mean(), 0.95)
    further = probs[:, 1:][is_given[:, 1:]]
    order = np.argsort(-further)
    counts = np.arange(1, len(order) + 1)
    shares = is_true[:, 1:][is_given[:, 1:]][order].cumsum() / counts
    enough = shares >= goal + np.sqrt(goal * (1 - goal) / counts)
    return float(max(0.5, min(further[order][enough], default=goal)))


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
    return best if right[best] > right["combined"] + 2 * standard_error else "combined"


def fit_experts(trainer: Trainer) -> None:
    """Give the last and the best model a linear expert, weights of their experts, and a mode; for
    rank 0.

    Each description of the validation data counts once, so that frequent ones do not decide.
    """
    run = trainer.run
    data = trainer.train_data
    examples = trainer.val_data.examples.sample(NUM_GREEDY, seed=0)
    texts = pd.DataFrame({"text": examples.texts, "lang": examples.langs})
    examples = examples.take(np.flatnonzero(~texts.duplicated()))

    model_config = trainer.model.config
    linear = fit_linear_expert(data, num_classes=model_config.num_classes)
    if linear is not None:
        linear = without_small_weights(linear, examples, code_truth(examples, model_config.codes))
    of_attributes = fit_attribute_expert(data)
    if of_attributes is not None:
        truth = attribute_truth(examples, model_config.attributes)
        of_attributes = without_small_weights(of_attributes, examples, truth)
    experts = (linear, of_attributes)

    is_done = read_model_config(run.best).fitted_to_validation  # by an earlier start of the run
    is_last = not is_done and filecmp.cmp(
        run.path / WEIGHTS_FILE, run.best / WEIGHTS_FILE, shallow=False
    )
    if not is_last:
        _fit_to([run.path], trainer, experts, examples)
    if not is_done:
        said = _fit_to([run.best, run.path] if is_last else [run.best], trainer, experts, examples)
        log.info(f"{BEST_FOLDER}/: {said}")


def code_truth(examples: Examples, codes: Sequence[str]) -> list[Tensor]:
    """Return which codes are true of each row, bool (n, num_codes), as the one part of a linear
    expert's outputs.
    """
    class_of = {code: i for i, code in enumerate(codes)}
    is_true = np.zeros((len(examples), len(codes)), dtype=bool)
    for row, row_codes in enumerate(examples.codes.to_numpy(dtype=object)):
        for code in row_codes:
            if code in class_of:
                is_true[row, class_of[code]] = True
    return [torch.from_numpy(is_true)]


def attribute_truth(examples: Examples, attributes: Mapping[str, tuple[str, ...]]) -> list[Tensor]:
    """Return which categories of each attribute are true of each row, bool (n, 1 + num_categories)
    each.
    """
    parts = []
    for name, categories in attributes.items():
        ids = torch.from_numpy(category_ids(examples.attributes[name], categories))
        parts.append(ids[:, None] == torch.arange(1 + len(categories)))
    return parts


def without_small_weights(
    expert: LinearExpert, examples: Examples, truth: Sequence[Tensor]
) -> LinearExpert:
    """Return an expert with as few of its weights, the largest, as validation allows.

    The share of right first choices may not fall by more than a standard error of the difference.
    `truth` says what is true of each row, bool (n, k), by parts of the expert's outputs.
    """
    inputs = examples.table["input"].to_pylist()
    batches = torch.from_numpy(lower_characters(inputs)).split(_BATCH)

    def right_choices(candidate: LinearExpert) -> Tensor:
        log_odds = torch.cat([candidate(batch) for batch in batches])
        parts = log_odds.split([part.shape[1] for part in truth], dim=1)
        choices = [part.argmax(1, keepdim=True) for part in parts]
        right = [part.gather(1, choice) for part, choice in zip(truth, choices, strict=True)]
        return torch.cat(right, dim=1).double().mean(1)

    right_of_all = right_choices(expert)
    num_cells = len(expert.buckets) * len(expert.bias)
    sizes = expert.values.abs().float().sort(descending=True).values
    for share in _SHARES_OF_WEIGHTS:
        num_weights = max(round(share * num_cells), _MIN_WEIGHTS)
        if num_weights >= len(sizes):
            break
        candidate = expert.pruned(float(sizes[num_weights]))
        change = right_choices(candidate) - right_of_all
        standard_error = float(change.square().mean().sqrt()) / math.sqrt(len(change))
        if float(change.mean()) >= -standard_error:
            return candidate
    return expert


def _fit_to(
    folders: list[Path],
    trainer: Trainer,
    experts: tuple[LinearExpert | None, LinearExpert | None],
    examples: Examples,
) -> str:
    """Fit the experts of a model, write it into all folders that hold it, and return how right its
    modes are.
    """
    model = load_model(folders[0])
    model.config = replace(model.config, experts={})  # so that the decoder votes
    coder = Coder(model, str(trainer.device), precision=trainer.config.precision)
    set_experts(model, *experts, fit_nearest_expert(coder.computing, trainer.train_data))
    weights = fit_all_weights(coder, examples, num_train=len(trainer.train_data))
    of_attributes = fit_attributes(coder, examples, num_train=len(trainer.train_data))
    model.config = replace(model.config, experts=weights, attribute_experts=of_attributes)
    modes = ("combined", "greedy", "flat") if model.config.decoder_learns else ("combined", "flat")
    given, true = (
        coder.distinct(examples.texts, examples.langs),
        examples.codes.to_numpy(dtype=object),
    )

    def answers(mode: str) -> tuple[Prediction, float]:
        found = coder.code(given, PredictOptions(mode=mode), progress=False)
        return found, float(score_sets(code_sets(true), code_sets(found.codes))["accuracy"].mean())

    predicted = {mode: answers(mode) for mode in modes}
    right = {mode: share for mode, (_, share) in predicted.items()}
    best = best_mode(right, num_rows=len(examples))
    shares = ", ".join(f"{mode} {100 * share:.1f}" for mode, share in right.items())
    said = (
        f"accuracy on distinct validation descriptions, in %: {shares}. Default prediction "
        f"mode: {best} (another "
        "replaces combined only if it is better by more than two standard errors)."
    )
    if coder.formatter.num_blocks > 1:
        combined = predicted["combined"][0]
        is_true = (combined.codes[:, :, None] == true[:, None]).any(2)
        weights["further"] = least_probability(combined.probs, is_true)
        model.config = replace(model.config, experts=weights)
        predicted["combined"] = answers("combined")
        share = 100 * predicted["combined"][1]
        said += (
            f" With further codes only from a probability of {weights['further']:.2f}: "
            f"combined {share:.1f}."
        )
    usual_confidence = float(np.quantile(predicted[best][0].conf, USUAL_SHARE))
    model.config = replace(model.config, mode=best, usual_confidence=usual_confidence)
    for folder in folders:
        rewrite_model(folder, model)
    return said


def set_experts(
    model: MixerModel,
    linear: LinearExpert | None,
    of_attributes: LinearExpert | None,
    nearest: NearestExpert | None,
) -> None:
    """Give a model other experts, or none: linear ones on codes and on attributes, and the nearest
    rows.
    """
    model.linear_expert = linear
    model.attribute_expert = of_attributes
    model.nearest_expert = nearest
    model.to(next(model.parameters()).device)
    for kind, expert in (("linear", linear), ("attribute", of_attributes)):
        sizes: dict[str, Any] = {
            f"num_{kind}_features": 0 if expert is None else len(expert.buckets),
            f"num_{kind}_weights": 0 if expert is None else len(expert.values),
            f"{kind}_threshold": 0.0 if expert is None else expert.threshold,
        }
        model.config = replace(model.config, **sizes)
    num_rows = 0 if nearest is None else len(nearest.rows)
    model.config = replace(model.config, num_nearest_rows=num_rows)


def rewrite_model(folder: Path, model: MixerModel, *, remark: str = "") -> None:
    """Write a model again, and its card, with a remark behind the card's section on accuracy."""
    behind, path = "\n## Model", folder / CARD_FILE
    card = (
        path.read_text(encoding="utf-8").replace(behind, remark + behind, 1)
        if path.is_file()
        else None
    )
    save_model(folder, model.config, model.state_dict(), tokenizer=model.tokenizer, card=card)
