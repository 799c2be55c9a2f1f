"""Code the files that are sent in, one after the other, in the background."""

import re
import secrets
import shutil
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import pandas as pd
from anyio import open_file
from fastapi import Body, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.background import BackgroundTask

from histocoder.checkpoints.run_folder import run_of
from histocoder.classes.class_columns import Classes, classes_of
from histocoder.classes.crosswalk import Crosswalk
from histocoder.config import SOURCE_COL, PredictConfig
from histocoder.config.prediction import ClassOptions
from histocoder.desk.domain.card import Source
from histocoder.desk.domain.cards import Cards
from histocoder.desk.domain.checks import (
    CATEGORIES,
    Check,
    TrainOptions,
    check,
    code_columns,
    guess_language,
)
from histocoder.desk.domain.models import Model, Models
from histocoder.desk.domain.sample import TITLES, sample_tables, titles
from histocoder.errors import Cancelled, UserError
from histocoder.evaluation.checked_file import write_checked
from histocoder.evaluation.review_file import Columns, answer_columns
from histocoder.files import write_text
from histocoder.inference.predict_file import facts_of, predict_file
from histocoder.inference.provenance import provenance_file, write_provenance
from histocoder.inference.table_coder import TableCoder
from histocoder.log import log
from histocoder.tables.excel import sheets_of
from histocoder.tables.header import descriptions_in
from histocoder.tables.table import EXCEL, kind_of, open_table, strings
from histocoder.text.languages import chosen_language

_RECORD = "file.json"  # what is known of a file, in its folder
_PREVIEW_ROWS, _PREVIEW_CHARACTERS, _GUESS_ROWS = 8, 120, 300
_NAME_BYTES = (
    160  # maximum size of a file's name, which may have 255 bytes on disk, with what is added
)
NOT_WRITTEN = {".sav": ".csv", ".xlsm": ".xlsx", ".xls": ".xlsx", ".ods": ".xlsx"}
"""Forms that are only read -> those in which they come back."""
_FAILED = "The program failed; the output of histocoder serve says why."


class Options(BaseModel):
    """Options of coding a file."""

    model_config = ConfigDict(str_max_length=2000)

    input_col: str
    language: str = "unk"
    language_col: str | None = None
    known: bool = False  # whether descriptions of the training data get their own codes
    classes: str | None = None  # id of a table of classes, which are added


class Preview(BaseModel):
    """The first rows of a file."""

    columns: list[str]
    rows: list[list[str]]
    input_col: str | None  # column that probably holds descriptions
    language_col: str | None  # column that probably holds languages
    language: str  # language in which the descriptions probably are
    target_cols: list[str]  # columns that probably hold codes
    attribute_cols: list[str]  # columns of few categories, which may be attributes
    notices: list[str]


class File(BaseModel):
    """A file, and how far it is."""

    id: str
    name: str
    sent: float
    use: Literal["code", "train", "classes"] = "code"
    is_sample: bool = False  # whether it was made to try the desk with
    sheet: str | None = None  # sheet of a workbook that is used
    sheets: list[str] = []  # sheets that it may be, where there are several
    state: Literal["new", "queued", "running", "done", "failed", "cancelled"] = (
        "new"  # "cancelled": formerly
    )
    options: Options | None = None
    target_cols: list[str] = []  # columns of codes of the model that coded it
    num_rows: int | None = None
    rows_done: float = 0
    message: str = ""
    summary: dict[
        str, float
    ] = {}  # numbers of `rows`, of `blank` ones, and `to_check`, those less sure than `sure`
    notices: list[str] = []


class Uploads:
    """The files of a desk, each in a folder of its own."""

    def __init__(self, folder: Path, models: Models, cards: Cards) -> None:
        self._folder, self._models, self._cards = folder, models, cards
        self._lock = threading.RLock()
        self._worker = ThreadPoolExecutor(1)
        self._is_stopping = False
        records = [
            File.model_validate_json(path.read_bytes()) for path in folder.glob(f"*/{_RECORD}")
        ]
        self._files = {file.id: file for file in sorted(records, key=lambda file: file.sent)}

    def start(self) -> None:
        """Resume the files that an earlier server has not finished."""
        for file in self._files.values():
            if file.state in ("queued", "running"):
                self._queue(file)

    def stop(self) -> None:
        """Interrupt coding; the next server resumes it."""
        self._is_stopping = True
        self._worker.shutdown(cancel_futures=True)

    async def send(
        self,
        request: Request,
        name: Annotated[str, Field(max_length=300)],
        sheet: str | None = None,
        use: Literal["code", "train", "classes"] = "code",
    ) -> File:
        """Send a file as the body of the request; `name` tells its form by its suffix, `sheet` one
        of a workbook.
        """
        name = "".join(
            char
            for char in re.split(r"[/\\]", name)[-1]
            if char.isprintable() and char not in ':*?"<>|'
        )
        name = name.encode()[-_NAME_BYTES:].decode(errors="ignore")
        kind_of(Path(name))  # raises an error if it can't be read
        file = File(id=secrets.token_hex(8), name=name, sent=time.time(), sheet=sheet, use=use)
        path = self._path(file)
        try:
            path.parent.mkdir(parents=True)
            async with await open_file(path, "wb") as saved:
                async for part in request.stream():
                    await saved.write(part)
            self._files[file.id] = file
            await run_in_threadpool(self._choose_sheet, file)
            await run_in_threadpool(self.preview, file.id)  # a table that can't be read is not kept
            self._set(file)
        except BaseException as error:
            self._files.pop(file.id, None)
            shutil.rmtree(path.parent, ignore_errors=True)
            if isinstance(error, OSError):
                raise UserError(
                    f"{name} can't be saved on the server: {error.strerror or error}."
                ) from error
            raise
        return file

    def _choose_sheet(self, file: File) -> None:
        """Choose the likeliest sheet of a workbook that has several, unless one is named."""
        if file.sheet is not None or self._path(file).suffix.lower() not in EXCEL:
            return
        sheets = sheets_of(self._path(file), self._wanted_columns())
        if len(sheets.names) > 1:
            file.sheet = sheets.likeliest
            file.sheets = sheets.names

    def use_sheet(
        self, file: str, sheet: Annotated[str, Body(embed=True, max_length=300)]
    ) -> Preview:
        """Use another sheet of a workbook, and return its first rows."""
        sent = self.get(file)
        if sent.state in ("queued", "running") or sheet not in sent.sheets:
            raise UserError(f"{sent.name} is being coded, or has no sheet {sheet}.")
        earlier = sent.sheet
        sent.sheet = sheet
        try:
            preview = self.preview(file)  # a sheet that can't be read is not used
            self._set(sent)
        except BaseException:
            sent.sheet = earlier
            raise
        return preview

    def _wanted_columns(self) -> list[str]:
        """Return names that columns of descriptions and languages probably have."""
        named = (self._models.settings.get(name) for name in ("input_col", "language_col"))
        return [*filter(None, named), "occ1", "lang"]

    def sample(self) -> list[File]:
        """Make two files of histocoder's own titles: a coded table to train on, and a table to
        code.
        """
        return [self._make(*table, is_sample=True) for table in sample_tables()]

    def titles(self) -> File:
        """Make a file of all of histocoder's titles, to train on where nothing is coded yet."""
        return self._make(TITLES, "train", titles())

    def _make(
        self,
        name: str,
        use: Literal["train", "code"],
        table: pd.DataFrame,
        *,
        is_sample: bool = False,
    ) -> File:
        file = File(
            id=secrets.token_hex(8), name=name, sent=time.time(), use=use, is_sample=is_sample
        )
        self._path(file).parent.mkdir(parents=True)
        table.to_csv(self._path(file), index=False)
        self._set(file)
        self._files[file.id] = file
        return file

    def all(self) -> list[File]:
        """List the files, the last one first."""
        return list(self._files.values())[::-1]

    def get(self, file: str) -> File:
        """Return a file, and how much of it is coded."""
        return self._files[file]

    def preview(self, file: str) -> Preview:
        """Return the first rows, and what their columns probably hold."""
        sent = self.get(file)
        if sent.use == "classes":
            Crosswalk(self._path(sent), ClassOptions())  # raises an error if it is none
        input_col, language_col = (
            self._models.settings.get(name) for name in ("input_col", "language_col")
        )
        table = open_table(self._path(sent), {}, optional=self._wanted_columns(), sheet=sent.sheet)
        chunk = next(iter(table.chunks(chunk_rows=_GUESS_ROWS)))
        texts_of = (strings(column).fill_null("").to_pylist() for column in chunk.columns)
        columns = dict(
            zip(table.header, texts_of, strict=True)
        )  # of several with one name, the last
        cells, (fewest, most) = pd.DataFrame(columns, dtype=object), CATEGORIES
        langs = (name for name in (language_col, "lang", "language") if name and table.has(name))
        texts = (
            table.column(input_col)
            if input_col and table.has(input_col)
            else descriptions_in(table.header)
        )
        return Preview(
            columns=[*columns],
            rows=[
                [cell[:_PREVIEW_CHARACTERS] for cell in row]
                for row in cells[:_PREVIEW_ROWS].to_numpy().tolist()
            ],
            input_col=texts,
            language_col=next(map(table.column, langs), None),
            language=guess_language(columns[texts]) if texts else "unk",
            target_cols=code_columns(cells),
            attribute_cols=[
                name for name in cells if fewest <= cells[name].str.strip().nunique() <= most
            ],
            notices=[self.as_sent(notice) for notice in table.notices],
        )

    def check(self, file: str, options: TrainOptions) -> Check:
        """Prepare a table of training data to try, and list all its problems."""
        sent = self.get(file)
        found = check(self._path(sent), options, sheet=sent.sheet)
        return Check.model_validate_json(self.as_sent(found.model_dump_json()))

    def train(self, file: str, options: TrainOptions) -> Model:
        """Train a new model on a table."""
        sent = self.get(file)
        return self._models.train(self._path(sent), options, file=file, sheet=sent.sheet)

    def code(self, file: str, options: Options) -> File:
        """Code a file as `histocoder predict` does, after those that wait already."""
        sent = self.get(file)
        with self._lock:
            if sent.state in ("queued", "running"):
                raise UserError(f"{sent.name} is already being coded.")
            self._config(sent, options)  # raises an error if the options do not fit the file
            self._queue(sent, options=options)
        return sent

    def remove(self, file: str) -> list[File]:
        """Delete a file, its codes and what was decided on it, and stop coding it; return the other
        files.
        """
        if users := [model.id for model in self._models.all() if model.file == file]:
            raise UserError(f"{users[0]} is trained on this table. Delete the model first.")
        busy = [
            (one.name, one.options)
            for one in self._files.values()
            if one.state in ("queued", "running")
        ]
        if users := [name for name, options in busy if options and options.classes == file]:
            raise UserError(
                f"{users[0]} is being coded with these classes. Delete it first, or wait."
            )
        with self._lock:
            if self._files.pop(file).state != "running":  # else the worker deletes it
                shutil.rmtree(self._folder / file, ignore_errors=True)
        self._cards.remove_file(file)
        return self.all()

    def result(self, file: str, as_coded: bool = False) -> FileResponse:
        """Download the coded file, in the form of the one that was sent, with people's decisions in
        it.

        Beside these are who decided, when, and the model's codes; with `as_coded` it is as the
        model has coded it.
        """
        path = self._coded(file)
        sent = self.get(file)
        columns = self._columns(sent)
        decisions = (
            {} if as_coded else self._cards.decided(columns.target_cols, of_sample=sent.is_sample)
        )
        if not decisions:
            return FileResponse(path, filename=path.name)

        name = path.name.replace("_coded", "_checked")
        checked = path.with_name(
            f"{secrets.token_hex(8)}{''.join(path.suffixes[-2:])}"
        )  # other requests have their own
        titles = self._models.coding.titles
        write_checked(path, checked, decisions, columns, titles=titles, classes=self._classes(sent))
        return FileResponse(checked, filename=name, background=BackgroundTask(checked.unlink))

    def _classes(self, file: File) -> list[Classes]:
        """Return the classes that a coded file has."""
        assert file.options is not None
        if not file.options.classes:
            return []
        if file.options.classes not in self._files:
            raise UserError(
                f"The table of classes of {file.name} was deleted. Code the file again."
            )
        config = self._config(file, file.options)
        answers = answer_columns(open_table(self._output(file), ()), file.target_cols)
        codes = [answer.code for answer in answers]
        return classes_of(
            codes, config, config.classes, codes=None, prefix=config.columns, expect=False
        )

    def provenance(self, file: str) -> FileResponse:
        """Download where the coded file comes from, with a paragraph for a methods section, as
        JSON.
        """
        if not (path := provenance_file(self._coded(file))).is_file():
            raise KeyError(file)  # coded by an earlier version
        return FileResponse(path, filename=path.name)

    def to_review(self, file: str) -> Source:
        """Make cards of a coded file."""
        path = self._coded(file)
        sent = self.get(file)
        return self._cards.add_source(
            path, path.name, self._columns(sent), file_id=file, is_sample=sent.is_sample
        )

    def _columns(self, file: File) -> Columns:
        """Return the names of a coded file's columns."""
        assert file.options is not None
        targets = file.target_cols or self._models.coding.coder.model.config.target_cols
        return Columns(file.options.input_col, file.options.language_col, targets)

    def as_sent(self, message: str) -> str:
        """Return a message that names files as the user does, without the folders in which they are
        kept.
        """
        return re.sub(rf"{re.escape(str(self._folder))}[/\\]\w+[/\\]", "", message)

    def _path(self, file: File) -> Path:
        return self._folder / file.id / file.name

    def _output(self, file: File) -> Path:
        name = Path(file.name)
        suffix = "".join(name.suffixes[-2 if name.suffix.lower() == ".gz" else -1 :])
        stem = file.name.removesuffix(suffix)
        if name.suffix.lower() in NOT_WRITTEN:
            suffix = NOT_WRITTEN[name.suffix.lower()]
        return self._folder / file.id / f"{stem}_coded{suffix}"

    def _coded(self, file: str) -> Path:
        """Return the path of a coded file; raise a UserError if it is not coded yet."""
        sent = self.get(file)
        if sent.state != "done":
            raise UserError(f"{sent.name} is not coded yet.")
        return self._output(sent)

    def _set(self, file: File, **changes: Any) -> None:
        """Change a record once that is saved: what the page shows is what the next server finds."""
        changed = file.model_copy(update=changes)
        write_text(self._folder / file.id / _RECORD, changed.model_dump_json())
        for name, value in changes.items():
            setattr(file, name, value)

    def _queue(self, file: File, **changes: Any) -> None:
        self._set(file, state="queued", message="", rows_done=0, notices=[], summary={}, **changes)
        self._worker.submit(self._work, file)

    def _config(self, file: File, options: Options) -> PredictConfig:
        """Return the settings of `predict_file`; raise a UserError if they do not fit the file.

        A CSV that is not separated by commas keeps its separator, and is marked as UTF-8 as Excel
        expects it. New columns whose names are taken begin with `pred_`.
        """
        coder = self._models.coding.coder
        chosen_language(
            options.language, coder.model.config.languages
        )  # raises an error if it is not one
        paths: dict[str, Any] = {"input": str(self._path(file)), "output": str(self._output(file))}
        if options.classes:
            paths["classes"] = str(self._path(self.get(options.classes)))
        chosen = options.model_dump(exclude={"known", "classes"})
        config = PredictConfig(**paths, mode=coder.mode, sheet=file.sheet, **chosen)
        table = open_table(self._path(file), config.settings_of_columns, sheet=file.sheet)
        names, prefix = [*TableCoder(coder, config).schema.names, SOURCE_COL], ""
        while any(f"{prefix}{name}" in table.header for name in names):
            prefix += "pred_"
        is_excels = table.csv is not None and table.csv.delimiter != "," and ".tsv" not in file.name
        return replace(config, columns=prefix, excel=is_excels)

    def _work(self, file: File) -> None:
        """Code a file, unless it was deleted from the queue."""
        with self._lock:
            if self._is_over(file):
                return
            file.state = "running"
        changes: dict[str, Any] = {"state": "failed", "message": _FAILED}
        try:
            changes = self._code(file)
        except Cancelled:
            changes = {"state": "queued", "message": ""}
        except UserError as error:
            changes = {"state": "failed", "message": self.as_sent(str(error))}
        except Exception:
            log.error(traceback.format_exc())
            raise  # to the job's future
        finally:
            self._end(file, changes)

    def _is_over(self, file: File) -> bool:
        return self._is_stopping or file.id not in self._files

    def _code(self, file: File) -> dict[str, Any]:
        """Code a file, with its provenance, and return what its record says of it."""
        messages: list[str] = []

        def count(num_rows: float, total: int) -> None:
            file.num_rows = total
            file.rows_done += num_rows
            if self._is_over(file):
                raise Cancelled

        assert file.options is not None
        coding = self._models.coding
        known = coding.known if file.options.known else None
        config = self._config(file, file.options)
        facts = predict_file(
            coding.coder,
            config,
            model_id=f"{coding.model_id} {file.options.known}",
            known=known,
            say=messages.append,
            progress=count,
        )
        facts = facts_of(coding.coder, config, coding.folder, name=coding.name) | facts
        model = str(coding.folder.relative_to(run_of(coding.folder).parent))
        command = ["predict", "--model", model, *(["--known", "auto"] if known else [])]
        write_provenance(command, config, facts, as_sent=self.as_sent)
        return {
            "state": "done",
            "message": "",
            "rows_done": file.num_rows or 0,
            "summary": self._summary(file, f"{config.columns}conf"),
            "target_cols": [*coding.coder.model.config.target_cols],
            "notices": self.as_sent("\n".join(messages)).splitlines(),
        }

    def _summary(self, file: File, conf_col: str) -> dict[str, float]:
        """Return how many rows a coded file has, how many are blank, and how many have to be
        checked.
        """
        cells = open_table(self._output(file), (conf_col,)).read([conf_col]).columns[conf_col]
        conf = pd.to_numeric(cells.to_pandas().str.replace(",", "."), errors="coerce")
        summary: dict[str, float] = {"rows": len(conf), "blank": int(conf.isna().sum())}
        if (sure := self._models.coding.surety.sure) is not None:
            summary |= {"to_check": int((conf < sure).sum()), "sure": sure}
        return summary

    def _end(self, file: File, changes: dict[str, Any]) -> None:
        """Record how coding a file has ended, or delete what is left of a file that was deleted."""
        with self._lock:
            if file.id not in self._files:
                shutil.rmtree(self._folder / file.id, ignore_errors=True)
                return
            try:
                self._set(file, **changes)
            except UserError as error:  # as on a full disk; the next server codes the file again
                file.state = "failed"
                file.message = self.as_sent(str(error))
