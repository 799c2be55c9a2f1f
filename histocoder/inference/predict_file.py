"""Codes whole files, in chunks: a run that was interrupted resumes, and memory does not grow with the file."""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
from tqdm import tqdm

from histocoder import distributed
from histocoder.checkpoints.lock import holding
from histocoder.config import PredictConfig
from histocoder.data.examples import LANG_COL
from histocoder.data.output import Form, check_output
from histocoder.data.table import TableFile, is_bytes, is_parquet, open_table
from histocoder.errors import Interrupted, UserError, counted
from histocoder.files import make_folder
from histocoder.inference.chunks import ChunkCoder, rows_of_chunk
from histocoder.inference.coder import Coder
from histocoder.inference.join import Join
from histocoder.inference.known import Known
from histocoder.inference.notices import FileNotices
from histocoder.inference.parts import Parts, check_free, write_tables
from histocoder.inference.predictions import code_columns


def predict_file(
    coder: Coder,
    config: PredictConfig,
    *,
    model_id: str,
    known: Known | None = None,
    join: Join | None = None,
    overwrite: bool = False,
    say: Callable[[str], None] = print,
    chunk_rows: int | None = None,
    bar: tqdm | None = None,
) -> None:
    """Code a file into another, with all its columns, the language if one was given for all rows, and the codes.

    Chunks are coded into files beside the output, which become the output when all are there; after an interruption
    they stay. Several processes share the chunks. The output does not depend on interruptions.

    Parameters
    ----------
    model_id : str
        Identity of the model; chunks that another model has coded are not used.
    known : Known, optional
        Hand-coded descriptions, which keep their codes; a column `source` says which.
    join : Join, optional
        Table whose columns are added by code.
    chunk_rows : int, optional
        Number of rows of a chunk; by default few enough to hold in memory.
    bar : tqdm, optional
        Progress bar that counts rows; by default one on rank 0's terminal, if there is one. Coding can be resumed after
        an `Interrupted` that its `update` raises.
    """
    config, table = _open(coder, config)
    chunks = ChunkCoder(coder, config, known=known)
    form, num_rows = _form(coder, config, table, chunks.names, join)
    say(f"Coding in mode {config.mode}.")
    if LANG_COL in table.header and config.language_col is None and config.language == "unk":
        say(f"{config.input}: languages are taken as unknown (unk); the column {LANG_COL!r} is not chosen for them.")
    output = Path(config.output)
    parts = Parts(output)
    chunk_rows = chunk_rows or rows_of_chunk(chunks.names)
    settings = {"model": model_id, "chunk_rows": chunk_rows, **({} if known is None else {"known": known.source_id})}
    if bar is None:
        hidden = True if distributed.rank() else None  # None: without a terminal
        bar = tqdm(total=num_rows, unit="row", unit_scale=True, disable=hidden, dynamic_ncols=True)
    with _writing(output):
        open_parts = partial(parts.open, config, settings, overwrite=overwrite, say=say)
        distributed.run_on_primary(open_parts, doing="checking the input")
        with parts.kept_if_any():
            num_chunks = _code_chunks(chunks, table, parts, chunk_rows=chunk_rows, say=say, bar=bar)
        distributed.run_on_primary(partial(parts.join, form, num_chunks, join, say=say), doing="writing the output")
    say(f"Coded {config.input} into {output}.")


def predict_file_by(
    engine: Callable[[TableFile, PredictConfig], Iterator[pa.Table]],
    coder: Coder,
    config: PredictConfig,
    *,
    join: Join | None = None,
    overwrite: bool = False,
    say: Callable[[str], None] = print,
) -> None:
    """Write a file as `predict_file` does, from an engine that yields the input with the columns of its codes."""
    config, table = _open(coder, config)
    form, _ = _form(coder, config, table, ChunkCoder(coder, config, known=None).names, join)
    output = Path(config.output)
    say(f"Coding in mode {config.mode}.")
    with _writing(output):
        check_free(output, overwrite=overwrite, source=table.path)
        write_tables(output, engine(table, config), form, join, say=say)
    say(f"Coded {config.input} into {output}.")


@contextmanager
def _writing(output: Path) -> Iterator[None]:
    """Lock the output, so that no other run writes it."""
    distributed.run_on_primary(partial(_check_folder, output.parent), doing="checking the output's folder")
    with holding(output.with_name(f".{output.name}.lock"), path=output, instead="another --output"):
        yield


def _open(coder: Coder, config: PredictConfig) -> tuple[PredictConfig, TableFile]:
    """Open the input; return the settings with its mode and the names of its columns, which the parts record."""
    table = open_table(Path(config.input), config.settings_of_columns, sheet=config.sheet)
    own: dict[str, Any] = {setting: table.column(name) for name, setting in config.settings_of_columns.items()}
    return replace(config, mode=config.mode or coder.mode, **own), table


def _form(
    coder: Coder, config: PredictConfig, table: TableFile, names: Sequence[str], join: Join | None
) -> tuple[Form, int]:
    """Return the form of the output, and the number of rows of the input; raise a UserError if they do not fit."""
    if not is_parquet(Path(config.output)):
        _check_text(table)
    new = config.output_names(names, taken=table.header)
    codes = code_columns(new)
    for name in join.columns(codes) if join is not None else ():
        if name in (*table.header, *new):
            raise UserError(f"--join: the output already has a column {name!r}; rename it in the table.")
    titles = coder.model.config.descriptions
    form = Form.like(table, excel=config.excel, raw=config.raw, codes=codes, titles=titles)
    form = form if config.excel else replace(form, decimal=".")
    num_rows = table.count_rows()
    check_output(Path(config.output), excel=config.excel, num_rows=num_rows)
    return form, num_rows


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder} to write to.")
    make_folder(folder)  # raises a UserError if it can't be written to


def _code_chunks(
    coder: ChunkCoder, table: TableFile, parts: Parts, *, chunk_rows: int, say: Callable[[str], None], bar: tqdm
) -> int:
    """Code this process's chunks, and wait for the other processes; return the number of all chunks."""
    if not parts.folder.is_dir():
        raise UserError(f"{parts.folder.parent} is not the folder that rank 0 writes to. Name one that all nodes see.")
    rank, world_size = distributed.rank(), distributed.world_size()
    notices = FileNotices(say)
    for notice in table.notices:
        say(notice)
    num_chunks = rows_done = 0
    with bar, notices.collecting():
        for number, chunk in enumerate(table.chunks(chunk_rows=chunk_rows)):
            if number % world_size == rank:
                _code_chunk(coder, number, chunk, parts, rows_done=rows_done, bar=bar)
            num_chunks += 1
            rows_done += len(chunk)
            bar.update(rows_done - bar.n)
    distributed.barrier(doing="coding its share")
    notices.tell(may_repeat=coder.is_full)
    if coder.has_known:
        total = sum(map(int, distributed.gather_objects(str(coder.num_known))))
        say(f"{total:,} of {counted(rows_done, 'row', 'rows')} got the codes of hand-coded descriptions (--known).")
    return num_chunks


def _code_chunk(coder: ChunkCoder, number: int, chunk: pa.Table, parts: Parts, *, rows_done: int, bar: tqdm) -> None:
    """Code a chunk, unless an earlier run has coded it."""
    done = parts.read(number)
    if done is not None:
        coder.take_in(done)
        return
    batches = parts.batches(number, told=bar.update)
    try:
        parts.write(number, coder.code(chunk, batches.tell, batches.parts))
    except (KeyboardInterrupt, Interrupted):
        batches.keep()
        raise Interrupted(
            f"Interrupted after about {counted(rows_done + round(batches.num_told), 'row', 'rows')}, which are kept "
            f"next to {parts.output}. Run the same command again to resume.",
            signal.SIGINT,
        ) from None


def _check_text(table: TableFile) -> None:
    """Raise a UserError that names the first column that CSV can't hold, or whose bytes are not text."""
    for field in table.schema:
        try:
            pa.csv.write_csv(pa.schema([field]).empty_table(), pa.BufferOutputStream())
        except pa.ArrowInvalid as error:
            raise UserError(
                f"{table.path}, column {field.name!r}: its cells are of the type {field.type}, which CSV can't hold. "
                "Choose an --output that ends in .parquet."
            ) from error
    if blobs := [field.name for field in table.schema if is_bytes(field.type)]:
        for _ in table.tables(blobs):
            pass  # bytes that are not UTF-8 raise an error
