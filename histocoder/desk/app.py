"""Make the desk an application: its page, its routes, and answers to errors."""

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files as resources
from pathlib import Path

from fastapi import FastAPI, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from histocoder import __version__
from histocoder.desk.coding import Busy
from histocoder.desk.desk import Desk
from histocoder.desk.routes import add_coding, add_files, add_improve, add_review
from histocoder.desk.security import Guard
from histocoder.desk.store import Conflict
from histocoder.errors import UserError

_MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def create_app(desk: Desk, *, token: str, host: str = "127.0.0.1", port: int = 8000) -> FastAPI:
    """Return the ASGI application of a desk; for token, host and port see `Guard`."""
    stop = threading.Event()

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        """Work in the background while the server runs."""
        desk.files.start()
        encoding = threading.Thread(target=desk.coding.encode_neighbours, args=(stop,), daemon=True)
        encoding.start()
        yield
        stop.set()
        await run_in_threadpool(desk.files.stop)
        await run_in_threadpool(encoding.join, 30)
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


def _add_errors(app: FastAPI) -> None:
    """Answer errors with a sentence."""

    def answer(status: int, text: str) -> JSONResponse:
        return JSONResponse({"detail": text}, status)

    def problems(error: RequestValidationError) -> str:
        """Return what is wrong with each field, without its content, which JSON can't always hold."""
        return "; ".join(f"{'.'.join(map(str, one['loc'][1:]))}: {one['msg']}" for one in error.errors())

    app.add_exception_handler(RequestValidationError, lambda _, error: answer(422, problems(error)))
    app.add_exception_handler(UserError, lambda _, error: answer(422, str(error)))
    app.add_exception_handler(KeyError, lambda _, __: answer(404, "Not found."))
    app.add_exception_handler(Busy, lambda _, __: answer(429, "The model is busy. Try again in a moment."))
    app.add_exception_handler(
        Conflict, lambda _, error: JSONResponse({"detail": str(error), "card": error.card.model_dump()}, 409)
    )


def _add_page(app: FastAPI) -> None:
    """Serve the page: these files, read once, and no others."""
    static = {
        path.name: path.read_bytes()
        for path in resources("histocoder.desk").joinpath("static").iterdir()
        if Path(path.name).suffix in _MEDIA_TYPES
    }

    @app.get("/static/{name}", include_in_schema=False)
    def part(name: str) -> Response:
        return Response(static[name], media_type=_MEDIA_TYPES[Path(name).suffix])

    app.add_api_route("/", lambda: part("index.html"), include_in_schema=False)
    app.add_api_route("/docs", lambda: part("docs.html"), include_in_schema=False)
