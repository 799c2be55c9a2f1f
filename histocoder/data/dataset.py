"""Batches made of the arrays of a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from histocoder.data.augment import Augmenter
from histocoder.data.cache import ExampleArrays
from histocoder.data.encodings import Encoded, Encodings
from histocoder.data.samplers import Share
from histocoder.data.tokens import LANG_SEP, UNKNOWN, join_language, tokenize
from histocoder.formatters import BOS, EOS, MISSING, PAD, Formatter

_ROWS_AT_ONCE = 1 << 18
_ROWS_MULTIPLE = 16
"""See `Batch.merged`."""


@dataclass
class Batch:
    """One rank's part of a step."""

    input_ids: Tensor
    """Of shape (B, S), int32."""
    targets: Tensor
    """Of shape (B, 2 + num_blocks * block_size), int64."""
    class_ids: Tensor
    """Of shape (B, num_blocks), int64; -1 where there is none."""
    num_rows: int
    """Rows of the global batch; `num_target_blocks` and `weight` refer to it as well, see `samplers.Share`."""
    num_target_blocks: int
    weight: float
    rows: np.ndarray
    """The rows of the dataset."""
    counts: Tensor
    """Of shape (B,), float32: how often each row occurs, see `merged`."""
    encoded: Encoded | None = None
    """The encoder's outputs, where they are known before."""

    def merged(self) -> Batch:
        """Return the same with rows that are alike, in text and codes, once, and counted as often as they occur.

        Loss and gradients are the same but for dropout, which such rows then share. Some stay as they are, so that a
        multiple of 16 rows remains: processors prepare themselves for each shape of a batch.
        """
        columns = (self.input_ids.numpy(), self.class_ids.numpy().astype(np.int32))
        table = np.ascontiguousarray(np.concatenate(columns, axis=1))
        alike = table.view(np.dtype((np.void, table.strides[0])))[:, 0]
        _, first, group = np.unique(alike, return_index=True, return_inverse=True)
        is_repeat = np.ones(len(table), dtype=bool)
        is_repeat[first] = False
        num_kept = -(-len(first) // _ROWS_MULTIPLE) * _ROWS_MULTIPLE
        dropped = np.flatnonzero(is_repeat)[max(num_kept - len(first), 0) :]
        if not len(dropped):
            return self
        counts = self.counts.numpy().copy()
        np.add.at(counts, first[group[dropped]], counts[dropped])
        kept = np.setdiff1d(np.arange(len(table)), dropped)
        merged = replace(self, counts=torch.from_numpy(counts), rows=self.rows[kept])
        return merged._mapped(lambda tensor: tensor[torch.from_numpy(kept)])

    def to(self, device: torch.device) -> Batch:
        """Return the same on another device."""
        return self._mapped(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """Return the same in pinned memory; called by `DataLoader`."""
        return self._mapped(Tensor.pin_memory)

    def share_memory(self) -> Batch:
        """Return the same in shared memory."""
        return self._mapped(Tensor.share_memory_)

    def _mapped(self, function: Callable[[Tensor], Tensor]) -> Batch:
        return replace(
            self,
            input_ids=function(self.input_ids),
            targets=function(self.targets),
            class_ids=function(self.class_ids),
            counts=function(self.counts),
            encoded=None if self.encoded is None else Encoded(*map(function, self.encoded)),
        )


class OccupationDataset(Dataset):
    """Descriptions with their codes; indexed by a `Share`, gives a `Batch`.

    Parameters
    ----------
    arrays : ExampleArrays
    formatter : Formatter
        That the arrays were made with.
    classes : sequence of str
        The flat head's codes, in order.
    max_len : int
        Tokens of an input at most.
    augmenter : Augmenter, optional
        For training.
    pad_to : int, optional
        See `ModelConfig`.

    Attributes
    ----------
    arrays, augmenter
    encodings : Encodings or None
        The encoder's outputs of all rows, which then stand in each batch; none unless they are set.

    Raises
    ------
    ValueError
        Where a code does not fit the formatter, or is no class.
    """

    def __init__(
        self,
        arrays: ExampleArrays,
        *,
        formatter: Formatter,
        classes: Sequence[str],
        max_len: int,
        augmenter: Augmenter | None = None,
        pad_to: int | None = None,
    ) -> None:
        self.arrays = arrays
        self._formatter, self._classes = formatter, classes
        self._blocks = _block_table(arrays.code_table, formatter)
        self._class_ids = _class_table(arrays.code_table, classes)
        self._max_len, self._pad_to = max_len, pad_to
        self.augmenter = augmenter
        self.encodings: Encodings | None = None
        self._lang_lengths = np.array([len(lang) for lang in arrays.languages])

    def __len__(self) -> int:
        return len(self.arrays)

    def of(self, arrays: ExampleArrays, *, augmenter: Augmenter | None) -> OccupationDataset:
        """Other rows in the same form."""
        form: dict[str, Any] = {"formatter": self._formatter, "classes": self._classes}
        return OccupationDataset(arrays, **form, max_len=self._max_len, augmenter=augmenter, pad_to=self._pad_to)

    def lengths(self, epoch: int = 0) -> np.ndarray:
        """Tokens of each row as it stands in an epoch, of shape (n,).

        Where tokens are no characters, how many a row has after its noise is known from tokenising it alone, of which
        there would be one more of all rows in each epoch: then they are those before noise, which is near enough to
        make batches of like lengths. Batches are padded to what their rows have.
        """
        plain = self.arrays.lengths
        if self.augmenter is None or not self.arrays.tokenizer.reads_characters:
            return plain
        found = np.empty(len(plain), dtype=np.min_scalar_type(self._max_len))
        for start in range(0, len(plain), _ROWS_AT_ONCE):
            rows = np.arange(start, min(start + _ROWS_AT_ONCE, len(plain)))
            noise = self.augmenter.noise(rows, epoch)
            lang = np.where(noise.withheld, len(UNKNOWN), self._lang_lengths[self.arrays.langs[rows]])
            text = self.augmenter.lengths(noise, self.arrays.offsets[rows + 1] - self.arrays.offsets[rows])
            found[rows] = np.minimum(lang + len(LANG_SEP) + 2 + text, self._max_len)
        return found

    @property
    def num_target_blocks(self) -> np.ndarray:
        """Codes of each row, of shape (n,)."""
        return self.arrays.num_codes

    def labels(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows, one with k classes k times, and the class of each, both of shape (num_labels,)."""
        class_ids = self._class_ids[self.arrays.codes]  # (n, num_blocks)
        rows, blocks = (class_ids >= 0).nonzero()
        return rows, class_ids[rows, blocks]

    def __getitem__(self, share: Share) -> Batch:
        rows, tokenizer = share.rows, self.arrays.tokenizer
        texts = self.arrays.texts(rows) if self.augmenter is None else self._augment(self.augmenter, share)
        tokens = tokenize(texts, max_len=self._max_len, tokenizer=tokenizer)
        input_ids = tokens.pad(np.arange(len(rows)), max_len=self._max_len, num_positions=self._pad_to)
        num_encoded = tokenizer.num_encoded(input_ids.shape[1], self._max_len)
        codes = self.arrays.codes[rows]  # (B, num_blocks)
        blocks = self._blocks[codes].reshape(len(rows), -1)  # (B, num_blocks * block_size)
        return Batch(
            input_ids=torch.from_numpy(input_ids),
            targets=torch.from_numpy(np.pad(blocks, ((0, 0), (1, 1)), constant_values=((0, 0), (BOS, EOS)))),
            class_ids=torch.from_numpy(self._class_ids[codes]),
            num_rows=share.num_rows,
            num_target_blocks=share.num_target_blocks,
            weight=share.weight,
            rows=rows,
            counts=torch.ones(len(rows)),
            encoded=None if self.encodings is None else self.encodings.pad(rows, num_positions=num_encoded),
        )

    def _augment(self, augmenter: Augmenter, share: Share) -> list[str]:
        noise = augmenter.noise(share.rows, share.epoch)
        descriptions = self.arrays.descriptions(share.rows)
        altered = [augmenter.alter(text, noise, i) for i, text in enumerate(descriptions)]
        langs = [self.arrays.languages[place] for place in self.arrays.langs[share.rows]]
        return join_language(altered, np.where(noise.withheld, UNKNOWN, langs).tolist())


def _block_table(codes: Sequence[str], formatter: Formatter) -> np.ndarray:
    """Return the tokens of an unused block and of each code, an array of int64 of shape (1 + n, block_size)."""
    return np.pad(formatter.blocks(codes).astype(np.int64), ((1, 0), (0, 0)), constant_values=PAD)


def _class_table(codes: Sequence[str], classes: Sequence[str]) -> np.ndarray:
    """Return the class of each code behind that of an unused block; -1 where there is none."""
    index = {code: i for i, code in enumerate(classes)}
    strange = next((code for code in codes if code not in index and code != MISSING), None)
    if strange is not None:
        raise ValueError(f"the code {strange!r} is not in the key")
    return np.array([-1, *(index.get(code, -1) for code in codes)], dtype=np.int64)
