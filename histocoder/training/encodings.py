"""Encodings of the rows to train on, for the directions of a new head and the expert of nearest
rows.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from histocoder.data.dataset import OccupationDataset
from histocoder.model import MixerModel
from histocoder.model.mixer import CosineClassifier
from histocoder.model.nearest import NearestExpert
from histocoder.text.tokenizers import end_characters, tokenize

_DIRECTION_ROWS = 20_000  # rows that a new head's directions are computed from
_MOST_ROWS = 200_000  # rows that the nearest-neighbour expert remembers
_LEAST_SHARE = (
    0.5  # share of a description's most frequent code that another has, to be remembered as well
)
_BATCH = 256


@torch.no_grad()
def encodings(model: MixerModel, data: OccupationDataset, rows: np.ndarray) -> Tensor:
    """Return the pooled encodings (n, dim) of some rows without noise, in fp32 on the model's
    device.
    """
    device, was_training = next(model.parameters()).device, model.training
    model.eval()
    order = np.argsort(data.lengths()[rows], kind="stable")
    found = torch.empty(len(rows), model.encoder.config.hidden_size, device=device)
    for start in range(0, len(rows), _BATCH):
        some = order[start : start + _BATCH]
        tokens = tokenize(
            data.examples.inputs(rows[some]), max_len=data.max_len, tokenizer=model.tokenizer
        )
        ids = tokens.pad(np.arange(len(some)), max_len=data.max_len, num_positions=data.pad_to)
        found[torch.from_numpy(some)] = model.encode(torch.from_numpy(ids).to(device))[1].float()
    model.train(was_training)
    return found


def set_directions(model: MixerModel, data: OccupationDataset, device: torch.device) -> None:
    """Set the first weights of a new cosine head from the encodings of a sample of the data to
    train on.
    """
    if not isinstance(model.linear_decoder, CosineClassifier):
        return
    rows = np.sort(np.random.default_rng(0).permutation(data.rows)[:_DIRECTION_ROWS])
    model.to(device)
    labelled, class_ids = data.labels(rows)
    shares = torch.zeros(len(rows), model.config.num_classes, device=device)
    shares[np.searchsorted(rows, labelled), class_ids] = 1.0
    shares *= torch.from_numpy(data.weights[rows]).to(device)[:, None] / shares.sum(
        1, keepdim=True
    ).clamp(min=1)
    model.linear_decoder.set_directions(encodings(model, data, rows), shares)
    model.to("cpu")


def fit_nearest_expert(model: MixerModel, data: OccupationDataset) -> NearestExpert:
    """Remember the encodings of each description with the codes that it mostly has; a sample if
    there are too many.
    """
    rows, class_ids = data.labels()
    _, text_of_row = data.distinct_texts()
    text = text_of_row[rows]
    pairs, first, pair = np.unique(
        np.column_stack([text, class_ids]), axis=0, return_index=True, return_inverse=True
    )
    weights = np.bincount(pair, data.weights[rows])
    most = np.zeros(text.max() + 1)
    np.maximum.at(most, pairs[:, 0], weights)
    kept = np.sort(first[weights >= _LEAST_SHARE * most[pairs[:, 0]]])
    if len(kept) > _MOST_ROWS:
        kept = np.sort(np.random.default_rng(0).choice(kept, _MOST_ROWS, replace=False))
    remembered, index = np.unique(rows[kept], return_inverse=True)
    found, ends = (
        encodings(model, data, remembered),
        end_characters(data.examples.inputs(remembered)),
    )
    parts = (
        found[torch.from_numpy(index)],
        *(torch.from_numpy(x).to(found.device) for x in (ends[index], class_ids[kept])),
    )
    return NearestExpert.of(*parts, num_classes=model.config.num_classes)
