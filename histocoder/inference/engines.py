"""What the processes of Ray and Spark do for a table, so that they code it as one process does."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from histocoder import __version__
from histocoder.config import PredictConfig
from histocoder.errors import UserError
from histocoder.inference.pairs import LANG, TEXT, pairs_of, with_language

if TYPE_CHECKING:
    from histocoder.inference.coder import Coder

ROW, ROWS = "histocoder row", "histocoder rows"
"""Columns of `Job.distinct`: which row of a block has a description first, and how many rows the block has."""
_KEY = "histocoder key"
_PAIRS_AT_ONCE = 1_000_000
"""Descriptions of blocks that are held before those found already are left out."""


@dataclass(frozen=True)
class Job:
    """How a table is coded; small, since every worker receives it.

    What a model computes depends in its last digits on what stands in a batch with a description. So descriptions are
    coded in the batches of one process: together with those that come first in the same chunk of rows.
    """

    model: str
    options: dict[str, Any]
    """Fields of `PredictConfig`."""
    device: str
    precision: str
    new: dict[str, pa.DataType]
    """The columns of codes, as they are called in the output."""
    chunk_rows: int
    """Rows whose new descriptions are coded together."""

    @classmethod
    def of(cls, model: str | Path, header: Sequence[str], *, device: str, precision: str, **options: Any) -> Job:
        """Check what the user gives, and open the model; `options` are fields of `PredictConfig`.

        Raises
        ------
        UserError
            If there is no model, or the columns lack one that is read, or have one that is added.
        """
        from histocoder.checkpoints.hub import local_folder
        from histocoder.inference.chunks import ChunkCoder, rows_of_chunk
        from histocoder.inference.coder import Coder

        folder = str(Path(local_folder(model)).resolve())
        coder = Coder.from_pretrained(folder, "cpu")
        options = {"input": "The table", **options, "mode": options.get("mode") or coder.mode}
        config = PredictConfig(**options)
        for column in config.input_cols:
            if column not in header:
                raise UserError(f"{config.input} has no column {column!r}; it has: {', '.join(header)}.")
        coding = ChunkCoder(coder, config, known=None)
        config.output_names(coding.names, coder.system, taken=header)
        none = pa.table({TEXT: pa.array([], pa.string()), LANG: pa.array([], pa.string())})
        new = {name: column.type for name, column in coding.columns(none).items()}
        return cls(folder, options, device, precision, new, rows_of_chunk(coding.names))

    @property
    def input_cols(self) -> list[str]:
        """The columns that are read."""
        return [name for name in (self.options["input_col"], self.options["language_col"]) if name is not None]

    @property
    def language(self) -> str:
        """The language of all descriptions, where they have no column of it."""
        return self.options.get("language", "unk")

    def pairs(self, table: pa.Table) -> pa.Table:
        """Return the description and the language of each row."""
        return pairs_of(table, self.options["input_col"], self.options["language_col"], self.language)

    def distinct(self, table: pa.Table) -> pa.Table:
        """Return each description of a table with its language once, in the order in which they come first."""
        pairs = self.pairs(table).append_column(ROW, pa.array(np.arange(len(table))))
        first = _first_rows(pairs).sort_by(ROW)
        return first.append_column(ROWS, pa.repeat(len(table), len(first)))

    def code(self, pairs: pa.Table) -> pa.Table:
        """Return distinct descriptions of one chunk, in their order, with the columns of their codes."""
        from histocoder.inference.chunks import ChunkCoder

        coder = _open(self.model, self.device, self.precision)
        columns = ChunkCoder(coder, PredictConfig(**self.options), known=None).columns(pairs)
        return pa.table({TEXT: pairs[TEXT], LANG: pairs[LANG], **columns})

    def add(self, table: pa.Table, coded: pa.Table) -> pa.Table:
        """Return a table with the codes of its descriptions, all of which are among those of `by_key`."""
        rows = pc.index_in(_keys(self.pairs(table)), value_set=coded[_KEY])
        table = with_language(table, self.language)
        for name in self.new:
            table = table.append_column(name, coded[name].take(rows))
        return table

    def probe(self) -> Callable[[], str]:
        """Return what says why a worker can't do this, or nothing; it needs no histocoder to be read there."""
        model, wanted = self.model, __version__

        def fault() -> str:
            """Return a sentence for the user, or nothing."""
            import os
            import socket

            try:
                from histocoder import __version__ as found
            except ImportError:
                return f"{socket.gethostname()} has no histocoder. Install histocoder {wanted} on all machines."
            if found != wanted:
                return (
                    f"{socket.gethostname()} has histocoder {found}, not {wanted} as here. Install one on all machines."
                )
            if not os.path.isdir(model):
                return f"{socket.gethostname()} does not see {model}. Name a folder that all machines see."
            return ""

        return fault


def refuse_workers(engine: str, faults: Sequence[str]) -> None:
    """Raise a UserError where a worker's probe has found a fault."""
    if faults := [fault for fault in faults if fault]:
        raise UserError(f"{engine}: {faults[0]}")


class Distinct:
    """Collect the distinct descriptions of a whole table from its blocks.

    Parameters
    ----------
    chunk_rows : int
        See `Job.chunk_rows`.
    """

    def __init__(self, chunk_rows: int) -> None:
        self._chunk_rows, self._num_rows = chunk_rows, 0
        self._found: list[pa.Table] = []
        self._merged = 0

    def add(self, blocks: pa.Table) -> None:
        """Take in what `Job.distinct` has returned of the next block, or of several."""
        if len(blocks) == 0:
            return
        rows, sizes = blocks[ROW].to_numpy(), blocks[ROWS].to_numpy()
        is_first = rows == 0  # as a block's first description is
        ends = self._num_rows + sizes[is_first].cumsum()
        starts = ends - sizes[is_first]
        self._num_rows = int(ends[-1])
        rows = rows + starts[is_first.cumsum() - 1]
        self._found.append(pa.table({TEXT: blocks[TEXT], LANG: blocks[LANG], ROW: rows}))
        if sum(map(len, self._found)) > 2 * self._merged + _PAIRS_AT_ONCE:
            self._merge()

    def _merge(self) -> pa.Table:
        found = _first_rows(pa.concat_tables(self._found))
        self._found, self._merged = [found], len(found)
        return found

    def chunks(self) -> Iterator[pa.Table]:
        """Yield the descriptions that come first in a chunk of rows, for each chunk that has some."""
        if not self._found:
            raise UserError("The table has no rows.")
        pairs = self._merge().sort_by(ROW)
        chunks = pairs[ROW].to_numpy() // self._chunk_rows
        bounds = [0, *(np.flatnonzero(np.diff(chunks)) + 1).tolist(), len(pairs)]
        for start, end in itertools.pairwise(bounds):
            yield pairs.slice(start, end - start)


def in_a_row(chunk: pa.Table) -> pa.Table:
    """Return a chunk of descriptions as one row of lists, which an engine that cuts and joins blocks leaves whole."""
    return pa.table({name: [chunk[name].to_pylist()] for name in (TEXT, LANG)})


class Actor:
    """Codes what `in_a_row` has returned; a class, since Ray's actors are made of one."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def __call__(self, row: pa.Table) -> pa.Table:
        return self._job.code(pa.table({name: row[name].combine_chunks().flatten() for name in (TEXT, LANG)}))


def _first_rows(pairs: pa.Table) -> pa.Table:
    """Return distinct descriptions, in no order, with the first of their rows."""
    first = pairs.group_by([TEXT, LANG]).aggregate([(ROW, "min")])
    return first.rename_columns({f"{ROW}_min": ROW})


def by_key(coded: pa.Table) -> pa.Table:
    """Return what `Job.code` has returned, with one column to find descriptions by."""
    return coded.append_column(_KEY, _keys(coded)).drop_columns([TEXT, LANG])


def _keys(pairs: pa.Table) -> pa.Array:
    texts, langs = (pairs[name].cast(pa.large_string()) for name in (TEXT, LANG))
    return pc.binary_join_element_wise(langs, texts, pa.scalar("\t", pa.large_string())).combine_chunks()


@cache
def _open(model: str, device: str, precision: str) -> Coder:
    """Open a model once in a worker."""
    from histocoder.inference.coder import Coder

    return Coder.from_pretrained(model, device, precision=precision)
