"""Make a desk an application: its page, its routes, and answers to errors."""

import mimetypes
import sqlite3
from collections.abc import Callable

from fastapi import FastAPI, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from fastapi.staticfiles import StaticFiles

from histocoder import __version__
from histocoder.desk.domain.card import Conflict
from histocoder.desk.domain.desk import Desk
from histocoder.desk.web.guard import STATIC, Guard, answer
from histocoder.desk.web.users import Users
from histocoder.errors import UserError


def create_app(
    desk: Desk, *, token: str, host: str = "127.0.0.1", port: int = 8000, users: Users
) -> FastAPI:
    """Return the ASGI application of a desk; for token, host, port and users see `Guard`."""
    app = FastAPI(
        title="histocoder",
        version=__version__,
        description=(
            "Code descriptions, code files, review codes. Send `Authorization: Bearer TOKEN`."
        ),
        docs_url=None,  # FastAPI's own pages load scripts from other servers
        redoc_url=None,
        lifespan=desk.lifespan,
    )
    guard = Guard(token=token, host=host, port=port, users=users)
    app.middleware("http")(guard)
    _add_errors(app, desk.as_sent)
    mimetypes.add_type("text/javascript", ".js")  # on Windows a program may have registered another
    app.mount("/static", StaticFiles(directory=STATIC))
    app.add_api_route("/", lambda: FileResponse(STATIC / "index.html"), include_in_schema=False)
    app.add_api_route("/docs", lambda: FileResponse(STATIC / "docs.html"), include_in_schema=False)
    app.post("/sign-in", include_in_schema=False)(guard.sign_in)
    app.post("/sign-out", include_in_schema=False)(guard.sign_out)
    uploads, cards, models = desk.uploads, desk.cards, desk.models
    app.get("/api/about", tags=["code"])(desk.about)
    app.post("/api/code", tags=["code"])(desk.code)
    app.get("/api/codes", tags=["code"])(desk.search)
    app.post("/api/files", tags=["files"], status_code=201)(uploads.send)
    app.get("/api/files", tags=["files"])(uploads.all)
    app.get("/api/files/{file}", tags=["files"])(uploads.get)
    app.get("/api/files/{file}/preview", tags=["files"])(uploads.preview)
    app.post("/api/files/{file}/sheet", tags=["files"])(uploads.use_sheet)
    app.post("/api/files/{file}/code", tags=["files"])(uploads.code)
    app.post("/api/sample", tags=["files"])(uploads.sample)
    app.post("/api/titles", tags=["files"])(uploads.titles)
    app.get("/api/models", tags=["models"])(models.all)
    app.get("/api/models/{model}/{name}", tags=["models"], response_class=Response)(models.read)
    app.post("/api/models/{model}/use", tags=["models"])(models.use)
    if desk.may_train:
        app.post("/api/files/{file}/check", tags=["models"])(uploads.check)
        app.post("/api/files/{file}/train", tags=["models"])(uploads.train)
        app.post("/api/models/{model}/correct", tags=["models"])(desk.correct)
        app.post("/api/models/{model}/stop", tags=["models"])(models.halt)
        app.post("/api/models/{model}/resume", tags=["models"])(models.resume)
        app.delete("/api/models/{model}", tags=["models"])(models.remove)
    app.delete("/api/files/{file}", tags=["files"])(uploads.remove)
    app.get("/api/files/{file}/result", tags=["files"], response_class=FileResponse)(uploads.result)
    app.get("/api/files/{file}/provenance", tags=["files"], response_class=FileResponse)(
        uploads.provenance
    )
    app.post("/api/files/{file}/review", tags=["review"])(uploads.to_review)
    app.get("/api/review", tags=["review"])(desk.sources)
    app.delete("/api/review/{source}", tags=["review"])(cards.remove)
    app.get("/api/review/{source}/cards", tags=["review"])(cards.next_cards)
    app.get("/api/review/{source}/list", tags=["review"])(cards.listing)
    app.get("/api/review/{source}/agreement", tags=["review"])(cards.agreement)
    app.get("/api/review/cards/{card}", tags=["review"])(cards.evidence)
    app.post("/api/review/cards/{card}", tags=["review"])(cards.decide)
    app.post("/api/review/accept", tags=["review"])(cards.accept)
    app.post("/api/review/{source}/undo", tags=["review"])(cards.undo)
    app.get("/api/review/{source}/trust", tags=["review"])(cards.trust)
    app.get("/api/corrections.csv", tags=["review"], response_class=Response)(desk.export)
    app.get("/api/decisions.csv", tags=["review"], response_class=Response)(desk.decisions)
    app.post("/api/improve", tags=["review"])(desk.improve)
    return app


def _add_errors(app: FastAPI, as_sent: Callable[[str], str]) -> None:
    """Answer errors with a sentence, in which files are named `as_sent`."""

    def problems(error: RequestValidationError) -> str:
        """Return what is wrong with each field, without its content, which JSON can't always
        hold.
        """
        return "; ".join(
            f"{'.'.join(map(str, one['loc'][1:]))}: {one['msg']}" for one in error.errors()
        )

    app.add_exception_handler(RequestValidationError, lambda _, error: answer(422, problems(error)))
    app.add_exception_handler(UserError, lambda _, error: answer(422, as_sent(str(error))))
    app.add_exception_handler(sqlite3.OperationalError, lambda _, error: _database_answer(error))
    app.add_exception_handler(KeyError, lambda _, __: answer(404, "Not found."))
    app.add_exception_handler(
        Conflict, lambda _, error: answer(409, str(error), card=error.card.model_dump())
    )


def _database_answer(error: sqlite3.OperationalError) -> JSONResponse:
    """Return what a person can do when the database can't be written; raise the error if it is
    another one.
    """
    if not any(reason in str(error) for reason in ("disk is full", "disk I/O error")):
        raise error
    return answer(
        507, "The server's disk is full: this is not saved. Make room there, and do it again."
    )
