"""The desk as an application: its page, its routes, and how errors are answered."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.resources import files as resources
from pathlib import Path

from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse, JSONResponse

from histocoder import __version__
from histocoder.desk.routes import Desk, add_coding, add_files, add_improve, add_review
from histocoder.desk.security import Guard
from histocoder.desk.store import Conflict
from histocoder.desk.turns import Busy
from histocoder.errors import UserError

_MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def create_app(desk: Desk, *, token: str, host: str = "127.0.0.1", port: int = 8000) -> FastAPI:
    """Return the ASGI application of a desk.

    Parameters
    ----------
    desk : Desk
    token, host, port
        See `Guard`.
    """
    stop = threading.Event()

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        """Work in the background while the server runs."""
        desk.files.start()
        reading = threading.Thread(target=_encode_neighbours, args=(desk, stop), daemon=True)
        reading.start()
        yield
        stop.set()
        await run_in_threadpool(desk.files.stop)
        await run_in_threadpool(reading.join, 30)
        await run_in_threadpool(desk.improve.stop)
        desk.store.close()

    app = FastAPI(
        title="histocoder",
        version=__version__,
        description="Code descriptions, code files, review codes. Send `Authorization: Bearer TOKEN`.",
        docs_url=None,  # FastAPI's own pages load scripts from other servers
        redoc_url=None,
        lifespan=lifespan,
    )
    app.add_middleware(Guard, token=token, host=host, port=port)
    _add_errors(app)
    _add_page(app)
    add_coding(app, desk)
    add_files(app, desk)
    add_review(app, desk)
    add_improve(app, desk)
    return app


def _encode_neighbours(desk: Desk, stop: threading.Event) -> None:
    if desk.coding.neighbours is not None:
        desk.coding.neighbours.encode(desk.coding.coder, desk.coding.turns, stop)


def _add_errors(app: FastAPI) -> None:
    """Answer errors with a sentence."""

    def answer(status: int, text: Callable[[Exception], str]) -> Callable[[Request, Exception], JSONResponse]:
        """Return a handler that answers with a status and a text."""
        return lambda _request, error: JSONResponse({"detail": text(error)}, status)

    app.add_exception_handler(UserError, answer(422, str))
    app.add_exception_handler(KeyError, answer(404, lambda _: "There is no such thing here."))
    app.add_exception_handler(Busy, answer(429, lambda _: "The model is busy. Try again in a moment."))
    app.add_exception_handler(
        Conflict,
        lambda _, error: JSONResponse({"detail": str(error), "card": error.card.model_dump()}, 409),
    )


def _add_page(app: FastAPI) -> None:
    """Serve the page: these files, read once, and no others."""
    static = {
        path.name: path.read_bytes()
        for path in resources("histocoder.desk").joinpath("static").iterdir()
        if Path(path.name).suffix in _MEDIA_TYPES
    }

    @app.get("/", include_in_schema=False)
    def page() -> HTMLResponse:
        return HTMLResponse(static["index.html"])

    @app.get("/docs", include_in_schema=False)
    def docs() -> HTMLResponse:
        return HTMLResponse(static["docs.html"])

    @app.get("/static/{name}", include_in_schema=False)
    def part(name: str) -> Response:
        return Response(static[name], media_type=_MEDIA_TYPES[Path(name).suffix])
