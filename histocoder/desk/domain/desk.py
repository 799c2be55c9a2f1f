"""A desk: its models, cards and files, and what they do together."""

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import pyarrow as pa
from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, Field

from histocoder.data.labelled_files import CHECKED_COL
from histocoder.desk.domain.card import Source
from histocoder.desk.domain.cards import CORRECTIONS_FILE, DECISIONS_FILE, Cards
from histocoder.desk.domain.coding import (
    NO_OCCUPATION,
    Answer,
    Code,
    CodeRequest,
    NamedLanguage,
    Surety,
    named_languages,
)
from histocoder.desk.domain.models import Model, Models
from histocoder.desk.domain.uploads import Uploads
from histocoder.evaluation.review_file import Columns, next_step
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
    surety: Surety = Surety()
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
        self.models, self._file, self.may_train = models, folder / CORRECTIONS_FILE, may_train
        self.cards = Cards(folder / "desk.sqlite", models, double_share=double_share)
        self.uploads = Uploads(folder / "files", models, self.cards)
        self._first: int | None = None  # source to review first

    def review(self, data: Path, *, input_col: str | None = None) -> None:
        """Make cards of a coded file, which is reviewed first; see `Columns`."""
        settings = self.models.settings
        text_col = input_col or settings.get("input_col") or "occ1"
        targets, language_col = (
            self.models.coding.coder.model.config.target_cols,
            settings.get("language_col"),
        )
        columns = Columns(
            text_col, target_cols=targets, run_input_col=text_col, run_language_col=language_col
        )
        self._first = self.cards.add_source(data, data.name, columns).id

    @asynccontextmanager
    async def lifespan(self, _app: FastAPI) -> AsyncIterator[None]:
        """Work in the background while the server runs."""
        self.uploads.start()
        self.models.start()
        yield
        await run_in_threadpool(self.uploads.stop)
        await run_in_threadpool(self.models.stop)
        self.cards.close()

    def as_sent(self, message: str) -> str:
        """Return a message that names files as the user does, without the folders in which they are
        kept.
        """
        return self.uploads.as_sent(message).replace(f"{self._folder}{os.sep}", "")

    def about(self, request: Request) -> About:
        """Describe the model in use and this server."""
        server: dict[str, Any] = {
            "may_train": self.may_train,
            "user": getattr(request.state, "user", None),
        }
        if self.models.in_use is None:
            return About(model=None, languages=named_languages(map(Language, NAMES)), **server)
        coding, coder = self.models.coding, self.models.coding.coder
        has_none = coder.system == "hisco" or NO_OCCUPATION in coder.codes
        return About(
            model=coding.name,
            system=coder.system,
            num_codes=len(coder.codes),
            most_codes=coder.formatter.num_blocks,
            no_occupation=coding.titled(NO_OCCUPATION) if has_none else None,
            languages=named_languages(
                set(coder.model.config.languages) - {"unk"} or map(Language, NAMES)
            ),
            surety=coding.surety,
            **server,
        )

    def code(self, wanted: CodeRequest) -> list[Answer]:
        """Code descriptions; blank ones get no codes."""
        coding = self.models.coding
        lang = chosen_language(wanted.lang, coding.coder.model.config.languages)
        return coding.answer(wanted.texts, [lang] * len(wanted.texts))

    def search(
        self,
        q: Annotated[str, Field(max_length=200)],
        limit: Annotated[int, Field(ge=1, le=100)] = 20,
    ) -> list[Code]:
        """Search the classification by code or words of the title; whole words come first."""
        return self.models.coding.search(q, limit)

    def sources(self) -> list[Source]:
        """List the coded files that are under review, the one to continue with first."""
        return sorted(self.cards.sources(), key=lambda one: one.id != self._first)

    def settled(self) -> pa.Table:
        """Return the settled descriptions as `--corrections` takes them; of several decisions on
        one, the last.
        """
        targets, settings = self.models.coding.coder.model.config.target_cols, self.models.settings
        language_col = settings.get("language_col")
        lang_cols = [language_col] if language_col else [] if settings else ["lang"]
        names = [settings.get("input_col") or "occ1", *lang_cols, CHECKED_COL, *targets, "who"]
        rows = {}
        for card in self.cards.settled(targets, of_sample=self._uses_sample()):
            langs, codes = [card.lang] * len(lang_cols), card.codes or []
            cells = [
                card.text,
                *langs,
                "x",
                *codes,
                *[None] * (len(targets) - len(codes)),
                card.who,
            ]
            key = description_keys([card.text])[0], *map(Language, langs)
            rows[key] = dict(zip(names, cells, strict=True))
        return pa.Table.from_pylist(
            list(rows.values()), pa.schema([(name, pa.string()) for name in names])
        )

    def _uses_sample(self) -> bool:
        """Return whether the model in use was trained on the sample."""
        model = self.models.in_use
        return model is not None and any(
            file.id == model.file and file.is_sample for file in self.uploads.all()
        )

    def improve(self) -> Improvement:
        """Write the corrections on the server, with formulas as they are, and return how to train
        on them.
        """
        number, model = self._write(self._file), self.models.in_use
        assert model is not None  # else there are no corrections
        next_one = next_step(str(self.models.best(model.id)), self._file, self.models.run(model.id))
        return Improvement(
            corrections=number, next_step=next_one, learned=self.models.has_learned(self._file)
        )

    def _write(self, path: Path, *, raw: bool = True) -> int:
        """Write the settled descriptions to a file, and return their number."""
        with self.cards.lock:
            settled = self.settled()
            write_table(path, [settled], Form(raw=raw))
        return len(settled)

    def correct(self, model: str) -> Model:
        """Train a model further on the settled descriptions."""
        return self.models.correct(model, self._write)

    def decisions(self) -> Response:
        """Return who has decided what, as CSV."""
        with self.cards.lock:
            decisions = self.cards.decisions()
        return _download(DECISIONS_FILE, lambda path: write_frame(path, decisions))

    def export(self, raw: bool = False) -> Response:
        """Return settled descriptions, as CSV for `finetune.py --corrections`; `raw` leaves
        formulas as they are.
        """
        return _download(self._file.name, lambda path: self._write(path, raw=raw))


def _download(name: str, write: Callable[[Path], object]) -> Response:
    """Return a CSV file that `write` writes to a path, as an answer of its own: no other request
    changes it.
    """
    with TemporaryDirectory() as folder:
        path = Path(folder) / name
        write(path)
        content = path.read_bytes()
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return Response(content, media_type="text/csv; charset=utf-8", headers=headers)
