"""Rows of a dataset encoded once: outputs of a frozen encoder, directions of a new head, and the
expert of nearest rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from histocoder import distributed, launcher
from histocoder.data.dataset import Batch, OccupationDataset
from histocoder.log import log
from histocoder.model import MixerModel, NgramEncoder, Tokenizer
from histocoder.model.devices import total_bytes
from histocoder.model.mixer import CosineClassifier
from histocoder.model.nearest import NearestExpert
from histocoder.text.tokenizers import end_characters, tokenize

_MEMORY_SHARE = 0.25  # of the machine's memory, or a GPU's free memory, that outputs may take
_NUM_DIRECTION_ROWS = 20_000  # rows that a new head's directions are computed from
_MAX_NEAREST_ROWS = 200_000  # rows that the expert of nearest rows remembers
_MIN_CODE_SHARE = 0.5  # of the rows with a description's most frequent code, to be remembered too
_BATCH_SIZE = 256


class _EncodedBatch(NamedTuple):
    rows: Tensor  # positions among the rows to encode, of shape (B,), on the model's device
    memory: Tensor  # of shape (B, M, dim)
    pooled: Tensor  # of shape (B, dim)


@torch.no_grad()
def _encode(
    model: MixerModel, data: OccupationDataset, rows: np.ndarray, *, batch_size: int
) -> Iterator[_EncodedBatch]:
    """Encode some rows, without noise, in batches of like lengths."""
    device = next(model.parameters()).device
    order = np.argsort(data.lengths()[rows], kind="stable")
    for start in range(0, len(order), batch_size):
        index = order[start : start + batch_size]
        texts = data.examples.inputs.texts(rows[index])
        tokens = tokenize(texts, max_len=data.max_len, tokenizer=model.tokenizer)
        ids = tokens.pad(np.arange(len(index)), max_len=data.max_len, num_positions=data.pad_to)
        memory, pooled, _ = model.encode(torch.from_numpy(ids).to(device))
        yield _EncodedBatch(torch.from_numpy(index).to(device), memory, pooled)


@dataclass(frozen=True)
class FrozenOutputs:
    """Outputs of a frozen encoder for the rows of a dataset, each distinct text once, on the
    model's device.
    """

    memory: Tensor  # of all texts, one after the other, of shape (num_tokens, dim)
    pooled: Tensor  # of shape (num_texts, dim)
    starts: Tensor  # first index of each text in `memory`, of shape (num_texts,)
    lengths: Tensor  # number of tokens of each text, of shape (num_texts,)
    text_of_row: Tensor  # of shape (n,)
    tokenizer: Tokenizer
    max_len: int

    def of(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return memory (B, M, dim), with zeros behind each text, and pooled outputs (B, dim) of a
        batch's rows.

        The batch is on the model's device.
        """
        num_positions = self.tokenizer.num_encoded(batch.input_ids.shape[1], self.max_len)
        texts = self.text_of_row[batch.rows]
        index, is_token = self._indices(texts, num_positions)
        memory = self.memory[index.clamp(max=len(self.memory) - 1)]
        return memory.masked_fill_(~is_token[..., None], 0.0), self.pooled[texts]

    def fill(self, batch: _EncodedBatch) -> None:
        """Set the outputs of some texts."""
        index, is_token = self._indices(batch.rows, batch.memory.shape[1])
        self.memory[index[is_token]] = batch.memory[is_token]
        self.pooled[batch.rows] = batch.pooled

    def _indices(self, texts: Tensor, num_positions: int) -> tuple[Tensor, Tensor]:
        """Return the indices of the texts' positions in `memory`, and which are tokens, both (B,
        num_positions).
        """
        position = torch.arange(num_positions, device=texts.device)
        return self.starts[texts][:, None] + position, position < self.lengths[texts][:, None]


def frozen_outputs(model: MixerModel, data: OccupationDataset) -> FrozenOutputs | None:
    """Compute a frozen encoder's outputs for data without noise; None if each step is to compute
    them.
    """
    if not model.encoder_is_frozen or not model.config.mask_memory or data.augmenter is not None:
        return None
    # hashing n-grams takes less time than finding their outputs
    if isinstance(model.encoder, NgramEncoder):
        return None

    device = next(model.parameters()).device
    is_gpu = device.type == "cuda"
    first_rows, text_of_row = data.distinct_texts()
    lengths = torch.from_numpy(data.lengths()[first_rows].astype(np.int64))
    num_tokens = int(lengths.sum())
    dim = model.encoder.config.hidden_size

    # the same on all ranks: with FSDP, those that encode wait for each other's shards
    num_bytes = (num_tokens + len(first_rows)) * dim * model.dtype.itemsize
    if is_gpu:
        free_bytes = float(torch.cuda.mem_get_info(device)[0])
    else:
        free_bytes = total_bytes() / launcher.read_launch().local_world_size
    is_too_large = torch.tensor(int(num_bytes > _MEMORY_SHARE * free_bytes))
    has_room = not distributed.all_reduce(is_too_large, "max")
    manner = "in each step, since they take more than a quarter of the memory"
    if has_room:
        manner = "once, and kept in memory"
    log.info(
        f"The frozen encoder's outputs for {len(first_rows):,} distinct descriptions "
        f"({num_bytes / 1e9:,.2g} GB) are computed {manner}."
    )
    if not has_room:
        return None

    outputs = FrozenOutputs(
        memory=torch.empty(num_tokens, dim, dtype=model.dtype, device=device),
        pooled=torch.empty(len(first_rows), dim, dtype=model.dtype, device=device),
        starts=(lengths.cumsum(0) - lengths).to(device),
        lengths=lengths.to(device),
        text_of_row=torch.from_numpy(text_of_row).to(device),
        tokenizer=model.tokenizer,
        max_len=data.max_len,
    )
    for batch in _encode(model, data, first_rows, batch_size=1024 if is_gpu else 64):
        outputs.fill(batch)
    return outputs


def pooled_encodings(model: MixerModel, data: OccupationDataset, rows: np.ndarray) -> Tensor:
    """Return the pooled encodings (n, dim) of some rows without noise, in fp32 on the model's
    device.
    """
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    encodings = torch.empty(len(rows), model.encoder.config.hidden_size, device=device)
    for batch in _encode(model, data, rows, batch_size=_BATCH_SIZE):
        encodings[batch.rows] = batch.pooled.float()
    model.train(was_training)
    return encodings


def set_directions(model: MixerModel, data: OccupationDataset, device: torch.device) -> None:
    """Set the first weights of a new cosine head from the encodings of a sample of the data to
    train on.
    """
    if not isinstance(model.linear_decoder, CosineClassifier):
        return
    sample = np.random.default_rng(0).permutation(data.rows)[:_NUM_DIRECTION_ROWS]
    rows = np.sort(sample)
    model.to(device)

    # a row's weight is shared by its codes
    labelled_rows, class_ids = data.labels(rows)
    shares = torch.zeros(len(rows), model.config.num_classes, device=device)
    shares[np.searchsorted(rows, labelled_rows), class_ids] = 1.0
    weights = torch.from_numpy(data.weights[rows]).to(device)
    shares *= weights[:, None] / shares.sum(1, keepdim=True).clamp(min=1)

    model.linear_decoder.set_directions(pooled_encodings(model, data, rows), shares)
    model.to("cpu")


def fit_nearest_expert(model: MixerModel, data: OccupationDataset) -> NearestExpert:
    """Remember the encodings of each description with the codes that it mostly has; a sample if
    there are too many.
    """
    # the distinct pairs of text and class, and the weight of the rows that have them
    rows, class_ids = data.labels()
    text = data.distinct_texts().text_of_row[rows]
    pairs, first, pair_of_row = np.unique(
        np.column_stack([text, class_ids]), axis=0, return_index=True, return_inverse=True
    )
    weights = np.bincount(pair_of_row, data.weights[rows])

    # a text keeps the most frequent one, and others that are not much rarer
    max_weight = np.zeros(text.max() + 1)
    np.maximum.at(max_weight, pairs[:, 0], weights)
    labels = np.sort(first[weights >= _MIN_CODE_SHARE * max_weight[pairs[:, 0]]])
    if len(labels) > _MAX_NEAREST_ROWS:
        sample = np.random.default_rng(0).choice(labels, _MAX_NEAREST_ROWS, replace=False)
        labels = np.sort(sample)

    # a text with two codes is encoded once
    encoded_rows, index = np.unique(rows[labels], return_inverse=True)
    encodings = pooled_encodings(model, data, encoded_rows)
    ends = end_characters(data.examples.inputs.texts(encoded_rows))
    device = encodings.device
    return NearestExpert.of(
        encodings[torch.from_numpy(index)],
        torch.from_numpy(ends[index]).to(device),
        torch.from_numpy(class_ids[labels]).to(device),
        num_classes=model.config.num_classes,
    )
