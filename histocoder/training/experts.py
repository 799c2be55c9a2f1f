"""Experts of a trained model: fitted, weighed, and written with it."""

import filecmp
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from histocoder.checkpoints.model_files import (
    CARD_FILE,
    WEIGHTS_FILE,
    load_model,
    read_model_config,
    save_model,
)
from histocoder.checkpoints.training_state import BEST_FOLDER
from histocoder.config import NUM_GREEDY, PredictOptions
from histocoder.data.dataset import OccupationDataset
from histocoder.data.examples import Examples
from histocoder.evaluation.scores import code_sets, score_sets
from histocoder.inference.coder import Coder
from histocoder.inference.predictions import Prediction
from histocoder.inference.table_coder import USUAL_SHARE
from histocoder.log import log
from histocoder.model import MixerModel
from histocoder.model.linear_expert import LinearExpert
from histocoder.model.nearest import NearestExpert
from histocoder.training.encoded_rows import fit_nearest_expert
from histocoder.training.expert_weights import (
    best_mode,
    fit_all_weights,
    fit_attributes,
    least_probability,
)
from histocoder.training.svm import (
    attribute_truth,
    code_truth,
    fit_attribute_expert,
    fit_linear_expert,
    without_small_weights,
)
from histocoder.training.trainer import Trainer


def fit_experts(trainer: Trainer) -> None:
    """Give the last and the best model a linear expert, weights of their experts, and a mode; for
    rank 0.

    Each description of the validation data counts once, so that frequent ones do not decide.
    """
    run = trainer.run
    data = trainer.train_data
    model_config = trainer.model.config
    examples = trainer.val_data.examples.sample(NUM_GREEDY, seed=0)
    texts = pd.DataFrame({"text": examples.texts, "lang": examples.langs})
    examples = examples.take(np.flatnonzero(~texts.duplicated()))

    # linear experts read descriptions alone, so both models have the same
    linear = fit_linear_expert(data, num_classes=model_config.num_classes)
    if linear is not None:
        truth = code_truth(examples, model_config.codes)
        linear = without_small_weights(linear, examples, truth)
    attribute = fit_attribute_expert(data)
    if attribute is not None:
        truth = attribute_truth(examples, model_config.attributes)
        attribute = without_small_weights(attribute, examples, truth)
    fit = partial(_fit_to, trainer=trainer, linear=linear, attribute=attribute, examples=examples)

    # an earlier start of the run may have refitted the best model, which is then complete
    is_refitted = read_model_config(run.best).fitted_to_validation
    best_folders = [run.best]
    if not is_refitted and _is_same_model(run.best, run.path):
        best_folders.append(run.path)
    else:
        fit([run.path])
    if not is_refitted:
        log.info(f"{BEST_FOLDER}/: {fit(best_folders)}")


def _is_same_model(first: Path, second: Path) -> bool:
    """Return whether two models have the same weights."""
    return filecmp.cmp(first / WEIGHTS_FILE, second / WEIGHTS_FILE, shallow=False)


class _Trial(NamedTuple):
    """A model's answers in a mode on descriptions whose codes are known."""

    prediction: Prediction
    share_right: float


def _try_mode(coder: Coder, examples: Examples, mode: str) -> _Trial:
    descriptions = coder.distinct(examples.texts, examples.langs)
    prediction = coder.code(descriptions, PredictOptions(mode=mode), progress=False)
    scores = score_sets(code_sets(examples.codes), code_sets(prediction.codes))
    return _Trial(prediction, float(scores["accuracy"].mean()))


def _fit_to(
    folders: list[Path],
    *,
    trainer: Trainer,
    linear: LinearExpert | None,
    attribute: LinearExpert | None,
    examples: Examples,
) -> str:
    """Fit the experts of a model, write it into all folders that hold it, and return how right its
    modes are.
    """
    train_data = trainer.train_data
    model = load_model(folders[0])
    model.config = replace(model.config, experts={})  # so that the decoder votes
    coder = Coder(model, str(trainer.device), precision=trainer.config.precision)
    set_experts(model, linear, attribute, fit_nearest_expert(coder.computing, train_data))

    # how much each of them counts
    weights = fit_all_weights(coder, examples, num_train=len(train_data))
    attribute_weights = fit_attributes(coder, examples, num_train=len(train_data))
    model.config = replace(model.config, experts=weights, attribute_experts=attribute_weights)

    # the mode that is right most often; a decoder that does not learn has none of its own
    trials = {}
    for mode in ("combined", "greedy", "flat"):
        if mode != "greedy" or model.config.decoder_learns:
            trials[mode] = _try_mode(coder, examples, mode)
    shares = {mode: trial.share_right for mode, trial in trials.items()}
    best = best_mode(shares, num_rows=len(examples))
    accuracies = ", ".join(f"{mode} {100 * share:.1f}" for mode, share in shares.items())
    summary = (
        f"accuracy on distinct validation descriptions, in %: {accuracies}. Default prediction "
        f"mode: {best} (another "
        "replaces combined only if it is better by more than two standard errors)."
    )

    # where a row may have several codes, how probable a further one has to be
    if coder.formatter.num_blocks > 1:
        prediction = trials["combined"].prediction
        codes = examples.codes.to_numpy(dtype=object)
        is_true = (prediction.codes[:, :, None] == codes[:, None]).any(2)
        weights["further"] = least_probability(prediction.probs, is_true)
        model.config = replace(model.config, experts=weights)
        trials["combined"] = _try_mode(coder, examples, "combined")
        summary += (
            f" With further codes only from a probability of {weights['further']:.2f}: "
            f"combined {100 * trials['combined'].share_right:.1f}."
        )

    # a file with many more descriptions below this confidence is unlike the training data
    usual_confidence = float(np.quantile(trials[best].prediction.conf, USUAL_SHARE))
    model.config = replace(model.config, mode=best, usual_confidence=usual_confidence)
    for folder in folders:
        rewrite_model(folder, model)
    return summary


def refit_experts(model: MixerModel, data: OccupationDataset) -> None:
    """Fit the experts that a model has to other data; their weights, and the sizes below which
    those of a linear expert are left out, stay.
    """
    config = model.config
    linear = None
    if "linear" in config.experts:
        linear = fit_linear_expert(data, num_classes=config.num_classes)
    if linear is not None:
        linear = linear.pruned(config.linear_threshold)
    attribute = None
    if config.attribute_experts:
        attribute = fit_attribute_expert(data)
    if attribute is not None:
        attribute = attribute.pruned(config.attribute_threshold)
    nearest = None
    if "nearest" in config.experts:
        nearest = fit_nearest_expert(model, data)
    set_experts(model, linear, attribute, nearest)


def set_experts(
    model: MixerModel,
    linear: LinearExpert | None,
    attribute: LinearExpert | None,
    nearest: NearestExpert | None,
) -> None:
    """Give a model other experts, or none: linear ones on codes and on attributes, and the nearest
    rows.
    """
    model.linear_expert = linear
    model.attribute_expert = attribute
    model.nearest_expert = nearest
    model.to(next(model.parameters()).device)

    # the sizes of their weights, with which a saved model is built
    sizes: dict[str, Any] = {"num_nearest_rows": 0}
    if nearest is not None:
        sizes["num_nearest_rows"] = len(nearest.rows)
    for kind, expert in (("linear", linear), ("attribute", attribute)):
        sizes[f"num_{kind}_features"] = 0
        sizes[f"num_{kind}_weights"] = 0
        sizes[f"{kind}_threshold"] = 0.0
        if expert is not None:
            sizes[f"num_{kind}_features"] = len(expert.buckets)
            sizes[f"num_{kind}_weights"] = len(expert.values)
            sizes[f"{kind}_threshold"] = expert.threshold
    model.config = replace(model.config, **sizes)


def rewrite_model(folder: Path, model: MixerModel, *, remark: str = "") -> None:
    """Write a model again, and its card, with a remark behind the card's section on accuracy."""
    card = None
    path = folder / CARD_FILE
    if path.is_file():
        next_section = "\n## Model"
        text = path.read_text(encoding="utf-8")
        card = text.replace(next_section, remark + next_section, 1)
    save_model(folder, model.config, model.state_dict(), tokenizer=model.tokenizer, card=card)
