"""The parts of a file that is being coded: chunks beside the output, which are joined when all are there."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import pyarrow.feather

from histocoder import distributed
from histocoder.config import PredictConfig
from histocoder.data.output import Form, write_table
from histocoder.data.table import fingerprint
from histocoder.errors import UserError, counted
from histocoder.files import make_folder, remove_leftovers, replacing, write_text
from histocoder.inference.join import Join
from histocoder.inference.predictions import load_parts, save_parts

_GROUP_ROWS, _GROUP_CELLS = 100_000, 20_000_000  # size of a row group of a Parquet file
_KEEP_SECONDS = 20.0  # interval at which what is coded of a chunk is saved
_PART, _BATCHES = ".arrow", ".batches"  # suffixes of a whole chunk, and of the batches of an unfinished one


def check_free(output: Path, *, overwrite: bool, source: Path | None = None) -> None:
    """Raise a UserError if writing an output would lose a file."""
    if output.exists() and not overwrite:
        raise UserError(f"{output} already exists. Add --overwrite to replace it, or choose another --output.")
    if source is not None and source.exists() and output.exists() and output.samefile(source):
        raise UserError("--output is the input itself; choose another.")


def write_tables(
    output: Path, tables: Iterable[pa.Table], form: Form, join: Join | None, *, say: Callable[[str], None]
) -> None:
    """Write tables, one below the other and with the columns of `join`."""
    coded = tables if join is None else (join.add(table, form.codes) for table in tables)
    notices = write_table(output, _groups(coded), form)
    for notice in (*notices, None if join is None else join.notice()):
        if notice:
            say(notice)


class Parts:
    """A folder of chunks by their numbers, and of batches of interrupted chunks, beside the output."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.folder = output.with_name(f".{output.name}.parts")

    def open(
        self, config: PredictConfig, settings: dict[str, object], *, overwrite: bool, say: Callable[[str], None]
    ) -> None:
        """Create the folder; one with other settings or another input is replaced."""
        source = Path(config.input)
        check_free(self.output, overwrite=overwrite, source=source)
        settings = {**asdict(config), **settings, "source": fingerprint(source), "processes": distributed.world_size()}
        settings["parts"] = _PART
        path = self.folder / "settings.json"
        if path.exists() and json.loads(path.read_text(encoding="utf-8")) == settings:
            remove_leftovers(self.folder)
            names = [path.name for path in self.folder.glob("[0-9]*")]
            if names:
                num_done = sum(not name.endswith(_BATCHES) for name in names)
                done = counted(num_done, "chunk is", "chunks are") if num_done else "part of the first chunk is"
                say(f"Resuming an interrupted run: {done} done.")
            return
        self.delete()
        make_folder(self.folder)
        write_text(path, json.dumps(settings, indent=2))

    def delete(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def _is_empty(self) -> bool:
        return not any(self.folder.glob("[0-9]*"))

    @contextmanager
    def kept_if_any(self) -> Iterator[None]:
        """Delete the folder after a user's mistake if nothing is coded yet."""
        try:
            yield
        except UserError:
            if distributed.is_primary() and self._is_empty:
                self.delete()
            raise

    def read(self, number: int) -> pa.Table | None:
        """Return a chunk; None if it is not coded yet."""
        path = self._path(number)
        return pa.feather.read_table(path) if path.exists() else None

    def write(self, number: int, chunk: pa.Table) -> None:
        """Save a chunk and delete its batches."""
        with self._kept_for_later(), replacing(self._path(number)) as temporary:
            pa.feather.write_feather(chunk, str(temporary))
        self._path(number, _BATCHES).unlink(missing_ok=True)

    def batches(self, number: int, *, told: Callable[[float], object]) -> Batches:
        return Batches(self._path(number, _BATCHES), told=told)

    def join(self, form: Form, num_chunks: int, join: Join | None, *, say: Callable[[str], None]) -> None:
        """Write one file of all chunks, in order, with the columns of `join`, and delete them."""
        files = [self._path(number) for number in range(num_chunks)]
        for file in files:
            if not file.exists():
                raise UserError(
                    f"The chunk {file}, one of {num_chunks}, was coded but is missing now. The others are kept; run "
                    "the command again."
                )
        with self._kept_for_later():
            write_tables(self.output, map(pa.feather.read_table, files), form, join, say=say)
        self.delete()

    def _path(self, number: int, suffix: str = _PART) -> Path:
        return self.folder / f"{number:06d}{suffix}"

    @contextmanager
    def _kept_for_later(self) -> Iterator[None]:
        """Let an error say that the chunks coded so far are kept."""
        try:
            yield
        except UserError as error:
            if self._is_empty:
                raise
            raise UserError(
                f"{error} The chunks coded so far are kept. Make room, and run the command again."
            ) from error


class Batches:
    """Coded batches of a chunk, saved at intervals in case the run is interrupted."""

    def __init__(self, path: Path, *, told: Callable[[float], object]) -> None:
        self.path, self._told = path, told
        self.parts = load_parts(path)
        self.num_told, self._num_kept = 0.0, len(self.parts)
        self._kept_at = time.monotonic()

    def tell(self, num_rows: float) -> None:
        """Count rows that were coded, about so many."""
        self._told(num_rows)
        self.num_told += num_rows
        if time.monotonic() - self._kept_at >= _KEEP_SECONDS:
            self.keep()

    def keep(self) -> None:
        if len(self.parts) > self._num_kept:
            save_parts(self.path, self.parts)
        self._num_kept, self._kept_at = len(self.parts), time.monotonic()


def _groups(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Yield tables joined into larger ones, since a Parquet writer keeps metadata of each to the end."""
    waiting: list[pa.Table] = []
    for table in tables:
        waiting.append(table)
        if sum(map(len, waiting)) >= min(_GROUP_ROWS, _GROUP_CELLS // table.num_columns):
            yield pa.concat_tables(waiting)
            waiting = []
    if waiting:
        yield pa.concat_tables(waiting)
