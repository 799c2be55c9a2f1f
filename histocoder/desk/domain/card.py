"""A card of a desk's review, what people decide on it, alone or two of them, and what they ask
for.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import Request
from pydantic import BaseModel, Field

from histocoder.desk.domain.coding import Answer, Code

Number = Annotated[int, Field(ge=-1, lt=2**63)]  # of a row, as SQLite can hold it
Who = Annotated[str, Field(min_length=1, max_length=60)]
_BATCH = 500  # cards that are listed or accepted
AND = " & "  # between the names of two people


class Card(BaseModel):
    """A distinct description of a coded file, and the reviewers' decision on it."""

    id: int
    place: int  # position in the queue, from 0
    text: str
    lang: str
    times: int  # number of rows with this description
    confidence: float
    predicted: list[str]
    version: int  # number of changes so far; a decision names the one that it saw
    status: Literal["open", "settled", "unsure", "disputed"]
    codes: list[str] | None  # codes that were decided on; None where none were
    who: str | None
    at: float | None = None  # when they were
    row: dict[str, str] = {}  # other columns of the first of its rows
    double: bool = False  # whether two people decide on it, without seeing each other's decisions
    opinions: list["Opinion"] = []  # their decisions, once both have decided
    carried: bool = (
        False  # whether it was settled by a decision on the same description in another file
    )

    def seen_by(self, who: str, opinions: Mapping[str, list[str] | None]) -> "Card":
        """Let a reviewer of a card for two see their own opinion alone, or once both decided, both;
        return it.
        """
        if self.status != "open":
            self.opinions = [Opinion(who=one, codes=codes) for one, codes in opinions.items()]
        elif who in opinions:
            self.codes, self.who, self.status = (
                opinions[who],
                who,
                "unsure" if opinions[who] is None else "settled",
            )
        return self

    @staticmethod
    def together(opinions: Mapping[str, list[str] | None]) -> dict[str, Any]:
        """Return the state of a card for two with these opinions: it is open until there are
        two.
        """
        names, codes = list(opinions), list(opinions.values())
        if len(names) < 2:
            return {"status": "open", "codes": None, "by": None}
        is_same = len({None if one is None else frozenset(one) for one in codes}) == 1
        status = "disputed" if not is_same else "unsure" if codes[0] is None else "settled"
        return {
            "status": status,
            "codes": codes[0] if status == "settled" else None,
            "by": AND.join(names),
        }


class Opinion(BaseModel):
    """Decision of one of two people on a card."""

    who: str
    codes: list[str] | None


class Evidence(BaseModel):
    """A card, and what helps to judge it."""

    card: Card
    answer: Answer
    predicted: list[Code]  # codes of the file, with titles


class Decision(BaseModel):
    """A reviewer's decision on a card."""

    who: Who = "program"  # of a server with users: who is signed in, whatever is given here
    version: int  # version of the card that the reviewer saw
    codes: (
        Annotated[list[Annotated[str, Field(max_length=1000)]], Field(max_length=20)] | None
    )  # None: unsure


class Filter(BaseModel):
    """Filter of a list of cards, and its order."""

    who: Who = "program"
    q: Annotated[str, Field(max_length=200)] = ""  # part of the text
    code: Annotated[str, Field(max_length=200)] = ""  # beginning of a code
    lang: Annotated[str, Field(max_length=100)] = ""
    status: Literal["", "open", "settled", "unsure", "disputed"] = ""
    low: float = 0.0  # bounds of the confidence
    high: float = 1.0
    sort: Literal["worth", "times", "conf", "text"] = "worth"
    offset: Number = 0
    limit: Annotated[int, Field(ge=1, le=_BATCH)] = 50


class Accepted(BaseModel):
    """Cards whose predicted codes are accepted at once, each with the version that the reviewer
    saw.
    """

    who: Who = "program"
    cards: Annotated[dict[Number, int], Field(min_length=1, max_length=_BATCH)]


class Source(BaseModel):
    """A coded file to review."""

    id: int
    name: str
    file: str | None = None  # its id under Files
    cards: int
    settled: int
    decided: int  # settled ones, and those that are unsure or disputed


class Conflict(Exception):
    """Another reviewer has decided on a card in the meantime."""

    def __init__(self, card: Card) -> None:
        super().__init__(
            f"{card.who or 'Another reviewer'} has decided on this description in the meantime."
        )
        self.card = card


def user_of(request: Request, given: str) -> str:
    """Return who has signed in; of a server without users, who is `given`."""
    return getattr(request.state, "user", None) or given
