"""Codes whole files, in chunks: what is done stays done, and memory does not grow with the file."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet
from tqdm import tqdm

from histocoder import distributed
from histocoder.checkpoints.lock import holding
from histocoder.data.output import Output
from histocoder.data.sources import EXCEL, LABELLED, PARQUET
from histocoder.data.table import TableFile, check_output, count_rows, fingerprint, is_parquet, open_table
from histocoder.errors import Interrupted, UserError
from histocoder.files import make_folder, remove_leftovers, replacing
from histocoder.inference.coder import Coder, check_threshold
from histocoder.inference.join import Join
from histocoder.inference.known import KNOWN, SOURCE_COL, Known
from histocoder.inference.notices import FileNotices
from histocoder.inference.pairs import LANG, TEXT, pairs_of, with_language
from histocoder.inference.predictions import Part, load_parts, save_parts

_CHUNK_ROWS, _CHUNK_CELLS = 10_000, 2_000_000
"""Of a chunk at most, likewise below; a row has a cell for each column of its codes."""
_GROUP_ROWS, _GROUP_CELLS = 100_000, 20_000_000
"""Of a row group of a Parquet file."""
_REMEMBERED, _REMEMBERED_CELLS = 500_000, 10_000_000
"""Of the distinct descriptions whose codes are kept, to be used again in later chunks."""
_DECIMALS = 6
_KEEP_SECONDS = 20.0
"""After which what is coded of a chunk is kept, so that no more is lost."""
_PART, _BATCHES = ".arrow", ".batches"
"""Suffixes of the files that hold a chunk, and what is coded of one."""


@dataclass(frozen=True)
class PredictConfig:
    """How a file is coded."""

    input: str
    output: str = ""
    """Empty where no file is written."""
    input_col: str = "occ1"
    language: str = "unk"
    language_col: str | None = None
    mode: str = "greedy"
    k: int = 5
    threshold: float | None = None
    constrain: bool = False
    batch_size: int = 256
    min_confidence: float = 0.0
    columns: str = ""
    """What the names of the columns that are added begin with."""
    excel: bool = False
    """Whether CSV is written as Excel opens it: UTF-8 with a byte order mark, separated as the input is."""
    sheet: str | None = None
    """Of an Excel workbook; None: the only one that holds anything."""
    raw: bool = False
    """Whether texts that a spreadsheet would run as formulas are written as they are."""

    def __post_init__(self) -> None:
        if self.language != "unk" and self.language_col is not None:
            raise UserError("Give --language (one for all rows) or --language-col (one for each row), not both.")
        if self.k < 1:
            raise UserError(f"--k is {self.k}; it must be 1 or more.")
        if self.batch_size < 1:
            raise UserError(f"--batch-size is {self.batch_size}; it must be 1 or more.")
        check_threshold(self.threshold)
        if self.output:
            check_output(Path(self.output))
        if self.excel and Path(self.output).suffix.lower() in (*PARQUET, *EXCEL, *LABELLED):
            raise UserError("--excel is for CSV; choose an --output that ends in .csv.")

    @property
    def input_cols(self) -> list[str]:
        """The columns that are read."""
        return [c for c in (self.input_col, self.language_col) if c is not None]


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
    engine: Callable[[TableFile], Iterable[pa.Table]] | None = None,
) -> None:
    """Code a CSV or Parquet file into another, with all its columns and the codes' behind them; before these stands the
    language, where one was given for all rows.

    Chunks are coded into files of their own beside the output, which they become when all are there; started again
    after an interruption, those that are there stay. Several processes share the chunks out. The output does not depend
    on interruptions.

    Parameters
    ----------
    coder : Coder
    config : PredictConfig
    model_id : str
        What tells this model from others; parts that another has left are not used.
    known : Known, optional
        Hand-coded descriptions, which keep their codes; a column `source` says which.
    join : Join, optional
        A table whose columns are added by code.
    overwrite : bool
        Whether to replace an existing output.
    say : callable
        Receives each notice to the user.
    chunk_rows : int, optional
        Rows of a chunk; by default so many that little is lost, and not much has to be held in memory.
    bar : tqdm, optional
        Counts the rows; by default one on the terminal, if there is one.
    engine : callable, optional
        Has other processes code the table, and yields it with its codes; of it, no part is kept when it is interrupted.

    Raises
    ------
    UserError
        If the input or the settings can't be used, or the output exists already or is being written by another run.
    """
    source, output = Path(config.input), Path(config.output)
    column_names = coder.column_names if known is None else partial(known.column_names, coder)
    names = column_names(config.mode, k=config.k)
    chunk_rows = chunk_rows or rows_of_chunk(names)
    parts = output.with_name(f".{output.name}.parts")
    settings = {"model": model_id, "chunk_rows": chunk_rows, **({} if known is None else {"known": known.source_id})}
    table = open_table(source, config.input_cols, sheet=config.sheet)
    new = names_of_output(names, coder.system, config, taken=table.header)
    if not is_parquet(output):
        _check_csv(table)
    code_columns = {own: name for own, name in new.items() if name.startswith(f"{coder.system}_")}
    for name in join.columns(code_columns) if join is not None else ():
        if name in (*table.header, *new):
            raise UserError(f"--join: the output has a column {name!r} already; rename the table's.")
    form = Output(
        output,
        delimiter=table.dialect.delimiter if config.excel and table.dialect is not None else ",",
        excel=config.excel,
        raw=config.raw,
        codes=code_columns,
        titles=coder.model.config.descriptions,
    )
    num_rows = count_rows(table)
    form.check(num_rows)
    bar = _progress_bar(num_rows) if bar is None else bar
    distributed.run_on_primary(lambda: _check_folder(output.parent), doing="looking at the output's folder")
    with holding(output.with_name(f".{output.name}.lock"), what=f"writes {output}", instead="another --output"):
        distributed.run_on_primary(lambda: _keep_files(source, output, overwrite), doing="looking at the output")

        def added(coded: pa.Table) -> pa.Table:
            return coded if join is None else join.add(coded, code_columns)

        if engine is not None:
            with replacing(output) as temporary:
                _write(form, temporary, map(added, engine(table)), say)
        else:
            distributed.run_on_primary(lambda: _open_parts(parts, config, settings, say), doing="looking at the input")
            if not parts.is_dir():
                raise UserError(
                    f"{output.parent} is not the folder that rank 0 writes to. Name one that all nodes see."
                )
            try:
                num_chunks = _code_chunks(
                    coder, config, table, parts, known=known, names=names, chunk_rows=chunk_rows, say=say, bar=bar
                )
            except UserError:
                if distributed.is_primary() and not any(parts.glob("[0-9]*")):
                    shutil.rmtree(parts, ignore_errors=True)  # no chunk in it is worth keeping
                raise
            distributed.run_on_primary(
                lambda: _join_parts(parts, form, num_chunks, added=added, say=say), doing="writing the output"
            )
    if join is not None and (notice := join.notice()):
        say(notice)
    say(f"Coded {source} into {output}.")


def rows_of_chunk(names: Sequence[str]) -> int:
    """Return how many rows are coded at once, where so many columns are added to each."""
    return min(_CHUNK_ROWS, -(-_CHUNK_CELLS // len(names)))


def names_of_output(
    names: Sequence[str], system: str, config: PredictConfig, *, taken: Sequence[str] = ()
) -> dict[str, str]:
    """Name of each column that is added -> the column of `Coder.predict`, one of `names`.

    Of codes that are ranked, all but the first are alternatives, and say so: `alt_hisco_2`.

    Raises
    ------
    UserError
        Where one of them is in the input, whose columns are `taken`.
    """
    is_ranked = config.mode == "topk"
    first = (f"{system}_1", "prob_1", "desc_1", "conf", SOURCE_COL)
    found = {f"{config.columns}{'alt_' if is_ranked and name not in first else ''}{name}": name for name in names}
    if clash := [name for name in found if name in taken]:
        raise UserError(
            f"{config.input} has a column {clash[0]!r} already. Choose with --columns what the names of the new "
            f"columns begin with, such as --columns pred_{config.columns}."
        )
    return found


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder} to write to.")
    make_folder(folder)  # which says so where it can't be written to


def _code_chunks(
    coder: Coder,
    config: PredictConfig,
    table: TableFile,
    parts: Path,
    *,
    known: Known | None,
    names: Sequence[str],
    chunk_rows: int,
    say: Callable[[str], None],
    bar: tqdm,
) -> int:
    """Code this process's share of the chunks, and wait for the others' shares; returns the number of all chunks."""
    rank, world_size = distributed.rank(), distributed.world_size()
    memory, notices = Memory(coder, config, known=known, names=names), FileNotices()
    for notice in table.notices:
        say(notice)
    num_chunks = rows_done = num_known = 0
    with bar, notices.collecting():
        for number, chunk in enumerate(table.chunks(chunk_rows=chunk_rows)):
            part, is_mine = _part(parts, number), number % world_size == rank
            if is_mine and part.exists():
                done = pa.feather.read_table(part)
                memory.take_in(done)
            elif is_mine:
                batches = _Batches(parts / f"{number:06d}{_BATCHES}", told=bar.update)
                try:
                    done = memory.code(chunk, batches)
                    with _kept_for_later(part, parts) as temporary:
                        pa.feather.write_feather(done, str(temporary))
                except KeyboardInterrupt:
                    batches.keep()
                    raise Interrupted(
                        f"Interrupted: about {rows_done + round(batches.num_told):,} rows are coded, and kept beside "
                        f"{config.output}. The same command resumes from there.",
                        signal.SIGINT,
                    ) from None
                batches.path.unlink(missing_ok=True)
            if is_mine and known is not None:
                num_known += pc.sum(pc.equal(done[-1], KNOWN), min_count=0).as_py()
            num_chunks += 1
            rows_done += len(chunk)
            bar.update(rows_done - bar.n)
    distributed.wait_for_all(doing="coding its share")
    notices.tell(say, may_repeat=memory.is_full)
    if known is not None:
        total = sum(map(int, distributed.gather_texts(str(num_known))))
        say(f"{total:,} of {rows_done:,} rows got the codes of hand-coded descriptions (--known).")
    return num_chunks


def _check_csv(table: TableFile) -> None:
    """Raise a UserError that names the first column that CSV can't hold."""
    for field in table.schema:
        try:
            pa.csv.write_csv(pa.schema([field]).empty_table(), pa.BufferOutputStream())
        except pa.ArrowInvalid as error:
            raise UserError(
                f"{table.path}, column {field.name!r}: its cells are of the type {field.type}, which CSV can't hold. "
                "Choose an --output that ends in .parquet."
            ) from error


def _part(parts: Path, number: int) -> Path:
    """Return the path of a chunk."""
    return parts / f"{number:06d}{_PART}"


def _progress_bar(num_rows: int) -> tqdm:
    """On rank 0, where there is a terminal."""
    hidden = True if distributed.rank() else None
    return tqdm(total=num_rows, unit="row", unit_scale=True, disable=hidden, dynamic_ncols=True)


class _Batches:
    """What of a chunk is coded, kept now and then for when the run is interrupted."""

    def __init__(self, path: Path, *, told: Callable[[float], object]) -> None:
        self.path, self._told = path, told
        self.parts = load_parts(path)
        self.num_told, self._num_kept = 0.0, len(self.parts)
        self._kept_at = time.monotonic()

    def tell(self, num_rows: float) -> None:
        """Hear that so many rows more are coded, about."""
        self._told(num_rows)
        self.num_told += num_rows
        if time.monotonic() - self._kept_at >= _KEEP_SECONDS:
            self.keep()

    def keep(self) -> None:
        """Write what is coded into the file."""
        if len(self.parts) > self._num_kept:
            save_parts(self.path, self.parts)
        self._num_kept, self._kept_at = len(self.parts), time.monotonic()


class Memory:
    """Codes chunks, each distinct description once; a full memory takes in no more, so that it does not grow."""

    def __init__(
        self, coder: Coder, config: PredictConfig, *, known: Known | None = None, names: Sequence[str]
    ) -> None:
        self._config, self._names = config, list(names)
        self._code = coder.predict if known is None else partial(known.predict, coder)
        self._output_names = names_of_output(names, coder.system, config)
        self._numbers = [name for name in names if _is_number(name, config)]
        self._places: dict[tuple[str, str], int] = {}  # of each text and language in the arrays
        self._arrays = {name: np.empty(0, float if name in self._numbers else object) for name in names}
        self._room = min(_REMEMBERED, _REMEMBERED_CELLS // len(names))

    def code(self, chunk: pa.Table, batches: _Batches) -> pa.Table:
        """Return the chunk with the codes' columns behind its own.

        `batches` hears what is done, and holds what an interrupted run has done.
        """
        columns = self.columns(self._pairs(chunk), batches.tell, batches.parts)
        chunk = with_language(chunk, self._config.language)
        for name, column in columns.items():
            chunk = chunk.append_column(name, column)
        return chunk

    def columns(
        self, table: pa.Table, tell: Callable[[float], object] = lambda _: None, parts: list[Part] | None = None
    ) -> dict[str, pa.Array]:
        """Return the codes' columns, of the descriptions that `pairs_of` has returned.

        `tell` hears how many rows more are done; `parts` are what an interrupted run has done.
        """
        pairs = _tuples(table)
        new = self._new(pairs)
        num_known = len(pairs) - sum(map(new.__contains__, pairs))
        tell(num_known)
        if new:
            rows_each = (len(pairs) - num_known) / len(new)
            self._add(new, self._predict(new, told=lambda count: tell(count * rows_each), parts=parts))
        rows = np.fromiter(map(self._places.__getitem__, pairs), dtype=np.int64, count=len(pairs))
        found = {}
        for name, column in self._output_names.items():
            kind = pa.float64() if column in self._numbers else pa.string()
            found[name] = pa.array(self._arrays[column][rows], kind, from_pandas=True)
        self._forget_surplus()
        return found

    @property
    def is_full(self) -> bool:
        """Whether it takes in no more."""
        return len(self._places) >= self._room

    def take_in(self, coded: pa.Table) -> None:
        """Remember a chunk that `code` has coded, as if it had just done so."""
        if self.is_full:
            return
        pairs = _tuples(self._pairs(coded))
        own = range(coded.num_columns - len(self._names), coded.num_columns)
        codes = coded.select(list(own)).to_pandas().set_axis(self._names, axis=1)
        new = self._new(pairs)
        self._add(new, codes.iloc[list(new.values())])
        self._forget_surplus()

    def _pairs(self, chunk: pa.Table) -> pa.Table:
        return pairs_of(chunk, self._config.input_col, self._config.language_col, self._config.language)

    def _new(self, pairs: list[tuple[str, str]]) -> dict[tuple[str, str], int]:
        """Return those that are not known, and the row of each where it comes first."""
        new: dict[tuple[str, str], int] = {}
        for row, pair in enumerate(pairs):
            if pair not in self._places:
                new.setdefault(pair, row)
        return new

    def _predict(
        self, new: Iterable[tuple[str, str]], *, told: Callable[[int], object], parts: list[Part] | None
    ) -> pd.DataFrame:
        config = self._config
        texts, langs = zip(*new, strict=True)
        return self._code(
            texts,
            langs,
            mode=config.mode,
            k=config.k,
            threshold=config.threshold,
            constrain=config.constrain or None,
            min_confidence=config.min_confidence,
            batch_size=config.batch_size,
            progress=told,
            parts=parts,
        )

    def _add(self, new: Iterable[tuple[str, str]], codes: pd.DataFrame) -> None:
        start, end = len(self._places), len(self._places) + len(codes)
        self._places.update(zip(new, range(start, end), strict=True))
        codes = codes.reindex(columns=self._names)  # flat may have found fewer codes, or more
        for name, array in self._arrays.items():
            if len(array) < end:
                self._arrays[name] = np.concatenate([array, np.empty_like(array, shape=end)])  # twice as long, or more
            column = codes[name].to_numpy(array.dtype)
            self._arrays[name][start:end] = np.round(column, _DECIMALS) if name in self._numbers else column

    def _forget_surplus(self) -> None:
        while len(self._places) > self._room:
            self._places.popitem()


def _tuples(pairs: pa.Table) -> list[tuple[str, str]]:
    return list(zip(pairs[TEXT].to_pylist(), pairs[LANG].to_pylist(), strict=True))


def _is_number(column: str, config: PredictConfig) -> bool:
    return config.mode == "full" or column == "conf" or column.startswith("prob_")


def _keep_files(source: Path, output: Path, overwrite: bool) -> None:
    """Raise a UserError where writing the output would lose a file."""
    if output.exists() and not overwrite:
        raise UserError(f"{output} exists already. Add --overwrite to replace it, or choose another --output.")
    if source.exists() and output.exists() and output.samefile(source):
        raise UserError("--output is the input itself; choose another.")


def _open_parts(parts: Path, config: PredictConfig, settings: dict[str, object], say: Callable[[str], None]) -> None:
    """Create the folder of the parts; one with other settings or another input is replaced.

    Raises
    ------
    UserError
        Where the input can't be read.
    """
    source = Path(config.input)
    settings = {**asdict(config), **settings, "source": fingerprint(source), "processes": distributed.world_size()}
    settings["parts"] = _PART
    path = parts / "settings.json"
    if path.exists() and json.loads(path.read_text(encoding="utf-8")) == settings:
        remove_leftovers(parts)
        names = [path.name for path in parts.glob("[0-9]*")]
        if names:
            num_done = sum(not name.endswith(_BATCHES) for name in names)
            more = ", and parts of others" if num_done < len(names) else ""
            say(f"Resuming where it was interrupted: {num_done} chunks are done{more}.")
        return
    shutil.rmtree(parts, ignore_errors=True)
    make_folder(parts)
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(settings, indent=2), encoding="utf-8")


@contextmanager
def _kept_for_later(path: Path, parts: Path) -> Iterator[Path]:
    """`replacing`, for a file whose failure loses nothing of what was done before, in `parts`."""
    try:
        with replacing(path) as temporary:
            yield temporary
    except UserError as error:
        if not any(parts.glob("[0-9]*")):
            raise
        raise UserError(f"{error} The chunks coded so far are kept: make room and start it again.") from error


def _join_parts(
    parts: Path,
    output: Output,
    num_chunks: int,
    *,
    added: Callable[[pa.Table], pa.Table],
    say: Callable[[str], None],
) -> None:
    """Join all parts, in order, into one file, and delete them."""
    files = [_part(parts, number) for number in range(num_chunks)]
    for file in files:
        if not file.exists():
            raise UserError(
                f"The chunk {file}, one of {num_chunks}, was coded and is gone. The others are kept: start it again."
            )
    with _kept_for_later(output.path, parts) as temporary:
        _write(output, temporary, (added(pa.feather.read_table(file)) for file in files), say)
    shutil.rmtree(parts, ignore_errors=True)


def _write(output: Output, temporary: Path, tables: Iterable[pa.Table], say: Callable[[str], None]) -> None:
    """Write tables, one below the other, to where the file is made, and say what there is to say of it."""
    rest = iter(tables)
    first = next(rest)
    for notice in output.write(temporary, first.schema, _groups(itertools.chain([first], rest))):
        say(notice)


def _groups(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Yield the rows of several tables in few, since a writer of Parquet keeps metadata of each to the end."""
    waiting: list[pa.Table] = []
    for table in tables:
        waiting.append(table)
        if sum(map(len, waiting)) >= min(_GROUP_ROWS, _GROUP_CELLS // table.num_columns):
            yield pa.concat_tables(waiting)
            waiting = []
    if waiting:
        yield pa.concat_tables(waiting)
