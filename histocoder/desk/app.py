"""Make the desk an application: its parts, its routes and page, who may ask, and answers to errors."""

import mimetypes
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pyarrow as pa
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel

from histocoder import __version__
from histocoder.checkpoints.model_files import CONFIG_FILE, WEIGHTS_FILE
from histocoder.checkpoints.run_folder import run_settings
from histocoder.data.example_files import CHECKED_COL
from histocoder.data.languages import Language
from histocoder.data.normalize import description_keys
from histocoder.data.output import Form, write_table
from histocoder.desk.cards import Cards, Conflict, Source
from histocoder.desk.coding import NO_OCCUPATION, Code, Coding, NamedLanguage
from histocoder.desk.uploads import Uploads
from histocoder.errors import UserError
from histocoder.evaluation.review_file import Columns, next_step
from histocoder.files import make_folder, sha256
from histocoder.inference.coder import Coder

BODY_BYTES = 1 << 20  # maximum size of a request other than an upload
UPLOAD_BYTES = 2 << 30
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_STATIC = Path(__file__).with_name("static")
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

    model: str
    system: str
    num_codes: int
    most_codes: int  # maximum number of codes of a description
    no_occupation: Code | None
    languages: list[NamedLanguage]


class Improvement(BaseModel):
    """Number of corrections, and how to train on them."""

    corrections: int
    next_step: str


class Desk:
    """The parts of a desk, with the decisions and files that its folder holds.

    `model` is the model's name as the user gave it, `model_folder` that of its files, and `run` that of the run that it
    comes from.
    """

    def __init__(self, coder: Coder, folder: Path, *, model: str, model_folder: Path, run: Path) -> None:
        make_folder(folder / "files")
        self._model, self._run, self._file = model, run, folder / "corrections.csv"
        self.name = run.name if Path(model).exists() else model  # as the page shows it
        self.settings = run_settings(run)
        model_id = f"{sha256(model_folder / WEIGHTS_FILE)} {sha256(model_folder / CONFIG_FILE)} {coder.precision}"
        self.coding = Coding(coder, run=run, model_id=model_id)
        self.cards = Cards(folder / "desk.sqlite", self.coding)
        self.uploads = Uploads(folder / "files", self.coding, self.cards, settings=self.settings)
        self._first: int | None = None  # source to review first

    def review(self, data: Path, *, input_col: str | None = None) -> None:
        """Make cards of a coded file, which is reviewed first; see `Columns`."""
        text_col = input_col or self.settings.get("input_col") or "occ1"
        targets, language_col = self.coding.coder.model.config.target_cols, self.settings.get("language_col")
        columns = Columns(text_col, target_cols=targets, run_input_col=text_col, run_language_col=language_col)
        self._first = self.cards.add_source(data, data.name, columns).id

    @asynccontextmanager
    async def lifespan(self, _app: FastAPI) -> AsyncIterator[None]:
        """Work in the background while the server runs."""
        self.uploads.start()
        yield
        await run_in_threadpool(self.uploads.stop)
        self.cards.close()

    def about(self) -> About:
        """Describe the model and this server."""
        coder = self.coding.coder
        return About(
            model=self.name,
            system=coder.system,
            num_codes=len(coder.codes),
            most_codes=coder.formatter.num_blocks,
            no_occupation=self.coding.titled(NO_OCCUPATION) if NO_OCCUPATION in coder.codes else None,
            languages=self.coding.languages,
        )

    def sources(self) -> list[Source]:
        """List the coded files that are under review, the one to continue with first."""
        return sorted(self.cards.sources(), key=lambda one: one.id != self._first)

    def settled(self) -> pa.Table:
        """Return the settled descriptions as `--corrections` takes them; of several decisions on one, the last."""
        targets, language_col = self.coding.coder.model.config.target_cols, self.settings.get("language_col")
        lang_cols = [language_col] if language_col else [] if self.settings else ["lang"]
        names = [self.settings.get("input_col") or "occ1", *lang_cols, CHECKED_COL, *targets, "who"]
        rows = {}
        for card in self.cards.settled():
            langs, codes = [card.lang] * len(lang_cols), card.codes or []
            cells = [card.text, *langs, "x", *codes, *[None] * (len(targets) - len(codes)), card.who]
            key = description_keys([card.text])[0], *map(Language, langs)
            rows[key] = dict(zip(names, cells, strict=True))
        return pa.Table.from_pylist(list(rows.values()), pa.schema([(name, pa.string()) for name in names]))

    def improve(self, raw: bool = True) -> Improvement:
        """Write the corrections on the server, and return how to train on them; `raw` leaves formulas as they are."""
        with self.cards.lock:
            settled = self.settled()
            write_table(self._file, [settled], Form(raw=raw))
        return Improvement(corrections=len(settled), next_step=next_step(self._model, self._file, self._run))

    def export(self, raw: bool = False) -> FileResponse:
        """Return settled descriptions, as CSV for `finetune.py --corrections`; `raw` leaves formulas as they are."""
        self.improve(raw)
        return FileResponse(self._file, media_type="text/csv; charset=utf-8", filename=self._file.name)


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
    mimetypes.add_type("text/javascript", ".js")  # on Windows a program may have registered another
    app.mount("/static", StaticFiles(directory=_STATIC))
    app.add_api_route("/", lambda: FileResponse(_STATIC / "index.html"), include_in_schema=False)
    app.add_api_route("/docs", lambda: FileResponse(_STATIC / "docs.html"), include_in_schema=False)
    coding, uploads, cards = desk.coding, desk.uploads, desk.cards
    app.get("/api/about", tags=["code"])(desk.about)
    app.post("/api/code", tags=["code"])(coding.code)
    app.get("/api/codes", tags=["code"])(coding.search)
    app.post("/api/files", tags=["files"], status_code=201)(uploads.send)
    app.get("/api/files", tags=["files"])(uploads.all)
    app.get("/api/files/{file}", tags=["files"])(uploads.get)
    app.get("/api/files/{file}/preview", tags=["files"])(uploads.preview)
    app.post("/api/files/{file}/code", tags=["files"])(uploads.code)
    app.delete("/api/files/{file}", tags=["files"])(uploads.remove)
    app.get("/api/files/{file}/result", tags=["files"], response_class=FileResponse)(uploads.result)
    app.post("/api/files/{file}/review", tags=["review"])(uploads.to_review)
    app.get("/api/review", tags=["review"])(desk.sources)
    app.get("/api/review/{source}/cards", tags=["review"])(cards.next_cards)
    app.post("/api/review/cards/{card}", tags=["review"])(cards.decide)
    app.post("/api/review/{source}/undo", tags=["review"])(cards.undo)
    app.get("/api/review/{source}/trust", tags=["review"])(cards.trust)
    app.get("/api/corrections.csv", tags=["review"], response_class=FileResponse)(desk.export)
    app.post("/api/improve", tags=["review"])(desk.improve)
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


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address."""
    return host in _LOOPBACK


class Guard:
    """Middleware that accepts requests from the desk's own page and from programs with the token.

    The token is in a cookie that scripts can't read and that other sites' pages don't send, or in the header
    `Authorization: Bearer …`. The address with `?token=…` sets the cookie. A request under a foreign name (DNS
    rebinding) or from a foreign page is refused whatever token it has, and so is one that is too large or that does not
    say how large it is. The cookie's name has the port, since all ports share cookies.
    """

    def __init__(self, *, token: str, host: str, port: int) -> None:
        self._token, self._cookie = token, f"histocoder_{port}"
        self._is_public = not is_loopback(host)

    async def __call__(self, request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        """Answer a request, or refuse it; every answer has the headers of security."""
        given = request.query_params.get("token", "") if request.url.path == "/" else ""
        tokens = (given, request.headers.get("authorization", "").removeprefix("Bearer "))
        try:
            self._check(request, *tokens, request.cookies.get(self._cookie, ""))
            response = await call_next(request)
            if given:
                response.set_cookie(self._cookie, self._token, httponly=True, samesite="strict")
        except HTTPException as error:
            is_page = error.status_code == 401 and request.url.path == "/"
            response = HTMLResponse(_NO_TOKEN, 401) if is_page else _answer(error.status_code, error.detail)
        for name, value in _HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    def _check(self, request: Request, *tokens: str) -> None:
        """Raise an HTTPException if a request is refused."""
        headers = request.headers
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._is_public and not is_loopback(re.sub(r":\d+$", "", host).strip("[]")):
            raise HTTPException(421, "This server does not answer to that host name.")
        if origin is not None and origin.partition("://")[2] != host:
            raise HTTPException(403, "Requests from other sites are refused.")
        if not any(secrets.compare_digest(token.encode("utf-8", "replace"), self._token.encode()) for token in tokens):
            raise HTTPException(401, "The token is missing or wrong; histocoder serve prints it.")
        most = UPLOAD_BYTES if request.url.path == "/api/files" else BODY_BYTES
        size = headers.get("content-length", "" if "transfer-encoding" in headers else "0")
        if not size.isdecimal():
            raise HTTPException(411, "The request does not say how large it is.")
        if int(size) > most:
            raise HTTPException(413, f"That is more than {most >> 20:,} MB; code it with `histocoder predict` instead.")
