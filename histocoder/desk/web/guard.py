"""Decide which requests are answered, and whose they are."""

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import HTTPException, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse

from histocoder.desk.web.connections import LOOPBACK
from histocoder.desk.web.sign_in import sign_in_page
from histocoder.desk.web.users import Users

MAX_BODY_BYTES = 1 << 20  # of a request other than an upload
MAX_UPLOAD_BYTES = 2 << 30
MAX_REQUESTS = 64  # requests that are worked on at once; others wait
STATIC = Path(__file__).with_name("static")
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; frame-src 'self'; form-action 'self'; frame-ancestors 'none'; "
        "base-uri 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",  # without it a form that is sent has no origin
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Guard:
    """Middleware that accepts requests from the desk's own page and from programs with the token.

    The token is in a cookie that scripts can't read and that other sites' pages don't send, or in
    the header `Authorization: Bearer …`. The address with `?token=…` sets the cookie. On a server
    with users the page's cookie is that of who has signed in. A request under a foreign name (DNS
    rebinding) or from a foreign page is refused whatever token it has, and so is one that is too
    large or that does not say how large it is.
    """

    def __init__(self, *, token: str, cookie: str, host: str, users: Users) -> None:
        self._token = token
        self._cookie = cookie
        self._users = users
        self._is_public = host not in LOOPBACK
        self._requests = asyncio.Semaphore(MAX_REQUESTS)

    async def __call__(
        self, request: Request, call_next: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        """Answer a request, or refuse it; every answer has the headers of security."""
        try:
            response = await self._answer(request, call_next)
        except HTTPException as error:
            response = answer(error.status_code, error.detail)
            if error.status_code == 401 and request.scope["path"] == "/":
                response = self._first_page()
        for name, value in _HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    async def _answer(
        self, request: Request, call_next: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        """Answer a request; raise an HTTPException if it is refused."""
        path = request.scope["path"]
        has_users = bool(self._users.hashes())
        url_token = ""
        if path == "/" and not has_users:
            url_token = request.query_params.get("token", "")

        # the page to sign in, and the static files, are for everybody
        self._check_origin(request)
        self._check_size(request)
        if path != "/sign-in" and not path.startswith("/static/"):
            if has_users:
                request.state.user = self._user(request)
            else:
                cookie = request.cookies.get(self._cookie, "")
                self._check_token(url_token, cookie, _bearer(request))
                request.state.user = None

        # the address with the token signs the browser in
        async with self._requests:
            response = await call_next(request)
        if url_token:
            response.set_cookie(self._cookie, self._token, httponly=True, samesite="strict")
        return response

    def _first_page(self) -> HTMLResponse:
        """Return the page that a person sees who is not let in."""
        if self._users.hashes():
            return sign_in_page(status=401)
        return HTMLResponse((STATIC / "no-token.html").read_text(encoding="utf-8"), 401)

    def _user(self, request: Request) -> str:
        """Return who has signed in, or "program" for one with the token; raise an HTTPException for
        all others.
        """
        user = self._users.signed_in(request.cookies.get(self._cookie, ""))
        if user is None and not self._is_token(_bearer(request)):
            raise HTTPException(401, "Sign in again.")
        return user or "program"

    def _check_token(self, *tokens: str) -> None:
        if not any(self._is_token(token) for token in tokens):
            raise HTTPException(401, "The token is missing; histocoder serve prints it.")

    def _is_token(self, text: str) -> bool:
        return secrets.compare_digest(text.encode("utf-8", "replace"), self._token.encode())

    def _check_origin(self, request: Request) -> None:
        """Raise an HTTPException if a request is for another host, or from another one's page."""
        host = request.headers.get("host", "")
        name = re.sub(r":\d+$", "", host).strip("[]")
        if not self._is_public and name not in LOOPBACK:
            raise HTTPException(421, "This server does not answer to that host name.")
        origin = request.headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            raise HTTPException(403, "Requests from other sites are refused.")

    def _check_size(self, request: Request) -> None:
        """Raise an HTTPException if a request is too large, or does not say how large it is."""
        headers = request.headers

        # a body that comes in chunks has no length, and a request without a body has neither header
        default_size = "0"
        if "transfer-encoding" in headers:
            default_size = ""
        size = headers.get("content-length", default_size)
        if not size.isdecimal():
            raise HTTPException(411, "The request does not say how large it is.")
        max_bytes = MAX_BODY_BYTES
        if request.scope["path"] == "/api/files":
            max_bytes = MAX_UPLOAD_BYTES
        if int(size) > max_bytes:
            size_limit = f"{max_bytes >> 20:,} MB"
            raise HTTPException(
                413, f"That is more than {size_limit}; code it with `histocoder predict` instead."
            )


def _bearer(request: Request) -> str:
    return request.headers.get("authorization", "").removeprefix("Bearer ")


def answer(status: int, detail: str, **content: object) -> JSONResponse:
    """Return an answer that says what went wrong."""
    return JSONResponse({"detail": detail, **content}, status)
