"""Guard the desk: requests need a token, the right Host and Origin, and a body of limited size."""

import ipaddress
import secrets
import socket
from urllib.parse import urlsplit

import anyio
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.responses import HTMLResponse, JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

BODY_BYTES = 1 << 20  # maximum size of a request other than an upload
UPLOAD_BYTES = 2 << 30
_UPLOAD_PATH = "/api/files"
_SECONDS = 30.0  # time without a byte of a body, after which a request is refused
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
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


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address."""
    return host in _LOOPBACK


class Guard:
    """ASGI middleware that accepts requests from the desk's own page and from programs with the token.

    The token is in a cookie that scripts can't read and that other sites' pages don't send, or in the header
    `Authorization: Bearer …`. The address with `?token=…` sets the cookie. A request under a foreign name (DNS
    rebinding) or from a foreign page is refused whatever token it has.

    Parameters
    ----------
    app : ASGI application
    token : str
    host : str
        Address that the server listens at; unless it is a loopback address, every IP address and the machine's name
        are names of the server, too.
    port : int
        Part of the cookie's name, since cookies are shared by all ports.
    """

    def __init__(self, app: ASGIApp, *, token: str, host: str, port: int) -> None:
        self._app, self._token = app, token.encode()
        self._cookie = f"histocoder_{port}"
        self._any_address = not is_loopback(host)
        names = {host, socket.gethostname(), socket.getfqdn()} if self._any_address else set()
        self._names = {name.lower() for name in _LOOPBACK | names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # there are no web sockets
        request = HTTPConnection(scope)
        opens_page = scope["path"] == "/" and self._is_token(request.query_params.get("token", ""))

        async def answer(message: Message) -> None:
            """Send an answer with the headers that all have."""
            if message["type"] == "http.response.start":
                sent = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    sent.setdefault(name, value)
                if opens_page and message["status"] == 200:
                    token = self._token.decode()
                    sent.append("Set-Cookie", f"{self._cookie}={token}; Path=/; HttpOnly; SameSite=Strict")
            await send(message)

        most = UPLOAD_BYTES if scope["method"] == "POST" and scope["path"] == _UPLOAD_PATH else BODY_BYTES
        refusal = self._refusal(request, opens_page=opens_page)
        length = request.headers.get("content-length", "0")
        if refusal is None and (not length.isdecimal() or int(length) > most):
            refusal = 413, _too_large(most)
        if refusal is None:
            await self._app(scope, _limited(receive, most), answer)
            return
        status, reason = refusal
        wants_page = status == 401 and scope["path"] == "/"
        response = HTMLResponse(_NO_TOKEN, status) if wants_page else JSONResponse({"detail": reason}, status)
        await response(scope, receive, answer)

    def _refusal(self, request: HTTPConnection, *, opens_page: bool) -> tuple[int, str] | None:
        """Return status and reason where a request is refused."""
        headers = request.headers
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._is_own(host):
            return 421, "This server does not answer to that host name."
        if origin is not None and origin.partition("://")[2] != host:
            return 403, "Requests from other sites are refused."
        if self._is_token(headers.get("authorization", "").removeprefix("Bearer ")):
            return None
        if not opens_page and not self._is_token(request.cookies.get(self._cookie, "")):
            return 401, "The token is missing or wrong; histocoder serve prints it."
        if request.scope["method"] not in ("GET", "HEAD") and origin is None:
            return 403, "The request does not say which site it comes from."
        return None

    def _is_token(self, text: str) -> bool:
        return secrets.compare_digest(text.encode("utf-8", "replace"), self._token)

    def _is_own(self, host: str) -> bool:
        """Return whether a Host header names this server."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
            if name.lower() in self._names:
                return True
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return self._any_address


def _limited(receive: Receive, most: int) -> Receive:
    """Return a function that receives a body of at most `most` bytes."""
    received, is_whole = 0, False

    async def next_part() -> Message:
        """Receive a part, in time and within the limit."""
        nonlocal received, is_whole
        try:  # what comes after the body is the end of the connection, which may take its time
            with anyio.fail_after(None if is_whole else _SECONDS):
                message = await receive()
        except TimeoutError as error:
            raise HTTPException(408, "The request took too long.") from error
        received += len(message.get("body", b""))
        is_whole = not message.get("more_body", False)
        if received > most:
            raise HTTPException(413, _too_large(most))
        return message

    return next_part


def _too_large(most: int) -> str:
    size = f"{most >> 30} GB" if most >= 1 << 30 else f"{most >> 20} MB"
    return f"That is more than {size}; code it with `histocoder predict` instead."
