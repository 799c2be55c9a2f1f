"""Codes a table chunk by chunk, each distinct description once."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from histocoder import __version__
from histocoder.checkpoints.hub import local_folder
from histocoder.config import PredictConfig
from histocoder.data.languages import chosen_language, language_code
from histocoder.data.table import strings
from histocoder.errors import UserError
from histocoder.inference.coder import Coder
from histocoder.inference.known import KNOWN, Known
from histocoder.inference.predictions import Part

_REMEMBERED, _REMEMBERED_CELLS = 500_000, 10_000_000  # distinct descriptions, and cells of their codes, kept for later
_DECIMALS = 6
_CHUNK_ROWS, _CHUNK_CELLS = 10_000, 2_000_000  # largest number of rows of a chunk, and of cells of their codes


def rows_of_chunk(names: Sequence[str]) -> int:
    """Return the number of rows of a chunk to which columns of these names are added."""
    return min(_CHUNK_ROWS, -(-_CHUNK_CELLS // len(names)))


class ChunkCoder:
    """Codes chunks, each distinct description once while there is room to remember its codes."""

    def __init__(self, coder: Coder, config: PredictConfig, *, known: Known | None) -> None:
        self._config, self.has_known = config, known is not None
        self._code = coder.code if known is None else partial(known.code, coder)
        column_names = coder.column_names if known is None else partial(known.column_names, coder)
        names = self.names = column_names(config.mode, k=config.k)
        """Columns of `Coder.code`."""
        self.num_known = 0
        """Number of rows that got the codes of hand-coded descriptions."""
        self._output_names = config.output_names(names)
        is_full, probs = config.mode == "full", ("prob_", "alt_prob_")
        self._numbers = [name for name in names if is_full or name == "conf" or name.startswith(probs)]
        self._places: dict[tuple[str, str], int] = {}  # indices of texts and languages in the arrays
        self._arrays = {name: np.empty(0, float if name in self._numbers else object) for name in names}
        self._room = min(_REMEMBERED, _REMEMBERED_CELLS // len(names))

    def code(
        self, chunk: pa.Table, tell: Callable[[float], object] = lambda _: None, parts: list[Part] | None = None
    ) -> pa.Table:
        """Return the chunk with the codes' columns behind its own.

        `tell` is called with the number of rows coded since its last call; `parts` are from an interrupted run.
        """
        pairs = pairs_of(chunk, self._config)
        new = self._new(pairs)
        num_known = len(pairs) - sum(map(new.__contains__, pairs))
        tell(num_known)
        if new:
            rows_each = (len(pairs) - num_known) / len(new)
            texts, langs = zip(*new, strict=True)
            codes = self._code(texts, langs, self._config, progress=lambda count: tell(count * rows_each), parts=parts)
            self._add(new, codes)
        rows = np.fromiter(map(self._places.__getitem__, pairs), dtype=np.int64, count=len(pairs))
        chunk = with_language(chunk, self._config.language)
        for name, column in self._output_names.items():
            kind = pa.float64() if column in self._numbers else pa.string()
            chunk = chunk.append_column(name, pa.array(self._arrays[column][rows], kind, from_pandas=True))
        self._forget_surplus()
        self._count_known(chunk)
        return chunk

    @property
    def is_full(self) -> bool:
        """Whether no more codes are remembered."""
        return len(self._places) >= self._room

    def take_in(self, coded: pa.Table) -> None:
        """Remember a chunk that `code` has coded in an earlier run."""
        self._count_known(coded)
        if self.is_full:
            return
        pairs = pairs_of(coded, self._config)
        own = range(coded.num_columns - len(self.names), coded.num_columns)
        codes = coded.select(list(own)).to_pandas().set_axis(self.names, axis=1)
        new = self._new(pairs)
        self._add(new, codes.iloc[list(new.values())])
        self._forget_surplus()

    def _new(self, pairs: list[tuple[str, str]]) -> dict[tuple[str, str], int]:
        """Return the descriptions whose codes are not remembered, with the first row of each."""
        new: dict[tuple[str, str], int] = {}
        for row, pair in enumerate(pairs):
            if pair not in self._places:
                new.setdefault(pair, row)
        return new

    def _add(self, new: Iterable[tuple[str, str]], codes: pd.DataFrame) -> None:
        start, end = len(self._places), len(self._places) + len(codes)
        self._places.update(zip(new, range(start, end), strict=True))
        codes = codes.reindex(columns=self.names)  # flat may have found fewer codes, or more
        for name, array in self._arrays.items():
            if len(array) < end:
                self._arrays[name] = np.concatenate([array, np.empty_like(array, shape=end)])  # twice as long, or more
            column = codes[name].to_numpy(array.dtype)
            self._arrays[name][start:end] = np.round(column, _DECIMALS) if name in self._numbers else column

    def _count_known(self, coded: pa.Table) -> None:
        if self.has_known:
            self.num_known += pc.sum(pc.equal(coded[-1], KNOWN), min_count=0).as_py()

    def _forget_surplus(self) -> None:
        while len(self._places) > self._room:
            self._places.popitem()


@dataclass(frozen=True)
class BlockCoder:
    """Codes blocks of a cluster's table; it is sent to all workers, each of which opens the model once."""

    model: str
    config: PredictConfig
    device: str
    precision: str
    version: str = __version__

    @classmethod
    def of(cls, model: str | Path, header: Sequence[str], *, device: str, precision: str, **options: Any) -> BlockCoder:
        """Compare the model and the columns with `options`, fields of `PredictConfig`; raise a UserError."""
        folder = str(Path(local_folder(model)).resolve())
        coder = Coder.from_pretrained(folder, "cpu")
        config = PredictConfig(**{"input": "The table", **options})
        config = replace(config, mode=config.mode or coder.mode)
        for column in config.input_cols:
            if column not in header:
                raise UserError(f"{config.input} has no column {column!r}; it has: {', '.join(header)}.")
        config.output_names(coder.column_names(config.mode, k=config.k), taken=header)
        chosen_language(config.language, coder.model.config.languages)
        return cls(folder, config, device, precision)

    def __call__(self, block: pa.Table) -> Iterator[pa.Table]:
        """Yield a block with the codes' columns behind its own, in chunks; at least one, which may be empty."""
        coder = _open(self)
        chunk_rows = rows_of_chunk(coder.names)
        for start in range(0, max(len(block), 1), chunk_rows):
            yield coder.code(block.slice(start, chunk_rows))


@cache
def _open(job: BlockCoder) -> ChunkCoder:
    """Open a model, once in a process; raise a UserError where the workers are not alike."""
    if job.version != __version__:
        raise UserError(
            f"{socket.gethostname()} has histocoder {__version__}, and another machine {job.version}. Install one "
            "version on all machines."
        )
    if not Path(job.model).is_dir():
        raise UserError(f"{socket.gethostname()} does not see {job.model}. Name a folder that all machines see.")
    return ChunkCoder(Coder.from_pretrained(job.model, job.device, precision=job.precision), job.config, known=None)


def pairs_of(table: pa.Table, config: PredictConfig) -> list[tuple[str, str]]:
    """Return the description and the language of each row; "" if missing, and "unk"."""
    texts, *langs = (strings(table[name], f"The column {name!r}").fill_null("") for name in config.input_cols)
    of_rows = [lang or "unk" for lang in langs[0].to_pylist()] if langs else [config.language] * len(table)
    return list(zip(texts.to_pylist(), of_rows, strict=True))


def with_language(table: pa.Table, language: str) -> pa.Table:
    """Return a table with a column of the language after its own, if one was given for all rows."""
    if language == "unk":
        return table
    name = "lang"
    while name in table.column_names:
        name = f"pred_{name}"
    return table.append_column(name, pa.repeat(language_code(language), len(table)))
