"""The data set of a run: its examples as batches of tensors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from pandas.util import hash_array
from torch import Tensor
from torch.utils.data import Dataset

from histocoder.config import LANG_SEP
from histocoder.data.augment import Augmenter
from histocoder.data.examples import TITLES, Examples
from histocoder.data.samplers import BatchIndices
from histocoder.data.titles import WEIGHT
from histocoder.formatters import BOS, EOS, MISSING, PAD, Formatter
from histocoder.model.ngram import Lookup
from histocoder.text.tokenizers import (
    CHARACTERS,
    CLS_ID,
    SEP_ID,
    UNKNOWN,
    Tokenizer,
    join_language,
    tokenize,
)

_ROWS_AT_ONCE = 1 << 18
_ROWS_MULTIPLE = (
    16  # rows that a merged batch keeps a multiple of: processors compile code for each shape
)


@dataclass
class Batch:
    """One rank's part of a step."""

    input_ids: Tensor  # token ids, of shape (B, S), int32
    targets: Tensor  # tokens of the codes, of shape (B, 2 + num_blocks * block_size), int64
    class_ids: (
        Tensor  # classes of the codes, of shape (B, num_blocks), int64; -1 where there is none
    )
    attribute_ids: (
        Tensor  # categories of the attributes, of shape (B, A), int64; 0 is none, -1 not known
    )
    num_rows: int  # number of rows of the global batch; see `samplers.BatchIndices` for this and the next two
    num_target_blocks: int
    weight: float
    rows: Tensor  # indices of the rows in the dataset, of shape (B,)
    counts: Tensor  # number of times each row occurs, of shape (B,), float32; see `merged`
    lookup: Lookup | None = None  # n-grams, where the encoder reads them on a GPU

    def merged(self) -> "Batch":
        """Return the batch with rows of equal text and codes once, and their number in `counts`.

        Loss and gradients are the same, except that such rows share their dropout.
        """
        labels = (ids.numpy().astype(np.int32) for ids in (self.class_ids, self.attribute_ids))
        columns = (self.input_ids.numpy(), *labels)
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
        merged = replace(self, counts=torch.from_numpy(counts))
        return merged.mapped(lambda tensor: tensor[torch.from_numpy(kept)])

    def to(self, device: torch.device) -> "Batch":
        return self.mapped(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "Batch":
        """Copy the batch to pinned memory; called by `DataLoader`."""
        return self.mapped(Tensor.pin_memory)

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        """Return the batch with a function of each tensor in place of it."""
        values: dict[str, Any] = {
            name: function(x) for name, x in vars(self).items() if isinstance(x, Tensor)
        }
        lookup = None if self.lookup is None else self.lookup.mapped(function)
        return replace(self, **values, lookup=lookup)


@dataclass(eq=False)
class OccupationDataset(Dataset):
    """Descriptions with their codes; indexed by a `BatchIndices`, gives a `Batch`.

    Raises ValueError if a code does not fit the formatter, or is no class.
    """

    examples: Examples
    formatter: Formatter  # the one that the examples were checked with
    classes: Sequence[str]  # codes of the flat head, in order
    max_len: int  # maximum number of tokens of an input
    attributes: Mapping[str, Sequence[str]] = field(
        default_factory=dict
    )  # column -> categories, beside none
    tokenizer: Tokenizer = CHARACTERS
    augmenter: Augmenter | None = None
    pad_to: int | None = (
        None  # number of positions of all batches; None: as many as the longest row needs
    )
    # Whether each description is an example once, with its codes by their share of its rows
    once: bool = False

    def __post_init__(self) -> None:
        blocks = self.formatter.blocks(self.examples.code_table).astype(np.int64)
        self._blocks = np.pad(
            blocks, ((1, 0), (0, 0)), constant_values=PAD
        )  # an unused block, then each code's
        index = {MISSING: -1} | {code: i for i, code in enumerate(self.classes)}
        if strange := [code for code in self.examples.code_table if code not in index]:
            raise ValueError(f"the code {strange[0]!r} is not in the key")
        # the class of an unused block and of each code, -1 where there is none
        self._class_ids = np.array(
            [-1, *(index[code] for code in self.examples.code_table)], dtype=np.int64
        )
        # A model that is trained further may write more codes than these data have columns of.
        code_index = self.examples.code_index
        num_missing = self.formatter.num_blocks - code_index.shape[1]
        self._code_index = np.pad(code_index, ((0, 0), (0, num_missing)))  # (n, num_blocks)
        ids = [
            category_ids(self.examples.attributes[name], own)
            for name, own in self.attributes.items()
        ]
        self._attribute_ids = np.array(ids, dtype=np.int32).reshape(len(ids), len(self)).T  # (n, A)
        self._prefix_lengths = np.array([len(lang + LANG_SEP) for lang in self.examples.languages])
        if self.tokenizer.reads_characters:
            lengths = self.examples.num_characters.astype(np.int64) + 2
            self.num_cut = int((lengths > self.max_len).sum())
            lengths = np.minimum(lengths, self.max_len)
        else:
            parts = np.array_split(np.arange(len(self)), -(-len(self) // _ROWS_AT_ONCE))
            tokens = (
                self.tokenizer.token_ids(self.examples.inputs(rows), max_len=self.max_len)
                for rows in parts
            )
            of_parts = [(numbers, num_cut) for _, numbers, num_cut in tokens]
            lengths = np.concatenate([numbers for numbers, _ in of_parts])
            self.num_cut = sum(num_cut for _, num_cut in of_parts)
        self._lengths = lengths.astype(np.min_scalar_type(self.max_len))
        self.weights = np.broadcast_to(np.float32(1.0), len(self))
        """Weight of each row in the loss, of shape (n,)."""
        self.rows = np.arange(len(self), dtype=np.int32)
        """Rows that are examples to train on, of shape (m,)."""
        if TITLES in self.examples.splits:
            is_title = pc.equal(self.examples.table["split"].cast(pa.string()), TITLES).to_numpy()
            self.weights = np.where(is_title, WEIGHT, np.float32(1.0))
        self.num_titles = int((self.weights < 1).sum())
        if self.once:
            # the first row of each text, codes and attributes counts, by their share of the text's
            # rows
            _, text = self.distinct_texts()
            pairs = np.column_stack([text, self._code_index, self._attribute_ids])
            _, first, counts = np.unique(pairs, axis=0, return_index=True, return_counts=True)
            shares = np.zeros(len(self), dtype=np.float32)
            shares[first] = counts / np.bincount(text)[text[first]]
            self.rows, self.weights = np.sort(first).astype(np.int32), self.weights * shares
        self.num_target_blocks = (self._code_index > 0).sum(1, dtype=np.uint8)
        """Number of codes of each row, of shape (n,)."""

    def __len__(self) -> int:
        return len(self.examples)

    def of(
        self, examples: Examples, *, augmenter: Augmenter | None, once: bool = False
    ) -> "OccupationDataset":
        """Return a dataset of other rows in the same form."""
        return replace(self, examples=examples, augmenter=augmenter, once=once)

    def distinct_texts(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the first row of each distinct text, of shape (m,), and the text of each row, of
        shape (n,).
        """
        parts = np.array_split(np.arange(len(self)), -(-len(self) // _ROWS_AT_ONCE))
        hashes = [
            hash_array(np.array(self.examples.inputs(rows), dtype=object), categorize=False)
            for rows in parts
        ]
        _, first, text_of_row = np.unique(
            np.concatenate(hashes), return_index=True, return_inverse=True
        )
        return first, text_of_row

    def lengths(self, epoch: int = 0) -> np.ndarray:
        """Return the number of tokens of each row in an epoch, of shape (n,).

        If tokens are not characters, these are the lengths before noise: only tokenising all rows
        once more would give those after it. They serve to make batches of like lengths; a batch is
        padded to its own rows.
        """
        if self.augmenter is None or not self.tokenizer.reads_characters:
            return self._lengths
        found = np.empty_like(self._lengths)
        for start in range(0, len(found), _ROWS_AT_ONCE):
            rows = np.arange(start, min(start + _ROWS_AT_ONCE, len(found)))
            noise = self.augmenter.noise(rows, epoch)
            prefix = self._prefix_lengths[self.examples.lang_index[rows]]
            text = self.augmenter.lengths(noise, self.examples.num_characters[rows] - prefix)
            prefix = np.where(noise.withheld, len(UNKNOWN + LANG_SEP), prefix)
            found[rows] = np.minimum(prefix + text + 2, self.max_len)
        return found

    def labels(self, rows: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return rows, a row of k classes k times, and their classes, both of shape (num_labels,).

        These are all rows to train on, or those given.
        """
        rows = self.rows if rows is None else rows
        class_ids = self._class_ids[self._code_index[rows]]  # (m, num_blocks)
        index, blocks = (class_ids >= 0).nonzero()
        return rows[index], class_ids[index, blocks]

    def attribute_labels(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return, of each attribute, the rows to train on where it is known, and their
        categories.
        """
        columns = self._attribute_ids[self.rows].T
        return [(self.rows[ids >= 0], ids[ids >= 0]) for ids in columns]

    def descriptions(self, rows: np.ndarray) -> list[str]:
        """Return normalised descriptions, without their languages."""
        return [text.partition(LANG_SEP)[2] for text in self.examples.inputs(rows)]

    def __getitem__(self, share: BatchIndices) -> Batch:
        rows, input_ids = share.rows, self._input_ids(share)
        codes = self._code_index[rows]  # (B, num_blocks)
        blocks = self._blocks[codes].reshape(len(rows), -1)  # (B, num_blocks * block_size)
        targets = np.full((len(rows), 2 + blocks.shape[1]), BOS)
        targets[:, 1:-1], targets[:, -1] = blocks, EOS
        return Batch(
            input_ids=torch.from_numpy(input_ids),
            targets=torch.from_numpy(targets),
            class_ids=torch.from_numpy(self._class_ids[codes]),
            attribute_ids=torch.from_numpy(self._attribute_ids[rows].astype(np.int64)),
            num_rows=share.num_rows,
            num_target_blocks=share.num_target_blocks,
            weight=share.weight,
            rows=torch.from_numpy(rows),
            counts=torch.from_numpy(self.weights[rows]),
        )

    def _input_ids(self, share: BatchIndices) -> np.ndarray:
        """Return token ids, of shape (B, S)."""
        if self.augmenter is None and self.tokenizer.reads_characters:
            return self._characters(share.rows)
        texts = self.examples.inputs(share.rows)
        if (augmenter := self.augmenter) is not None:
            noise = augmenter.noise(share.rows, share.epoch)
            altered = [
                augmenter.alter(text, noise, i)
                for i, text in enumerate(self.descriptions(share.rows))
            ]
            langs = [self.examples.languages[lang] for lang in self.examples.lang_index[share.rows]]
            texts = join_language(altered, np.where(noise.withheld, UNKNOWN, langs).tolist())
        tokens = tokenize(texts, max_len=self.max_len, tokenizer=self.tokenizer)
        return tokens.pad(np.arange(len(texts)), max_len=self.max_len, num_positions=self.pad_to)

    def _characters(self, rows: np.ndarray) -> np.ndarray:
        """Return what `tokenize` makes of rows' characters, in half its time, since no strings are
        made of them.
        """
        characters, lengths = self.examples.characters(rows, most=self.max_len - 2)
        num_positions = self.pad_to or self.tokenizer.num_positions(
            int(lengths.max()) + 2, self.max_len
        )
        ids = np.zeros((len(rows), num_positions), dtype=np.int32)
        ids[:, 1:][np.arange(num_positions - 1) < lengths[:, None]] = characters
        ids[:, 0], ids[np.arange(len(rows)), lengths + 1] = CLS_ID, SEP_ID
        return ids


def category_ids(column: pa.ChunkedArray, categories: Sequence[str]) -> np.ndarray:
    """Return the index of each category, from 1, writable; 0 where there is none, -1 where that is
    not known.
    """
    return (
        pc.fill_null(pc.index_in(column, value_set=pa.array(["", *categories], pa.string())), -1)
        .to_numpy()
        .copy()
    )
