"""Code the files that are sent in, one after the other, in the background."""

import re
import secrets
import shutil
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from histocoder.config import SOURCE_COL, PredictConfig
from histocoder.data.cells import descriptions_in
from histocoder.data.languages import chosen_language
from histocoder.data.table import open_table, strings
from histocoder.desk.coding import CodingDesk
from histocoder.desk.store import Store
from histocoder.errors import Cancelled, UserError
from histocoder.evaluation.review import Columns
from histocoder.inference.predict_file import predict_file

_SUFFIXES = (".csv", ".tsv", ".txt", ".csv.gz", ".tsv.gz", ".parquet", ".pq", ".xlsx", ".dta", ".sav")
State = Literal["new", "queued", "running", "done", "failed", "cancelled"]
_WAITING = ("queued", "running")
_PREVIEW_ROWS = 8
_CELL = 120  # maximum number of characters of a cell in the preview


class Options(BaseModel):
    """Options of coding a file."""

    model_config = ConfigDict(str_max_length=2000, allow_inf_nan=False)

    input_col: str
    language: str = "unk"
    language_col: str | None = None
    known: bool = False
    """Whether descriptions of the training data get their own codes."""
    min_confidence: float = 0.0
    sheet: str | None = None
    """Sheet of an Excel workbook; by default the only one that holds anything."""
    raw: bool = False
    """Whether texts that a spreadsheet would run as formulas are written as they are."""
    excel: bool = False
    """Whether CSV is separated as the file is and marked as UTF-8, as Excel expects it; always where the file is not
    separated by commas."""
    columns: str = ""
    """Prefix of the new columns' names; `pred_` is added if the file has such columns already."""


class Preview(BaseModel):
    """The first rows of a file."""

    columns: list[str]
    rows: list[list[str]]
    input_col: str | None  # column that probably holds descriptions
    language_col: str | None  # column that probably holds languages
    notices: list[str]


class File(BaseModel):
    """A file, and how far it is."""

    id: str
    name: str
    state: State
    options: Options | None = None
    num_rows: int | None = None
    rows_done: int = 0
    rows_per_second: float | None = None
    seconds_left: float | None = None
    message: str = ""


class _RowsDone:
    """Rows of a file that have been coded; those of an earlier start do not count for the speed."""

    def __init__(self) -> None:
        self.num_rows, self.num_done = 0, 0.0
        self._num_new, self._start = 0.0, 0.0

    def add(self, num_rows: float, total: int) -> None:
        """Count rows that a batch has coded."""
        self.num_rows = total
        self.num_done += num_rows
        if self._start:
            self._num_new += num_rows
        else:
            self._start = time.monotonic()

    @property
    def rows_per_second(self) -> float | None:
        return self._num_new / (time.monotonic() - self._start) if self._num_new else None


class Files:
    """The files of a desk; `input_col` and `language_col` are the columns of the model's own data."""

    def __init__(
        self, folder: Path, store: Store, coding: CodingDesk, *, input_col: str | None, language_col: str | None
    ) -> None:
        self._folder, self._store, self._coding = folder, store, coding
        self._columns = (input_col, language_col)
        self._changed = threading.Condition()
        self._is_stopping = False
        self._cancel = threading.Event()  # stop coding the file that is running
        self._running: tuple[str, _RowsDone] | None = None  # that file, and how much of it is coded
        for file in store.files():
            if file["state"] == "running":  # on a server that was killed
                store.put_file(file["id"], state="queued")
        self._worker = threading.Thread(target=self._work, daemon=True)

    def start(self) -> None:
        """Start to code the files in the queue."""
        self._worker.start()

    def stop(self) -> None:
        """Interrupt coding; the next server resumes it."""
        with self._changed:
            self._is_stopping = True
            self._cancel.set()
            self._changed.notify_all()
        self._worker.join(timeout=30)

    def new(self, name: str, sheet: str | None) -> tuple[str, Path]:
        """Return the number of a new file, and the path to write it to; raise a UserError unless it is a table's."""
        name = "".join(char for char in re.split(r"[/\\]", name)[-1] if char.isprintable())
        suffix = next((suffix for suffix in reversed(_SUFFIXES) if name.lower().endswith(suffix)), None)
        if suffix is None:
            raise UserError(f"{name} can't be read as a table; send a file that ends in {', '.join(_SUFFIXES)}.")
        file = secrets.token_hex(8)
        path = self._folder / file / f"input{suffix}"
        path.parent.mkdir(parents=True)
        options = Options(input_col="", sheet=sheet).model_dump_json() if sheet else None
        self._store.put_file(file, name=name, suffix=suffix, state="new", message="", options=options)
        return file, path

    def all(self) -> list[File]:
        """List the files, the last one first."""
        return [self._described(record) for record in self._store.files()]

    def get(self, file: str) -> File:
        """Return a file, and how much of it is coded."""
        return self._described(self._store.file(file))

    def preview(self, file: str) -> Preview:
        """Return the first rows."""
        record = self._store.file(file)
        input_col, language_col = self._columns
        options = _options(record)
        with self._named(record):
            wanted = [*filter(None, self._columns), "occ1", "lang"]
            table = open_table(self._path(record), (), optional=wanted, sheet=options.sheet if options else None)
            chunk = next(iter(table.chunks(chunk_rows=_PREVIEW_ROWS)))
        cells = [[_shown(cell or "") for cell in strings(column).to_pylist()] for column in chunk.columns]
        likely = table.column(input_col) if input_col and table.has(input_col) else descriptions_in(table.header)
        langs = [table.column(name) for name in (language_col, "lang", "language") if name and table.has(name)]
        return Preview(
            columns=table.header,
            rows=[list(row) for row in zip(*cells, strict=True)],
            input_col=likely,
            language_col=langs[0] if langs else None,
            notices=[self._as_sent(notice, record) for notice in table.notices],
        )

    def code(self, file: str, options: Options) -> File:
        """Code a file as `histocoder predict` does, after those that wait already."""
        record, coder = self._store.file(file), self._coding.coder
        if record["state"] in _WAITING:
            raise UserError(f"{record['name']} is already being coded.")
        with self._named(record):
            config = self._config(record, options)
            chosen_language(config.language, coder.model.config.languages)  # raises an error if it is not one
            table = open_table(self._path(record), config.settings_of_columns, sheet=options.sheet)
        options.excel |= table.csv is not None and table.csv.delimiter != "," and "tsv" not in record["suffix"]
        names = [*coder.column_names(config), SOURCE_COL]
        while any(f"{options.columns}{name}" in table.header for name in names):
            options.columns += "pred_"
        with self._changed:
            self._store.put_file(file, state="queued", options=options.model_dump_json(), num_rows=None, message="")
            self._changed.notify_all()
        return self.get(file)

    def cancel(self, file: str) -> File:
        """Stop coding a file; what is coded is kept for when it is coded again."""
        with self._changed:
            if self._store.file(file)["state"] == "queued":
                self._store.put_file(file, state="cancelled")
            elif self._running is not None and self._running[0] == file:
                self._cancel.set()
        return self.get(file)

    def remove(self, file: str) -> list[File]:
        """Delete a file and its codes; return the other files."""
        record = self._store.file(file)
        if record["state"] in _WAITING:
            raise UserError(f"{record['name']} is being coded; cancel that first.")
        shutil.rmtree(self._folder / file, ignore_errors=True)
        self._store.drop_file(file)
        return self.all()

    def result(self, file: str) -> tuple[Path, str]:
        """Return the coded file, and what to call it."""
        record = self._store.file(file)
        if record["state"] != "done":
            raise UserError(f"{record['name']} is not coded yet.")
        return self._path(record, "coded"), _coded_name(record)

    def to_review(self, file: str) -> int:
        """Make cards of a coded file; return their source."""
        path, name = self.result(file)
        record = self._store.file(file)
        options = Options.model_validate_json(record["options"])
        columns = Columns(options.input_col, options.language_col, self._coding.coder.model.config.target_cols)
        with self._named(record):
            return self._store.add_source(path, name, columns)

    def _as_sent(self, message: str, record: dict[str, Any]) -> str:
        """Return a message that names a file, or the coded one, as the user does."""
        names = {self._path(record, "coded"): _coded_name(record), self._path(record): record["name"]}
        for path, name in {**names, self._folder: "files"}.items():
            message = message.replace(str(path), name)
        return message

    @contextmanager
    def _named(self, record: dict[str, Any]) -> Iterator[None]:
        """Let the messages of errors name the file as the user does."""
        try:
            yield
        except UserError as error:
            raise UserError(self._as_sent(str(error), record)) from error

    def _path(self, record: dict[str, Any], stem: Literal["input", "coded"] = "input") -> Path:
        return self._folder / record["id"] / f"{stem}{record['suffix']}"

    def _config(self, record: dict[str, Any], options: Options) -> PredictConfig:
        return PredictConfig(
            input=str(self._path(record)),
            output=str(self._path(record, "coded")),
            mode=self._coding.coder.mode,
            **options.model_dump(exclude={"known"}),
        )

    def _described(self, record: dict[str, Any]) -> File:
        file = File(**{**record, "options": _options(record)})
        number, progress = self._running or ("", _RowsDone())
        if file.state == "done":
            file.rows_done = file.num_rows or 0
        elif number == file.id and progress.num_rows:
            file.num_rows, file.rows_done = progress.num_rows, int(progress.num_done)
            file.rows_per_second = progress.rows_per_second
            if file.rows_per_second:
                file.seconds_left = max(0.0, progress.num_rows - progress.num_done) / file.rows_per_second
        return file

    def _next(self) -> dict[str, Any] | None:
        """Wait for the first file in the queue; None when the desk closes."""
        with self._changed:
            while not self._is_stopping:
                if waiting := [record for record in self._store.files() if record["state"] == "queued"]:
                    self._cancel.clear()
                    self._running = waiting[-1]["id"], _RowsDone()
                    self._store.put_file(waiting[-1]["id"], state="running")
                    return waiting[-1]
                self._changed.wait()
        return None

    def _work(self) -> None:
        """Code the files in the queue, until the desk closes."""
        while (record := self._next()) is not None:
            try:
                state, message = self._code(record)
            except Exception as error:  # does not stop the other files
                traceback.print_exc()
                said = f"The program failed: {error}. The output of histocoder serve has details."
                state, message = "failed", self._as_sent(said, record)
            with self._changed:
                assert self._running is not None
                num_rows = self._running[1].num_rows or None
                self._running = None
                self._store.put_file(record["id"], state=state, message=message, num_rows=num_rows)

    def _code(self, record: dict[str, Any]) -> tuple[State, str]:
        """Code a file; return its state afterwards, and a message."""
        options = _options(record)
        assert options is not None and self._running is not None
        said: list[str] = []
        try:
            with self._named(record):
                predict_file(
                    self._coding.coder,
                    self._config(record, options),
                    model_id=self._coding.model_id,
                    known=self._coding.known if options.known else None,
                    say=said.append,
                    progress=self._running[1].add,
                    cancel=self._cancel.is_set,
                )
        except Cancelled:
            return ("queued", "") if self._is_stopping else ("cancelled", "")
        except UserError as error:
            return "failed", str(error)
        return "done", self._as_sent("\n".join(said), record)


def _coded_name(record: dict[str, Any]) -> str:
    return f"{record['name'][: -len(record['suffix'])]}_coded{record['suffix']}"


def _options(record: dict[str, Any]) -> Options | None:
    return Options.model_validate_json(record["options"]) if record["options"] else None


def _shown(cell: str) -> str:
    return cell if len(cell) <= _CELL else cell[: _CELL - 1] + "…"
