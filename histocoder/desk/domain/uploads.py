"""The files that are sent in: their first rows, their codes, and the review of these."""

import re
import secrets
import shutil
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path

import pandas as pd
from anyio import open_file
from anyio.to_thread import run_sync

from histocoder.checkpoints.run_folder import run_of
from histocoder.classes.class_columns import Classes, classes_of
from histocoder.classes.crosswalk import Crosswalk
from histocoder.config import SOURCE_COL, PredictConfig
from histocoder.config.prediction import ClassOptions
from histocoder.desk.domain.card import Source
from histocoder.desk.domain.checks import Check, TrainOptions, check
from histocoder.desk.domain.coding import Coding
from histocoder.desk.domain.jobs import Jobs, read_records
from histocoder.desk.domain.models import Model, Models
from histocoder.desk.domain.outcome import Outcome
from histocoder.desk.domain.preview import Preview, read_preview
from histocoder.desk.domain.sample import TITLES, sample_tables, titles
from histocoder.desk.domain.sources import Sources
from histocoder.desk.domain.uploaded_file import (
    Download,
    File,
    Options,
    Use,
    coded_name,
    new_file,
    options_of,
)
from histocoder.errors import Cancelled, UserError
from histocoder.evaluation.checked_file import write_checked
from histocoder.evaluation.review_file import Columns, answer_columns
from histocoder.inference.predict_file import facts_of, predict_file
from histocoder.inference.provenance import provenance_file, write_provenance
from histocoder.inference.table_coder import TableCoder
from histocoder.tables.excel import sheets_of
from histocoder.tables.table import EXCEL, TEXT, kind_of, open_table
from histocoder.tables.text_file import readings_of
from histocoder.text.languages import chosen_language

_RECORD_FILE = "file.json"  # in the folder of a file


class Uploads:
    """The files of a desk, each in a folder of its own."""

    def __init__(self, folder: Path, models: Models, sources: Sources, outcome: Outcome) -> None:
        self._folder = folder
        self._models = models
        self._sources = sources
        self._outcome = outcome
        records = read_records(File, folder.glob(f"*/{_RECORD_FILE}"))
        records.sort(key=lambda file: file.sent)
        self.jobs: Jobs[File] = Jobs(
            records,
            path=lambda file: self._path(file).with_name(_RECORD_FILE),
            work=self._code,
            delete=self._delete,
            as_sent=self.as_sent,
        )

    async def receive(
        self, name: str, content: AsyncIterator[bytes], *, sheet: str | None, use: Use
    ) -> File:
        """Save a file that arrives in parts; raise a UserError, and keep nothing, if it can't be
        read.
        """
        file = new_file(name, use=use, sheet=sheet)
        kind_of(Path(file.name))  # raises an error if it can't be read
        path = self._path(file)
        try:
            # part by part, since a file may be larger than memory
            path.parent.mkdir(parents=True)
            async with await open_file(path, "wb") as saved:
                async for part in content:
                    await saved.write(part)

            # reading takes a while, in which other requests are answered
            await run_sync(self._choose_sheet, file)
            await run_sync(self._preview, file)  # a table that can't be read is not kept
            await run_sync(self._choose_encoding, file)
            self.jobs.add(file)
        except BaseException as error:
            self._delete(file)
            if isinstance(error, OSError):
                reason = error.strerror or error
                raise UserError(f"{file.name} can't be saved on the server: {reason}.") from error
            raise
        return file

    def _choose_sheet(self, file: File) -> None:
        """Choose the likeliest sheet of a workbook that has several, unless one is named."""
        path = self._path(file)
        if file.sheet is not None or path.suffix.lower() not in EXCEL:
            return
        settings = self._models.settings
        usual_columns = [settings.get("input_col"), settings.get("language_col"), "occ1", "lang"]

        # the likeliest has most of the columns that the model's table had
        sheets = sheets_of(path, list(filter(None, usual_columns)))
        if len(sheets.names) > 1:
            file.sheet = sheets.likeliest
            file.sheets = sheets.names

    def _choose_encoding(self, file: File) -> None:
        """Choose the encoding of a text file that is not UTF-8; people may choose another."""
        path = self._path(file)
        if kind_of(path) in TEXT:
            file.encodings = readings_of(path)
        if file.encodings:
            file.encoding = file.encodings[0].encoding

    def use_encoding(self, file_id: str, encoding: str) -> Preview:
        """Read a text file in another encoding, and return its first rows."""
        file = self.jobs[file_id]
        if file.is_unfinished or encoding not in [reading.encoding for reading in file.encodings]:
            raise UserError(f"{file.name} is being coded, or can't be read as {encoding}.")
        preview = self._preview(file.model_copy(update={"encoding": encoding}))
        self.jobs.save(file, encoding=encoding)
        return preview

    def use_sheet(self, file_id: str, sheet: str) -> Preview:
        """Use another sheet of a workbook, and return its first rows."""
        file = self.jobs[file_id]
        if file.is_unfinished or sheet not in file.sheets:
            raise UserError(f"{file.name} is being coded, or has no sheet {sheet}.")
        preview = self._preview(file.model_copy(update={"sheet": sheet}))
        self.jobs.save(file, sheet=sheet)
        return preview

    def make_sample(self) -> list[File]:
        """Make two files of histocoder's own titles: a coded table to train on, and a table to
        code.
        """
        return [
            self._make(name, use, table, is_sample=True) for name, use, table in sample_tables()
        ]

    def make_titles(self) -> File:
        """Make a file of all of histocoder's titles, to train on where nothing is coded yet."""
        return self._make(TITLES, "train", titles())

    def _make(self, name: str, use: Use, table: pd.DataFrame, *, is_sample: bool = False) -> File:
        file = new_file(name, use=use, is_sample=is_sample)
        self._path(file).parent.mkdir(parents=True)
        table.to_csv(self._path(file), index=False)
        self.jobs.add(file)
        return file

    def preview(self, file_id: str) -> Preview:
        """Return the first rows of a file, and what their columns probably hold."""
        return self._preview(self.jobs[file_id])

    def _preview(self, file: File) -> Preview:
        path = self._path(file)
        if file.use == "classes":
            Crosswalk(path, ClassOptions())  # raises an error if it is none
        settings = self._models.settings
        preview = read_preview(
            path,
            sheet=file.sheet,
            encoding=file.encoding,
            input_col=settings.get("input_col"),
            language_col=settings.get("language_col"),
        )
        preview.notices = [self.as_sent(notice) for notice in preview.notices]
        return preview

    def check(self, file_id: str, options: TrainOptions) -> Check:
        """Prepare a table of training data to try, and list all its problems."""
        file = self.jobs[file_id]
        result = check(self._path(file), options, sheet=file.sheet, encoding=file.encoding)
        return Check.model_validate_json(self.as_sent(result.model_dump_json()))

    def train(self, file_id: str, options: TrainOptions) -> Model:
        """Train a new model on a table."""
        file = self.jobs[file_id]
        return self._models.train(
            self._path(file), options, file=file_id, sheet=file.sheet, encoding=file.encoding
        )

    def queue(self, file_id: str, options: Options) -> File:
        """Code a file as `histocoder predict` does, after those that wait already."""
        file = self.jobs[file_id]
        with self.jobs.lock:
            if file.is_unfinished:
                raise UserError(f"{file.name} is already being coded.")
            # raises an error if the options do not fit the file
            self._config(file, options, self._models.coding)
            self.jobs.queue(file, rows_done=0, notices=[], summary={}, options=options)
        return file

    def remove(self, file_id: str) -> None:
        """Delete a file, its codes and what was decided on it, and stop coding it."""
        for model in self._models.jobs.all():
            if model.file == file_id:
                raise UserError(f"{model.id} is trained on this table. Delete the model first.")
        for file in self.jobs.all():
            if file.is_unfinished and file.options and file.options.classes == file_id:
                raise UserError(
                    f"{file.name} is being coded with these classes. Delete it first, or wait."
                )
        self.jobs.remove(file_id)
        self._sources.remove_file(file_id)

    def _delete(self, file: File) -> None:
        shutil.rmtree(self._folder / file.id, ignore_errors=True)

    def result(self, file_id: str, *, as_coded: bool) -> Download:
        """Return the coded file, in the form of the one that was sent, with people's decisions in
        it.

        Beside these are who decided, when, and the model's codes; with `as_coded` it is as the
        model has coded it.
        """
        file = self._coded_file(file_id)
        path = self._output(file)
        columns = self._columns(file)
        decisions = self._outcome.decided(columns.target_cols, of_sample=file.is_sample)
        if as_coded or not decisions:
            return Download(path, path.name)

        # a file of this request alone
        checked = path.with_name(f"{secrets.token_hex(8)}{''.join(path.suffixes[-2:])}")
        titles = self._models.coding.titles
        write_checked(path, checked, decisions, columns, titles=titles, classes=self._classes(file))
        return Download(checked, path.name.replace("_coded", "_checked"), is_temporary=True)

    def _classes(self, file: File) -> list[Classes]:
        """Return the classes that a coded file has."""
        options = options_of(file)
        if not options.classes:
            return []
        if options.classes not in self.jobs:
            raise UserError(
                f"The table of classes of {file.name} was deleted. Code the file again."
            )
        table = self._path(self.jobs[options.classes])
        answers = answer_columns(open_table(self._output(file), ()), file.target_cols)
        return classes_of(
            [answer.code for answer in answers],
            ClassOptions(),
            str(table),
            codes=None,
            prefix=answers[0].prob.removesuffix("prob_1"),
            expect=False,
        )

    def provenance(self, file_id: str) -> Download:
        """Return where the coded file comes from, with a paragraph for a methods section, as
        JSON.
        """
        path = provenance_file(self._output(self._coded_file(file_id)))
        if not path.is_file():
            raise KeyError(file_id)  # coded by an earlier version
        return Download(path, path.name)

    def to_review(self, file_id: str) -> Source:
        """Make cards of a coded file."""
        file = self._coded_file(file_id)
        path = self._output(file)
        return self._sources.add(
            path, path.name, self._columns(file), file_id=file_id, is_sample=file.is_sample
        )

    def _columns(self, file: File) -> Columns:
        """Return the names of a coded file's columns."""
        options = options_of(file)
        target_cols = file.target_cols or self._models.coding.target_cols
        return Columns(options.input_col, options.language_col, target_cols)

    def as_sent(self, message: str) -> str:
        """Return a message that names files as the user does, without the folders in which they are
        kept.
        """
        return re.sub(rf"{re.escape(str(self._folder))}[/\\]\w+[/\\]", "", message)

    def _path(self, file: File) -> Path:
        return self._folder / file.id / file.name

    def _output(self, file: File) -> Path:
        return self._folder / file.id / coded_name(file.name)

    def _coded_file(self, file_id: str) -> File:
        """Return a file; raise a UserError if it is not coded yet."""
        file = self.jobs[file_id]
        if file.state != "done":
            raise UserError(f"{file.name} is not coded yet.")
        return file

    def _config(self, file: File, options: Options, coding: Coding) -> PredictConfig:
        """Return the settings of `predict_file` with a model; raise a UserError if they do not fit
        the file.

        A CSV that is not separated by commas keeps its separator, and is marked as UTF-8 as Excel
        expects it. New columns whose names are taken begin with `pred_`.
        """
        coder = coding.coder
        chosen_language(options.language, coding.languages)  # raises an error if it is not one
        classes = None
        if options.classes:
            classes = str(self._path(self.jobs[options.classes]))

        # as on the command line, and in the mode that the model codes descriptions in
        config = PredictConfig(
            input=str(self._path(file)),
            output=str(self._output(file)),
            classes=classes,
            input_col=options.input_col,
            language=options.language,
            language_col=options.language_col,
            mode=coder.mode,
            sheet=file.sheet,
            file_encoding=file.encoding,
        )
        table = open_table(
            self._path(file),
            config.settings_of_columns,
            sheet=file.sheet,
            encoding=file.encoding,
        )
        names = [*TableCoder(coder, config).schema.names, SOURCE_COL]
        prefix = ""
        while any(f"{prefix}{name}" in table.header for name in names):
            prefix += "pred_"

        is_excels = table.csv is not None and table.csv.delimiter != "," and ".tsv" not in file.name
        return replace(config, columns=prefix, excel=is_excels)

    def _code(self, file: File) -> None:
        """Code a file, and write its provenance."""
        messages: list[str] = []

        def count(num_rows: float, total: int) -> None:
            file.num_rows = total
            file.rows_done += num_rows
            if self.jobs.is_interrupted(file):
                raise Cancelled

        file.rows_done = 0  # a file that is resumed counts those of earlier servers again
        options = options_of(file)
        coding = self._models.coding  # people may switch to another model in the meantime
        config = self._config(file, options, coding)
        known = None
        if options.known:
            known = coding.known
        counts = predict_file(
            coding.coder,
            config,
            model_id=f"{coding.model_id} {options.known}",
            known=known,
            say=messages.append,
            progress=count,
        )

        # the provenance, as if the file had been coded on the command line
        model = str(coding.folder.relative_to(run_of(coding.folder).parent))
        command = ["predict", "--model", model]
        if known is not None:
            command += ["--known", "auto"]
        facts = facts_of(coding.coder, config, coding.folder, name=coding.name) | counts
        write_provenance(command, config, facts, as_sent=self.as_sent)

        # only then others may read the output
        self.jobs.end(
            file,
            state="done",
            rows_done=file.num_rows or 0,
            summary=self._summary(file, f"{config.columns}conf", sure=coding.surety.sure),
            target_cols=coding.target_cols,
            notices=self.as_sent("\n".join(messages)).splitlines(),
        )

    def _summary(self, file: File, conf_col: str, *, sure: float | None) -> Mapping[str, float]:
        """Return how many rows a coded file has, how many are blank, what share of the others is
        expected to be right, and how many have to be checked, as they are less `sure`.
        """
        cells = open_table(self._output(file), (conf_col,)).read([conf_col]).columns[conf_col]

        # numbers as the file has them, with the decimal mark of its form
        conf = pd.to_numeric(cells.to_pandas().str.replace(",", "."), errors="coerce")
        summary: dict[str, float] = {"rows": len(conf), "blank": int(conf.isna().sum())}
        if conf.notna().any():
            summary["expected_right"] = float(conf.mean())
        if sure is not None:
            summary["to_check"] = int((conf < sure).sum())
            summary["sure"] = sure
        return summary
