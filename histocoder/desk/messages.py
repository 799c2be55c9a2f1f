"""What the desk's HTTP interface receives and answers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from histocoder.desk.coding import Answer, Code, Language
from histocoder.desk.store import Card

MOST_TEXTS, MOST_CHARACTERS = 1000, 2000
Text = Annotated[str, Field(max_length=MOST_CHARACTERS)]
Who = Annotated[str, Field(min_length=1, max_length=60)]


class Descriptions(BaseModel):
    """What is to be coded."""

    texts: Annotated[list[Text], Field(min_length=1, max_length=MOST_TEXTS)]
    lang: str = "unk"
    evidence: bool = True
    """Whether to look for the nearest descriptions of the training data."""


class Decision(BaseModel):
    """What a reviewer says of a card."""

    who: Who
    version: int
    """Of the card, as the reviewer saw it."""
    action: Literal["settle", "no occupation", "unsure"] = "settle"
    codes: Annotated[list[Annotated[str, Field(max_length=100)]], Field(max_length=20)] = []


class Reviewer(BaseModel):
    """Who asks."""

    who: Who


class Evidence(BaseModel):
    """A card, and what helps to judge it."""

    card: Card
    answer: Answer
    predicted: list[Code]
    """The codes of the file, with titles."""


class Changes(BaseModel):
    """What reviewers have decided."""

    last: int
    """Number of the last decision, from which to ask next time."""
    cards: list[Card]


class About(BaseModel):
    """The model, and what this server does."""

    version: str
    model: str
    system: str
    num_codes: int
    most_codes: int
    """Of a description."""
    no_occupation: Code | None
    languages: list[Language]
    has_known: bool
    neighbours: str
    """What the nearest descriptions are searched in."""
    may_train: bool
    upload_bytes: int
    """Of a file at most."""
