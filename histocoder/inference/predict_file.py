"""Codes whole files: a run that was interrupted resumes, and memory does not grow with the file."""

from __future__ import annotations

import json
import shutil
import signal
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
from tqdm import tqdm

from histocoder import distributed
from histocoder.checkpoints.run_folder import holding
from histocoder.config import PredictConfig
from histocoder.data.examples import LANG_COL
from histocoder.data.output import Form, check_output, write_table
from histocoder.data.table import TableFile, is_bytes, is_parquet, open_table, strings
from histocoder.errors import CountedNotice, Interrupted, Notice, UserError, counted
from histocoder.files import make_folder, remove_leftovers, replacing, write_text
from histocoder.inference.coder import Coder
from histocoder.inference.known import Known
from histocoder.inference.table_coder import TableCoder

_BATCHES = 4  # batches of a part, after which codes are kept
_RESUME = "What is coded so far is kept: run the same command again to resume."


def predict_file(
    coder: Coder,
    config: PredictConfig,
    *,
    model_id: str,
    known: Known | None = None,
    say: Callable[[str], None] = print,
    block_rows: int | None = None,
    progress: Callable[[float, int], object] | None = None,
    cancel: Callable[[], bool] | None = None,
) -> None:
    """Code a file into another, with all its columns, the language if one was given for all rows, and the codes.

    The file is read once: its rows and their distinct descriptions are kept beside the output, and the codes of these
    in parts. After an interruption they stay, and the same call resumes. Several processes share the parts. The output
    does not depend on interruptions.

    Parameters
    ----------
    model_id : str
        Identity of the model; parts that another model has coded are not used.
    known : Known, optional
        Hand-coded descriptions, which keep their codes; a column `source` says which.
    block_rows : int, optional
        Number of rows that are read at once; by default few enough to hold in memory.
    progress : callable, optional
        Receives the number of rows that a batch has coded, and of all rows; by default a progress bar on rank 0's
        terminal, if there is one.
    cancel : callable, optional
        Asked before each batch; if it returns True, `Cancelled` is raised, and the same call resumes.
    """
    table, output = open_table(Path(config.input), config.settings_of_columns, sheet=config.sheet), Path(config.output)
    own: dict[str, Any] = {setting: table.column(name) for name, setting in config.settings_of_columns.items()}
    config = replace(config, mode=config.mode or coder.mode, **own)
    tables = TableCoder(coder, config, known=known)
    form = _form(config, table, tables.schema.names)
    if LANG_COL in table.header and config.language_col is None and config.language == "unk":
        say(f"{config.input}: languages are taken as unknown (unk); the column {LANG_COL!r} is not chosen for them.")
    for notice in table.notices:
        say(notice)
    settings = {**asdict(config), "source": _state(table.path), "model": model_id, "known": known and known.source_id}
    parts = Parts(output, {**settings, "processes": distributed.world_size()}, size=_BATCHES * config.batch_size)
    distributed.run_on_primary(partial(make_folder, output.parent), doing="making the output's folder")
    with holding(output.with_name(f".{output.name}.lock"), path=output, instead="another --output"), parts.kept():
        with _notices_once(say):
            read = partial(_read, table, tables, parts, block_rows or tables.block_rows, say)
            distributed.run_on_primary(read, doing="reading the input")
            if not parts.open():
                raise UserError(
                    f"{output.parent} is not the folder that rank 0 writes to. Name one that all nodes see."
                )
            _code(tables, parts, progress=progress, cancel=cancel)
            distributed.barrier()
        distributed.run_on_primary(partial(_write, tables, parts, form, say), doing="writing the output")
        if known is not None and distributed.is_primary():
            rows = counted(parts.num_rows, "row", "rows")
            say(f"{tables.num_known:,} of {rows} got the codes of hand-coded descriptions (--known).")


def _form(config: PredictConfig, table: TableFile, names: Sequence[str]) -> Form:
    """Return the form of the output; raise a UserError if the input, the new columns and the output do not fit."""
    output = Path(config.output)
    check_output(output, excel=config.excel)
    if output.exists() and output.samefile(table.path):
        raise UserError("--output is the input itself; choose another.")
    config.check_free(names, taken=table.header)
    for field in () if is_parquet(output) else table.schema:
        try:
            pa.csv.write_csv(pa.schema([field]).empty_table(), pa.BufferOutputStream())
        except pa.ArrowInvalid as error:
            raise UserError(
                f"{table.path}, column {field.name!r}: its cells are of the type {field.type}, which CSV can't hold. "
                "Choose an --output that ends in .parquet."
            ) from error
    how = {"excel": config.excel, "raw": config.raw, **({} if config.excel else {"decimal": "."})}
    return Form.like(table, **how)


def _state(path: Path) -> list[Any]:
    """Return name, size and time of change of a file."""
    return [str(path), path.stat().st_size, path.stat().st_mtime_ns]


def _read(table: TableFile, tables: TableCoder, parts: Parts, block_rows: int, say: Callable[[str], None]) -> None:
    """Read the input and find its distinct descriptions, unless an earlier run has done so."""
    if parts.open():
        remove_leftovers(parts.folder)
        num_texts = sum(part.num_texts for part in parts.parts)
        if num_done := sum(part.num_texts for part in parts.parts if parts.codes(part).exists()):
            say(f"Resuming an interrupted run: {num_done:,} of {num_texts:,} distinct descriptions are coded.")
        return
    parts.delete()
    make_folder(parts.folder)
    blobs = [] if is_parquet(parts.output) else [i for i, one in enumerate(table.schema) if is_bytes(one.type)]
    for block in table.chunks(chunk_rows=block_rows):
        columns, new = block.columns, tables.find(block)
        for i in blobs:
            columns[i] = strings(columns[i], f"{table.path}, column {table.header[i]!r},")
        rows = pa.table([*columns, pa.array(new.rows)], names=[*table.header, "index of its description"])
        _keep(parts.path("rows", parts.num_blocks), rows)
        _keep(parts.path("texts", parts.num_blocks), pa.table([new.texts, new.langs], names=["text", "lang"]))
        parts.add(len(rows), len(new.texts))
    check_output(parts.output, num_rows=parts.num_rows)
    parts.close()


def _code(
    tables: TableCoder,
    parts: Parts,
    *,
    progress: Callable[[float, int], object] | None,
    cancel: Callable[[], bool] | None,
) -> None:
    """Code this process's parts."""
    own = parts.parts[distributed.rank() :: distributed.world_size()]
    rows_each = parts.num_rows / max(sum(part.num_texts for part in own), 1)
    hidden = True if progress is not None or distributed.rank() else None  # None: without a terminal
    with tqdm(total=parts.num_rows, unit="row", unit_scale=True, disable=hidden, dynamic_ncols=True) as bar:

        def tell(num_texts: int) -> None:
            bar.update(num_texts * rows_each)
            if progress is not None:
                progress(num_texts * rows_each, parts.num_rows)

        for part in own:
            if parts.codes(part).exists():
                tell(part.num_texts)
            else:
                new = pa.feather.read_table(parts.path("texts", part.block)).slice(part.start, part.num_texts)
                given = new["text"].to_pylist(), new["lang"].to_pylist()
                _keep(parts.codes(part), tables.code(*given, progress=tell, cancel=cancel))


def _write(tables: TableCoder, parts: Parts, form: Form, say: Callable[[str], None]) -> None:
    """Write the output, and delete the parts."""

    def blocks() -> Iterator[pa.Table]:
        """Yield the rows, block by block, with their codes."""
        for block in range(parts.num_blocks):
            rows = pa.feather.read_table(parts.path("rows", block))
            paths = [parts.codes(part) for part in parts.parts if part.block == block]
            if missing := [path for path in paths if not path.exists()]:
                raise UserError(f"The codes {missing[0]} were written but are missing now.")
            codes = pa.concat_tables([tables.schema.empty_table(), *map(pa.feather.read_table, paths)])
            last = rows.num_columns - 1
            yield tables.append(rows.remove_column(last), codes, rows[last].to_numpy())

    for notice in write_table(parts.output, blocks(), form):
        say(notice)
    parts.delete()


class Part(NamedTuple):
    """Some of the descriptions that a block of rows has and no earlier block."""

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
    size : int
        Number of descriptions of a part.
    """

    def __init__(self, output: Path, settings: dict[str, Any], *, size: int) -> None:
        self.output, self._settings, self._size = output, {**settings, "part_texts": size}, size
        self.folder = output.with_name(f".{output.name}.parts")
        self._record = self.folder / "settings.json"
        self.num_rows = self.num_blocks = 0
        self.parts: list[Part] = []

    def open(self) -> bool:
        """Return whether all rows have been read, by this process or an earlier run."""
        kept = json.loads(self._record.read_text(encoding="utf-8")) if self._record.exists() else {}
        if kept.get("settings") != self._settings:
            return False
        self.num_rows, self.num_blocks = kept["num_rows"], kept["num_blocks"]
        self.parts = [Part(*part) for part in kept["parts"]]
        return True

    def add(self, num_rows: int, num_texts: int) -> None:
        """Count a block of rows, and the parts of its new descriptions."""
        starts = range(0, num_texts, self._size)
        self.parts += [Part(self.num_blocks, start, min(self._size, num_texts - start)) for start in starts]
        self.num_blocks += 1
        self.num_rows += num_rows

    def close(self) -> None:
        """Record that all rows have been read."""
        kept = {"settings": self._settings, "num_rows": self.num_rows, "num_blocks": self.num_blocks}
        write_text(self._record, json.dumps({**kept, "parts": self.parts}))

    def path(self, kind: str, block: int, start: int = 0) -> Path:
        """Return the file of a block's "rows" or "texts", or of a part's "codes"."""
        return self.folder / f"{kind}-{block:06d}-{start:06d}.arrow"

    def codes(self, part: Part) -> Path:
        return self.path("codes", part.block, part.start)

    def delete(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Let an error or an interruption say that what is coded so far is kept; delete the folder if nothing is."""
        try:
            yield
        except (KeyboardInterrupt, Interrupted) as error:
            raise Interrupted(f"Interrupted. {_RESUME}", getattr(error, "signum", signal.SIGINT)) from None
        except UserError as error:
            if any(self.folder.glob("codes-*")):
                raise UserError(f"{error} {_RESUME}") from error
            if distributed.is_primary():
                self.delete()
            raise


def _keep(path: Path, table: pa.Table) -> None:
    with replacing(path) as temporary:
        pa.feather.write_feather(table, str(temporary))


@contextmanager
def _notices_once(say: Callable[[str], None]) -> Iterator[None]:
    """Have rank 0 say each notice of all processes once, and at the end the sums of numbers."""
    counts: Counter[tuple[str, str]] = Counter()
    shown: set[str] = set()

    def take(show: Callable[..., None], message: Warning | str, *where: Any, **more: Any) -> None:
        """Count a notice, or show it unless it was shown already."""
        if isinstance(message, CountedNotice):
            counts[message.words] += message.count
        elif str(message) not in shown:
            shown.add(str(message))
            if not isinstance(message, Notice):
                show(message, *where, **more)
            elif distributed.is_primary():
                say(str(message))

    with warnings.catch_warnings():
        warnings.simplefilter("always", Notice)
        warnings.showwarning = partial(take, warnings.showwarning)
        yield
    for words, count in sum(distributed.gather_objects(counts), Counter[tuple[str, str]]()).items():
        say(counted(count, *words))
