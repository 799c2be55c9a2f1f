"""Code the files that are sent in, one after the other, in the background."""

import re
import secrets
import shutil
import threading
import time
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from anyio import open_file
from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse
from pydantic import BaseModel, ConfigDict, Field

from histocoder.config import SOURCE_COL, PredictConfig
from histocoder.data.cells import descriptions_in
from histocoder.data.languages import chosen_language
from histocoder.data.table import open_table, strings
from histocoder.desk.cards import Cards, Source
from histocoder.desk.coding import Coding
from histocoder.errors import Cancelled, UserError
from histocoder.evaluation.review_file import Columns
from histocoder.files import write_text
from histocoder.inference.predict_file import predict_file
from histocoder.log import log

_SUFFIXES = (".csv", ".tsv", ".txt", ".csv.gz", ".tsv.gz", ".parquet", ".pq", ".xlsx", ".dta", ".sav")
_WAITING = ("queued", "running")
_RECORD = "file.json"  # what is known of a file, in its folder
_PREVIEW_ROWS, _PREVIEW_CHARACTERS = 8, 120
_NAME_CHARACTERS = 80  # maximum number of characters of a file's name, which may have 255 bytes on disk


class Options(BaseModel):
    """Options of coding a file."""

    model_config = ConfigDict(str_max_length=2000)

    input_col: str
    language: str = "unk"
    language_col: str | None = None
    known: bool = False  # whether descriptions of the training data get their own codes
    sheet: str | None = None  # sheet of an Excel workbook; by default the only one that holds anything


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
    suffix: str
    sent: float
    sheet: str | None = None
    state: Literal["new", "queued", "running", "done", "failed", "cancelled"] = "new"
    options: Options | None = None
    num_rows: int | None = None
    rows_done: float = 0
    rows_per_second: float | None = None
    message: str = ""


class Uploads:
    """The files of a desk, each in a folder of its own; `input_col` and `language_col` are those of the model's run."""

    def __init__(
        self, folder: Path, coding: Coding, cards: Cards, *, input_col: str | None, language_col: str | None
    ) -> None:
        self._folder, self._coding, self._cards = folder, coding, cards
        self._columns = (input_col, language_col)
        self._lock = threading.RLock()
        self._worker = ThreadPoolExecutor(1)
        self._is_stopping = False
        self._cancelled: set[str] = set()  # files whose coding is to stop
        records = [File.model_validate_json(path.read_bytes()) for path in folder.glob(f"*/{_RECORD}")]
        self._files = {file.id: file for file in sorted(records, key=lambda file: file.sent)}

    def start(self) -> None:
        """Resume the files that an earlier server has not finished."""
        for file in self._files.values():
            if file.state in _WAITING:
                self._put(file, state="queued")

    def stop(self) -> None:
        """Interrupt coding; the next server resumes it."""
        self._is_stopping = True
        self._worker.shutdown(cancel_futures=True)

    async def send(
        self, request: Request, name: Annotated[str, Field(max_length=300)], sheet: str | None = None
    ) -> File:
        """Send a file as the body of the request; `name` tells its form by its suffix, `sheet` one of a workbook."""
        name = "".join(char for char in re.split(r"[/\\]", name)[-1] if char.isprintable() and char not in ':*?"<>|')
        name = name[-_NAME_CHARACTERS:]
        suffix = next((suffix for suffix in reversed(_SUFFIXES) if name.lower().endswith(suffix)), None)
        if suffix is None:
            raise UserError(f"{name} can't be read as a table; send a file that ends in {', '.join(_SUFFIXES)}.")
        file = File(id=secrets.token_hex(8), name=name, suffix=suffix, sent=time.time(), sheet=sheet)
        path = self._path(file)
        try:
            path.parent.mkdir(parents=True)
            async with await open_file(path, "wb") as saved:
                async for part in request.stream():
                    await saved.write(part)
            self._files[file.id] = file
            await run_in_threadpool(self.preview, file.id)  # a table that can't be read is not kept
            self._put(file)
        except BaseException as error:
            self._files.pop(file.id, None)
            shutil.rmtree(path.parent, ignore_errors=True)
            if isinstance(error, OSError):
                raise UserError(f"{name} can't be saved on the server: {error.strerror or error}.") from error
            raise
        return file

    def all(self) -> list[File]:
        """List the files, the last one first."""
        return list(self._files.values())[::-1]

    def get(self, file: str) -> File:
        """Return a file, and how much of it is coded."""
        return self._files[file]

    def preview(self, file: str) -> Preview:
        """Return the first rows."""
        sent = self.get(file)
        input_col, language_col = self._columns
        wanted = [*filter(None, self._columns), "occ1", "lang"]
        table = open_table(self._path(sent), (), optional=wanted, sheet=sent.sheet)
        chunk = next(iter(table.chunks(chunk_rows=_PREVIEW_ROWS)))
        cells = [[_shortened(cell or "") for cell in strings(column).to_pylist()] for column in chunk.columns]
        likely = table.column(input_col) if input_col and table.has(input_col) else descriptions_in(table.header)
        langs = [table.column(name) for name in (language_col, "lang", "language") if name and table.has(name)]
        return Preview(
            columns=table.header,
            rows=[list(row) for row in zip(*cells, strict=True)],
            input_col=likely,
            language_col=langs[0] if langs else None,
            notices=[self.as_sent(notice) for notice in table.notices],
        )

    def code(self, file: str, options: Options) -> File:
        """Code a file as `histocoder predict` does, after those that wait already."""
        sent = self.get(file)
        with self._lock:
            if sent.state in _WAITING:
                raise UserError(f"{sent.name} is already being coded.")
            self._config(sent, options)  # raises an error if the options do not fit the file
            self._put(sent, state="queued", options=options, num_rows=None, message="")
        return sent

    def cancel(self, file: str) -> File:
        """Stop coding a file; what is coded is kept for when it is coded again."""
        sent = self.get(file)
        with self._lock:
            self._cancelled.add(file)
            if sent.state == "queued":
                self._put(sent, state="cancelled")
        return sent

    def remove(self, file: str) -> list[File]:
        """Delete a file and its codes; return the other files."""
        sent = self.get(file)
        with self._lock:
            if sent.state in _WAITING:
                raise UserError(f"{sent.name} is being coded; cancel that first.")
            shutil.rmtree(self._folder / file, ignore_errors=True)
            del self._files[file]
        return self.all()

    def result(self, file: str) -> FileResponse:
        """Download the coded file, in the form of the one that was sent."""
        return FileResponse(path := self._coded(file), filename=path.name)

    def to_review(self, file: str) -> Source:
        """Make cards of a coded file."""
        path, options = self._coded(file), self.get(file).options
        assert options is not None
        columns = Columns(options.input_col, options.language_col, self._coding.coder.model.config.target_cols)
        return self._cards.add_source(path, path.name, columns)

    def _path(self, file: File) -> Path:
        return self._folder / file.id / file.name

    def _coded(self, file: str) -> Path:
        """Return the path of a coded file; raise a UserError if it is not coded yet."""
        sent = self.get(file)
        if sent.state != "done":
            raise UserError(f"{sent.name} is not coded yet.")
        return self._output(sent)

    def _output(self, file: File) -> Path:
        return self._folder / file.id / f"{file.name[: -len(file.suffix)]}_coded{file.suffix}"

    def as_sent(self, message: str) -> str:
        """Return a message that names files as the user does, without the folders in which they are kept."""
        return re.sub(rf"{re.escape(str(self._folder))}[/\\]\w+[/\\]", "", message)

    def _put(self, file: File, **changes: Any) -> None:
        """Change what is known of a file, on disk too; code it if it is queued now."""
        with self._lock:
            for name, value in changes.items():
                setattr(file, name, value)
            write_text(self._folder / file.id / _RECORD, file.model_dump_json())
            if changes.get("state") == "queued":
                self._cancelled.discard(file.id)
                self._worker.submit(self._work, file).add_done_callback(_log_failure)

    def _config(self, file: File, options: Options) -> PredictConfig:
        """Return the settings of `predict_file`; raise a UserError if they do not fit the file.

        A CSV that is not separated by commas keeps its separator, and is marked as UTF-8 as Excel expects it. New
        columns whose names are taken begin with `pred_`.
        """
        coder = self._coding.coder
        chosen_language(options.language, coder.model.config.languages)  # raises an error if it is not one
        config = PredictConfig(
            input=str(self._path(file)),
            output=str(self._output(file)),
            mode=coder.mode,
            **options.model_dump(exclude={"known"}),
        )
        table = open_table(self._path(file), config.settings_of_columns, sheet=options.sheet)
        names, prefix = [*coder.column_names(config), SOURCE_COL], ""
        while any(f"{prefix}{name}" in table.header for name in names):
            prefix += "pred_"
        is_excels = table.csv is not None and table.csv.delimiter != "," and "tsv" not in file.suffix
        return replace(config, columns=prefix, excel=is_excels)

    def _work(self, file: File) -> None:
        """Code a file, unless it was cancelled in the queue."""
        with self._lock:
            if file.state != "queued":
                return
            self._put(file, state="running", rows_done=0, rows_per_second=None)
        assert file.options is not None
        first: tuple[float, float] | None = None  # time and rows of the first batch, which may be coded already
        said: list[str] = []

        def count(num_rows: float, total: int) -> None:
            nonlocal first
            file.num_rows, file.rows_done = total, file.rows_done + num_rows
            now = (time.monotonic(), file.rows_done)
            first = first or now
            if now[0] > first[0]:
                file.rows_per_second = (now[1] - first[1]) / (now[0] - first[0])

        end: dict[str, Any] = {
            "state": "failed",
            "message": "The program failed; the output of histocoder serve says why.",
        }
        try:
            predict_file(
                self._coding.coder,
                self._config(file, file.options),
                model_id=self._coding.model_id,
                known=self._coding.known if file.options.known else None,
                say=said.append,
                progress=count,
                cancel=lambda: self._is_stopping or file.id in self._cancelled,
            )
            end = {"state": "done", "message": self.as_sent("\n".join(said)), "rows_done": file.num_rows}
        except Cancelled:
            end = {"state": "running" if self._is_stopping else "cancelled"}
        except UserError as error:
            end = {"state": "failed", "message": self.as_sent(str(error))}
        finally:
            self._put(file, **end)


def _log_failure(work: Future[None]) -> None:
    """Write the traceback of a failure that is no mistake of the user's."""
    if not work.cancelled() and (error := work.exception()) is not None:
        log.error("".join(traceback.format_exception(error)))


def _shortened(cell: str) -> str:
    return cell if len(cell) <= _PREVIEW_CHARACTERS else cell[: _PREVIEW_CHARACTERS - 1] + "…"
