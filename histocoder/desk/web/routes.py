"""The routes of the desk: each passes what a request asks for to the domain."""

from typing import Annotated

from fastapi import APIRouter, Body, Query, Request, Response
from fastapi.responses import FileResponse
from pydantic import Field
from starlette.background import BackgroundTask

from histocoder.desk.domain.card import Card, Evidence, Filter, Listing, Source
from histocoder.desk.domain.checks import Check, TrainOptions
from histocoder.desk.domain.coding import Answer, Code
from histocoder.desk.domain.desk import About, Improvement
from histocoder.desk.domain.models import Model, RunFile
from histocoder.desk.domain.outcome import Agreement
from histocoder.desk.domain.preview import Preview
from histocoder.desk.domain.sources import CORRECTIONS_FILE, DECISIONS_FILE
from histocoder.desk.domain.trust import Trust
from histocoder.desk.domain.uploaded_file import Download, File, Options, Use
from histocoder.desk.web.requests import (
    Accepted,
    CodeRequest,
    CurrentUser,
    Decision,
    Number,
    Reviewer,
    TheDesk,
    Who,
)

code = APIRouter(prefix="/api", tags=["code"])
files = APIRouter(prefix="/api", tags=["files"])
models = APIRouter(prefix="/api", tags=["models"])
training = APIRouter(prefix="/api", tags=["models"])  # on a server that may train
review = APIRouter(prefix="/api", tags=["review"])

_REPORT_HEADERS = {  # its own styles and scripts work, and reach nothing of the desk
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; "
        "sandbox allow-scripts; frame-ancestors 'self'"
    ),
    "X-Frame-Options": "SAMEORIGIN",
}
_MEDIA_TYPES = {"report.html": "text/html", "metrics.json": "application/json"}

# ---- Codes of descriptions ----


@code.get("/about")
def about(desk: TheDesk, user: CurrentUser) -> About:
    """Describe the model in use and this server."""
    return desk.about(user)


@code.post("/code")
def code_texts(desk: TheDesk, wanted: CodeRequest) -> list[Answer]:
    """Code descriptions; blank ones get no codes."""
    return desk.code(wanted.texts, wanted.lang)


@code.get("/codes")
def search(
    desk: TheDesk,
    q: Annotated[str, Field(max_length=200)],
    limit: Annotated[int, Field(ge=1, le=100)] = 20,
) -> list[Code]:
    """Search the classification by code or words of the title; whole words come first."""
    return desk.models.coding.search(q, limit)


# ---- Files ----


@files.post("/files", status_code=201)
async def send(
    desk: TheDesk,
    request: Request,
    name: Annotated[str, Field(max_length=300)],
    sheet: str | None = None,
    use: Use = "code",
) -> File:
    """Send a file as the body of the request; `name` tells its form by its suffix, `sheet` one of a
    workbook.
    """
    return await desk.uploads.receive(name, request.stream(), sheet=sheet, use=use)


@files.get("/files")
def list_files(desk: TheDesk) -> list[File]:
    """List the files, the last one first."""
    return desk.uploads.jobs.all()


@files.get("/files/{file}")
def get_file(desk: TheDesk, file: str) -> File:
    """Return a file, and how much of it is coded."""
    return desk.uploads.jobs[file]


@files.get("/files/{file}/preview")
def preview(desk: TheDesk, file: str) -> Preview:
    """Return the first rows, and what their columns probably hold."""
    return desk.uploads.preview(file)


@files.post("/files/{file}/sheet")
def use_sheet(
    desk: TheDesk, file: str, sheet: Annotated[str, Body(embed=True, max_length=300)]
) -> Preview:
    """Use another sheet of a workbook, and return its first rows."""
    return desk.uploads.use_sheet(file, sheet)


@files.post("/files/{file}/encoding")
def use_encoding(
    desk: TheDesk, file: str, encoding: Annotated[str, Body(embed=True, max_length=300)]
) -> Preview:
    """Read a text file in another encoding, and return its first rows."""
    return desk.uploads.use_encoding(file, encoding)


@files.post("/files/{file}/code")
def code_file(desk: TheDesk, file: str, options: Options) -> File:
    """Code a file as `histocoder predict` does, after those that wait already."""
    return desk.uploads.queue(file, options)


@files.post("/sample")
def make_sample(desk: TheDesk) -> list[File]:
    """Make two files of histocoder's own titles: a coded table to train on, and a table to code."""
    return desk.uploads.make_sample()


@files.post("/titles")
def make_titles(desk: TheDesk) -> File:
    """Make a file of all of histocoder's titles, to train on where nothing is coded yet."""
    return desk.uploads.make_titles()


@files.delete("/files/{file}")
def remove_file(desk: TheDesk, file: str) -> list[File]:
    """Delete a file, its codes and what was decided on it, and stop coding it; return the other
    files.
    """
    desk.uploads.remove(file)
    return desk.uploads.jobs.all()


@files.get("/files/{file}/result", response_class=FileResponse)
def result(desk: TheDesk, file: str, as_coded: bool = False) -> FileResponse:
    """Download the coded file, in the form of the one that was sent, with people's decisions in it.

    Beside these are who decided, when, and the model's codes; with `as_coded` it is as the model
    has coded it.
    """
    return _file_response(desk.uploads.result(file, as_coded=as_coded))


@files.get("/files/{file}/provenance", response_class=FileResponse)
def provenance(desk: TheDesk, file: str) -> FileResponse:
    """Download where the coded file comes from, with a paragraph for a methods section, as JSON."""
    return _file_response(desk.uploads.provenance(file))


def _file_response(download: Download) -> FileResponse:
    task = BackgroundTask(download.path.unlink) if download.is_temporary else None
    return FileResponse(download.path, filename=download.name, background=task)


# ---- Models ----


@models.get("/models")
def list_models(desk: TheDesk) -> list[Model]:
    """List the models, the last one first."""
    return desk.models.jobs.all()


@models.get("/models/{model}/{name}", response_class=Response)
def read_run_file(desk: TheDesk, model: str, name: RunFile) -> Response:
    """Return a file of a model's run: its report, the numbers of both, and what training has
    said.
    """
    content = desk.models.run_file(model, name)  # at once, since logs grow
    headers = _REPORT_HEADERS if name == "report.html" else None
    return Response(content, media_type=_MEDIA_TYPES.get(name, "text/plain"), headers=headers)


@models.post("/models/{model}/use")
def use_model(desk: TheDesk, model: str) -> list[Model]:
    """Use a model for all that is coded and reviewed from now on."""
    desk.models.use(model)
    return desk.models.jobs.all()


@training.post("/files/{file}/check")
def check(desk: TheDesk, file: str, options: TrainOptions) -> Check:
    """Prepare a table of training data to try, and list all its problems."""
    return desk.uploads.check(file, options)


@training.post("/files/{file}/train")
def train(desk: TheDesk, file: str, options: TrainOptions) -> Model:
    """Train a new model on a table."""
    return desk.uploads.train(file, options)


@training.post("/models/{model}/correct")
def correct(desk: TheDesk, model: str) -> Model:
    """Train a model further on the settled descriptions."""
    return desk.correct(model)


@training.post("/models/{model}/stop")
def stop_training(desk: TheDesk, model: str) -> Model:
    """Stop training; it can be resumed."""
    return desk.models.halt(model)


@training.post("/models/{model}/resume")
def resume_training(desk: TheDesk, model: str) -> Model:
    """Resume training that was stopped, or has failed."""
    return desk.models.resume(model)


@training.delete("/models/{model}")
def remove_model(desk: TheDesk, model: str) -> list[Model]:
    """Delete a model that is neither in use nor being trained."""
    desk.models.remove(model)
    return desk.models.jobs.all()


# ---- Review ----


@review.post("/files/{file}/review")
def review_file(desk: TheDesk, file: str) -> Source:
    """Make cards of a coded file."""
    return desk.uploads.to_review(file)


@review.get("/review")
def list_sources(desk: TheDesk) -> list[Source]:
    """List the coded files that are under review, the one to continue with first."""
    return desk.sources_in_order()


@review.delete("/review/{source}")
def remove_source(desk: TheDesk, source: Number) -> list[Source]:
    """Remove a file from the review: its cards, their other columns and all decisions on them;
    return the others.

    Nothing of it remains in the database. Models that were trained on the decisions keep what they
    have learned.
    """
    desk.sources.remove(source)
    return desk.sources.all()


@review.get("/review/{source}/cards")
def next_cards(
    desk: TheDesk,
    reviewer: Reviewer,
    source: Number,
    after: Number = -1,
    count: Annotated[int, Field(ge=1, le=20)] = 5,
) -> list[Evidence]:
    """Return the next open descriptions, the most worth checking first; others do not get them for
    a while.
    """
    return desk.cards.next_cards(source, reviewer, after=after, count=count)


@review.get("/review/{source}/list")
def list_cards(
    desk: TheDesk, user: CurrentUser, source: Number, wanted: Annotated[Filter, Query()]
) -> Listing:
    """List the cards that a filter finds, as a reviewer may see them, with the titles of their
    codes.
    """
    return desk.cards.listing(source, user or wanted.who, wanted)


@review.get("/review/{source}/agreement")
def agreement(desk: TheDesk, source: Number) -> Agreement:
    """Return how far two people agree on a file's cards for two: their number, and those both
    decided on.
    """
    return desk.outcome.agreement(source)


@review.get("/review/cards/{card}")
def evidence(desk: TheDesk, reviewer: Reviewer, card: Number) -> Evidence:
    """Return a card, as this reviewer may see it, and what helps to judge it."""
    return desk.cards.evidence(card, reviewer)


@review.post("/review/cards/{card}")
def decide(desk: TheDesk, user: CurrentUser, card: Number, decision: Decision) -> Card:
    """Decide on a card. Status 409: another reviewer has in the meantime; `card` is its present
    state.
    """
    return desk.cards.decide(card, decision.version, user or decision.who, decision.codes)


@review.post("/review/accept")
def accept(desk: TheDesk, user: CurrentUser, batch: Accepted) -> list[Card]:
    """Accept the predicted codes of several cards, all or, if another reviewer has decided on one,
    none.
    """
    return desk.cards.accept(batch.cards, user or batch.who)


@review.post("/review/{source}/undo")
def undo(
    desk: TheDesk,
    user: CurrentUser,
    source: Number,
    who: Annotated[Who, Body(embed=True)] = "program",
) -> list[Card]:
    """Undo this reviewer's last decision, or all that were made at once. Status 409: another has
    decided since.
    """
    return desk.cards.undo(source, user or who)


@review.get("/review/{source}/trust")
def trust(desk: TheDesk, source: Number) -> Trust:
    """Return how much of a file is settled, and how many of its rows are right.

    The sample ends before the first card drawn that is not decided. Cards for two, which were drawn
    at random as well and take longer, are a sample of their own.
    """
    return desk.outcome.trust(source)


@review.get("/corrections.csv", response_class=Response)
def export_corrections(desk: TheDesk, raw: bool = False) -> Response:
    """Return settled descriptions, as CSV for `finetune.py --corrections`; `raw` leaves formulas as
    they are.
    """
    return _csv_response(CORRECTIONS_FILE, desk.corrections_csv(raw=raw))


@review.get("/decisions.csv", response_class=Response)
def export_decisions(desk: TheDesk) -> Response:
    """Return who has decided what, as CSV."""
    return _csv_response(DECISIONS_FILE, desk.decisions_csv())


def _csv_response(name: str, content: bytes) -> Response:
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return Response(content, media_type="text/csv; charset=utf-8", headers=headers)


@review.post("/improve")
def improve(desk: TheDesk) -> Improvement:
    """Write the corrections on the server, with formulas as they are, and return how to train on
    them.
    """
    return desk.improve()
