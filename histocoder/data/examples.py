"""Examples: descriptions with languages and codes, in memory or mapped from `examples.arrow`."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from histocoder.formatters import MISSING
from histocoder.text.packed_texts import PackedTexts

TEXT_COL = "occ1"
LANG_COL = "lang"
TRAIN = "train"
VAL = "validation"
HELD_OUT = "held out"
TITLES = "titles"
SEEN = "seen"
"""Rows to validate on of descriptions that are, or were, trained on as well."""
SPLITS = (TRAIN, VAL, HELD_OUT, TITLES, SEEN)
NO_SPLIT = -1
"""Split of rows that are dropped, or left out since their correction is held out."""
ROW_FIELDS = pa.schema(
    [
        ("row", pa.int64()),  # position in its file, from 0
        ("line", pa.int64()),  # its first line there; in Parquet the row, from 1
        ("text", pa.string()),  # description
        ("lang", pa.string()),  # see `Language`
        ("reason", pa.string()),  # why it is dropped; null if it is kept
    ]
)
"""First columns of checked rows; behind them are those of codes, which a dropped row has as the
file does.
"""
CODES_PREFIX = "codes."
"""Prefix of the names of columns of codes."""
ATTRIBUTES_PREFIX = "attributes."
"""Prefix of the names of columns of attributes: "" where a row has none, null where that is not
known.
"""


def row_schema(target_cols: Sequence[str], attribute_cols: Sequence[str] = ()) -> pa.Schema:
    """Return the columns of checked rows."""
    names = [f"{CODES_PREFIX}{name}" for name in target_cols]
    names += [f"{ATTRIBUTES_PREFIX}{name}" for name in attribute_cols]
    fields = list(ROW_FIELDS)
    fields.extend(pa.field(name, pa.string()) for name in names)
    return pa.schema(fields)


def is_codes(name: str) -> bool:
    """Return whether a column of checked rows is one of codes."""
    return name.startswith(CODES_PREFIX)


class _IndexedColumns(NamedTuple):
    """Columns of texts as indices into their distinct texts."""

    indices: np.ndarray  # from 1, 0 where there is none; of shape (n, number of columns)
    distinct: tuple[str, ...]


class Examples:
    """Descriptions with languages and codes, of n rows.

    Those that `open` maps into memory share one copy in all processes of a node, and also have the
    `input` that models read. Pickling them keeps the path and the splits alone.
    """

    def __init__(
        self,
        table: pa.Table,
        *,
        path: Path | None = None,
        splits: tuple[str, ...] = (),
        content: pa.Buffer | None = None,
    ) -> None:
        self.table = table
        """Columns `text`, `lang` and those of codes; see `row_schema` and `ExampleWriter`."""
        self.path = path
        """File that is mapped."""
        self.splits = splits
        """Splits of that file."""
        self._content = content
        """Content of that file."""

    @classmethod
    def open(cls, path: Path, *splits: str) -> "Examples":
        """Map the rows of some splits, those of one behind those of the other, in the order of the
        file.
        """
        content = pa.memory_map(str(path)).read_buffer()
        file = pa.ipc.open_file(content)

        # a batch is of one split, so that its first row tells
        batches = []
        for split in splits:
            for i in range(file.num_record_batches):
                batch = file.get_batch(i)
                if batch["split"][0].as_py() == split:
                    batches.append(batch)
        table = pa.Table.from_batches(batches, schema=file.schema)
        return cls(table, path=path, splits=splits, content=content)

    @classmethod
    def of(cls, texts: Sequence[str], langs: Sequence[str], codes: pd.DataFrame) -> "Examples":
        """Return examples from a column of codes for each of `codes`, None where there is none."""
        columns = {"text": texts, "lang": langs}
        columns |= {f"{CODES_PREFIX}{name}": codes[name] for name in codes}
        arrays = {name: pa.array(column, pa.string()) for name, column in columns.items()}
        return cls(pa.table(arrays))

    @classmethod
    def join(cls, parts: "Sequence[Examples]") -> "Examples":
        return cls(pa.concat_tables([part.table for part in parts]))

    def __len__(self) -> int:
        return len(self.table)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.path is None:
            return Examples, (self.table,)
        return Examples.open, (self.path, *self.splits)

    @cached_property
    def texts(self) -> list[str]:
        return self.table["text"].to_pylist()

    @cached_property
    def langs(self) -> list[str]:
        return self.table["lang"].to_pylist()

    @cached_property
    def codes(self) -> pd.DataFrame:
        """Codes, of shape (n, k): strings, None where there is none."""
        columns = {
            name.removeprefix(CODES_PREFIX): self.table[name].to_numpy()
            for name in self._code_columns
        }
        return pd.DataFrame(columns, dtype=object)

    @cached_property
    def attributes(self) -> dict[str, pa.ChunkedArray]:
        """Columns of attributes, by name; see `ATTRIBUTES_PREFIX`."""
        names = [name for name in self.table.column_names if name.startswith(ATTRIBUTES_PREFIX)]
        return {name.removeprefix(ATTRIBUTES_PREFIX): self.table[name] for name in names}

    @property
    def _code_columns(self) -> list[str]:
        return [name for name in self.table.column_names if is_codes(name)]

    def take(self, rows: np.ndarray) -> "Examples":
        return Examples(self.table.take(pa.array(rows)))

    def coded(self) -> "Examples":
        """Return the rows that have codes."""
        first = self.table[self._code_columns[0]]
        return Examples(self.table.filter(pc.fill_null(pc.not_equal(first, MISSING), False)))

    def sample(self, num_rows: int, *, seed: int) -> "Examples":
        """Draw rows at random, in their order; all of them if there are fewer."""
        mask = np.zeros(len(self), dtype=bool)
        mask[np.random.default_rng(seed).permutation(len(self))[:num_rows]] = True
        return Examples(self.table.filter(pa.array(mask)))  # chunk by chunk, unlike `take`

    def chunks(self) -> Iterator["Examples"]:
        """Yield all rows, a chunk at a time."""
        yield from map(Examples, _chunks(self.table))

    def to_tables(self) -> Iterator[pa.Table]:
        """Yield descriptions, languages, codes, and attributes that some rows state, under the
        names that people know, by chunks.
        """
        names = {"text": TEXT_COL, "lang": LANG_COL}
        names |= {name: name.removeprefix(CODES_PREFIX) for name in self._code_columns}
        for name, column in self.attributes.items():
            if column.null_count < len(column):
                names[f"{ATTRIBUTES_PREFIX}{name}"] = name
        yield from _chunks(self.table.select(list(names)).rename_columns(list(names.values())))

    @cached_property
    def languages(self) -> tuple[str, ...]:
        """Distinct languages."""
        return self._indexed_langs.distinct

    @cached_property
    def lang_index(self) -> np.ndarray:
        """Index of each row's language in `languages`, of shape (n,)."""
        return self._indexed_langs.indices[:, 0] - 1

    @property
    def code_table(self) -> tuple[str, ...]:
        """Distinct codes."""
        return self._indexed_codes.distinct

    @property
    def code_index(self) -> np.ndarray:
        """Index of each code in `code_table`, from 1; 0 where there is none; of shape (n, k)."""
        return self._indexed_codes.indices

    @cached_property
    def _indexed_langs(self) -> _IndexedColumns:
        return _indexed([self.table["lang"]])

    @cached_property
    def _indexed_codes(self) -> _IndexedColumns:
        return _indexed([self.table[name] for name in self._code_columns])

    @cached_property
    def inputs(self) -> PackedTexts:
        """Texts that models read: the languages and descriptions, joined for `tokenize`."""
        return PackedTexts.of_column(self.table["input"], self._content)


def _chunks(table: pa.Table) -> Iterator[pa.Table]:
    """Yield all rows, a chunk at a time."""
    for batch in table.to_batches():
        yield pa.Table.from_batches([batch])


def _indexed(columns: Sequence[pa.ChunkedArray]) -> _IndexedColumns:
    """Return columns of texts as indices into their distinct texts."""
    joined = pa.chunked_array([chunk for column in columns for chunk in column.chunks], pa.string())

    # chunks share one dictionary, and the smallest type that holds its indices
    coded = joined.dictionary_encode().unify_dictionaries()
    values = coded.chunk(0).dictionary
    index_type = np.min_scalar_type(len(values))
    parts: list[np.ndarray] = []
    for chunk in coded.chunks:
        indices = np.asarray(chunk.indices.fill_null(-1)) + 1
        parts.append(indices.astype(index_type))

    # one column lies behind the other
    index = np.concatenate(parts).reshape(len(columns), -1).T
    return _IndexedColumns(np.ascontiguousarray(index), tuple(values.to_pylist()))
