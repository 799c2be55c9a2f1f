"""Parts of `ray.code` and `spark.code`, which code a table as one process does."""

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
"""Columns of `Job.distinct`: the first row of a block that has a description, and the number of the block's rows."""
_KEY = "histocoder key"
_PAIRS_AT_ONCE = 1_000_000  # descriptions of blocks that are held before duplicates are dropped


@dataclass(frozen=True)
class Job:
    """Settings for coding a table; small, since every worker receives it.

    Probabilities depend in their last digits on which descriptions share a batch. So descriptions are coded in the
    batches of one process: together with those that come first in the same chunk of rows.
    """

    model: str
    config: PredictConfig
    device: str
    precision: str
    new: dict[str, pa.DataType]  # columns of codes, under their names in the output
    chunk_rows: int  # number of rows whose new descriptions are coded together

    @classmethod
    def of(cls, model: str | Path, header: Sequence[str], *, device: str, precision: str, **options: Any) -> Job:
        """Open the model and compare the columns with `options`, fields of `PredictConfig`; raise a UserError."""
        from histocoder.checkpoints.hub import local_folder
        from histocoder.inference.chunks import ChunkCoder, rows_of_chunk
        from histocoder.inference.coder import Coder

        folder = str(Path(local_folder(model)).resolve())
        coder = Coder.from_pretrained(folder, "cpu")
        config = PredictConfig(**{"input": "The table", **options, "mode": options.get("mode") or coder.mode})
        for column in config.input_cols:
            if column not in header:
                raise UserError(f"{config.input} has no column {column!r}; it has: {', '.join(header)}.")
        coding = ChunkCoder(coder, config, known=None)
        config.output_names(coding.names, coder.system, taken=header)
        none = pa.table({TEXT: pa.array([], pa.string()), LANG: pa.array([], pa.string())})
        new = {name: column.type for name, column in coding.columns(none).items()}
        return cls(folder, config, device, precision, new, rows_of_chunk(coding.names))

    def distinct(self, table: pa.Table) -> pa.Table:
        """Return each description of a table with its language once, in the order in which they come first."""
        pairs = pairs_of(table, self.config).append_column(ROW, pa.array(np.arange(len(table))))
        first = _first_rows(pairs).sort_by(ROW)
        return first.append_column(ROWS, pa.repeat(len(table), len(first)))

    def code(self, pairs: pa.Table) -> pa.Table:
        """Return distinct descriptions of one chunk, in their order, with the columns of their codes."""
        from histocoder.inference.chunks import ChunkCoder

        coder = _open(self.model, self.device, self.precision)
        columns = ChunkCoder(coder, self.config, known=None).columns(pairs)
        return pa.table({TEXT: pairs[TEXT], LANG: pairs[LANG], **columns})

    def add(self, table: pa.Table, coded: pa.Table) -> pa.Table:
        """Return a table with the codes of its descriptions, from the result of `by_key`."""
        rows = pc.index_in(_keys(pairs_of(table, self.config)), value_set=coded[_KEY])
        table = with_language(table, self.config.language)
        for name in self.new:
            table = table.append_column(name, coded[name].take(rows))
        return table

    def probe(self) -> Callable[[], str]:
        """Return a function that says why a worker can't do this, if so; a worker without histocoder can run it."""
        model, wanted = self.model, __version__

        def fault() -> str:
            """Return a sentence for the user, or an empty one."""
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
    """Raise a UserError if a worker's probe has found a fault."""
    if faults := [fault for fault in faults if fault]:
        raise UserError(f"{engine}: {faults[0]}")


class Distinct:
    """The distinct descriptions of a whole table, collected from its blocks."""

    def __init__(self, chunk_rows: int) -> None:
        self._chunk_rows, self._num_rows = chunk_rows, 0
        self._found: list[pa.Table] = []
        self._merged = 0

    def add(self, blocks: pa.Table) -> None:
        """Add the results of `Job.distinct` for the next block, or for several."""
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
    """Return a chunk of descriptions as one row of lists, which Ray never divides among blocks."""
    return pa.table({name: [chunk[name].to_pylist()] for name in (TEXT, LANG)})


class Actor:
    """Codes chunks that `in_a_row` has returned; Ray makes its actors from a class."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def __call__(self, row: pa.Table) -> pa.Table:
        return self._job.code(pa.table({name: row[name].combine_chunks().flatten() for name in (TEXT, LANG)}))


def _first_rows(pairs: pa.Table) -> pa.Table:
    """Return distinct descriptions with their first rows, in no order."""
    first = pairs.group_by([TEXT, LANG]).aggregate([(ROW, "min")])
    return first.rename_columns({f"{ROW}_min": ROW})


def by_key(coded: pa.Table) -> pa.Table:
    """Return the result of `Job.code` with a column of keys in place of descriptions and languages."""
    return coded.append_column(_KEY, _keys(coded)).drop_columns([TEXT, LANG])


def _keys(pairs: pa.Table) -> pa.Array:
    texts, langs = (pairs[name].cast(pa.large_string()) for name in (TEXT, LANG))
    return pc.binary_join_element_wise(langs, texts, pa.scalar("\t", pa.large_string())).combine_chunks()


@cache
def _open(model: str, device: str, precision: str) -> Coder:
    from histocoder.inference.coder import Coder

    return Coder.from_pretrained(model, device, precision=precision)
