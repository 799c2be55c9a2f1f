"""The routes of the desk's HTTP interface, by the tabs of its page."""

from __future__ import annotations

import errno
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse
from pydantic import Field

from histocoder import __version__
from histocoder.desk.coding import Answer, Code, CodingDesk
from histocoder.desk.files import File, Files, Options, Preview
from histocoder.desk.improve import Improve, Improvement
from histocoder.desk.messages import About, Changes, Decision, Descriptions, Evidence, Reviewer, Who
from histocoder.desk.security import UPLOAD_BYTES
from histocoder.desk.store import Card, Source, Store
from histocoder.desk.trust import Trust
from histocoder.errors import UserError

_BLOCK_BYTES = 1 << 20
_AS_FILE = {"Content-Disposition": 'attachment; filename="corrections.csv"'}


@dataclass(frozen=True)
class Desk:
    """All that the routes need."""

    model: str
    coding: CodingDesk
    store: Store
    files: Files
    improve: Improve
    source: int | None = None
    """Of the file to review that the server was started with."""


def add_coding(app: FastAPI, desk: Desk) -> None:
    """Add the routes that code descriptions."""
    coding = desk.coding

    @app.get("/api/about", tags=["code"])
    def about() -> About:
        """Say what the model is."""
        none, near = coding.no_occupation, coding.neighbours
        return About(
            version=__version__,
            model=desk.model,
            system=coding.coder.system,
            num_codes=len(coding.coder.codes),
            most_codes=coding.coder.formatter.num_blocks,
            no_occupation=coding.code(none) if none else None,
            languages=coding.languages,
            has_known=coding.known is not None,
            neighbours=near.describe() if near else "there are no training data beside the model",
            may_train=desk.improve.may_train,
            upload_bytes=UPLOAD_BYTES,
        )

    @app.post("/api/code", tags=["code"])
    def code(wanted: Descriptions) -> list[Answer]:
        """Code descriptions; blank ones get no codes. Status 429: too many requests wait for the model."""
        return coding.answer(wanted.texts, [wanted.lang] * len(wanted.texts), evidence=wanted.evidence)

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
                raise HTTPException(507, f"The disk is full: {_free(path)} are free.") from error
            raise
        return files.get(file)

    @app.get("/api/files", tags=["files"])
    def all_files() -> list[File]:
        """List the files."""
        return files.all()

    @app.get("/api/files/{file}", tags=["files"])
    def one_file(file: str) -> File:
        """Say how far a file is."""
        return files.get(file)

    @app.get("/api/files/{file}/preview", tags=["files"])
    def preview(file: str) -> Preview:
        """Show the first rows."""
        return files.preview(file)

    @app.post("/api/files/{file}/code", tags=["files"])
    def code_file(file: str, options: Options) -> File:
        """Code the file, as `histocoder predict` does, after those that wait already."""
        return files.code(file, options)

    @app.post("/api/files/{file}/cancel", tags=["files"])
    def cancel(file: str) -> File:
        """Stop; what is coded is kept for when the file is coded again."""
        return files.cancel(file)

    @app.delete("/api/files/{file}", tags=["files"])
    def remove(file: str) -> list[File]:
        """Delete the file and its codes; return the other files."""
        files.remove(file)
        return files.all()

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
    with path.open("wb") as written:
        block = bytearray()
        async for part in request.stream():
            block += part
            if len(block) >= _BLOCK_BYTES:
                await run_in_threadpool(written.write, bytes(block))
                block.clear()
        await run_in_threadpool(written.write, bytes(block))


def _free(path: Path) -> str:
    return f"{shutil.disk_usage(path.parent).free / 1e9:.1f} GB"


def add_review(app: FastAPI, desk: Desk) -> None:
    """Add the routes of the review."""
    store, coding = desk.store, desk.coding

    @app.get("/api/review", tags=["review"])
    def sources() -> list[Source]:
        """List the coded files that are under review, the one to go on with first."""
        return sorted(store.sources(), key=lambda one: one.id != desk.source)

    @app.get("/api/review/{source}/cards", tags=["review"])
    def cards(source: int, who: Who, after: int = -1, count: Annotated[int, Field(ge=1, le=20)] = 5) -> list[Evidence]:
        """Return the next open descriptions, the most worth checking first; they are this reviewer's for a while."""
        return _with_evidence(store.next_cards(source, who, after=after, count=count))

    @app.get("/api/review/cards/{card}", tags=["review"])
    def one_card(card: int) -> Evidence:
        """Return one card."""
        return _with_evidence([store.card(card)])[0]

    @app.post("/api/review/cards/{card}", tags=["review"])
    def decide(card: int, decision: Decision) -> Card:
        """Decide on a card. Status 409: somebody else has in the meantime; `card` is how it is now."""
        codes = _decided_codes(decision, coding)
        return store.decide(card, version=decision.version, who=decision.who, codes=codes)

    @app.post("/api/review/{source}/undo", tags=["review"])
    def undo(source: int, reviewer: Reviewer) -> Evidence:
        """Take back this reviewer's last decision."""
        card = store.undo(source, reviewer.who)
        if card is None:
            raise UserError("There is nothing to undo.")
        return _with_evidence([card])[0]

    @app.get("/api/review/{source}/changes", tags=["review"])
    def changes(source: int, after: int = 0) -> Changes:
        """Return the cards that were decided on since decision number `after`."""
        last, found = store.changes(source, after=after)
        return Changes(last=last, cards=found)

    @app.get("/api/review/{source}/trust", tags=["review"])
    def trust(source: int) -> Trust:
        """Say how far the file can be trusted by now, and what an hour more brings."""
        return store.trust(source)

    @app.get("/api/corrections.csv", response_class=Response, tags=["review"])
    def corrections(raw: bool = False) -> Response:
        """Return what is settled, as CSV that `finetune.py --corrections` takes; `raw` leaves formulas as they are."""
        return Response(desk.improve.corrections(raw=raw), media_type="text/csv; charset=utf-8", headers=_AS_FILE)

    def _with_evidence(found: list[Card]) -> list[Evidence]:
        if not found:
            return []
        answers = coding.answer([card.text for card in found], [card.lang for card in found])
        return [
            Evidence(card=card, answer=answer, predicted=[coding.code(code) for code in card.predicted])
            for card, answer in zip(found, answers, strict=True)
        ]


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
        raise UserError("There is no code. Choose one, or say that there is no occupation, or that it is unsure.")
    return codes


def add_improve(app: FastAPI, desk: Desk) -> None:
    """Add the routes that train on corrections."""

    @app.get("/api/improve", tags=["improve"])
    def state() -> Improvement:
        """Return the command that trains on the corrections, and how far that is."""
        return desk.improve.state()

    @app.post("/api/improve/keep", tags=["improve"])
    def keep() -> Improvement:
        """Write the corrections where the command has them."""
        desk.improve.keep()
        return desk.improve.state()

    @app.post("/api/improve/train", tags=["improve"])
    def train() -> Improvement:
        """Train on the corrections, where the server was started with --allow-training."""
        desk.improve.train()
        return desk.improve.state()

    @app.post("/api/improve/stop", tags=["improve"])
    def stop() -> Improvement:
        """Stop the training."""
        desk.improve.stop()
        return desk.improve.state()
