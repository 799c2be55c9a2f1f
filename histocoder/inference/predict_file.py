"""Codes whole files: a run that was interrupted resumes, and memory does not grow with the file."""

import glob
import hashlib
import json
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.feather
from tqdm import tqdm

from histocoder import distributed
from histocoder.checkpoints.model_files import CONFIG_FILE, WEIGHTS_FILE, read_json
from histocoder.checkpoints.run_files import METRICS_FILE
from histocoder.checkpoints.run_folder import holding, run_of
from histocoder.config import SOURCE_COL, PredictConfig
from histocoder.data.examples import LANG_COL
from histocoder.errors import Interrupted, UserError, handling_stop_signals, sending_notices
from histocoder.files import make_folder, replacing, sha256
from histocoder.inference.coder import Coder, ShowProgress
from histocoder.inference.descriptions import Descriptions
from histocoder.inference.known import Known
from histocoder.inference.predictions import code_columns
from histocoder.inference.table_coder import TableCoder
from histocoder.tables.output import (
    Form,
    check_kept,
    check_new_columns,
    check_output,
    check_values,
    write_table,
)
from histocoder.tables.table import TableFile, open_table

_BATCHES, _FAST_BATCHES = (
    4,
    16,
)  # batches of a part, after which codes are kept; and those of fast models
RESUME = "What is coded so far is kept: run the same command again to resume."


def predict_file(
    coder: Coder,
    config: PredictConfig,
    *,
    model_id: str,
    known: Known | None = None,
    say: Callable[[str], None] = print,
    block_rows: int | None = None,
    progress: Callable[[float, int], object] | None = None,
) -> dict[str, Any]:
    """Code a file into another, with all its columns, the language if one was given for all rows,
    and the codes.

    The codes of its distinct descriptions are kept in parts beside the output, by which the same
    call resumes after an interruption, and which several processes share. Return, on rank 0, what
    `write_provenance` tells of the rows.

    `model_id` identifies the model and hand-coded descriptions: parts with codes by others are not
    used. Descriptions that are `known` keep their codes; a column `source` says which. `block_rows`
    are read at once, by default few enough to hold in memory. `progress` receives the number of
    rows that a batch has coded, and of all rows; by default it is a bar on rank 0's terminal, if
    there is one. It may raise an error to stop; the same call then resumes.
    """
    columns, output = (
        config.settings_of_columns | config.settings_of_qualifiers,
        Path(config.output),
    )
    table = open_table(
        Path(config.input), columns, sheet=config.sheet, encoding=config.file_encoding
    )
    own: dict[str, Any] = {setting: table.column(name) for name, setting in columns.items()}
    config = replace(config, mode=config.mode or coder.mode, **own)
    tables = TableCoder(coder, config, known=known)
    form = _form(config, table, tables.schema.names)
    if LANG_COL in table.header and config.language_col is None and config.language == "unk":
        say(
            f"{config.input}: languages are taken as unknown (unk); the column "
            f"{LANG_COL!r} is not chosen for them."
        )
    for notice in table.notices:
        say(notice)
    block_rows = block_rows or tables.block_rows
    size = (config.batch_size or coder.batch_size) * (_FAST_BATCHES if coder.is_fast else _BATCHES)
    path, state = table.path, table.path.stat()
    depends_on = [
        asdict(config),
        [str(path), state.st_size, state.st_mtime_ns],
        model_id,
        block_rows,
        size,
    ]
    identity = hashlib.sha256(json.dumps(depends_on).encode()).hexdigest()[:16]
    parts = output.with_name(f".{output.name}.parts")
    distributed.run_on_primary(
        partial(make_folder, output.parent), doing="making the output's folder"
    )
    lock = holding(
        output.with_name(f".{output.name}.lock"), path=output, instead="another --output"
    )
    with lock, _kept(parts), handling_stop_signals(_stop):
        count = partial(_count_rows, table, output, block_rows)
        num_rows = distributed.broadcast_from_primary(count, doing="reading the input")
        if any(parts.glob(f"codes-{identity}-*")):
            say("Resuming an interrupted run.")
        hidden = (
            True if progress is not None or distributed.rank() else None
        )  # None: without a terminal
        with (
            tqdm(
                total=num_rows, unit="row", unit_scale=True, disable=hidden, dynamic_ncols=True
            ) as bar,
            _saying(say),
        ):
            tell: Callable[[float], object] = bar.update
            if progress is not None:
                tell = lambda num_coded: progress(num_coded, num_rows)  # noqa: E731
            elif bar.disable and distributed.is_primary():
                tell = _Minutes(num_rows, say).add
            blocks, told = table.chunks(chunk_rows=block_rows), _Told(tables, config.columns)
            coded = _coded_blocks(
                tables, blocks, prefix=str(parts / f"codes-{identity}"), size=size, tell=tell
            )
            for notice in (
                write_table(output, map(told.add, coded), form)
                if distributed.is_primary()
                else coded
            ):
                say(notice)
        if distributed.is_primary():
            shutil.rmtree(parts, ignore_errors=True)
            for remark in filter(
                None, [tables.unlike(), *(classes.coverage() for classes in tables.classes)]
            ):
                say(remark)
    return told.numbers()


def facts_of(coder: Coder, config: PredictConfig, folder: Path, *, name: str) -> dict[str, Any]:
    """Return what `write_provenance` tells of the model in a folder, called `name`, and of how it
    codes.

    `validation` has the accuracy in the report of its run, which is of the run's last model, if
    that is in the mode.
    """
    mode, own, path = config.mode or coder.mode, coder.model.config, run_of(folder) / METRICS_FILE
    sha256s = {
        "sha256": sha256(folder / WEIGHTS_FILE),
        "config_sha256": sha256(folder / CONFIG_FILE),
    }
    found: dict[str, Any] = {
        "system": coder.system,
        "model": {"folder": name, **sha256s},
        "mode": mode,
    }
    found |= {
        "precision": coder.precision,
        "min_confidence": config.min_confidence,
        "validation": {},
    }
    if mode == "flat":
        usual = own.thresholds or own.default_threshold
        found["threshold"] = usual if config.threshold is None else config.threshold
    metrics = read_json(path) if path.is_file() else {}
    if metrics.get("mode") == mode:
        accuracy = round(metrics["answer"]["overall"]["accuracy"], 4)
        found["validation"] = {"rows": metrics["num_rows"], "accuracy": accuracy}
    return found


_SECONDS_BETWEEN_LINES = 60.0


class _Minutes:
    """Says once a minute how many rows are coded, and how long the rest takes: where no terminal
    shows a bar.
    """

    def __init__(self, num_rows: int, say: Callable[[str], None]) -> None:
        self._num_rows, self._say = num_rows, say
        self._num_coded = 0.0
        self._started = self._last = time.monotonic()

    def add(self, num_coded: float) -> None:
        """Count rows that have been coded."""
        self._num_coded += num_coded
        now = time.monotonic()
        if now - self._last < _SECONDS_BETWEEN_LINES or not self._num_coded:
            return
        self._last = now
        seconds = (now - self._started) * max(self._num_rows / self._num_coded - 1, 0)
        rest = timedelta(seconds=round(seconds))
        self._say(f"Coded {round(self._num_coded):,} of {self._num_rows:,} rows; {rest} left.")


def _stop(signum: int, _frame: object) -> NoReturn:
    raise Interrupted(signal.Signals(signum).name, signum)


class _Told:
    """Counts the rows of coded blocks by what became of them."""

    def __init__(self, tables: TableCoder, prefix: str) -> None:
        names, self._classes = tables.schema.names, tables.classes
        self._code = next(iter(code_columns(names)), names[0])
        self._conf, self._source = (
            one if one in names else None for one in (f"{prefix}conf", f"{prefix}{SOURCE_COL}")
        )
        self._counts, self._sums = Counter[str](), Counter[str]()  # the latter of confidence

    def add(self, block: pa.Table) -> pa.Table:
        """Count a block's rows, and return it."""
        is_coded = block[self._code].is_valid().to_numpy()
        conf = (
            np.where(is_coded, 1.0, np.nan) if self._conf is None else block[self._conf].to_numpy()
        )  # mode full
        is_asked = ~np.isnan(conf)
        parts = {
            "rows": np.ones_like(is_coded),
            "coded": is_coded,
            "unsure": is_asked & ~is_coded,
            "blank": ~is_asked,
        }
        is_known = np.zeros_like(is_coded)
        if self._source is not None:
            parts["known"] = is_known = (
                pc.equal(block[self._source], "known").fill_null(False).to_numpy()
            )
        self._counts.update({name: int(part.sum()) for name, part in parts.items()})
        for name, part in (("answered", is_asked & ~is_known), ("coded", is_coded & ~is_known)):
            self._sums.update({f"{name} rows": int(part.sum()), name: conf[part].sum()})
        return block

    def numbers(self) -> dict[str, Any]:
        """Return the counts, the mean confidence in rows that the model answered and in those it
        coded, and classes.
        """
        names = [
            name for name in ("answered", "coded") if self._conf and self._sums[f"{name} rows"]
        ]
        accuracy = {
            name: round(float(self._sums[name] / self._sums[f"{name} rows"]), 4) for name in names
        }
        classes = [classes.told for classes in self._classes]
        return {"counts": dict(self._counts), "expected_accuracy": accuracy, "classes": classes}


def _form(config: PredictConfig, table: TableFile, names: Sequence[str]) -> Form:
    """Return the form of the output; raise a UserError if the input, the new columns and the output
    do not fit.
    """
    output = Path(config.output)
    check_output(output, inputs=(table.path, config.classes), excel=config.excel)
    check_kept(table, output)
    check_new_columns(names, path=table.path, taken=table.header, prefix=f"pred_{config.columns}")
    how = {"excel": config.excel, "raw": config.raw, **({} if config.excel else {"decimal": "."})}
    return Form.like(table, **how)


def _count_rows(table: TableFile, output: Path, block_rows: int) -> int:
    """Read all of the input, so that a damaged file is refused before anything is coded, and return
    its rows.

    What a killed run has left of the output is deleted.
    """
    for left in output.parent.glob(f".{glob.escape(output.name)}.*.tmp"):
        left.unlink()
    num_rows = 0
    for block in table.chunks(chunk_rows=block_rows):
        num_rows += len(block)
        check_values(block, output)
    check_output(output, num_rows=num_rows)
    return num_rows


def _coded_blocks(
    tables: TableCoder,
    blocks: Iterator[pa.Table],
    *,
    prefix: str,
    size: int,
    tell: Callable[[float], object],
) -> Iterator[pa.Table]:
    """Yield blocks of rows with their codes, on rank 0; `tell` receives numbers of rows.

    A block's new descriptions are coded in parts of up to `size`, which ranks deal out among
    themselves; the codes of each are in a file of its own, whose name begins with `prefix`.
    """
    rank, world_size = distributed.rank(), distributed.world_size()
    for number, block in enumerate(blocks):
        new = tables.find(block)
        starts = range(0, len(new.texts), size)
        parts = [
            (Path(f"{prefix}-{number:06d}-{start:06d}.arrow"), new.part(start, size))
            for start in starts
        ]
        own = parts[rank::world_size]
        rows_each = len(block) / max(sum(len(part.texts) for _, part in own), 1)

        def tell_texts(num_texts: int, each: float = rows_each) -> None:
            tell(num_texts * each)

        for path, part in own:
            _codes(tables, path, part, progress=tell_texts)
        if not own:
            tell(len(block))
        distributed.barrier()
        if rank == 0:
            codes = [_codes(tables, path, part, progress=False) for path, part in parts]
            yield tables.append(block, codes, new.rows)


def _codes(
    tables: TableCoder, path: Path, part: Descriptions, *, progress: ShowProgress
) -> pa.Table:
    """Return the codes of some descriptions, from their file if they are coded already."""
    if not path.exists():
        codes = tables.code(part, progress=progress)
        path.parent.mkdir(exist_ok=True)
        with replacing(path) as temporary:
            pa.feather.write_feather(codes, str(temporary))
    elif callable(progress):
        progress(len(part.texts))
    return pa.feather.read_table(path)


@contextmanager
def _kept(parts: Path) -> Iterator[None]:
    """Let an error or an interruption say that what is coded so far is kept."""
    try:
        yield
    except (KeyboardInterrupt, Interrupted) as error:
        raise Interrupted(
            f"Interrupted. {RESUME}", getattr(error, "signum", signal.SIGINT)
        ) from None
    except UserError as error:
        raise UserError(
            f"{error} {RESUME}" if any(parts.glob("codes-*")) else str(error)
        ) from error


@contextmanager
def _saying(say: Callable[[str], None]) -> Iterator[None]:
    """Have rank 0 say each notice once."""
    notices = set[str]()

    def take(notice: str) -> None:
        if notice not in notices and distributed.is_primary():
            notices.add(notice)
            say(notice)

    with sending_notices(take):
        yield
