"""Batches made of the arrays of a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from histocoder.data.augment import Augmenter, row_rng
from histocoder.data.cache import ExampleArrays
from histocoder.data.samplers import Share
from histocoder.data.tokens import LANG_SEP, tokenize
from histocoder.formatters import BOS, EOS, MISSING, PAD, Formatter


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
    """Of the global batch, likewise below; see `samplers.Share`."""
    num_target_blocks: int
    weight: float
    rows: np.ndarray
    """The rows of the dataset."""

    def to(self, device: torch.device) -> Batch:
        """The same on another device."""
        moved = {
            name: getattr(self, name).to(device, non_blocking=True) for name in ("input_ids", "targets", "class_ids")
        }
        return replace(self, **moved)

    def pin_memory(self) -> Batch:
        """The same in pinned memory; called by `DataLoader`."""
        return replace(
            self,
            input_ids=self.input_ids.pin_memory(),
            targets=self.targets.pin_memory(),
            class_ids=self.class_ids.pin_memory(),
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
        For training; needs `seed`.

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
        seed: int = 0,
    ) -> None:
        self.arrays = arrays
        self._blocks = _block_table(arrays.code_table, formatter)
        self._class_ids = _class_table(arrays.code_table, classes)
        self._max_len = max_len
        self._augmenter = augmenter
        self._seed = seed

    def __len__(self) -> int:
        return len(self.arrays)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row, before it is altered, of shape (n,)."""
        return self.arrays.texts.lengths

    @property
    def num_target_blocks(self) -> np.ndarray:
        """Codes of each row, of shape (n,)."""
        return self.arrays.num_codes

    def __getitem__(self, share: Share) -> Batch:
        rows = share.rows
        if self._augmenter is None:
            input_ids = self.arrays.texts.pad(rows, max_len=self._max_len)
        else:
            altered = tokenize(self._augment(rows, share.epoch), max_len=self._max_len)
            input_ids = altered.pad(np.arange(len(rows)), max_len=self._max_len)
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
        )

    def _augment(self, rows: np.ndarray, epoch: int) -> list[str]:
        assert self._augmenter is not None
        altered = []
        for row in rows.tolist():
            lang, _, text = self.arrays.texts.text(row).partition(LANG_SEP)
            text, lang = self._augmenter(text, lang, row_rng(self._seed, epoch, row))
            altered.append(lang + LANG_SEP + text)
        return altered


def _block_table(codes: Sequence[str], formatter: Formatter) -> np.ndarray:
    """The tokens of each code behind those of an unused block, an array of int64 of shape (1 + n, block_size)."""
    targets = formatter.encode_columns([np.array(codes, dtype=object)])
    blocks = targets[:, 1 : 1 + formatter.block_size].astype(np.int64)
    return np.pad(blocks, ((1, 0), (0, 0)), constant_values=PAD)


def _class_table(codes: Sequence[str], classes: Sequence[str]) -> np.ndarray:
    """The class of each code behind that of an unused block; -1 where there is none."""
    index = {code: i for i, code in enumerate(classes)}
    strange = next((code for code in codes if code not in index and code != MISSING), None)
    if strange is not None:
        raise ValueError(f"the code {strange!r} is not in the key")
    return np.array([-1, *(index.get(code, -1) for code in codes)], dtype=np.int64)
