"""Codes whole files: a run that was interrupted resumes, and memory does not grow with the file."""

import signal
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
from tqdm import tqdm

from histocoder import distributed
from histocoder.checkpoints.run_folder import holding
from histocoder.config import PredictConfig
from histocoder.data.examples import LANG_COL
from histocoder.data.output import Form, check_output, write_table
from histocoder.data.table import TableFile, is_bytes, is_parquet, open_table, strings
from histocoder.errors import CountedNotice, Interrupted, Notice, UserError, counted
from histocoder.files import make_folder, remove_leftovers
from histocoder.inference.coder import Coder
from histocoder.inference.join import Join
from histocoder.inference.known import Known
from histocoder.inference.parts import Parts
from histocoder.inference.predictions import code_columns
from histocoder.inference.table_coder import TableCoder

_BATCHES = 4  # batches of a part, after which codes are kept


def predict_file(
    coder: Coder,
    config: PredictConfig,
    *,
    model_id: str,
    known: Known | None = None,
    join: Join | None = None,
    overwrite: bool = False,
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
    join : Join, optional
        Table whose columns are added by code.
    block_rows : int, optional
        Number of rows that are read at once; by default few enough to hold in memory.
    progress : callable, optional
        Receives the number of rows that a batch has coded, and of all rows; by default a progress bar on rank 0's
        terminal, if there is one.
    cancel : callable, optional
        Asked before each batch; if it returns True, `Cancelled` is raised, and the same call resumes.
    """
    config, table = _open(coder, config)
    tables = TableCoder(coder, config, known=known)
    form = _form(coder, config, table, tables.names, join)
    if LANG_COL in table.header and config.language_col is None and config.language == "unk":
        say(f"{config.input}: languages are taken as unknown (unk); the column {LANG_COL!r} is not chosen for them.")
    for notice in table.notices:
        say(notice)
    output = Path(config.output)
    settings = {**asdict(config), "source": _state(table.path), "model": model_id, "known": known and known.source_id}
    settings["processes"] = distributed.world_size()
    parts = Parts(output, settings, part_texts=_BATCHES * config.batch_size)
    check_free(output, overwrite=overwrite, source=table.path)
    with _writing(output), parts.kept():
        with _notices_once(say):
            read = partial(_read, table, tables, parts, config, block_rows=block_rows or tables.block_rows, say=say)
            distributed.run_on_primary(read, doing="reading the input")
            if not parts.open():
                raise UserError(
                    f"{output.parent} is not the folder that rank 0 writes to. Name one that all nodes see."
                )
            _code(tables, parts, progress=progress, cancel=cancel)
            distributed.barrier()
        distributed.run_on_primary(partial(_write, tables, parts, form, join, say=say), doing="writing the output")


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
    form, output = _form(coder, config, table, TableCoder(coder, config).names, join), Path(config.output)
    check_free(output, overwrite=overwrite, source=table.path)
    with _writing(output):
        _write_tables(output, engine(table, config), form, join, say=say)


def check_free(output: Path, *, overwrite: bool, source: Path | None = None) -> None:
    """Raise a UserError if writing an output would lose a file."""
    if output.exists() and not overwrite:
        raise UserError(f"{output} already exists. Add --overwrite to replace it, or choose another --output.")
    if source is not None and source.exists() and output.exists() and output.samefile(source):
        raise UserError("--output is the input itself; choose another.")


@contextmanager
def _writing(output: Path) -> Iterator[None]:
    """Lock the output, so that no other run writes it."""
    distributed.run_on_primary(partial(_check_folder, output.parent), doing="checking the output's folder")
    with holding(output.with_name(f".{output.name}.lock"), path=output, instead="another --output"):
        yield


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder} to write to.")
    make_folder(folder)  # raises a UserError if it can't be written to


def _open(coder: Coder, config: PredictConfig) -> tuple[PredictConfig, TableFile]:
    """Open the input; return the settings with its mode and the names of its columns, which the parts record."""
    table = open_table(Path(config.input), config.settings_of_columns, sheet=config.sheet)
    own: dict[str, Any] = {setting: table.column(name) for name, setting in config.settings_of_columns.items()}
    return replace(config, mode=config.mode or coder.mode, **own), table


def _form(coder: Coder, config: PredictConfig, table: TableFile, names: list[str], join: Join | None) -> Form:
    """Return the form of the output; raise a UserError if the input, the new columns and the output do not fit."""
    check_output(Path(config.output), excel=config.excel)
    new = config.output_names(names, taken=table.header)
    for field in () if is_parquet(Path(config.output)) else table.schema:
        try:
            pa.csv.write_csv(pa.schema([field]).empty_table(), pa.BufferOutputStream())
        except pa.ArrowInvalid as error:
            raise UserError(
                f"{table.path}, column {field.name!r}: its cells are of the type {field.type}, which CSV can't hold. "
                "Choose an --output that ends in .parquet."
            ) from error
    codes = code_columns(new)
    for name in join.columns(codes) if join is not None else ():
        if name in (*table.header, *new):
            raise UserError(f"--join: the output already has a column {name!r}; rename it in the table.")
    form = Form.like(table, excel=config.excel, raw=config.raw, codes=codes, titles=coder.model.config.descriptions)
    return form if config.excel else replace(form, decimal=".")


def _state(path: Path) -> list[list[Any]]:
    """Return name, size and time of change of a file, or of all files of a folder."""
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    return [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files]


def _read(
    table: TableFile,
    tables: TableCoder,
    parts: Parts,
    config: PredictConfig,
    *,
    block_rows: int,
    say: Callable[[str], None],
) -> None:
    """Read the input and find its distinct descriptions, unless an earlier run has done so."""
    if parts.open():
        remove_leftovers(parts.folder)
        num_texts = sum(part.num_texts for part in parts.parts)
        if num_done := sum(part.num_texts for part in parts.parts if parts.is_coded(part)):
            say(f"Resuming an interrupted run: {num_done:,} of {num_texts:,} distinct descriptions are coded.")
        return
    parts.create()
    blobs = [] if is_parquet(parts.output) else [i for i, one in enumerate(table.schema) if is_bytes(one.type)]
    for block in table.chunks(chunk_rows=block_rows):
        columns = block.columns
        for i in blobs:
            columns[i] = strings(columns[i], f"{table.path}, column {table.header[i]!r},")
        parts.add(pa.table(columns, names=table.header), tables.find(block))
    check_output(parts.output, excel=config.excel, num_rows=parts.num_rows)
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

        try:
            for part in own:
                if parts.is_coded(part):
                    tell(part.num_texts)
                else:
                    parts.write(part, tables.code(*parts.texts(part), progress=tell, cancel=cancel))
        except (KeyboardInterrupt, Interrupted):
            num_done = round(rows_each * sum(part.num_texts for part in own if parts.is_coded(part)))
            raise Interrupted(
                f"Interrupted after about {counted(num_done, 'row', 'rows')}, which are kept next to {parts.output}. "
                "Run the same command again to resume.",
                signal.SIGINT,
            ) from None


def _write(tables: TableCoder, parts: Parts, form: Form, join: Join | None, *, say: Callable[[str], None]) -> None:
    """Write the output, and delete the parts."""
    _write_tables(parts.output, (tables.append(*block) for block in parts.read(tables.schema)), form, join, say=say)
    parts.delete()
    if tables.num_known is not None:
        rows = counted(parts.num_rows, "row", "rows")
        say(f"{tables.num_known:,} of {rows} got the codes of hand-coded descriptions (--known).")


def _write_tables(
    output: Path, tables: Iterable[pa.Table], form: Form, join: Join | None, *, say: Callable[[str], None]
) -> None:
    """Write tables, one below the other and with the columns of `join`."""
    coded = tables if join is None else (join.add(table, form.codes) for table in tables)
    for notice in write_table(output, coded, form):
        say(notice)
    for notice in join.notices() if join is not None else ():
        say(notice)


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
