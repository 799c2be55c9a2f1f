"""Descriptions and labels as flat arrays, and batches made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.utils.data import Dataset

from histocoder.data.augment import Augmenter, row_rng
from histocoder.data.samplers import Share
from histocoder.formatters import MISSING, PAD, Formatter
from histocoder.model.encoder import trimmed_length

CLS_ID, SEP_ID, PAD_ID = 0xE000, 0xE001, 0
"""CANINE's own, in Unicode's private use area."""
LANG_SEP = "[SEP]"
"""Stands between language and description, as these five characters."""


class TokenizedTexts:
    """Token ids of texts, one behind the other in one array.

    Parameters
    ----------
    texts : sequence of str
    max_len : int
        Tokens of a text at most, CLS and SEP included; the rest is cut off.

    Attributes
    ----------
    ids : ndarray of int32, of shape (total,)
        CLS, the Unicode code points, SEP; text after text.
    offsets : ndarray of int64, of shape (n + 1,)
        Where each text begins.

    Examples
    --------
    >>> TokenizedTexts(["en[SEP]cook"], max_len=128).ids[:4].tolist()
    [57344, 101, 110, 91]
    """

    def __init__(self, texts: Sequence[str], *, max_len: int) -> None:
        full = np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
        points = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
        kept = np.minimum(full, max_len - 2)
        self.offsets = np.concatenate([[0], np.cumsum(kept + 2)])
        self.ids = np.empty(self.offsets[-1], dtype=np.int32)
        self.ids[self.offsets[:-1]], self.ids[self.offsets[1:] - 1] = CLS_ID, SEP_ID
        self.ids[_ragged(self.offsets[:-1] + 1, kept)] = points[_ragged(np.cumsum(full) - full, kept)]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each text, of shape (n,)."""
        return np.diff(self.offsets)

    def text(self, row: int) -> str:
        """The text of a row, as far as it was kept."""
        ids = self.ids[self.offsets[row] + 1 : self.offsets[row + 1] - 1]
        return ids.tobytes().decode("utf-32-le", "surrogatepass")

    def pad(self, rows: np.ndarray, *, max_len: int, num_positions: int | None = None) -> np.ndarray:
        """Some texts as one array of shape (len(rows), S), 0 behind each; S is by default `trimmed_length`'s."""
        starts, lengths = self.offsets[rows], self.offsets[rows + 1] - self.offsets[rows]
        num_positions = num_positions or trimmed_length(int(lengths.max()), max_len)
        padded = np.full((len(rows), num_positions), PAD_ID, dtype=np.int32)
        padded[np.arange(num_positions) < lengths[:, None]] = self.ids[_ragged(starts, lengths)]
        return padded


def _ragged(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The indices start, start + 1, …, start + length - 1 of each run, one run behind the other."""
    behind = np.cumsum(lengths)
    return np.repeat(starts - (behind - lengths), lengths) + np.arange(behind[-1] if len(behind) else 0)


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
    texts, langs : sequence of str, of shape (n,)
    codes : DataFrame of str, of shape (n, k)
        Codes, first code first; None where there is none.
    formatter : Formatter
    classes : sequence of str
        The flat head's codes, in order.
    max_len : int
        Tokens of an input at most.
    augmenter : Augmenter, optional
        For training; needs `seed`.

    Raises
    ------
    ValueError
        Where a code does not fit the formatter.
    """

    def __init__(
        self,
        texts: Sequence[str],
        langs: Sequence[str],
        codes: pd.DataFrame,
        *,
        formatter: Formatter,
        classes: Sequence[str],
        max_len: int,
        augmenter: Augmenter | None = None,
        seed: int = 0,
    ) -> None:
        self.targets = formatter.encode_columns([codes[column] for column in codes.columns])
        self.class_ids = class_ids(codes, classes, num_blocks=formatter.num_blocks)
        first_tokens = self.targets[:, 1 : -1 : formatter.block_size]
        self.num_target_blocks = (first_tokens != PAD).sum(1)
        self.texts = TokenizedTexts(join_language(texts, langs), max_len=max_len)
        self._max_len = max_len
        self._augmenter = augmenter
        self._seed = seed

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, share: Share) -> Batch:
        rows = share.rows
        if self._augmenter is None:
            input_ids = self.texts.pad(rows, max_len=self._max_len)
        else:
            altered = TokenizedTexts(self._augment(rows, share.epoch), max_len=self._max_len)
            input_ids = altered.pad(np.arange(len(rows)), max_len=self._max_len)
        return Batch(
            input_ids=torch.from_numpy(input_ids),
            targets=torch.from_numpy(self.targets[rows].astype(np.int64)),
            class_ids=torch.from_numpy(self.class_ids[rows].astype(np.int64)),
            num_rows=share.num_rows,
            num_target_blocks=share.num_target_blocks,
            weight=share.weight,
            rows=rows,
        )

    def _augment(self, rows: np.ndarray, epoch: int) -> list[str]:
        assert self._augmenter is not None
        altered = []
        for row in rows.tolist():
            lang, _, text = self.texts.text(row).partition(LANG_SEP)
            text, lang = self._augmenter(text, lang, row_rng(self._seed, epoch, row))
            altered.append(lang + LANG_SEP + text)
        return altered


def join_language(texts: Sequence[str], langs: Sequence[str]) -> list[str]:
    """What the model reads: language, separator, description."""
    return [f"{lang}{LANG_SEP}{text}" for text, lang in zip(texts, langs, strict=True)]


def class_ids(codes: pd.DataFrame, classes: Sequence[str], *, num_blocks: int) -> np.ndarray:
    """The flat head's class of each code.

    Parameters
    ----------
    codes : DataFrame of str, of shape (n, k)
        None where there is none.
    classes : sequence of str
    num_blocks : int
        k or more.

    Returns
    -------
    ndarray of int32, of shape (n, num_blocks)
        -1 where there is no code.

    Raises
    ------
    ValueError
        Where a code is no class.
    """
    index = pd.Index(classes, dtype=object)
    ids = np.full((len(codes), num_blocks), -1, dtype=np.int32)
    for i, column in enumerate(codes.columns):
        values = codes[column].to_numpy(dtype=object)
        ids[:, i] = index.get_indexer(pd.Index(values, dtype=object))
        strange = (ids[:, i] < 0) & ~np.isin(values.astype(str), ("None", "nan", MISSING))
        if strange.any():
            raise ValueError(f"the code {values[strange.argmax()]!r} in {column} is not in the key")
    return ids
