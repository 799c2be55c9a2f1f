"""A desk: its models, cards and files, and what they do together."""

import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
from pydantic import BaseModel

from histocoder.checkpoints.model_files import read_model_config
from histocoder.checkpoints.run_folder import run_settings
from histocoder.data.labelled_files import CHECKED_COL
from histocoder.desk.domain.card import Source
from histocoder.desk.domain.cards import Cards
from histocoder.desk.domain.coding import (
    NO_OCCUPATION,
    Answer,
    Code,
    NamedLanguage,
    Surety,
    named_languages,
)
from histocoder.desk.domain.database import Database
from histocoder.desk.domain.models import Model, Models
from histocoder.desk.domain.outcome import Outcome
from histocoder.desk.domain.sources import CORRECTIONS_FILE, DECISIONS_FILE, Sources
from histocoder.desk.domain.uploads import Uploads
from histocoder.evaluation.checked_file import next_step
from histocoder.evaluation.review_file import Columns
from histocoder.files import make_folder
from histocoder.tables.output import Form, write_frame, write_table
from histocoder.text.languages import NAMES, Language, chosen_language
from histocoder.text.normalize import description_keys


class About(BaseModel):
    """The model in use, None if there is none, and what this server does."""

    model: str | None
    system: str = ""
    num_codes: int = 0
    most_codes: int = 1  # maximum number of codes of a description
    no_occupation: Code | None = None
    languages: list[NamedLanguage]
    all_languages: list[NamedLanguage]  # of which a new model may learn any
    surety: Surety = Surety()
    in_the_box: bool = False  # whether it is the model in the box
    may_train: bool
    user: str | None  # who has signed in, on a server with users


class Improvement(BaseModel):
    """Number of corrections, and how to train on them."""

    corrections: int
    next_step: str
    learned: bool  # whether a model has learned them already


class Desk:
    """The parts of a desk, with the models, decisions and files that its folder holds."""

    def __init__(
        self, folder: Path, *, models: Models, double_share: float = 0.0, may_train: bool = True
    ) -> None:
        make_folder(folder / "files")
        self._folder = folder
        self._corrections = folder / CORRECTIONS_FILE
        self._first_source: int | None = None  # the one to review first
        self.may_train = may_train
        self.models = models
        self._db = Database(folder / "desk.sqlite")
        self.sources = Sources(folder, self._db, double_share=double_share)
        self.cards = Cards(self._db, models)
        self.outcome = Outcome(self._db, models)
        self.uploads = Uploads(folder / "files", models, self.sources, self.outcome)

    def start(self) -> None:
        """Begin to work in the background."""
        self.uploads.jobs.start()
        self.models.jobs.start()

    def close(self) -> None:
        """Interrupt the work in the background, which the next server resumes."""
        self.uploads.jobs.stop()
        self.models.jobs.stop()
        self._db.close()

    def review(self, data: Path, *, input_col: str | None = None) -> None:
        """Make cards of a coded file, which is reviewed first; see `Columns`."""
        settings = self.models.settings
        text_col = input_col or settings.get("input_col") or "occ1"
        columns = Columns(
            text_col,
            target_cols=self.models.coding.target_cols,
            run_input_col=text_col,
            run_language_col=settings.get("language_col"),
        )
        self._first_source = self.sources.add(data, data.name, columns).id

    def as_sent(self, message: str) -> str:
        """Return a message that names files as the user does, without the folders in which they are
        kept.
        """
        return self.uploads.as_sent(message).replace(f"{self._folder}{os.sep}", "")

    def about(self, user: str | None) -> About:
        """Describe the model in use and this server, for who has signed in."""
        all_languages = named_languages(map(Language, NAMES))
        if not self.models.has_model:
            return About(
                model=None,
                languages=all_languages,
                all_languages=all_languages,
                may_train=self.may_train,
                user=user,
            )
        coding = self.models.coding
        coder = coding.coder

        # a button for it, in classifications that have such a code
        no_occupation = None
        if coder.system == "hisco" or NO_OCCUPATION in coder.codes:
            no_occupation = coding.titled(NO_OCCUPATION)
        languages = named_languages(set(coding.languages) - {"unk"} or map(Language, NAMES))
        return About(
            model=coding.name,
            system=coder.system,
            num_codes=len(coder.codes),
            most_codes=coder.formatter.num_blocks,
            no_occupation=no_occupation,
            languages=languages,
            all_languages=all_languages,
            surety=coding.surety,
            in_the_box=self.models.box_is_in_use,
            may_train=self.may_train,
            user=user,
        )

    def code(self, texts: list[str], lang: str) -> list[Answer]:
        """Code descriptions; blank ones get no codes."""
        coding = self.models.coding
        lang = chosen_language(lang, coding.languages)
        return coding.answer(texts, [lang] * len(texts))

    def sources_in_order(self) -> list[Source]:
        """List the coded files that are under review, the one to continue with first."""
        return sorted(self.sources.all(), key=lambda source: source.id != self._first_source)

    def settled(self, model: Model) -> pa.Table:
        """Return the settled descriptions as `--corrections` takes them to train a model further;
        of several decisions on one, the last.
        """
        settings = run_settings(self.models.run(model.id))
        target_cols = read_model_config(self.models.best(model.id)).written_cols
        text_col = settings.get("input_col") or "occ1"
        lang_col: str | None = "lang"
        if settings:
            lang_col = settings.get("language_col")

        # the columns of the training data, so that both are read alike
        names = [text_col, CHECKED_COL, *target_cols, "who"]
        if lang_col:
            names.insert(1, lang_col)

        # later decisions on a description replace earlier ones
        rows = {}
        for card in self.outcome.settled(target_cols, of_sample=self._is_of_sample(model)):
            row: dict[str, str | None] = {text_col: card.text, CHECKED_COL: "x", "who": card.who}
            key = description_keys([card.text])[0]
            if lang_col:
                row[lang_col] = card.lang
                key = f"{Language(card.lang)} {key}"
            row.update(zip(target_cols, card.codes or (), strict=False))
            rows[key] = row
        return pa.Table.from_pylist(
            list(rows.values()), pa.schema([(name, pa.string()) for name in names])
        )

    def _is_of_sample(self, model: Model) -> bool:
        """Return whether a model was trained on the sample."""
        return any(file.is_sample for file in self.uploads.jobs.all() if file.id == model.file)

    def improve(self) -> Improvement:
        """Write the corrections on the server, with formulas as they are, and return how to train
        on them.
        """
        model = self.models.in_use
        num_corrections = self._write_corrections(self._corrections, model)

        # what to do with the file on the command line, where training on the page is off
        best = self.models.best(model.id)
        return Improvement(
            corrections=num_corrections,
            next_step=next_step(
                str(best),
                self._corrections,
                self.models.run(model.id),
                written_cols=read_model_config(best).written_cols,
            ),
            learned=self.models.has_learned(self._corrections),
        )

    def _write_corrections(self, path: Path, model: Model, *, raw: bool = True) -> int:
        """Write the settled descriptions for a model to a file, and return their number."""
        with self._db.lock:
            settled = self.settled(model)
            write_table(path, [settled], Form(raw=raw))
        return len(settled)

    def correct(self, model_id: str) -> Model:
        """Train a model further on the settled descriptions."""
        model = self.models.jobs[model_id]
        return self.models.correct(model_id, lambda path: self._write_corrections(path, model))

    def corrections_csv(self, *, raw: bool) -> bytes:
        """Return settled descriptions, as CSV for `finetune.py --corrections`; `raw` leaves
        formulas as they are.
        """
        model = self.models.in_use
        return _written(
            CORRECTIONS_FILE, lambda path: self._write_corrections(path, model, raw=raw)
        )

    def decisions_csv(self) -> bytes:
        """Return who has decided what, as CSV."""
        return _written(DECISIONS_FILE, lambda path: write_frame(path, self.outcome.decisions()))


def _written(name: str, write: Callable[[Path], object]) -> bytes:
    """Return what a function writes to a file of its own, which no other request changes."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / name
        write(path)
        return path.read_bytes()
