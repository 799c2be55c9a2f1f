"""A card of a desk's review, what people decide on it, alone or two of them, and what they ask
for.
"""

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from pydantic import BaseModel, Field, computed_field

from histocoder.desk.domain.coding import Answer, Code
from histocoder.desk.domain.database import Database

MAX_LISTED = 500  # cards that are listed or accepted at once
Status: TypeAlias = Literal["open", "settled", "unsure", "disputed"]
Codes: TypeAlias = list[str] | None
"""Codes that were decided on; None where a reviewer was unsure, or nobody has decided."""


class Opinion(BaseModel):
    """Decision of one of two people on a card."""

    who: str
    codes: Codes


class Card(BaseModel):
    """A distinct description of a coded file, and the reviewers' decision on it."""

    id: int
    # position in the queue, from 0
    place: int
    text: str
    lang: str
    # number of rows with this description
    times: int
    confidence: float
    predicted: list[str]
    # number of changes so far; a decision names the one that it saw
    version: int
    status: Status
    codes: Codes
    deciders: list[str] = Field(exclude=True)
    # when they decided
    at: float | None = None
    # other columns of the first of its rows
    row: dict[str, str] = {}
    # whether two people decide on it, without seeing each other's decisions
    double: bool = False
    # their decisions, once both have decided
    opinions: list[Opinion] = []
    # whether its decision is one on the same description in another file
    carried: bool = False

    @computed_field  # type: ignore[prop-decorator]
    @property
    def who(self) -> str | None:
        """Who decided."""
        return " & ".join(self.deciders) or None

    @property
    def is_undecided(self) -> bool:
        """Whether the card waits for a decision, or for one that ends a dispute."""
        return self.status in ("open", "disputed")


def card_of(row: sqlite3.Row) -> Card:
    """Return the card of a row of the database."""
    values = dict(row)

    # lists and mappings are JSON in the database
    for name in ("predicted", "codes", "deciders", "row"):
        values[name] = json.loads(values[name] or "null")
    values["deciders"] = values["deciders"] or []
    return Card(confidence=values["conf"], **values)


def opinions_on(db: Database, card_id: int) -> dict[str, Codes]:
    """Return who has which opinion on a card for two, the last of each person; not how it was
    settled.
    """
    opinions = {}
    for row in db.rows("opinions", card=card_id):
        opinions[row["who"]] = json.loads(row["after"])["codes"]
    return opinions


@dataclass(frozen=True)
class Verdict:
    """The decision on a card, by one reviewer or by two together."""

    status: Status = "open"
    codes: Codes = None
    deciders: tuple[str, ...] = ()
    at: float | None = None  # None: now


def verdict_of(codes: Codes, who: str) -> Verdict:
    """Return the verdict of one reviewer."""
    return Verdict("unsure" if codes is None else "settled", codes, (who,))


def joint_verdict(opinions: Mapping[str, Codes]) -> Verdict:
    """Return what the opinions of two reviewers make of a card: it is open until there are two."""
    if len(opinions) < 2:
        return Verdict()
    verdicts = [verdict_of(codes, who) for who, codes in opinions.items()]

    # the order of codes does not matter
    distinct_sets = {frozenset(verdict.codes or ()) for verdict in verdicts}
    if len(distinct_sets) > 1:
        return Verdict("disputed", None, tuple(opinions))
    return Verdict(verdicts[0].status, verdicts[0].codes, tuple(opinions))


class Evidence(BaseModel):
    """A card, and what helps to judge it."""

    card: Card
    answer: Answer
    predicted: list[Code]  # codes of the file, with titles


class Filter(BaseModel):
    """Filter of a list of cards, and its order."""

    who: str = Field("program", min_length=1, max_length=60)
    q: str = Field("", max_length=200)  # part of the text
    code: str = Field("", max_length=200)  # beginning of a code
    lang: str = Field("", max_length=100)
    status: Literal["", "open", "settled", "unsure", "disputed"] = ""
    low: float = 0.0  # bounds of the confidence
    high: float = 1.0
    sort: Literal["worth", "times", "conf", "text"] = "worth"
    offset: int = Field(0, ge=-1, lt=2**63)
    limit: int = Field(50, ge=1, le=MAX_LISTED)


class Listing(BaseModel):
    """Cards that a filter finds, at most as many as its limit."""

    total: int  # number of cards that the filter finds
    cards: list[Card]
    titles: dict[str, str]  # code -> title, where it has one


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
