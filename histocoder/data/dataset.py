"""The data set of a run: its examples as batches of tensors."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from histocoder.data.titles import TITLE_WEIGHT
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
_ROWS_MULTIPLE = 16
"""Divisor of the number of rows of a merged batch: processors compile code for each shape."""


@dataclass
class Batch:
    """One rank's part of a step."""

    input_ids: Tensor
    """Token ids, of shape (B, S), int32."""
    targets: Tensor
    """Tokens of the codes, of shape (B, 2 + num_blocks * block_size), int64."""
    class_ids: Tensor
    """Classes of the codes, of shape (B, num_blocks), int64; -1 where there is none."""
    attribute_ids: Tensor
    """Categories of the attributes, of shape (B, A), int64; 0 is none, -1 not known."""
    num_rows: int
    """Number of rows of the global batch; see `BatchIndices` for this and the next two."""
    num_target_blocks: int
    weight: float
    rows: Tensor
    """Indices of the rows in the dataset, of shape (B,)."""
    counts: Tensor
    """Number of times each row occurs, of shape (B,), float32; see `merged`."""
    lookup: Lookup | None = None
    """N-grams, where the encoder reads them on a GPU."""

    def merged(self) -> "Batch":
        """Return the batch with rows of equal text and codes once, and their number in `counts`.

        Loss and gradients are the same, except that such rows share their dropout.
        """
        columns = [self.input_ids, self.class_ids, self.attribute_ids]
        table = np.concatenate([column.numpy().astype(np.int32) for column in columns], axis=1)
        bytes_of_rows = np.ascontiguousarray(table).view(np.dtype((np.void, table.strides[0])))
        _, first, group = np.unique(bytes_of_rows[:, 0], return_index=True, return_inverse=True)

        # the first row of each group stays, and as many others as fill up a multiple
        is_repeat = np.ones(len(table), dtype=bool)
        is_repeat[first] = False
        num_rows = math.ceil(len(first) / _ROWS_MULTIPLE) * _ROWS_MULTIPLE
        dropped = np.flatnonzero(is_repeat)[max(num_rows - len(first), 0) :]
        if not len(dropped):
            return self

        # a row that is dropped counts with the first of its group
        counts = self.counts.numpy().copy()
        np.add.at(counts, first[group[dropped]], counts[dropped])
        rows = torch.from_numpy(np.setdiff1d(np.arange(len(table)), dropped))
        return replace(self, counts=torch.from_numpy(counts)).mapped(lambda tensor: tensor[rows])

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
    formatter: Formatter
    """Formatter that the examples were checked with."""
    classes: Sequence[str]
    """Codes of the flat head, in order."""
    max_len: int
    """Maximum number of tokens of an input."""
    attributes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Column -> its categories, beside none."""
    tokenizer: Tokenizer = CHARACTERS
    augmenter: Augmenter | None = None
    pad_to: int | None = None
    """Number of positions of all batches; None: as many as the longest row needs."""
    once: bool = False
    """Whether each description is an example once, with its codes by their share of its rows."""

    def __post_init__(self) -> None:
        self._index_codes()
        self._index_attributes()
        self._measure_inputs()
        self._weigh_rows()

    def _index_codes(self) -> None:
        """Set the blocks and the class of each distinct code, and the codes of each row."""
        codes = self.examples.code_table
        class_of = {MISSING: -1}
        for i, code in enumerate(self.classes):
            class_of[code] = i
        class_ids = [-1]
        for code in codes:
            if code not in class_of:
                raise ValueError(f"the code {code!r} is not in the key")
            class_ids.append(class_of[code])
        self._class_ids = np.array(class_ids, dtype=np.int64)

        # code 0 is none, whose block is padding
        blocks = self.formatter.blocks(codes).astype(np.int64)
        self._blocks = np.pad(blocks, ((1, 0), (0, 0)), constant_values=PAD)

        # a model that is trained further may write more codes than these data have columns of
        code_index = self.examples.code_index
        num_missing = self.formatter.num_blocks - code_index.shape[1]
        self._code_index = np.pad(code_index, ((0, 0), (0, num_missing)))  # (n, num_blocks)
        self.num_target_blocks = (self._code_index > 0).sum(1, dtype=np.uint8)
        """Number of codes of each row, of shape (n,)."""

    def _index_attributes(self) -> None:
        shape = (len(self), len(self.attributes))
        self._attribute_ids = np.empty(shape, dtype=np.int32, order="F")  # (n, A)
        for i, (name, categories) in enumerate(self.attributes.items()):
            self._attribute_ids[:, i] = category_ids(self.examples.attributes[name], categories)

    def _measure_inputs(self) -> None:
        """Set the number of tokens of each row, and the number of rows that are cut."""
        self._prefix_lengths = np.array([len(lang + LANG_SEP) for lang in self.examples.languages])
        if self.tokenizer.reads_characters:
            # two more for the first and the last token
            lengths = self.examples.inputs.lengths.astype(np.int64) + 2
            self.num_cut = int((lengths > self.max_len).sum())
            lengths = np.minimum(lengths, self.max_len)
        else:
            lengths_of_parts: list[np.ndarray] = []
            self.num_cut = 0
            for texts in self._texts():
                _, lengths, num_cut = self.tokenizer.token_ids(texts, max_len=self.max_len)
                lengths_of_parts.append(lengths)
                self.num_cut += num_cut
            lengths = np.concatenate(lengths_of_parts)
        self._lengths = lengths.astype(np.min_scalar_type(self.max_len))

    def _weigh_rows(self) -> None:
        """Set the rows to train on, and their weights."""
        self.rows = np.arange(len(self), dtype=np.int32)
        """Rows that are examples to train on, of shape (m,)."""
        self.weights = np.broadcast_to(np.float32(1.0), len(self))
        """Weight of each row in the loss, of shape (n,)."""
        if TITLES in self.examples.splits:
            is_title = pc.equal(self.examples.table["split"].cast(pa.string()), TITLES).to_numpy()
            self.weights = np.where(is_title, TITLE_WEIGHT, np.float32(1.0))
        self.num_titles = int((self.weights < 1).sum())
        if not self.once:
            return

        # the first row of each text, codes and attributes stands for all of them, and weighs their
        # share of the text's rows
        _, text = self.distinct_texts()
        pairs = np.column_stack([text, self._code_index, self._attribute_ids])
        _, first, counts = np.unique(pairs, axis=0, return_index=True, return_counts=True)
        shares = np.zeros(len(self), dtype=np.float32)
        shares[first] = counts / np.bincount(text)[text[first]]
        self.rows = np.sort(first).astype(np.int32)
        self.weights = self.weights * shares

    def _texts(self) -> Iterator[list[str]]:
        """Yield the inputs of all rows, some at a time."""
        num_parts = math.ceil(len(self) / _ROWS_AT_ONCE)
        for rows in np.array_split(np.arange(len(self)), num_parts):
            yield self.examples.inputs.texts(rows)

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
        hashes = [
            hash_array(np.array(texts, dtype=object), categorize=False) for texts in self._texts()
        ]
        _, first_row, text_of_row = np.unique(
            np.concatenate(hashes), return_index=True, return_inverse=True
        )
        return first_row, text_of_row

    def lengths(self, epoch: int = 0) -> np.ndarray:
        """Return the number of tokens of each row in an epoch, of shape (n,).

        If tokens are not characters, these are the lengths before noise: only tokenising all rows
        once more would give those after it. They serve to make batches of like lengths; a batch is
        padded to its own rows.
        """
        if self.augmenter is None or not self.tokenizer.reads_characters:
            return self._lengths

        # noise changes the length of a text, and that of its language if this is withheld
        lengths = np.empty_like(self._lengths)
        for start in range(0, len(self), _ROWS_AT_ONCE):
            rows = np.arange(start, min(start + _ROWS_AT_ONCE, len(self)))
            noise = self.augmenter.noise(rows, epoch)
            prefix = self._prefix_lengths[self.examples.lang_index[rows]]
            text = self.augmenter.lengths(noise, self.examples.inputs.lengths[rows] - prefix)
            prefix = np.where(noise.withheld, len(UNKNOWN + LANG_SEP), prefix)
            lengths[rows] = np.minimum(prefix + text + 2, self.max_len)
        return lengths

    def labels(self, rows: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return rows, a row of k classes k times, and their classes, both of shape (num_labels,).

        These are all rows to train on, or those given.
        """
        if rows is None:
            rows = self.rows
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
        return [text.partition(LANG_SEP)[2] for text in self.examples.inputs.texts(rows)]

    def __getitem__(self, indices: BatchIndices) -> Batch:
        # missing codes are index 0: a block of padding, and class -1
        rows = indices.rows
        codes = self._code_index[rows]  # (B, num_blocks)
        blocks = self._blocks[codes].reshape(len(rows), -1)  # (B, num_blocks * block_size)
        targets = np.pad(blocks, ((0, 0), (1, 1)), constant_values=((0, 0), (BOS, EOS)))
        return Batch(
            input_ids=torch.from_numpy(self._input_ids(indices)),
            targets=torch.from_numpy(targets),
            class_ids=torch.from_numpy(self._class_ids[codes]),
            attribute_ids=torch.from_numpy(self._attribute_ids[rows].astype(np.int64)),
            num_rows=indices.num_rows,
            num_target_blocks=indices.num_target_blocks,
            weight=indices.weight,
            rows=torch.from_numpy(rows),
            counts=torch.from_numpy(self.weights[rows]),
        )

    def _input_ids(self, indices: BatchIndices) -> np.ndarray:
        """Return token ids, of shape (B, S)."""
        augmenter = self.augmenter
        if augmenter is None and self.tokenizer.reads_characters:
            return self._characters(indices.rows)

        # noise alters the descriptions, and withholds languages, before they are joined
        texts = self.examples.inputs.texts(indices.rows)
        if augmenter is not None:
            noise = augmenter.noise(indices.rows, indices.epoch)
            descriptions = self.descriptions(indices.rows)
            altered = [augmenter.alter(text, noise, i) for i, text in enumerate(descriptions)]
            langs = np.array(self.examples.languages)[self.examples.lang_index[indices.rows]]
            texts = join_language(altered, np.where(noise.withheld, UNKNOWN, langs).tolist())
        tokens = tokenize(texts, max_len=self.max_len, tokenizer=self.tokenizer)
        return tokens.pad(np.arange(len(texts)), max_len=self.max_len, num_positions=self.pad_to)

    def _characters(self, rows: np.ndarray) -> np.ndarray:
        """Return what `tokenize` makes of rows' characters, in half its time, since no strings are
        made of them.
        """
        characters, lengths = self.examples.inputs.code_points(rows, max_length=self.max_len - 2)
        num_positions = self.pad_to
        if num_positions is None:
            num_positions = self.tokenizer.num_positions(int(lengths.max()) + 2, self.max_len)

        # a row is its first token, its characters, its last token and padding
        ids = np.zeros((len(rows), num_positions), dtype=np.int32)
        ids[:, 0] = CLS_ID
        ids[:, 1:][np.arange(num_positions - 1) < lengths[:, None]] = characters
        ids[np.arange(len(rows)), lengths + 1] = SEP_ID
        return ids


def category_ids(column: pa.ChunkedArray, categories: Sequence[str]) -> np.ndarray:
    """Return the index of each category, from 1, writable; 0 where there is none, -1 where that is
    not known.
    """
    index = pc.index_in(column, value_set=pa.array(["", *categories], pa.string()))
    return pc.fill_null(index, -1).to_numpy().copy()
