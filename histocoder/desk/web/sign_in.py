"""Sign people in by name and password, on a server with users."""

import asyncio
import math
from pathlib import Path
from urllib.parse import parse_qsl

from anyio import CapacityLimiter, fail_after
from anyio.to_thread import run_sync
from fastapi import Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from jinja2 import Environment

from histocoder.desk.web.users import MAX_NAME, Attempts, Users

MAX_SIGNING_IN = 10  # people whose passwords wait to be checked
_FORM_SECONDS = 10.0  # time in which the form to sign in arrives
_SIGNED_IN_SECONDS = 30 * 24 * 3600
_PAGE = Path(__file__).with_name("sign-in.html.jinja")


def sign_in_page(
    message: str = "", *, status: int, seconds_to_wait: float | None = None
) -> HTMLResponse:
    """Return the page to sign in, with what went wrong, and after how many seconds one can try
    again.
    """
    template = Environment(autoescape=True).from_string(_PAGE.read_text(encoding="utf-8"))
    response = HTMLResponse(template.render(message=message), status)
    if seconds_to_wait is not None:
        response.headers["Retry-After"] = str(math.ceil(seconds_to_wait))
    return response


class SignIn:
    """Signs users in and out, who have a cookie while they are signed in.

    A password takes a fifth of a second of a processor, and 16 MB. So passwords are checked one
    after the other, in a thread for which no other request waits, and many guesses at once are
    counted, too.
    """

    def __init__(self, users: Users, *, cookie: str) -> None:
        self._users = users
        self._cookie = cookie
        self._attempts = Attempts()
        self._num_waiting = 0
        self._queue = asyncio.Lock()
        self._thread = CapacityLimiter(1)

    async def sign_in(self, request: Request) -> Response:
        """Sign in a user whose name and password a form has sent."""
        try:
            with fail_after(_FORM_SECONDS):
                body = await request.body()
        except TimeoutError:
            return sign_in_page("The form did not arrive.", status=408)
        form = dict(parse_qsl(body.decode("utf-8", "replace")))
        name = form.get("name", "")[:MAX_NAME]
        address = ""
        if request.client:
            address = request.client.host

        # a crowd of guesses is sent away, so that people find a place
        if self._num_waiting >= MAX_SIGNING_IN:
            message = "Many people are signing in. Try again in a moment."
            return sign_in_page(message, status=429, seconds_to_wait=2.0)
        self._num_waiting += 1
        try:
            async with self._queue:
                return await self._check(name, form.get("password", ""), address)
        finally:
            self._num_waiting -= 1

    async def _check(self, name: str, password: str, address: str) -> Response:
        """Sign in a user, unless the password is wrong or there were too many wrong ones."""
        seconds = self._attempts.seconds_to_wait(name, address)
        if seconds:
            message = f"Too many wrong passwords. Try again in {math.ceil(seconds)} seconds."
            return sign_in_page(message, status=429, seconds_to_wait=seconds)
        signed = await run_sync(self._users.sign_in, name, password, limiter=self._thread)
        if signed is None:
            self._attempts.add_wrong(name, address)
            return sign_in_page("Name or password are wrong.", status=401)

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
