"""Outputs of a frozen encoder, which are computed once before training."""

import numpy as np
import torch
from torch import Tensor

from histocoder import distributed
from histocoder.data.dataset import Batch, OccupationDataset
from histocoder.log import log
from histocoder.model import MixerModel, NgramEncoder
from histocoder.model.devices import total_bytes
from histocoder.text.tokenizers import tokenize

_SHARE_OF_MEMORY = (
    0.25  # share of the machine's memory, or of a GPU's free memory, that outputs may take
)


class FrozenOutputs:
    """Outputs of a model's frozen encoder for the rows of a dataset, each distinct text once, on
    the model's device.

    `first` is the first row of each distinct text, of shape (m,); `text_of_row` is the text of each
    row, of shape (n,).
    """

    @torch.no_grad()
    def __init__(
        self, model: MixerModel, data: OccupationDataset, first: np.ndarray, text_of_row: np.ndarray
    ) -> None:
        device = next(model.parameters()).device
        self._tokenizer, self._max_len = model.tokenizer, data.max_len
        lengths = torch.from_numpy(data.lengths()[first].astype(np.int64))
        self._text_of_row, self._lengths = (
            torch.from_numpy(text_of_row).to(device),
            lengths.to(device),
        )
        self._starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)[:-1]]).to(device)
        dim, size = model.encoder.config.hidden_size, 64 if device.type == "cpu" else 1024
        self._memory = torch.empty(int(lengths.sum()), dim, dtype=model.dtype, device=device)
        self._pooled = torch.empty(len(first), dim, dtype=model.dtype, device=device)
        order = np.argsort(lengths.numpy(), kind="stable")
        for start in range(0, len(order), size):
            texts = torch.from_numpy(order[start : start + size])
            tokens = tokenize(
                data.examples.inputs(first[texts]), max_len=data.max_len, tokenizer=model.tokenizer
            )
            ids = torch.from_numpy(tokens.pad(np.arange(len(texts)), max_len=data.max_len)).to(
                device
            )
            memory, pooled, _ = model.encode(ids)
            index, is_token = self._indices(texts.to(device), memory.shape[1])
            self._memory[index[is_token]], self._pooled[texts.to(device)] = memory[is_token], pooled

    def of(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return memory (B, M, dim), with zeros behind each text, and pooled outputs (B, dim) of a
        batch's rows.

        The batch is on the model's device.
        """
        num_positions = self._tokenizer.num_encoded(batch.input_ids.shape[1], self._max_len)
        texts = self._text_of_row[batch.rows]
        index, is_token = self._indices(texts, num_positions)
        memory = self._memory[index.clamp(max=len(self._memory) - 1)]
        return memory.masked_fill_(~is_token[..., None], 0.0), self._pooled[texts]

    def _indices(self, texts: Tensor, num_positions: int) -> tuple[Tensor, Tensor]:
        """Return the indices of the texts' positions in `_memory`, and which are tokens, both (B,
        num_positions).
        """
        position = torch.arange(num_positions, device=texts.device)
        return self._starts[texts][:, None] + position, position < self._lengths[texts][:, None]


def frozen_outputs(model: MixerModel, data: OccupationDataset) -> FrozenOutputs | None:
    """Compute a frozen encoder's outputs for data without noise; None if each step is to compute
    them.
    """
    if not (model.encoder_is_frozen and model.config.mask_memory) or data.augmenter is not None:
        return None
    if isinstance(model.encoder, NgramEncoder):
        return None  # which takes less time than finding its outputs
    device = next(model.parameters()).device
    is_gpu, num_processes = device.type == "cuda", distributed.read_launch().local_world_size
    room = torch.cuda.mem_get_info(device)[0] if is_gpu else total_bytes() / num_processes
    first, text_of_row = data.distinct_texts()
    num_vectors = int(data.lengths()[first].sum(dtype=np.int64)) + len(
        first
    )  # of tokens, and of texts
    size = num_vectors * model.encoder.config.hidden_size * model.dtype.itemsize
    what = (
        f"The frozen encoder's outputs for {len(first):,} distinct descriptions "
        f"({size / 1e9:,.2g} GB) are computed"
    )
    # the same on all ranks: with FSDP, those that encode wait for each other's shards
    has_room = not distributed.all_reduce(torch.tensor(int(size > _SHARE_OF_MEMORY * room)), "max")
    how = (
        "once, and kept in memory"
        if has_room
        else "in each step, since they take more than a quarter of the memory"
    )
    log.info(f"{what} {how}.")
    return FrozenOutputs(model, data, first, text_of_row) if has_room else None
