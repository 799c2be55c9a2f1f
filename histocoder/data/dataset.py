"""The data set of a run: its examples as batches of tensors."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

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

        # each row as one value of bytes, which are compared faster than numbers along an axis
        row_type = np.dtype((np.void, table.itemsize * table.shape[1]))
        row_bytes = np.ascontiguousarray(table).view(row_type)[:, 0]
        _, first, group = np.unique(row_bytes, return_index=True, return_inverse=True)

        # the first row of each group stays, and as many others as fill up a multiple
        is_repeat = np.ones(len(table), dtype=bool)
        is_repeat[first] = False
        num_fillers = -len(first) % _ROWS_MULTIPLE
        dropped = np.flatnonzero(is_repeat)[num_fillers:]
        if not len(dropped):
            return self

        # a row that is dropped counts with the first of its group
        counts = self.counts.numpy().copy()
        np.add.at(counts, first[group[dropped]], counts[dropped])
        is_kept = np.ones(len(table), dtype=bool)
        is_kept[dropped] = False
        rows = torch.from_numpy(np.flatnonzero(is_kept))
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


class DistinctTexts(NamedTuple):
    """The m distinct texts of n rows."""

    first_rows: np.ndarray
    """First row of each text, of shape (m,)."""
    text_of_row: np.ndarray
    """Index of each row's text, of shape (n,)."""


class InputLengths(NamedTuple):
    """Lengths of the inputs of n rows."""

    lengths: np.ndarray
    """Number of tokens of each row, at most as many as the model reads, of shape (n,)."""
    num_cut: int
    """Number of rows that are longer than that."""


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
        # code 0 is none: class -1, and a block of padding
        self._class_ids = self._classes_of_codes()  # (1 + number of distinct codes,)
        blocks = self.formatter.blocks(self.examples.code_table).astype(np.int64)
        self._blocks = np.pad(blocks, ((1, 0), (0, 0)), constant_values=PAD)

        # a model that is trained further may write more codes than these data have columns of
        code_index = self.examples.code_index
        num_missing = self.formatter.num_blocks - code_index.shape[1]
        self._code_index = np.pad(code_index, ((0, 0), (0, num_missing)))  # (n, num_blocks)
        self.num_target_blocks = (self._code_index > 0).sum(1, dtype=np.uint8)
        """Number of codes of each row, of shape (n,)."""
        self._attribute_ids = self._attributes_of_rows()  # (n, A)

        lengths, self.num_cut = self._input_lengths()
        self._lengths = lengths.astype(np.min_scalar_type(self.max_len))
        self._prefix_lengths = np.array([len(lang + LANG_SEP) for lang in self.examples.languages])

        self.rows = np.arange(len(self), dtype=np.int32)
        """Rows that are examples to train on, of shape (m,)."""
        self.weights = self._title_weights()
        """Weight of each row in the loss, of shape (n,)."""
        self.num_titles = int((self.weights < 1).sum())
        if self.once:
            shares = self._shares()
            self.rows = np.flatnonzero(shares).astype(np.int32)
            self.weights = self.weights * shares

    def _classes_of_codes(self) -> np.ndarray:
        """Return the class of no code, and of each distinct code."""
        class_of = {MISSING: -1}
        for i, code in enumerate(self.classes):
            class_of[code] = i
        class_ids = [-1]
        for code in self.examples.code_table:
            if code not in class_of:
                raise ValueError(f"the code {code!r} is not in the key")
            class_ids.append(class_of[code])
        return np.array(class_ids, dtype=np.int64)

    def _attributes_of_rows(self) -> np.ndarray:
        """Return the categories of each row, of shape (n, A)."""
        ids = np.empty((len(self), len(self.attributes)), dtype=np.int32, order="F")
        for i, (name, categories) in enumerate(self.attributes.items()):
            ids[:, i] = category_ids(self.examples.attributes[name], categories)
        return ids

    def _input_lengths(self) -> InputLengths:
        """Return the number of tokens of each row, and how many rows are cut."""
        if self.tokenizer.reads_characters:
            return character_lengths(self.examples, max_len=self.max_len)

        lengths_of_parts: list[np.ndarray] = []
        num_cut = 0
        for rows in self._parts():
            texts = self.examples.inputs.texts(rows)
            _, lengths, num_cut_of_part = self.tokenizer.token_ids(texts, max_len=self.max_len)
            lengths_of_parts.append(lengths)
            num_cut += num_cut_of_part
        return InputLengths(np.concatenate(lengths_of_parts), num_cut)

    def _title_weights(self) -> np.ndarray:
        """Return the weight of each row as a title or another description, of shape (n,)."""
        if TITLES not in self.examples.splits:
            return np.broadcast_to(np.float32(1.0), len(self))
        is_title = pc.equal(self.examples.table["split"].cast(pa.string()), TITLES).to_numpy()
        return np.where(is_title, TITLE_WEIGHT, np.float32(1.0))

    def _shares(self) -> np.ndarray:
        """Return each row's share of the rows of its text, of shape (n,).

        The first row of each text, codes and attributes has that of all of them, and the others 0.
        """
        text = self.distinct_texts().text_of_row
        pairs = np.column_stack([text, self._code_index, self._attribute_ids])
        _, first, counts = np.unique(pairs, axis=0, return_index=True, return_counts=True)
        shares = np.zeros(len(self), dtype=np.float32)
        shares[first] = counts / np.bincount(text)[text[first]]
        return shares

    def _parts(self) -> Iterator[np.ndarray]:
        """Yield the indices of all rows, some at a time."""
        for start in range(0, len(self), _ROWS_AT_ONCE):
            yield np.arange(start, min(start + _ROWS_AT_ONCE, len(self)))

    def __len__(self) -> int:
        return len(self.examples)

    def of(self, examples: Examples, *, once: bool = False) -> "OccupationDataset":
        """Return a dataset of other rows in the same form, without noise."""
        return replace(self, examples=examples, augmenter=None, once=once)

    def distinct_texts(self) -> DistinctTexts:
        """Return the distinct texts, by hash."""
        hashes: list[np.ndarray] = []
        for rows in self._parts():
            texts = np.array(self.examples.inputs.texts(rows), dtype=object)
            hashes.append(hash_array(texts, categorize=False))
        _, first_rows, text_of_row = np.unique(
            np.concatenate(hashes), return_index=True, return_inverse=True
        )
        return DistinctTexts(first_rows, text_of_row)

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
        for rows in self._parts():
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


def character_lengths(examples: Examples, *, max_len: int) -> InputLengths:
    """Return the lengths of inputs whose tokens are characters."""
    # two more for the first and the last token
    lengths = examples.inputs.lengths.astype(np.int64) + 2
    return InputLengths(np.minimum(lengths, max_len), int((lengths > max_len).sum()))


def category_ids(column: pa.ChunkedArray, categories: Sequence[str]) -> np.ndarray:
    """Return the index of each category, from 1, writable; 0 where there is none, -1 where that is
    not known.
    """
    index = pc.index_in(column, value_set=pa.array(["", *categories], pa.string()))
    return pc.fill_null(index, -1).to_numpy().copy()
