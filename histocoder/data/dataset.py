"""Batches of `examples.arrow`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from histocoder.config import LANG_SEP
from histocoder.data.augment import Augmenter
from histocoder.data.samplers import Share
from histocoder.data.store import StoredExamples
from histocoder.data.tokens import UNKNOWN, tokenize
from histocoder.formatters import BOS, EOS, MISSING, PAD, Formatter
from histocoder.formatters.tokenizers import CHARACTERS, CLS_ID, SEP_ID, Tokenizer, join_language

_ROWS_AT_ONCE = 1 << 18
_ROWS_MULTIPLE = 16  # rows that a merged batch keeps a multiple of: processors compile code for each shape


@dataclass
class Batch:
    """One rank's part of a step."""

    input_ids: Tensor  # token ids, of shape (B, S), int32
    targets: Tensor  # tokens of the codes, of shape (B, 2 + num_blocks * block_size), int64
    class_ids: Tensor  # classes of the codes, of shape (B, num_blocks), int64; -1 where there is none
    num_rows: int  # number of rows of the global batch; see `samplers.Share` for this and the next two
    num_target_blocks: int
    weight: float
    rows: np.ndarray  # indices of the rows in the dataset
    counts: Tensor  # number of times each row occurs, of shape (B,), float32; see `merged`

    def merged(self) -> Batch:
        """Return the batch with rows of equal text and codes once, and their number in `counts`.

        Loss and gradients are the same, except that such rows share their dropout.
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
        return self._mapped(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """Copy the batch to pinned memory; called by `DataLoader`."""
        return self._mapped(Tensor.pin_memory)

    def share_memory(self) -> Batch:
        return self._mapped(Tensor.share_memory_)

    def _mapped(self, function: Callable[[Tensor], Tensor]) -> Batch:
        return replace(
            self,
            input_ids=function(self.input_ids),
            targets=function(self.targets),
            class_ids=function(self.class_ids),
            counts=function(self.counts),
        )


@dataclass(eq=False)
class OccupationDataset(Dataset):
    """Descriptions with their codes; indexed by a `Share`, gives a `Batch`.

    Raises ValueError if a code does not fit the formatter, or is no class.
    """

    examples: StoredExamples
    formatter: Formatter  # the one that the examples were checked with
    classes: Sequence[str]  # codes of the flat head, in order
    max_len: int  # maximum number of tokens of an input
    tokenizer: Tokenizer = CHARACTERS
    augmenter: Augmenter | None = None
    pad_to: int | None = None  # number of positions of all batches; None: as many as the longest row needs

    def __post_init__(self) -> None:
        blocks = self.formatter.blocks(self.examples.code_table).astype(np.int64)
        self._blocks = np.pad(blocks, ((1, 0), (0, 0)), constant_values=PAD)  # an unused block, then each code's
        self._class_ids = _class_table(self.examples.code_table, self.classes)
        self._prefix_lengths = np.array([len(lang + LANG_SEP) for lang in self.examples.languages])
        self._lengths = self._count_tokens().astype(np.min_scalar_type(self.max_len))
        self.num_target_blocks = (self.examples.codes > 0).sum(1, dtype=np.uint8)
        """Number of codes of each row, of shape (n,)."""

    def __len__(self) -> int:
        return len(self.examples)

    def of(self, examples: StoredExamples, *, augmenter: Augmenter | None) -> OccupationDataset:
        """Return a dataset of other rows in the same form."""
        return replace(self, examples=examples, augmenter=augmenter)

    def lengths(self, epoch: int = 0) -> np.ndarray:
        """Return the number of tokens of each row in an epoch, of shape (n,).

        If tokens are not characters, these are the lengths before noise: only tokenising all rows once more would give
        those after it. They serve to make batches of like lengths; a batch is padded to its own rows.
        """
        if self.augmenter is None or not self.tokenizer.reads_characters:
            return self._lengths
        found = np.empty_like(self._lengths)
        for start in range(0, len(found), _ROWS_AT_ONCE):
            rows = np.arange(start, min(start + _ROWS_AT_ONCE, len(found)))
            noise = self.augmenter.noise(rows, epoch)
            prefix = self._prefix_lengths[self.examples.langs[rows]]
            text = self.augmenter.lengths(noise, self.examples.num_characters[rows] - prefix)
            prefix = np.where(noise.withheld, len(UNKNOWN + LANG_SEP), prefix)
            found[rows] = np.minimum(prefix + text + 2, self.max_len)
        return found

    def _count_tokens(self) -> np.ndarray:
        if self.tokenizer.reads_characters:
            return np.minimum(self.examples.num_characters.astype(np.int64) + 2, self.max_len)
        parts = np.array_split(np.arange(len(self)), -(-len(self) // _ROWS_AT_ONCE))
        tokens = (self.tokenizer.token_ids(self.examples.inputs(rows), max_len=self.max_len) for rows in parts)
        return np.concatenate([lengths for _, lengths, _ in tokens])

    def labels(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows, a row of k classes k times, and their classes, both of shape (num_labels,)."""
        class_ids = self._class_ids[self.examples.codes]  # (n, num_blocks)
        rows, blocks = (class_ids >= 0).nonzero()
        return rows, class_ids[rows, blocks]

    def descriptions(self, rows: np.ndarray) -> list[str]:
        """Return normalised descriptions, without their languages."""
        return self.examples.inputs(rows, skip=self._prefix_lengths[self.examples.langs[rows]])

    def __getitem__(self, share: Share) -> Batch:
        rows, input_ids = share.rows, self._input_ids(share)
        codes = self.examples.codes[rows]  # (B, num_blocks)
        blocks = self._blocks[codes].reshape(len(rows), -1)  # (B, num_blocks * block_size)
        targets = np.full((len(rows), 2 + blocks.shape[1]), BOS)
        targets[:, 1:-1], targets[:, -1] = blocks, EOS
        return Batch(
            input_ids=torch.from_numpy(input_ids),
            targets=torch.from_numpy(targets),
            class_ids=torch.from_numpy(self._class_ids[codes]),
            num_rows=share.num_rows,
            num_target_blocks=share.num_target_blocks,
            weight=share.weight,
            rows=rows,
            counts=torch.ones(len(rows)),
        )

    def _input_ids(self, share: Share) -> np.ndarray:
        """Return token ids, of shape (B, S)."""
        if self.augmenter is None and self.tokenizer.reads_characters:
            return self._characters(share.rows)
        texts = self.examples.inputs(share.rows) if self.augmenter is None else self._augment(self.augmenter, share)
        tokens = tokenize(texts, max_len=self.max_len, tokenizer=self.tokenizer)
        return tokens.pad(np.arange(len(texts)), max_len=self.max_len, num_positions=self.pad_to)

    def _characters(self, rows: np.ndarray) -> np.ndarray:
        """Return what `tokenize` makes of rows' characters, in half its time, since no strings are made of them."""
        characters, lengths = self.examples.characters(rows, most=self.max_len - 2)
        num_positions = self.pad_to or self.tokenizer.num_positions(int(lengths.max()) + 2, self.max_len)
        ids = np.zeros((len(rows), num_positions), dtype=np.int32)
        ids[:, 1:][np.arange(num_positions - 1) < lengths[:, None]] = characters
        ids[:, 0], ids[np.arange(len(rows)), lengths + 1] = CLS_ID, SEP_ID
        return ids

    def _augment(self, augmenter: Augmenter, share: Share) -> list[str]:
        noise = augmenter.noise(share.rows, share.epoch)
        altered = [augmenter.alter(text, noise, i) for i, text in enumerate(self.descriptions(share.rows))]
        langs = [self.examples.languages[lang] for lang in self.examples.langs[share.rows]]
        return join_language(altered, np.where(noise.withheld, UNKNOWN, langs).tolist())


def _class_table(codes: Sequence[str], classes: Sequence[str]) -> np.ndarray:
    """Return the classes of an unused block and of each code, of shape (1 + num_codes,); -1 where there is none."""
    index = {MISSING: -1} | {code: i for i, code in enumerate(classes)}
    if strange := [code for code in codes if code not in index]:
        raise ValueError(f"the code {strange[0]!r} is not in the key")
    return np.array([-1, *(index[code] for code in codes)], dtype=np.int64)
