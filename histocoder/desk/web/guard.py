"""Decide who may ask, and sign users in."""

import asyncio
import math
import re
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import parse_qsl

from anyio import CapacityLimiter, fail_after
from anyio.to_thread import run_sync
from fastapi import HTTPException, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse

from histocoder.desk.web.connections import LOOPBACK
from histocoder.desk.web.users import MAX_NAME, Attempts, Users

BODY_BYTES = 1 << 20  # maximum size of a request other than an upload
UPLOAD_BYTES = 2 << 30
MAX_REQUESTS = 64  # requests that are worked on at once; others wait
MAX_SIGNING_IN = 10  # people whose passwords wait to be checked
BODY_SECONDS = 10.0  # time in which the form to sign in arrives
STATIC = Path(__file__).with_name("static")
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
    (STATIC / name).read_text(encoding="utf-8") for name in ("no-token.html", "sign-in.html")
)
_SIGNED_IN_SECONDS = 30 * 24 * 3600


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
                HTMLResponse(page, 401) if is_page else answer(error.status_code, error.detail)
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
            return answer(408, "The form did not arrive.")
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


def _sign_in_page(message: str, status: int, *, wait: float | None = None) -> HTMLResponse:
    """Return the page to sign in, with what went wrong, and after how many seconds one can try
    again.
    """
    headers = None if wait is None else {"Retry-After": str(math.ceil(wait))}
    return HTMLResponse(
        _SIGN_IN.replace("<form", f"<p role=alert>{message}</p><form"), status, headers=headers
    )


def answer(status: int, detail: str, **more: object) -> JSONResponse:
    return JSONResponse({"detail": detail, **more}, status)
