"""Codes whole files: a run that was interrupted resumes, and memory does not grow with the file."""

import glob
import hashlib
import json
import shutil
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
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
from histocoder.errors import Interrupted, UserError, sending_notices
from histocoder.files import make_folder, replacing, sha256
from histocoder.inference.coder import Coder, ShowProgress
from histocoder.inference.descriptions import Descriptions
from histocoder.inference.known import Known
from histocoder.inference.predictions import code_columns
from histocoder.inference.table_coder import TableCoder
from histocoder.signals import handling_stop_signals
from histocoder.tables.output import (
    Form,
    check_kept,
    check_new_columns,
    check_output,
    check_values,
    write_table,
)
from histocoder.tables.table import TableFile, open_table

BATCHES_OF_PART = 4
"""Number of batches after which codes are kept."""
BATCHES_OF_FAST_PART = 16
"""Number of batches of fast models."""
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
    config, table = _opened(config, coder.mode)
    tables = TableCoder(coder, config, known=known)
    block_rows = block_rows or tables.block_rows
    parts = _parts(coder, config, table, model_id=model_id, block_rows=block_rows)
    form = _form(config, table, tables.schema.names)
    for classes in tables.classes:
        classes.check_header(table.path, table.header)
    for notice in _notices(config, table):
        say(notice)

    output = Path(config.output)
    distributed.run_on_primary(
        partial(make_folder, output.parent), doing="making the output's folder"
    )
    lock_path = output.with_name(f".{output.name}.lock")
    lock = holding(lock_path, path=output, instead="another --output")

    # Notices are said once, by rank 0, which writes what all ranks code.
    with lock, _saying_what_is_kept(parts), handling_stop_signals(_stop), _saying(say):
        count = partial(_check_rows, table, output, block_rows)
        num_rows = distributed.broadcast_from_primary(count, doing="reading the input")
        if any(parts.files()):
            say("Resuming an interrupted run.")

        counter = RowCounter(tables, config.columns, min_confidence=config.min_confidence)
        with _showing_progress(num_rows, progress, say) as on_progress:
            blocks = table.chunks(chunk_rows=block_rows)
            coded_blocks = _coded_blocks(tables, blocks, parts, on_progress)
            if distributed.is_primary():
                for notice in write_table(output, map(counter.add, coded_blocks), form):
                    say(notice)
            else:
                deque(coded_blocks, maxlen=0)

        # The output is whole: what was kept for resuming has served its purpose.
        if distributed.is_primary():
            shutil.rmtree(parts.folder, ignore_errors=True)
            unlike = tables.unlike()
            if unlike is not None:
                say(unlike)
            for classes in tables.classes:
                say(classes.coverage())
    return counter.numbers()


def _opened(config: PredictConfig, mode: str) -> tuple[PredictConfig, TableFile]:
    """Open the input; return the settings, with a mode and its own names of columns, and it."""
    columns = config.settings_of_columns | config.settings_of_qualifiers
    table = open_table(
        Path(config.input), columns, sheet=config.sheet, encoding=config.file_encoding
    )
    names: dict[str, Any] = {setting: table.column(name) for name, setting in columns.items()}
    return replace(config, mode=config.mode or mode, **names), table


def _notices(config: PredictConfig, table: TableFile) -> Iterator[str]:
    """Yield what a user should know of the input before it is coded."""
    if LANG_COL in table.header and config.language_col is None and config.language == "unk":
        yield (
            f"{config.input}: languages are taken as unknown (unk); the column "
            f"{LANG_COL!r} is not chosen for them."
        )
    yield from table.notices


@dataclass(frozen=True)
class _Parts:
    """Files beside an output with the codes of its distinct descriptions, until all are coded."""

    folder: Path
    identity: str
    """Hash of all that the codes depend on: a run takes up the parts of its own alone."""
    num_texts: int
    """Number of descriptions of a part, at most."""

    def files(self) -> Iterator[Path]:
        """Return the files of earlier runs."""
        return self.folder.glob(f"{self.identity}-*")

    def of_block(self, number: int, new: Descriptions) -> list[tuple[Path, Descriptions]]:
        """Return the parts of a block's new descriptions, each with its file."""
        parts = []
        for start in range(0, len(new.texts), self.num_texts):
            name = f"{self.identity}-{number:06d}-{start:06d}.arrow"
            parts.append((self.folder / name, new.part(start, self.num_texts)))
        return parts


def _parts(
    coder: Coder, config: PredictConfig, table: TableFile, *, model_id: str, block_rows: int
) -> _Parts:
    """Return the parts of the same table by the same model with the same settings."""
    batches_of_part = BATCHES_OF_FAST_PART if coder.is_fast else BATCHES_OF_PART
    num_texts = (config.batch_size or coder.batch_size) * batches_of_part
    state = table.path.stat()
    depends_on = [
        asdict(config),
        [str(table.path), state.st_size, state.st_mtime_ns],
        model_id,
        block_rows,
        num_texts,
    ]
    identity = hashlib.sha256(json.dumps(depends_on).encode()).hexdigest()[:16]
    output = Path(config.output)
    return _Parts(output.with_name(f".{output.name}.parts"), identity, num_texts)


@contextmanager
def _showing_progress(
    num_rows: int,
    progress: Callable[[float, int], object] | None,
    say: Callable[[str], None],
) -> Iterator[Callable[[float], object]]:
    """Yield a function that receives numbers of coded rows, for `progress`, a bar, or a line a
    minute.
    """
    if progress is not None:
        yield lambda num_coded: progress(num_coded, num_rows)
        return
    if not distributed.is_primary():
        yield lambda _: None
        return

    # None shows the bar on a terminal alone; a job's log file gets lines instead.
    with tqdm(total=num_rows, unit="row", unit_scale=True, disable=None, dynamic_ncols=True) as bar:
        yield ProgressLines(num_rows, say).add if bar.disable else bar.update


def facts_of(coder: Coder, config: PredictConfig, folder: Path, *, name: str) -> dict[str, Any]:
    """Return what `write_provenance` tells of the model in a folder, called `name`, and of how it
    codes.

    `validation` has the accuracy in the report of its run, which is of the run's last model, if
    that is in the mode.
    """
    mode = config.mode or coder.mode
    facts: dict[str, Any] = {
        "system": coder.system,
        "model": {
            "folder": name,
            "sha256": sha256(folder / WEIGHTS_FILE),
            "config_sha256": sha256(folder / CONFIG_FILE),
        },
        "mode": mode,
        "precision": coder.precision,
        "min_confidence": config.min_confidence,
        "has_confidence_elsewhere": bool(coder.model.config.confidence) and mode == coder.mode,
        "validation": {},
    }
    if mode == "flat":
        facts["threshold"] = config.threshold
        if config.threshold is None:
            model_config = coder.model.config
            facts["threshold"] = model_config.thresholds or model_config.default_threshold

    # A run's report may be of another mode than the one that is asked for here.
    path = run_of(folder) / METRICS_FILE
    metrics = read_json(path) if path.is_file() else {}
    if metrics.get("mode") == mode:
        accuracy = round(metrics["answer"]["overall"]["accuracy"], 4)
        facts["validation"] = {"rows": metrics["num_rows"], "accuracy": accuracy}
    return facts


SECONDS_BETWEEN_LINES = 60.0


class ProgressLines:
    """Says once a minute how many rows are coded, and how long the rest takes: where no terminal
    shows a bar.
    """

    def __init__(self, num_rows: int, say: Callable[[str], None]) -> None:
        self._num_rows = num_rows
        self._say = say
        self._num_coded = 0.0
        self._start_time = time.monotonic()
        self._last_time = self._start_time

    def add(self, num_coded: float) -> None:
        """Count rows that have been coded."""
        self._num_coded += num_coded
        now = time.monotonic()
        if now - self._last_time < SECONDS_BETWEEN_LINES or not self._num_coded:
            return
        self._last_time = now
        seconds_each = (now - self._start_time) / self._num_coded
        num_left = max(self._num_rows - self._num_coded, 0)
        remaining = timedelta(seconds=round(seconds_each * num_left))
        self._say(f"Coded {round(self._num_coded):,} of {self._num_rows:,} rows; {remaining} left.")


def _stop(signum: int, _frame: object) -> NoReturn:
    raise Interrupted(signal.Signals(signum).name, signum)


class RowCounter:
    """Counts the rows of coded blocks by what became of them."""

    def __init__(self, tables: TableCoder, prefix: str, *, min_confidence: float) -> None:
        self._min_confidence = min_confidence
        names = tables.schema.names
        self._classes = tables.classes
        self._code = next(iter(code_columns(names)), names[0])
        self._conf = f"{prefix}conf"
        self._has_conf = self._conf in names  # not in mode full
        self._source = f"{prefix}{SOURCE_COL}"
        self._has_source = self._source in names
        self._counts = Counter[str]()

        # of rows that the model answered, and of those that it coded
        self._num_by_model = Counter[str]()
        self._sum_conf = Counter[str]()

    def add(self, block: pa.Table) -> pa.Table:
        """Count a block's rows, and return it."""
        is_coded = block[self._code].is_valid().to_numpy()
        is_answered = is_coded
        if self._has_conf:
            conf = block[self._conf].to_numpy()
            is_answered = ~np.isnan(conf)
        is_known = np.zeros_like(is_coded)
        if self._has_source:
            is_known = pc.equal(block[self._source], "known").fill_null(False).to_numpy()
            self._counts["known"] += int(is_known.sum())

        # A known row without a code has no occupation, which the model was not asked.
        self._counts["rows"] += len(block)
        self._counts["coded"] += int(is_coded.sum())

        # the model may be sure that there is no occupation
        is_uncoded = is_answered & ~is_coded & ~is_known
        is_unsure = is_uncoded
        if self._has_conf:
            is_unsure = is_uncoded & (conf < self._min_confidence)
        self._counts["unsure"] += int(is_unsure.sum())
        self._counts["without"] += int((is_uncoded & ~is_unsure).sum())
        self._counts["blank"] += int((~is_answered).sum())

        # The confidence of a known row is a share of rows, and says nothing of the model.
        if self._has_conf:
            for name, rows in (("answered", is_answered), ("coded", is_coded)):
                is_by_model = rows & ~is_known
                self._num_by_model[name] += int(is_by_model.sum())
                self._sum_conf[name] += conf[is_by_model].sum()
        return block

    def numbers(self) -> dict[str, Any]:
        """Return the counts, the mean confidence in rows that the model answered and in those it
        coded, and classes.
        """
        mean_conf = {}
        for name, number in self._num_by_model.items():
            if number:
                mean_conf[name] = round(float(self._sum_conf[name] / number), 4)
        return {
            "counts": dict(self._counts),
            "expected_accuracy": mean_conf,
            "classes": [classes.record for classes in self._classes],
        }


def _form(config: PredictConfig, table: TableFile, names: Sequence[str]) -> Form:
    """Return the form of the output; raise a UserError if the input, the new columns and the output
    do not fit.
    """
    output = Path(config.output)
    check_output(output, inputs=(table.path, config.classes), excel=config.excel)
    check_kept(table, output)
    check_new_columns(names, path=table.path, taken=table.header, prefix=f"pred_{config.columns}")
    form = Form.like(table, excel=config.excel, raw=config.raw)
    return form if config.excel else replace(form, decimal=".")


def _check_rows(table: TableFile, output: Path, block_rows: int) -> int:
    """Read all of the input, so that a damaged file is refused before anything is coded, and return
    its rows.

    What a killed run has left of the output is deleted.
    """
    for left_over in output.parent.glob(f".{glob.escape(output.name)}.*.tmp"):
        left_over.unlink()
    num_rows = 0
    for block in table.chunks(chunk_rows=block_rows):
        num_rows += len(block)
        check_values(block, output)
    check_output(output, num_rows=num_rows)
    return num_rows


def _coded_blocks(
    tables: TableCoder,
    blocks: Iterator[pa.Table],
    parts: _Parts,
    on_progress: Callable[[float], object],
) -> Iterator[pa.Table]:
    """Yield blocks of rows with their codes, on rank 0; `on_progress` receives numbers of
    rows.

    Ranks deal out the parts of a block's new descriptions among themselves.
    """
    rank = distributed.rank()
    for number, block in enumerate(blocks):
        new = tables.find(block)
        parts_of_block = parts.of_block(number, new)

        # A block's rows count as coded evenly with its new descriptions.
        parts_of_rank = parts_of_block[rank :: distributed.world_size()]
        num_texts = sum(len(part.texts) for _, part in parts_of_rank)
        rows_each = len(block) / max(num_texts, 1)

        def count_texts(num_coded: int, rows_each: float = rows_each) -> None:
            on_progress(num_coded * rows_each)

        for path, part in parts_of_rank:
            _codes(tables, path, part, progress=count_texts)
        if not parts_of_rank:
            on_progress(len(block))

        # Rank 0 reads what the other ranks have written.
        distributed.barrier()
        if rank == 0:
            codes = [_codes(tables, path, part, progress=False) for path, part in parts_of_block]
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
def _saying_what_is_kept(parts: _Parts) -> Iterator[None]:
    """Let an error or an interruption say that what is coded so far is kept."""
    try:
        yield
    except (KeyboardInterrupt, Interrupted) as error:
        signum = getattr(error, "signum", signal.SIGINT)
        raise Interrupted(f"Interrupted. {RESUME}", signum) from None
    except UserError as error:
        message = str(error)
        if any(parts.folder.glob("*.arrow")):
            message += f" {RESUME}"
        raise UserError(message) from error


@contextmanager
def _saying(say: Callable[[str], None]) -> Iterator[None]:
    """Have rank 0 say each notice once."""
    notices = set[str]()

    # The same notice may come of every block.
    def take(notice: str) -> None:
        if notice not in notices and distributed.is_primary():
            notices.add(notice)
            say(notice)

    with sending_notices(take):
        yield
