"""Make the desk an application: its parts, its routes and page, who may ask, and answers to
errors.
"""

import asyncio
import math
import mimetypes
import os
import re
import secrets
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any
from urllib.parse import parse_qsl

import pyarrow as pa
from anyio import CapacityLimiter, fail_after
from anyio.to_thread import run_sync
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, RedirectResponse
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel, Field

from histocoder import __version__
from histocoder.data.example_files import CHECKED_COL
from histocoder.data.languages import NAMES, Language, chosen_language
from histocoder.data.normalize import description_keys
from histocoder.desk.card import Conflict, Source
from histocoder.desk.cards import CORRECTIONS_FILE, DECISIONS_FILE, Cards
from histocoder.desk.coding import (
    NO_OCCUPATION,
    Answer,
    Code,
    CodeRequest,
    NamedLanguage,
    Surety,
    named_languages,
)
from histocoder.desk.connections import LOOPBACK
from histocoder.desk.models import Model, Models
from histocoder.desk.uploads import Uploads
from histocoder.desk.users import MAX_NAME, Attempts, Users
from histocoder.errors import UserError
from histocoder.evaluation.review_file import Columns, next_step
from histocoder.files import make_folder
from histocoder.tables.output import Form, write_frame, write_table

BODY_BYTES = 1 << 20  # maximum size of a request other than an upload
UPLOAD_BYTES = 2 << 30
MAX_REQUESTS = 64  # requests that are worked on at once; others wait
MAX_SIGNING_IN = 10  # people whose passwords wait to be checked
BODY_SECONDS = 10.0  # time in which the form to sign in arrives
_STATIC = Path(__file__).with_name("static")
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src "
    "'self' data:; "
    "connect-src 'self'; frame-src 'self'; form-action 'self'; frame-ancestors 'none'; "
    "base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",  # without it a form that is sent has no origin
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_NO_TOKEN, _SIGN_IN = (
    (_STATIC / name).read_text(encoding="utf-8") for name in ("no-token.html", "sign-in.html")
)
_SIGNED_IN_SECONDS = 30 * 24 * 3600


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
    app.mount("/static", StaticFiles(directory=_STATIC))
    app.add_api_route("/", lambda: FileResponse(_STATIC / "index.html"), include_in_schema=False)
    app.add_api_route("/docs", lambda: FileResponse(_STATIC / "docs.html"), include_in_schema=False)
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

    app.add_exception_handler(
        RequestValidationError, lambda _, error: _answer(422, problems(error))
    )
    app.add_exception_handler(UserError, lambda _, error: _answer(422, as_sent(str(error))))
    app.add_exception_handler(sqlite3.OperationalError, lambda _, error: _database_answer(error))
    app.add_exception_handler(KeyError, lambda _, __: _answer(404, "Not found."))
    app.add_exception_handler(
        Conflict, lambda _, error: _answer(409, str(error), card=error.card.model_dump())
    )


def _database_answer(error: sqlite3.OperationalError) -> JSONResponse:
    """Return what a person can do when the database can't be written; raise the error if it is
    another one.
    """
    if not any(reason in str(error) for reason in ("disk is full", "disk I/O error")):
        raise error
    return _answer(
        507, "The server's disk is full: this is not saved. Make room there, and do it again."
    )


def _sign_in_page(message: str, status: int, *, wait: float | None = None) -> HTMLResponse:
    """Return the page to sign in, with what went wrong, and after how many seconds one can try
    again.
    """
    headers = None if wait is None else {"Retry-After": str(math.ceil(wait))}
    return HTMLResponse(
        _SIGN_IN.replace("<form", f"<p role=alert>{message}</p><form"), status, headers=headers
    )


def _answer(status: int, detail: str, **more: object) -> JSONResponse:
    return JSONResponse({"detail": detail, **more}, status)


class Guard:
    """Middleware that accepts requests from the desk's own page and from programs with the token.

    The token is in a cookie that scripts can't read and that other sites' pages don't send, or in
    the header `Authorization: Bearer …`. The address with `?token=…` sets the cookie. A request
    under a foreign name (DNS rebinding) or from a foreign page is refused whatever token it has,
    and so is one that is too large or that does not say how large it is. The cookie's name has the
    port, since all ports share cookies.
    """

    def __init__(self, *, token: str, host: str, port: int, users: Users) -> None:
        self._token, self._cookie, self._users = token, f"histocoder_{port}", users
        self._is_public = host not in LOOPBACK
        self._requests = asyncio.Semaphore(MAX_REQUESTS)
        self._attempts = Attempts()
        self._num_signing_in = 0
        self._one_sign_in = (
            asyncio.Lock()
        )  # a password takes a fifth of a second of a processor, and 16 MB
        self._sign_in_thread = CapacityLimiter(
            1
        )  # beside those of other requests, which do not wait for passwords

    async def __call__(
        self, request: Request, call_next: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        """Answer a request, or refuse it; every answer has the headers of security."""
        path, has_users = request.scope["path"], bool(self._users.hashes())
        given = request.query_params.get("token", "") if path == "/" and not has_users else ""
        try:
            self._check(request)
            if path != "/sign-in" and not path.startswith("/static/"):
                request.state.user = self._user(request, given, has_users=has_users)
            async with self._requests:
                response = await call_next(request)
            if given:
                response.set_cookie(self._cookie, self._token, httponly=True, samesite="strict")
        except HTTPException as error:
            page = _SIGN_IN if has_users else _NO_TOKEN
            is_page = error.status_code == 401 and path == "/"
            response = (
                HTMLResponse(page, 401) if is_page else _answer(error.status_code, error.detail)
            )
        for name, value in _HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    def _user(self, request: Request, given: str, *, has_users: bool) -> str | None:
        """Return who sends a request; raise an HTTPException if nobody is signed in, and the token
        is missing.
        """
        cookie = request.cookies.get(self._cookie, "")
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        user = self._users.signed_in(cookie) if has_users else None
        tokens = [bearer] if has_users else [given, bearer, cookie]
        if user or any(
            secrets.compare_digest(one.encode("utf-8", "replace"), self._token.encode())
            for one in tokens
        ):
            return user or ("program" if has_users else None)
        raise HTTPException(
            401,
            "Sign in again." if has_users else "The token is missing; histocoder serve prints it.",
        )

    async def sign_in(self, request: Request) -> Response:
        """Sign in a user whose name and password a form has sent."""
        try:
            with fail_after(BODY_SECONDS):
                body = await request.body()
        except TimeoutError:
            return _answer(408, "The form did not arrive.")
        form = dict(parse_qsl(body.decode("utf-8", "replace")))
        name, password = form.get("name", "")[:MAX_NAME], form.get("password", "")
        address = request.client.host if request.client else ""
        if self._num_signing_in >= MAX_SIGNING_IN:
            return _sign_in_page(
                "Many people are signing in. Try again in a moment.", 429, wait=2.0
            )

        # one after the other, so that many guesses at once are counted, too
        self._num_signing_in += 1
        try:
            async with self._one_sign_in:
                if wait := self._attempts.seconds_to_wait(name, address):
                    seconds = f"{math.ceil(wait)} seconds"
                    return _sign_in_page(
                        f"Too many wrong passwords. Try again in {seconds}.", 429, wait=wait
                    )
                signed = await run_sync(
                    self._users.sign_in, name, password, limiter=self._sign_in_thread
                )
        finally:
            self._num_signing_in -= 1

        if signed is None:
            self._attempts.add_wrong(name, address)
            return _sign_in_page("Name or password are wrong.", 401)
        self._attempts.forget(name, address)
        response = RedirectResponse("/", 303)
        response.set_cookie(
            self._cookie, signed, httponly=True, samesite="strict", max_age=_SIGNED_IN_SECONDS
        )
        return response

    def sign_out(self) -> Response:
        """Sign out."""
        response = RedirectResponse("/", 303)
        response.delete_cookie(self._cookie)
        return response

    def _check(self, request: Request) -> None:
        """Raise an HTTPException if a request is refused."""
        headers = request.headers
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._is_public and re.sub(r":\d+$", "", host).strip("[]") not in LOOPBACK:
            raise HTTPException(421, "This server does not answer to that host name.")
        if origin is not None and origin.partition("://")[2] != host:
            raise HTTPException(403, "Requests from other sites are refused.")
        most = UPLOAD_BYTES if request.scope["path"] == "/api/files" else BODY_BYTES
        size = headers.get("content-length", "" if "transfer-encoding" in headers else "0")
        if not size.isdecimal():
            raise HTTPException(411, "The request does not say how large it is.")
        if int(size) > most:
            raise HTTPException(
                413,
                f"That is more than {most >> 20:,} MB; code it with `histocoder predict` instead.",
            )
