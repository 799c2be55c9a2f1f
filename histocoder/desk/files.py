"""Code the files that are sent in, one after the other, in the background."""

import os
import re
import secrets
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal

from pydantic import BaseModel, ConfigDict
from tqdm import tqdm

from histocoder.config import SOURCE_COL, PredictConfig
from histocoder.data.header import descriptions_in
from histocoder.data.languages import chosen_language
from histocoder.data.table import open_table, strings
from histocoder.desk.coding import CodingDesk
from histocoder.desk.store import Store
from histocoder.errors import Interrupted, UserError
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


class Files:
    """The files of a desk; `input_col` and `language_col` are the columns of the model's own data."""

    def __init__(
        self, folder: Path, store: Store, coding: CodingDesk, *, input_col: str | None, language_col: str | None
    ) -> None:
        self._folder, self._store, self._coding = folder, store, coding
        self._columns = (input_col, language_col)
        self._changed = threading.Condition()
        self._stop = False
        self._cancelled: set[str] = set()
        self._bar: tuple[str, tqdm] | None = None  # number and progress of the file that is being coded
        for file in store.files():
            if file["state"] == "running":  # on a server that was killed
                store.put_file(file["id"], state="queued")
        self._worker: threading.Thread | None = None

    def start(self) -> None:
        """Start to code the files in the queue."""
        self._worker = threading.Thread(target=self._work, daemon=True)
        self._worker.start()

    def stop(self) -> None:
        """Interrupt coding; the next server resumes it."""
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        if self._worker is not None:
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
        record = self._store.file(file)
        if record["state"] in _WAITING:
            raise UserError(f"{record['name']} is already being coded.")
        path = self._path(record)
        with self._named(record):
            config = self._config(record, options)
            chosen_language(config.language, self._coding.coder.model.config.languages)  # raises an error if not one
            table = open_table(path, config.input_cols, sheet=options.sheet)
            options.excel |= table.csv is not None and table.csv.delimiter != "," and "tsv" not in path.name
            names = [*self._coding.coder.column_names(config.mode, k=config.k), SOURCE_COL]
            while any(f"{options.columns}{name}" in table.header for name in names):
                options.columns += "pred_"
        with self._changed:
            self._cancelled.discard(file)
            self._store.put_file(
                file, state="queued", options=options.model_dump_json(), num_rows=table.count_rows(), message=""
            )
            self._changed.notify_all()
        return self.get(file)

    def cancel(self, file: str) -> File:
        """Stop coding a file; what is coded is kept for when it is coded again."""
        record = self._store.file(file)
        with self._changed:
            if record["state"] in _WAITING:
                self._cancelled.add(file)
            if record["state"] == "queued":
                self._store.put_file(file, state="cancelled")
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
        number, bar = self._bar or (None, None)
        if file.state == "done":
            file.rows_done = file.num_rows or 0
        elif bar is not None and number == file.id:
            now = bar.format_dict
            file.rows_done, file.rows_per_second = int(now["n"]), now["rate"]
            if now["rate"]:
                file.seconds_left = max(0.0, (now["total"] or 0) - now["n"]) / now["rate"]
        return file

    def _work(self) -> None:
        """Code the files in the queue, until the desk closes."""
        while True:
            with self._changed:
                waiting = [record for record in self._store.files() if record["state"] == "queued"]
                if self._stop:
                    return
                if not waiting:
                    self._changed.wait()
                    continue
                record = waiting[-1]
                self._store.put_file(record["id"], state="running")
            try:
                state, message = self._code(record)
            except Exception as error:
                message = f"The program failed: {error}. The output of histocoder serve has details."
                self._store.put_file(record["id"], state="failed", message=self._as_sent(message, record))
                self.start()  # for the other files; this thread ends, and Python prints the traceback
                raise
            self._store.put_file(record["id"], state=state, message=message)

    def _code(self, record: dict[str, Any]) -> tuple[State, str]:
        """Code a file; return its state afterwards, and a message."""
        options = _options(record)
        assert options is not None
        said: list[str] = []

        def check() -> None:
            if self._stop or record["id"] in self._cancelled:
                raise Interrupted("Cancelled.", signal.SIGINT)

        try:
            with self._named(record), Path(os.devnull).open("w") as nowhere:
                bar = _Bar(record["num_rows"], nowhere, check)
                self._bar = record["id"], bar
                predict_file(
                    self._coding.coder,
                    self._config(record, options),
                    model_id=self._coding.model_id,
                    known=self._coding.known if options.known else None,
                    overwrite=True,
                    say=lambda text: said.append(self._as_sent(text, record)),
                    bar=bar,
                )
        except Interrupted:
            return ("queued", "") if self._stop else ("cancelled", "")
        except UserError as error:
            return "failed", str(error)
        finally:
            self._bar = None
        return "done", "\n".join(said[1:-1])  # the first and the last one say that it is coded


class _Bar(tqdm):
    """Progress in rows, which calls `check` after each batch."""

    def __init__(self, total: int, file: IO[str], check: Callable[[], None]) -> None:
        self._check = check
        super().__init__(total=total, file=file)

    def update(self, n: float | None = 1) -> bool | None:
        """Count rows."""
        shown = super().update(n)
        self._check()
        return shown


def _coded_name(record: dict[str, Any]) -> str:
    return f"{record['name'][: -len(record['suffix'])]}_coded{record['suffix']}"


def _options(record: dict[str, Any]) -> Options | None:
    return Options.model_validate_json(record["options"]) if record["options"] else None


def _shown(cell: str) -> str:
    return cell if len(cell) <= _CELL else cell[: _CELL - 1] + "…"
