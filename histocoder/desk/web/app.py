"""Make a desk an application: its page, its routes, and answers to errors."""

import mimetypes
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from fastapi.staticfiles import StaticFiles

from histocoder._version import __version__
from histocoder.desk.domain.card import Conflict
from histocoder.desk.domain.desk import Desk
from histocoder.desk.web import routes
from histocoder.desk.web.guard import STATIC, Guard, answer
from histocoder.desk.web.sign_in import SignIn
from histocoder.desk.web.users import Users
from histocoder.errors import UserError


def create_app(
    desk: Desk, *, token: str, host: str = "127.0.0.1", port: int = 8000, users: Users
) -> FastAPI:
    """Return the ASGI application of a desk; for token, host, port and users see `Guard`."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        """Work in the background while the server runs."""
        desk.start()
        yield
        await run_in_threadpool(desk.close)

    app = FastAPI(
        title="histocoder",
        version=__version__,
        description=(
            "Code descriptions, code files, review codes. Send `Authorization: Bearer TOKEN`."
        ),
        docs_url=None,  # FastAPI's own pages load scripts from other servers
        redoc_url=None,
        lifespan=lifespan,
    )
    app.state.desk = desk
    cookie = f"histocoder_{port}"  # all ports of a host share their cookies
    app.middleware("http")(Guard(token=token, cookie=cookie, host=host, users=users))
    sign_in = SignIn(users, cookie=cookie)
    app.post("/sign-in", include_in_schema=False)(sign_in.sign_in)
    app.post("/sign-out", include_in_schema=False)(sign_in.sign_out)
    _add_page(app)
    _add_errors(app)
    app.include_router(routes.code)
    app.include_router(routes.files)
    app.include_router(routes.models)
    if desk.may_train:
        app.include_router(routes.training)
    app.include_router(routes.review)
    return app


def _add_page(app: FastAPI) -> None:
    """Serve the page, its files, and the page that documents the routes."""
    mimetypes.add_type("text/javascript", ".js")  # on Windows a program may have registered another
    app.mount("/static", StaticFiles(directory=STATIC))

    @app.get("/", include_in_schema=False)
    def index() -> FileResponse:
        return FileResponse(STATIC / "index.html")

    @app.get("/docs", include_in_schema=False)
    def docs() -> FileResponse:
        return FileResponse(STATIC / "docs.html")


def _add_errors(app: FastAPI) -> None:
    """Answer errors with a sentence, in which files are named as the user does."""
    desk = app.state.desk

    @app.exception_handler(RequestValidationError)
    def refuse_fields(_request: object, error: RequestValidationError) -> JSONResponse:
        """Say what is wrong with each field, without its content, which JSON can't always hold."""
        problems = []
        for field in error.errors():
            path = ".".join(str(part) for part in field["loc"][1:])
            problems.append(f"{path}: {field['msg']}")
        return answer(422, "; ".join(problems))

    @app.exception_handler(UserError)
    def explain_mistake(_request: object, error: UserError) -> JSONResponse:
        return answer(422, desk.as_sent(str(error)))

    @app.exception_handler(KeyError)
    def miss(_request: object, _error: KeyError) -> JSONResponse:
        return answer(404, "Not found.")

    @app.exception_handler(Conflict)
    def show_conflict(_request: object, error: Conflict) -> JSONResponse:
        return answer(409, str(error), card=error.card.model_dump())

    @app.exception_handler(sqlite3.OperationalError)
    def explain_full_disk(_request: object, error: sqlite3.OperationalError) -> JSONResponse:
        """Say what a person can do when the database can't be written; raise the error if it is
        another one.
        """
        if not any(reason in str(error) for reason in ("disk is full", "disk I/O error")):
            raise error
        return answer(
            507, "The server's disk is full: this is not saved. Make room there, and do it again."
        )
