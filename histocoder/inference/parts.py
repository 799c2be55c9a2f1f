"""Parts of a file that is being coded: its rows, their distinct descriptions, and the codes of these."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.feather

from histocoder import distributed
from histocoder.errors import UserError
from histocoder.files import make_folder, replacing, write_text
from histocoder.inference.descriptions import Descriptions

_SETTINGS, _INDEX = "settings.json", "row"


class Part(NamedTuple):
    """A part of the distinct descriptions: some of those that a block of rows has and no earlier block."""

    block: int
    start: int
    num_texts: int


class Parts:
    """A folder beside the output, with a file for each block of rows, for its new descriptions, and each part's codes.

    Parameters
    ----------
    output : Path
    settings : dict
        Settings and input that the parts depend on; those of others are not used.
    part_texts : int
        Number of descriptions of a part.
    """

    def __init__(self, output: Path, settings: dict[str, Any], *, part_texts: int) -> None:
        self.output, self._settings, self._size = output, {**settings, "part_texts": part_texts}, part_texts
        self.folder = output.with_name(f".{output.name}.parts")
        self.num_rows = self._num_blocks = 0
        self.parts: list[Part] = []

    def open(self) -> bool:
        """Return whether all rows have been read, by this process or an earlier run."""
        path = self.folder / _SETTINGS
        kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if kept.get("settings") != self._settings:
            return False
        self.num_rows, self._num_blocks = kept["num_rows"], kept["num_blocks"]
        self.parts = [Part(*part) for part in kept["parts"]]
        return True

    def create(self) -> None:
        """Make an empty folder in place of an earlier one."""
        self.delete()
        make_folder(self.folder)

    def add(self, rows: pa.Table, new: Descriptions) -> None:
        """Keep a block of rows, and its new descriptions."""
        block, num_texts = self._num_blocks, len(new.texts)
        _write(self._path("rows", block), rows.append_column(_INDEX, pa.array(new.rows)))
        _write(self._path("texts", block), pa.table([new.texts, new.langs], names=["text", "lang"]))
        starts = range(0, num_texts, self._size)
        self.parts += [Part(block, start, min(self._size, num_texts - start)) for start in starts]
        self._num_blocks += 1
        self.num_rows += len(rows)

    def close(self) -> None:
        """Record that all rows have been read."""
        kept = {"settings": self._settings, "num_rows": self.num_rows, "num_blocks": self._num_blocks}
        write_text(self.folder / _SETTINGS, json.dumps({**kept, "parts": self.parts}))

    def is_coded(self, part: Part) -> bool:
        return self._path("codes", part.block, part.start).exists()

    def texts(self, part: Part) -> tuple[list[str], list[str]]:
        """Return the descriptions of a part, and their languages."""
        table = pa.feather.read_table(self._path("texts", part.block)).slice(part.start, part.num_texts)
        return table["text"].to_pylist(), table["lang"].to_pylist()

    def write(self, part: Part, codes: pa.Table) -> None:
        """Keep the codes of a part."""
        _write(self._path("codes", part.block, part.start), codes)

    def read(self, schema: pa.Schema) -> Iterator[tuple[pa.Table, pa.Table, np.ndarray]]:
        """Yield each block of rows, the codes of its new descriptions, and the index of each row's description."""
        starts = defaultdict(list)
        for part in self.parts:
            starts[part.block].append(part.start)
        for block in range(self._num_blocks):
            rows, paths = pa.feather.read_table(self._path("rows", block)), self._paths(block, starts[block])
            codes = pa.concat_tables([schema.empty_table(), *map(pa.feather.read_table, paths)])
            last = rows.num_columns - 1
            yield rows.remove_column(last), codes, rows[last].to_numpy()

    def delete(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Let an error say that what is coded so far is kept; delete the folder if nothing is."""
        try:
            yield
        except UserError as error:
            if any(self.folder.glob("codes-*")):
                resume = "What is coded so far is kept: run the same command again to resume."
                raise UserError(f"{error} {resume}") from error
            if distributed.is_primary():
                self.delete()
            raise

    def _path(self, kind: str, block: int, start: int = 0) -> Path:
        return self.folder / f"{kind}-{block:06d}-{start:06d}.arrow"

    def _paths(self, block: int, starts: list[int]) -> list[Path]:
        """Return the files of a block's codes; raise a UserError if one is missing."""
        paths = [self._path("codes", block, start) for start in starts]
        for path in paths:
            if not path.exists():
                raise UserError(f"The codes {path} were written but are missing now.")
        return paths


def _write(path: Path, table: pa.Table) -> None:
    with replacing(path) as temporary:
        pa.feather.write_feather(table, str(temporary))
