"""Answer requests to the desk's HTTP interface, by the tabs of its page."""

import errno
import shutil
from pathlib import Path
from typing import Annotated, Literal

import anyio
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse
from pydantic import BaseModel, Field

from histocoder import __version__
from histocoder.data.languages import chosen_language
from histocoder.desk.coding import Answer, Code, CodingDesk, Language
from histocoder.desk.desk import Desk
from histocoder.desk.files import File
from histocoder.desk.security import UPLOAD_BYTES
from histocoder.desk.store import Card, Number, Source
from histocoder.errors import UserError

Who = Annotated[str, Field(min_length=1, max_length=60)]


class CodeRequest(BaseModel):
    """Descriptions to code."""

    texts: Annotated[list[Annotated[str, Field(max_length=2000)]], Field(min_length=1, max_length=1000)]
    lang: Annotated[str, Field(max_length=100)] = "unk"
    evidence: bool = True  # whether to search the nearest descriptions of the training data


class Decision(BaseModel):
    """A reviewer's decision on a card."""

    who: Who
    version: int  # version of the card that the reviewer saw
    action: Literal["settle", "no occupation", "unsure"] = "settle"
    codes: Annotated[list[Annotated[str, Field(max_length=1000)]], Field(max_length=20)] = []


class Reviewer(BaseModel):
    """The person who asks."""

    who: Who


class Evidence(BaseModel):
    """A card, and what helps to judge it."""

    card: Card
    answer: Answer
    predicted: list[Code]  # codes of the file, with titles


class About(BaseModel):
    """The model, and what this server does."""

    version: str
    model: str
    system: str
    num_codes: int
    most_codes: int  # maximum number of codes of a description
    no_occupation: Code | None
    languages: list[Language]
    has_known: bool
    neighbours: str  # state of the search for the nearest descriptions
    may_train: bool
    upload_bytes: int  # maximum size of a file


def add_coding(app: FastAPI, desk: Desk) -> None:
    """Add the routes that code descriptions."""
    coding = desk.coding

    @app.get("/api/about", tags=["code"])
    def about() -> About:
        """Describe the model and this server."""
        none, near = coding.no_occupation, coding.neighbours
        return About(
            version=__version__,
            model=desk.name,
            system=coding.coder.system,
            num_codes=len(coding.coder.codes),
            most_codes=coding.coder.formatter.num_blocks,
            no_occupation=coding.code(none) if none else None,
            languages=coding.languages,
            has_known=coding.known is not None,
            neighbours=near.describe() if near else "not available, since there are no training data next to the model",
            may_train=desk.improve.may_train,
            upload_bytes=UPLOAD_BYTES,
        )

    @app.post("/api/code", tags=["code"])
    def code(wanted: CodeRequest) -> list[Answer]:
        """Code descriptions; blank ones get no codes. Status 429: too many requests wait for the model."""
        lang = chosen_language(wanted.lang, coding.coder.model.config.languages)
        return coding.answer(wanted.texts, [lang] * len(wanted.texts), evidence=wanted.evidence)

    @app.get("/api/codes", tags=["code"])
    def codes(q: Annotated[str, Field(max_length=200)], limit: Annotated[int, Field(ge=1, le=100)] = 20) -> list[Code]:
        """Search the classification by code or words of the title."""
        return coding.search(q, limit=limit)


def add_files(app: FastAPI, desk: Desk) -> None:
    """Add the routes of files that are coded in the background."""
    files = desk.files

    @app.post("/api/files", status_code=201, tags=["files"])
    async def send(request: Request, name: Annotated[str, Field(max_length=300)], sheet: str | None = None) -> File:
        """Send a file as the body of the request; `name` tells its form by its suffix, `sheet` one of a workbook."""
        file, path = await run_in_threadpool(files.new, name, sheet)
        try:
            await _save_body(request, path)
            await run_in_threadpool(files.preview, file)  # a table that can't be read is not kept
        except BaseException as error:
            await run_in_threadpool(files.remove, file)
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                free = shutil.disk_usage(path.parents[1]).free / 1e9
                raise HTTPException(507, f"The file does not fit on the disk: {free:.1f} GB are free.") from error
            raise
        return files.get(file)

    app.get("/api/files", tags=["files"])(files.all)
    app.get("/api/files/{file}", tags=["files"])(files.get)
    app.get("/api/files/{file}/preview", tags=["files"])(files.preview)
    app.post("/api/files/{file}/code", tags=["files"])(files.code)
    app.post("/api/files/{file}/cancel", tags=["files"])(files.cancel)
    app.delete("/api/files/{file}", tags=["files"])(files.remove)

    @app.get("/api/files/{file}/result", response_class=FileResponse, tags=["files"])
    def result(file: str) -> FileResponse:
        """Download the coded file, in the form of the one that was sent."""
        path, name = files.result(file)
        return FileResponse(path, filename=name)

    @app.post("/api/files/{file}/review", tags=["review"])
    def to_review(file: str) -> Source:
        """Make cards of a coded file."""
        source = files.to_review(file)
        return next(one for one in desk.store.sources() if one.id == source)


async def _save_body(request: Request, path: Path) -> None:
    """Write the body of a request to disk as it comes."""
    async with await anyio.open_file(path, "wb") as file:
        async for part in request.stream():
            await file.write(part)


def add_review(app: FastAPI, desk: Desk) -> None:
    """Add the routes of the review."""
    store, coding = desk.store, desk.coding

    @app.get("/api/review", tags=["review"])
    def sources() -> list[Source]:
        """List the coded files that are under review, the one to continue with first."""
        return sorted(store.sources(), key=lambda one: one.id != desk.source)

    @app.get("/api/review/{source}/cards", tags=["review"])
    def cards(
        source: Number, who: Who, after: Number = -1, count: Annotated[int, Field(ge=1, le=20)] = 5
    ) -> list[Evidence]:
        """Return the next open descriptions, the most worth checking first; others do not get them for a while."""
        return _with_evidence(store.next_cards(source, who, after=after, count=count))

    @app.get("/api/review/cards/{card}", tags=["review"])
    def one_card(card: Number) -> Evidence:
        """Return one card."""
        return _with_evidence([store.card(card)])[0]

    @app.post("/api/review/cards/{card}", tags=["review"])
    def decide(card: Number, decision: Decision) -> Card:
        """Decide on a card. Status 409: another reviewer has in the meantime; `card` is its present state."""
        codes = _decided_codes(decision, coding)
        return store.decide(card, version=decision.version, who=decision.who, codes=codes)

    @app.post("/api/review/{source}/undo", tags=["review"])
    def undo(source: Number, reviewer: Reviewer) -> Evidence:
        """Undo this reviewer's last decision."""
        card = store.undo(source, reviewer.who)
        if card is None:
            raise UserError("There is nothing to undo.")
        return _with_evidence([card])[0]

    app.get("/api/review/{source}/changes", tags=["review"])(store.changes)
    app.get("/api/review/{source}/trust", tags=["review"])(store.trust)

    @app.get("/api/corrections.csv", response_class=Response, tags=["review"])
    def corrections(raw: bool = False) -> Response:
        """Return settled descriptions, as CSV for `finetune.py --corrections`; `raw` leaves formulas as they are."""
        headers = {"Content-Disposition": 'attachment; filename="corrections.csv"'}
        return Response(desk.improve.corrections(raw=raw), media_type="text/csv; charset=utf-8", headers=headers)

    def _with_evidence(found: list[Card]) -> list[Evidence]:
        if not found:
            return []
        answers = coding.answer([card.text for card in found], [card.lang for card in found])
        evidence = []
        for card, answer in zip(found, answers, strict=True):
            known = {code.code: code for code in (*answer.codes, *answer.alternatives)}
            predicted = [known.get(code) or coding.code(code) for code in card.predicted]
            evidence.append(Evidence(card=card, answer=answer, predicted=predicted))
        return evidence


def _decided_codes(decision: Decision, coding: CodingDesk) -> list[str] | None:
    """Return the codes that a decision settles on; None where it is unsure."""
    if decision.action == "unsure":
        return None
    if decision.action == "no occupation":
        if coding.no_occupation is None:
            raise UserError("This classification has no code for no occupation.")
        return [coding.no_occupation]
    codes = coding.check_codes(decision.codes)
    if not codes:
        raise UserError("No code is chosen. Choose one, or mark the description as no occupation or unsure.")
    return codes


def add_improve(app: FastAPI, desk: Desk) -> None:
    """Add the routes that train on corrections."""
    improve = desk.improve
    app.get("/api/improve", tags=["improve"])(improve.state)
    app.post("/api/improve/keep", tags=["improve"])(improve.keep)
    app.post("/api/improve/train", tags=["improve"])(improve.train)
    app.post("/api/improve/stop", tags=["improve"])(improve.stop)
