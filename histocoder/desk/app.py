"""Make the desk an application: its parts, its routes and page, who may ask, and answers to errors."""

import secrets
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib.resources import files as resources
from pathlib import Path
from urllib.parse import urlsplit

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse
from pydantic import BaseModel

from histocoder import __version__
from histocoder.checkpoints.model_files import CONFIG_FILE, WEIGHTS_FILE
from histocoder.desk.cards import Cards, Conflict, Source
from histocoder.desk.coding import Code, Coding, NamedLanguage
from histocoder.desk.improve import Improve
from histocoder.desk.uploads import Uploads
from histocoder.errors import UserError
from histocoder.evaluation.review_file import Columns
from histocoder.files import make_folder, sha256
from histocoder.inference.coder import Coder

BODY_BYTES = 1 << 20  # maximum size of a request other than an upload
UPLOAD_BYTES = 2 << 30
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_NO_TOKEN = """<!doctype html><html lang="en"><meta charset="utf-8"><title>histocoder</title>
<h1>This page needs its token</h1>
<p>Open the whole address that <code>histocoder serve</code> printed, with <code>?token=…</code>.</p></html>"""


class About(BaseModel):
    """The model, and what this server does."""

    version: str
    model: str
    system: str
    num_codes: int
    most_codes: int  # maximum number of codes of a description
    no_occupation: Code | None
    languages: list[NamedLanguage]
    neighbours: str  # state of the search for the nearest descriptions
    may_train: bool
    upload_bytes: int  # maximum size of a file


class Desk:
    """The parts of a desk, with the decisions and files that its folder holds.

    `model` is the model's name as the user gave it, `model_folder` that of its files, and `run` that of the run that it
    comes from. `may_train` says whether the server may start a training.
    """

    def __init__(
        self,
        coder: Coder,
        folder: Path,
        *,
        model: str,
        model_folder: Path,
        run: Path,
        may_train: bool = False,
    ) -> None:
        make_folder(folder / "files")
        self.name = run.name if Path(model).exists() else model  # as the page shows it
        model_id = f"{sha256(model_folder / WEIGHTS_FILE)} {sha256(model_folder / CONFIG_FILE)} {coder.precision}"
        target_cols = coder.model.config.target_cols
        self.coding = Coding(coder, run=run, folder=folder, model_id=model_id)
        self.cards = Cards(folder / "desk.sqlite", self.coding)
        self.improve = Improve(self.cards, folder, model=model, run=run, target_cols=target_cols, may_train=may_train)
        columns = {name: self.improve.settings.get(name) for name in ("input_col", "language_col")}
        self.uploads = Uploads(folder / "files", self.coding, self.cards, **columns)
        self._source: Source | None = None  # file to review first

    def review(self, data: Path, *, input_col: str | None = None, language_col: str | None = None) -> None:
        """Make cards of a coded file, which is reviewed first; see `Columns`."""
        text_col = input_col or self.improve.settings.get("input_col") or "occ1"
        columns = Columns(text_col, language_col, self.coding.coder.model.config.target_cols)
        self._source = self.cards.add_source(data, data.name, columns)

    @asynccontextmanager
    async def lifespan(self, _app: FastAPI) -> AsyncIterator[None]:
        """Work in the background while the server runs."""
        stop = threading.Event()
        if self.coding.neighbours is not None:
            threading.Thread(target=self.coding.neighbours.encode, args=(self.coding.coder, stop), daemon=True).start()
        self.uploads.start()
        yield
        stop.set()
        await run_in_threadpool(self.uploads.stop)
        await run_in_threadpool(self.improve.stop)
        self.cards.close()

    def about(self) -> About:
        """Describe the model and this server."""
        coder, near = self.coding.coder, self.coding.neighbours
        return About(
            version=__version__,
            model=self.name,
            system=coder.system,
            num_codes=len(coder.codes),
            most_codes=coder.formatter.num_blocks,
            no_occupation=self.coding.no_occupation,
            languages=self.coding.languages,
            neighbours=near.describe() if near else "not available, since there are no training data next to the model",
            may_train=self.improve.may_train,
            upload_bytes=UPLOAD_BYTES,
        )

    def sources(self) -> list[Source]:
        """List the coded files that are under review, the one to continue with first."""
        first = self._source.id if self._source is not None else None
        return sorted(self.cards.sources(), key=lambda one: one.id != first)


def create_app(desk: Desk, *, token: str, host: str = "127.0.0.1", port: int = 8000) -> FastAPI:
    """Return the ASGI application of a desk; for token, host and port see `Guard`."""
    app = FastAPI(
        title="histocoder",
        version=__version__,
        description="Code descriptions, code files, review codes. Send `Authorization: Bearer TOKEN`.",
        docs_url=None,  # FastAPI's own pages load scripts from other servers
        redoc_url=None,
        lifespan=desk.lifespan,
    )
    app.middleware("http")(Guard(token=token, host=host, port=port))
    _add_errors(app, desk.uploads.as_sent)
    _add_page(app)
    coding, uploads, cards, improve = desk.coding, desk.uploads, desk.cards, desk.improve
    app.get("/api/about", tags=["code"])(desk.about)
    app.post("/api/code", tags=["code"])(coding.code)
    app.get("/api/codes", tags=["code"])(coding.search)
    app.post("/api/files", tags=["files"], status_code=201)(uploads.send)
    app.get("/api/files", tags=["files"])(uploads.all)
    app.get("/api/files/{file}", tags=["files"])(uploads.get)
    app.get("/api/files/{file}/preview", tags=["files"])(uploads.preview)
    app.post("/api/files/{file}/code", tags=["files"])(uploads.code)
    app.post("/api/files/{file}/cancel", tags=["files"])(uploads.cancel)
    app.delete("/api/files/{file}", tags=["files"])(uploads.remove)
    app.get("/api/files/{file}/result", tags=["files"], response_class=FileResponse)(uploads.result)
    app.post("/api/files/{file}/review", tags=["review"])(uploads.to_review)
    app.get("/api/review", tags=["review"])(desk.sources)
    app.get("/api/review/{source}/cards", tags=["review"])(cards.next_cards)
    app.post("/api/review/cards/{card}", tags=["review"])(cards.decide)
    app.post("/api/review/{source}/undo", tags=["review"])(cards.undo)
    app.get("/api/review/{source}/changes", tags=["review"])(cards.changes)
    app.get("/api/review/{source}/trust", tags=["review"])(cards.trust)
    app.get("/api/corrections.csv", tags=["review"], response_class=Response)(improve.corrections)
    app.get("/api/improve", tags=["improve"])(improve.state)
    app.post("/api/improve/keep", tags=["improve"])(improve.keep)
    app.post("/api/improve/train", tags=["improve"])(improve.train)
    app.post("/api/improve/stop", tags=["improve"])(improve.stop)
    return app


def _add_errors(app: FastAPI, as_sent: Callable[[str], str]) -> None:
    """Answer errors with a sentence, in which files are named `as_sent`."""

    def problems(error: RequestValidationError) -> str:
        """Return what is wrong with each field, without its content, which JSON can't always hold."""
        return "; ".join(f"{'.'.join(map(str, one['loc'][1:]))}: {one['msg']}" for one in error.errors())

    app.add_exception_handler(RequestValidationError, lambda _, error: _answer(422, problems(error)))
    app.add_exception_handler(UserError, lambda _, error: _answer(422, as_sent(str(error))))
    app.add_exception_handler(KeyError, lambda _, __: _answer(404, "Not found."))
    app.add_exception_handler(Conflict, lambda _, error: _answer(409, str(error), card=error.card.model_dump()))


def _answer(status: int, detail: str, **more: object) -> JSONResponse:
    return JSONResponse({"detail": detail, **more}, status)


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


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address."""
    return host in _LOOPBACK


class Guard:
    """Middleware that accepts requests from the desk's own page and from programs with the token.

    The token is in a cookie that scripts can't read and that other sites' pages don't send, or in the header
    `Authorization: Bearer …`. The address with `?token=…` sets the cookie. A request under a foreign name (DNS
    rebinding) or from a foreign page is refused whatever token it has, and so is one that is too large or that does not
    say how large it is.

    Parameters
    ----------
    token : str
    host : str
        Address that the server listens at; unless it is a loopback address, others may know it by any name.
    port : int
        Part of the cookie's name, since cookies are shared by all ports.
    """

    def __init__(self, *, token: str, host: str, port: int) -> None:
        self._token, self._cookie = token, f"histocoder_{port}"
        self._is_public = not is_loopback(host)

    async def __call__(self, request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        """Answer a request, or refuse it; every answer has the headers of security."""
        opens_page = request.url.path == "/" and self._is_token(request.query_params.get("token", ""))
        try:
            self._check(request, has_token=opens_page)
            response = await call_next(request)
            if opens_page:
                response.set_cookie(self._cookie, self._token, httponly=True, samesite="strict")
        except HTTPException as error:
            is_page = error.status_code == 401 and request.url.path == "/"
            response = HTMLResponse(_NO_TOKEN, 401) if is_page else _answer(error.status_code, error.detail)
        for name, value in _HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    def _check(self, request: Request, *, has_token: bool) -> None:
        """Raise an HTTPException if a request is refused."""
        headers = request.headers
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._is_own(host):
            raise HTTPException(421, "This server does not answer to that host name.")
        if origin is not None and origin.partition("://")[2] != host:
            raise HTTPException(403, "Requests from other sites are refused.")
        if not has_token and not self._is_token(headers.get("authorization", "").removeprefix("Bearer ")):
            if not self._is_token(request.cookies.get(self._cookie, "")):
                raise HTTPException(401, "The token is missing or wrong; histocoder serve prints it.")
            if request.method not in ("GET", "HEAD") and origin is None:
                raise HTTPException(403, "The request does not say which site it comes from.")
        most = UPLOAD_BYTES if request.url.path == "/api/files" else BODY_BYTES
        size = headers.get("content-length", "" if "transfer-encoding" in headers else "0")
        if not size.isdecimal():
            raise HTTPException(411, "The request does not say how large it is.")
        if int(size) > most:
            raise HTTPException(413, f"That is more than {most >> 20:,} MB; code it with `histocoder predict` instead.")

    def _is_token(self, text: str) -> bool:
        return secrets.compare_digest(text.encode("utf-8", "replace"), self._token.encode())

    def _is_own(self, host: str) -> bool:
        """Return whether a Host header names this server."""
        try:
            return self._is_public or is_loopback(urlsplit(f"//{host}").hostname or "")
        except ValueError:
            return False
