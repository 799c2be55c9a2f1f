"""Parts of a file that is being coded: its rows, their distinct descriptions, and the codes of these."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather

from histocoder import distributed
from histocoder.errors import UserError
from histocoder.files import make_folder, replacing, write_text
from histocoder.inference.descriptions import Descriptions

_SETTINGS, _INDEX = "settings.json", "row"


@dataclass(frozen=True)
class Part:
    """A part of the distinct descriptions: some of those that a block of rows has and no earlier block."""

    block: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


class Parts:
    """A folder beside the output, with a file for each block of rows, for its descriptions, and for each part's codes.

    Parameters
    ----------
    output : Path
    settings : dict
        What the parts depend on; those of other settings are not used.
    part_texts : int
        Number of descriptions of a part.
    """

    def __init__(self, output: Path, settings: dict[str, Any], *, part_texts: int) -> None:
        self.output, self._settings, self._size = output, {**settings, "part_texts": part_texts}, part_texts
        self.folder = output.with_name(f".{output.name}.parts")
        self.num_rows = 0
        self._num_texts: list[int] = []  # of the new descriptions of each block

    def open(self) -> bool:
        """Return whether all rows have been read, by this process or an earlier run."""
        path = self.folder / _SETTINGS
        kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if kept.get("settings") != self._settings:
            return False
        self.num_rows, self._num_texts = kept["num_rows"], kept["num_texts"]
        return True

    def create(self) -> None:
        """Make an empty folder in place of an earlier one."""
        self.delete()
        make_folder(self.folder)

    def add(self, block: pa.Table, found: Descriptions) -> None:
        """Keep a block of rows, and its new descriptions."""
        number = len(self._num_texts)
        self._write(self._path("rows", number), block.append_column(_INDEX, pa.array(found.rows)))
        self._write(self._path("texts", number), pa.table([found.texts, found.langs], names=["text", "lang"]))
        self.num_rows += len(block)
        self._num_texts.append(len(found.texts))

    def close(self) -> None:
        """Record that all rows have been read."""
        kept = {"settings": self._settings, "num_rows": self.num_rows, "num_texts": self._num_texts}
        write_text(self.folder / _SETTINGS, json.dumps(kept, indent=2))

    def all(self) -> list[Part]:
        return [part for block in range(len(self._num_texts)) for part in self._of_block(block)]

    @property
    def num_texts(self) -> int:
        return sum(self._num_texts)

    def is_coded(self, part: Part) -> bool:
        return self._codes(part).exists()

    def texts(self, part: Part) -> tuple[list[str], list[str]]:
        """Return the descriptions of a part, and their languages."""
        table = pa.feather.read_table(self._path("texts", part.block)).slice(part.start, len(part))
        return table["text"].to_pylist(), table["lang"].to_pylist()

    def write(self, part: Part, codes: pa.Table) -> None:
        """Keep the codes of a part."""
        with self.saying_what_is_kept():
            self._write(self._codes(part), codes)

    def read(self, schema: pa.Schema) -> Iterator[tuple[pa.Table, pa.Table, np.ndarray]]:
        """Yield each block of rows, the codes of its new descriptions, and the index of each row's description."""
        for block in range(len(self._num_texts)):
            rows = pa.feather.read_table(self._path("rows", block))
            codes = [schema.empty_table()]
            for part in self._of_block(block):
                if not self.is_coded(part):
                    raise UserError(
                        f"The codes {self._codes(part)} were written but are missing now. The others are kept; run the "
                        "command again."
                    )
                codes.append(pa.feather.read_table(self._codes(part)))
            last = rows.num_columns - 1
            yield rows.remove_column(last), pa.concat_tables(codes), rows[last].to_numpy()

    def delete(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    @contextmanager
    def kept_if_any(self) -> Iterator[None]:
        """Delete the folder after a user's mistake if nothing is coded yet."""
        try:
            yield
        except UserError:
            if distributed.is_primary() and not any(self.folder.glob("codes-*")):
                self.delete()
            raise

    @contextmanager
    def saying_what_is_kept(self) -> Iterator[None]:
        """Let an error say that what is coded so far is kept."""
        try:
            yield
        except UserError as error:
            if not any(self.folder.glob("codes-*")):
                raise
            raise UserError(
                f"{error} The codes of all rows coded so far are kept. Make room, and run the command again."
            ) from error

    def _of_block(self, block: int) -> list[Part]:
        num_texts = self._num_texts[block]
        starts = range(0, num_texts, self._size)
        return [Part(block, start, min(start + self._size, num_texts)) for start in starts]

    def _path(self, kind: str, block: int) -> Path:
        return self.folder / f"{kind}-{block:06d}.arrow"

    def _codes(self, part: Part) -> Path:
        return self.folder / f"codes-{part.block:06d}-{part.start:06d}.arrow"

    def _write(self, path: Path, table: pa.Table) -> None:
        with replacing(path) as temporary:
            pa.feather.write_feather(table, str(temporary))
