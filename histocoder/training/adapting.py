"""Adaptation of a trained model to few rows: its experts learn them, the rest of it is kept.

A network that is trained on a hundred rows forgets most of what it knew of other descriptions, and
experts that are fitted to them alone know nothing else. Here the experts of the initial model learn
the rows beside what they know.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from scipy.sparse import csr_matrix
from torch import Tensor

from histocoder.checkpoints.model_files import load_model
from histocoder.config import RECIPES, ModelConfig, RunConfig
from histocoder.data.dataset import OccupationDataset
from histocoder.model import MixerModel
from histocoder.model.linear_expert import LinearExpert
from histocoder.text.tokenizers import end_characters, lower_characters
from histocoder.training.encoded_rows import pooled_encodings
from histocoder.training.experts import rewrite_model, set_experts
from histocoder.training.start import Start, kind_of_start

MAX_ROWS = 300
"""Rows up to which a model is adapted; benchmarks/own_model.py compares it with training."""
MIN_RATIO = 50
"""Descriptions that the initial model has learned for each row, from which on it is adapted."""

# Of a violated margin, C of support vector machines: where rows of five sources were learned, larger
# ones had more of them right, and no others.
_PENALTY = 5.0
_KINDS = ("continued", "continued n-gram")  # of `RECIPES`: starts that keep their heads
_MAX_PASSES = 50  # over the rows
_TOLERANCE = 1e-3  # change of the coefficients in a pass, below which the passes end
_LEAST_WEIGHT = 1e-3  # added weights of the linear expert that are smaller are left out


def is_adapted(config: RunConfig, start: Start, model: ModelConfig, *, num_rows: int) -> bool:
    """Return whether a run adapts its initial model to `num_rows` rows, instead of training it.

    It does for few rows of codes that the model has, unless a setting says how to train.
    """
    initial = start.config
    if initial is None or not start.keeps_heads or config.no_experts:
        return False
    kind = kind_of_start(config, start)
    if kind not in _KINDS:
        return False
    has_recipe = set(RECIPES[kind]) <= set(config.by_recipe or ())
    if not has_recipe or config.max_steps is not None or config.freeze_encoder:
        return False

    has_experts = min(initial.num_linear_features, initial.num_nearest_rows) > 0
    has_same_classes = initial.codes == model.codes and initial.attributes == model.attributes
    is_few = num_rows <= min(MAX_ROWS, initial.num_trained_on // MIN_RATIO)
    return has_experts and has_same_classes and is_few


def adapt(
    start: Start,
    data: OccupationDataset,
    folders: list[Path],
    *,
    config: ModelConfig,
    device: torch.device,
    remark: str = "",
) -> None:
    """Write the initial model, whose experts have learned all rows of some data, into folders.

    Weights of the votes, the mode and what is known of the confidence are those of the initial
    model: few rows can't tell better ones.

    Parameters
    ----------
    start : Start
        The initial model.
    data : OccupationDataset
        The rows, without titles.
    folders : list of Path
        Folders that hold a model, which is replaced.
    config : ModelConfig
        That of the run's own model, for the names of its columns and languages.
    device : torch.device
        Device on which the rows are encoded.
    remark : str
        Sentence for the cards of a model that has learned the validation data, once it is measured.
    """
    assert start.path is not None
    model = load_model(start.path).to(device)
    learn(model, data)

    # what it was trained on, so that a further run does not validate on it
    model.has_learned(torch.from_numpy(start.hashes_with(data.examples)))

    model.config = replace(
        model.config,
        target_cols=config.target_cols,
        languages=config.languages,
        descriptions=config.descriptions,
        fitted_to_validation=bool(remark),
    )
    for folder in folders:
        rewrite_model(folder, model, remark=remark)


def learn(model: MixerModel, data: OccupationDataset) -> None:
    """Let a model's experts learn all rows of some data."""
    linear_expert = model.linear_expert
    nearest_expert = model.nearest_expert
    assert linear_expert is not None and nearest_expert is not None

    # each description once, with all codes that its rows have
    first_rows, text_of_row = data.distinct_texts()
    rows, class_ids = data.labels()
    is_true = np.zeros((len(first_rows), model.config.num_classes), dtype=bool)
    is_true[text_of_row[rows], class_ids] = True
    texts = data.examples.inputs.texts(first_rows)

    # the nearest rows: one for each code of a description
    text, true_class = is_true.nonzero()
    encodings = pooled_encodings(model, data, first_rows)
    device = encodings.device
    nearest = nearest_expert.with_rows(
        encodings[torch.from_numpy(text).to(device)],
        torch.from_numpy(end_characters(texts)[text]).to(device),
        torch.from_numpy(true_class).to(device),
    )
    linear = adapted(linear_expert, texts, is_true)
    set_experts(model, linear, model.attribute_expert, nearest)


def adapted(expert: LinearExpert, texts: list[str], is_true: np.ndarray) -> LinearExpert:
    """Return a linear expert that has learned the classes of some texts.

    Of the machines that separate the texts by their margins, they are the nearest to the expert's
    own: the adaptive support vector machines of Yang, Yan and Hauptmann (2007, Cross-domain video
    concept detection using adaptive SVMs), by the dual coordinate descent of Hsieh et al. (2008,
    A dual coordinate descent method for large-scale linear SVM), for the squared hinge loss.

    Parameters
    ----------
    expert : LinearExpert
    texts : list of str
        Inputs of the model, n of them.
    is_true : ndarray of bool, of shape (n, num_classes)

    Returns
    -------
    LinearExpert
        With the n-grams of the expert, and a weight more where the texts ask for it.
    """
    num_rows, num_classes = is_true.shape
    num_features = len(expert.buckets)
    characters = torch.from_numpy(lower_characters(texts)).to(expert.bias.device)
    margins = expert.margins(characters).cpu().double().numpy()
    row, feature, shares = (part.cpu().numpy() for part in expert.tfidf(characters))
    features = csr_matrix((shares, (row, feature)), shape=(num_rows, num_features))
    products = (features @ features.T).toarray() + 1.0  # 1 for the bias

    signs = np.where(is_true, 1.0, -1.0)
    coefficients = np.zeros((num_rows, num_classes))
    for _ in range(_MAX_PASSES):
        largest_change = 0.0
        for i in range(num_rows):
            # the step to the optimum of one row's coefficients, of all classes at once
            gradient = signs[i] * margins[i] - 1 + coefficients[i] / (2 * _PENALTY)
            curvature = products[i, i] + 1 / (2 * _PENALTY)
            change = np.maximum(coefficients[i] - gradient / curvature, 0) - coefficients[i]
            changed = change.nonzero()[0]
            if len(changed) == 0:
                continue
            coefficients[i] += change
            signed_change = signs[i, changed] * change[changed]
            margins[:, changed] += products[:, i, None] * signed_change
            largest_change = max(largest_change, float(np.abs(change).max()))
        if largest_change < _TOLERANCE:
            break

    signed = coefficients * signs
    added = (features.T @ csr_matrix(signed)).tocsr()
    added.data[np.abs(added.data) < _LEAST_WEIGHT] = 0.0
    return _with_added(expert, added, torch.from_numpy(signed.sum(0)).float())


def _with_added(expert: LinearExpert, weights: csr_matrix, bias: Tensor) -> LinearExpert:
    """Return an expert with weights (num_features, num_classes) and biases (num_classes,) added to
    its own.
    """
    starts = np.concatenate([[0], expert.counts.cpu().numpy().cumsum()])
    parts = (expert.values.cpu().float().numpy(), expert.classes.cpu().numpy(), starts)
    total = (csr_matrix(parts, shape=weights.shape) + weights).tocsr()
    total.eliminate_zeros()

    num_features, num_classes = weights.shape
    result = LinearExpert(num_features, num_classes, total.nnz, threshold=expert.threshold)
    result.buckets.copy_(expert.buckets)
    result.idf.copy_(expert.idf)
    result.counts.copy_(torch.from_numpy(np.diff(total.indptr)))
    result.classes.copy_(torch.from_numpy(total.indices))
    result.values.copy_(torch.from_numpy(total.data))
    result.bias.copy_(expert.bias.cpu() + bias)
    return result.to(expert.values.device)
