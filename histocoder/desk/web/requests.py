"""Parts of requests that the routes take: the desk, who sends it, and bodies."""

from typing import Annotated

from fastapi import Depends, Request
from pydantic import BaseModel, BeforeValidator, Field

from histocoder.desk.domain.card import MAX_LISTED
from histocoder.desk.domain.desk import Desk

Number = Annotated[int, Field(ge=-1, lt=2**63)]  # of a row, as SQLite can hold it
Who = Annotated[str, Field(min_length=1, max_length=60)]  # without users: who a request says it is


async def _desk(request: Request) -> Desk:
    return request.app.state.desk


async def _current_user(request: Request) -> str | None:
    """Return who has signed in; None on a server without users."""
    return request.state.user


TheDesk = Annotated[Desk, Depends(_desk)]
CurrentUser = Annotated[str | None, Depends(_current_user)]


async def _reviewer(user: CurrentUser, who: Who = "program") -> str:
    """Return who has signed in; on a server without users, who the request says it is."""
    return user or who


Reviewer = Annotated[str, Depends(_reviewer)]


class CodeRequest(BaseModel):
    """Descriptions to code, or one."""

    texts: Annotated[
        list[Annotated[str, Field(max_length=2000)]],
        Field(min_length=1, max_length=1000),
        # R's JSON has a vector of one description as text
        BeforeValidator(lambda texts: [texts] if isinstance(texts, str) else texts),
    ]
    lang: Annotated[str, Field(max_length=100)] = "unk"


class Decision(BaseModel):
    """A reviewer's decision on a card."""

    who: Who = "program"  # of a server with users: who is signed in, whatever is given here
    version: int  # version of the card that the reviewer saw
    # None: unsure
    codes: Annotated[list[Annotated[str, Field(max_length=1000)]], Field(max_length=20)] | None


class Accepted(BaseModel):
    """Cards whose predicted codes are accepted at once, each with the version that the reviewer
    saw.
    """

    who: Who = "program"
    cards: Annotated[dict[Number, int], Field(min_length=1, max_length=MAX_LISTED)]
