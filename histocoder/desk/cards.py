"""Review coded files card by card: each distinct description is a card, and each decision is kept in SQLite."""

import itertools
import json
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
from fastapi import Body
from pydantic import BaseModel, Field

from histocoder.data.example_files import CHECKED_COL
from histocoder.desk.coding import Answer, Code, Coding
from histocoder.errors import UserError
from histocoder.evaluation.review_file import Columns, in_order_of_worth, open_coded
from histocoder.files import sha256

Number = Annotated[int, Field(ge=-1, lt=2**63)]  # of a row, as SQLite can hold it
Who = Annotated[str, Field(min_length=1, max_length=60)]
_CLAIM_SECONDS = 180.0  # time for which a card that one reviewer was given is not given to another
_EVERY, _DRAWS = 3, 2000  # every third card is from the random sample, which has at most so many draws
_FEWEST = 30  # settled cards of the random sample before which no estimate is given
_TABLES = """
CREATE TABLE IF NOT EXISTS sources (id INTEGER PRIMARY KEY, name TEXT, sha256 TEXT UNIQUE, at REAL);
CREATE TABLE IF NOT EXISTS cards (
    id INTEGER PRIMARY KEY, source INTEGER, place INTEGER, text TEXT, lang TEXT, predicted TEXT, conf REAL,
    times INTEGER, version INTEGER DEFAULT 0, status TEXT DEFAULT 'open', codes TEXT, who TEXT, at REAL);
CREATE UNIQUE INDEX IF NOT EXISTS cards_by_place ON cards (source, place);
CREATE INDEX IF NOT EXISTS cards_by_status ON cards (source, status, place);
CREATE TABLE IF NOT EXISTS draws (source INTEGER, due INTEGER, place INTEGER);
CREATE TABLE IF NOT EXISTS decisions (
    id INTEGER PRIMARY KEY AUTOINCREMENT, card INTEGER, who TEXT, at REAL, action TEXT, before TEXT, after TEXT,
    undone INTEGER DEFAULT 0);
"""


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
    status: Literal["open", "settled", "unsure"]
    codes: list[str] | None  # codes that were decided on; None where none were
    who: str | None


class Evidence(BaseModel):
    """A card, and what helps to judge it."""

    card: Card
    answer: Answer
    predicted: list[Code]  # codes of the file, with titles


class Decision(BaseModel):
    """A reviewer's decision on a card."""

    who: Who
    version: int  # version of the card that the reviewer saw
    codes: Annotated[list[Annotated[str, Field(max_length=1000)]], Field(max_length=20)] | None  # None: unsure


class Source(BaseModel):
    """A coded file to review."""

    id: int
    name: str
    cards: int
    settled: int


class Estimate(BaseModel):
    """A share, with its 95 % interval."""

    mean: float
    low: float
    high: float


class Trust(BaseModel):
    """State of the review of a file."""

    rows: int
    rows_settled: int
    cards: int
    cards_settled: int
    cards_unsure: int
    random_cards: int  # settled cards of the random sample
    random_cards_needed: int = _FEWEST  # number of them before which there is no estimate
    right: Estimate | None  # share of the file's rows that are right as the model coded them


class Conflict(Exception):
    """Another reviewer has decided on a card in the meantime."""

    def __init__(self, card: Card) -> None:
        super().__init__(f"{card.who} has decided on this description in the meantime.")
        self.card = card


class Cards:
    """The cards of a desk in its database; each decision is on disk before its method returns."""

    def __init__(self, path: Path, coding: Coding) -> None:
        self._coding = coding
        self.lock = threading.RLock()
        self._db = sqlite3.connect(path, check_same_thread=False)
        self._db.row_factory = sqlite3.Row
        self._db.executescript(f"PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; {_TABLES}")
        self._claims: dict[int, tuple[str, float]] = {}  # card -> reviewer, and when

    def close(self) -> None:
        with self.lock:
            self._db.close()

    def _rows(self, query: str, *values: Any) -> list[sqlite3.Row]:
        with self.lock:
            return self._db.execute(query, values).fetchall()

    def add_source(self, path: Path, name: str, columns: Columns) -> Source:
        """Make cards of what `histocoder predict` wrote; return their source.

        They are in the order of `histocoder review`, with a random sample among them; see `order_of_review`. A file
        with the content of an earlier one has that one's source.
        """
        digest = sha256(path)
        if not self._rows("SELECT id FROM sources WHERE sha256 = ?", digest):
            self._add(path, name, digest, columns)
        number = self._rows("SELECT id FROM sources WHERE sha256 = ?", digest)[0]["id"]
        return next(source for source in self.sources() if source.id == number)

    def _add(self, path: Path, name: str, digest: str, columns: Columns) -> None:
        cards = in_order_of_worth(open_coded(path, columns), columns)
        lang_col = cards.columns[1]
        langs = cards[lang_col].fillna("unk").astype(str) if lang_col != CHECKED_COL else ["unk"] * len(cards)
        codes = cards[list(columns.target_cols)].to_numpy(dtype=object)
        predicted = [json.dumps([code for code in row if not pd.isna(code) and code]) for row in codes]
        texts = cards[columns.input_col].fillna("").astype(str)
        values = list(zip(texts, langs, predicted, cards["conf"], cards["times"].tolist(), strict=True))
        order, draws = order_of_review(cards["times"].to_numpy(), int(digest, 16))
        places = {card: place for place, card in enumerate(order)}
        with self.lock, self._db as db:
            row = (name, digest, time.time())
            added = db.execute("INSERT INTO sources (name, sha256, at) VALUES (?, ?, ?)", row).lastrowid
            db.executemany(
                "INSERT INTO cards (source, place, text, lang, predicted, conf, times) VALUES (?, ?, ?, ?, ?, ?, ?)",
                ((added, place, *values[card]) for card, place in places.items()),
            )
            db.executemany("INSERT INTO draws VALUES (?, ?, ?)", ((added, due, places[card]) for due, card in draws))

    def sources(self) -> list[Source]:
        """List the coded files that are under review, the last one first."""
        query = """SELECT s.id, s.name, count(c.id) AS cards, coalesce(sum(c.status = 'settled'), 0) AS settled
                   FROM sources s LEFT JOIN cards c ON c.source = s.id GROUP BY s.id ORDER BY s.id DESC"""
        return [Source(**dict(row)) for row in self._rows(query)]

    def next_cards(
        self, source: Number, who: Who, after: Number = -1, count: Annotated[int, Field(ge=1, le=20)] = 5
    ) -> list[Evidence]:
        """Return the next open descriptions, the most worth checking first; others do not get them for a while."""
        query = "SELECT * FROM cards WHERE source = ? AND status = 'open' AND place > ? ORDER BY place LIMIT ?"
        now = time.monotonic()
        with self.lock:
            self._claims = {card: claim for card, claim in self._claims.items() if now - claim[1] < _CLAIM_SECONDS}
            taken = {card for card, (other, _) in self._claims.items() if other != who}
            rows = [row for row in self._rows(query, source, after, count + len(taken)) if row["id"] not in taken]
            self._claims.update({row["id"]: (who, now) for row in rows[:count]})
        return self._with_evidence([_card(row) for row in rows[:count]])

    def _with_evidence(self, cards: list[Card]) -> list[Evidence]:
        answers = self._coding.answer([card.text for card in cards], [card.lang for card in cards]) if cards else []
        evidence = []
        for card, answer in zip(cards, answers, strict=True):
            known = {code.code: code for code in (*answer.codes, *answer.alternatives)}
            predicted = [known.get(code) or self._coding.titled(code) for code in card.predicted]
            evidence.append(Evidence(card=card, answer=answer, predicted=predicted))
        return evidence

    def _card(self, card: int) -> Card:
        """Return a card; raise KeyError where there is none of that number."""
        found = self._rows("SELECT * FROM cards WHERE id = ?", card)
        if not found:
            raise KeyError(card)
        return _card(found[0])

    def decide(self, card: Number, decision: Decision) -> Card:
        """Decide on a card. Status 409: another reviewer has in the meantime; `card` is its present state."""
        codes = None if decision.codes is None else self._coding.check_codes(decision.codes)
        with self.lock:
            before = self._card(card)
            if before.version != decision.version:
                raise Conflict(before)
            action = "unsure" if codes is None else "accepted" if set(codes) == set(before.predicted) else "changed"
            status = "unsure" if codes is None else "settled"
            return self._write(before, who=decision.who, action=action, status=status, codes=codes)

    def undo(self, source: Number, who: Annotated[Who, Body(embed=True)]) -> Evidence:
        """Undo this reviewer's last decision. Status 409: somebody else has decided on that card since."""
        last = """SELECT d.* FROM decisions d JOIN cards c ON c.id = d.card WHERE c.source = ? AND d.who = ?
                  AND d.undone = 0 AND d.action != 'undone' ORDER BY d.id DESC LIMIT 1"""
        with self.lock:
            found = self._rows(last, source, who)
            if not found:
                raise UserError("There is nothing to undo.")
            card = self._card(found[0]["card"])
            if card.who != who:
                raise Conflict(card)
            before = json.loads(found[0]["before"])
            card = self._write(card, who=who, action="undone", undoes=found[0]["id"], **before)
        return self._with_evidence([card])[0]

    def _write(
        self, card: Card, *, who: str, action: str, status: str, codes: list[str] | None, undoes: int | None = None
    ) -> Card:
        """Change a card, and add the decision."""
        now, kept = time.time(), None if codes is None else json.dumps(codes)
        by = (None, None) if status == "open" else (who, now)
        before, after = {"status": card.status, "codes": card.codes}, {"status": status, "codes": codes}
        with self._db as db:
            db.execute(
                "UPDATE cards SET version = version + 1, status = ?, codes = ?, who = ?, at = ? WHERE id = ?",
                (status, kept, *by, card.id),
            )
            db.execute(
                "INSERT INTO decisions (card, who, at, action, before, after) VALUES (?, ?, ?, ?, ?, ?)",
                (card.id, who, now, action, json.dumps(before), json.dumps(after)),
            )
            db.execute("UPDATE decisions SET undone = 1 WHERE id = ?", (undoes,))
        return self._card(card.id)

    def settled(self) -> list[Card]:
        """Return the settled cards of all sources, the first decision first."""
        return [_card(row) for row in self._rows("SELECT * FROM cards WHERE status = 'settled' ORDER BY at")]

    def trust(self, source: Number) -> Trust:
        """Return how much of a file is settled, and how many of its rows are right."""
        counts = """SELECT count(*) AS cards, total(times) AS rows, total(times * (status = 'settled')) AS rows_settled,
                    total(status = 'settled') AS cards_settled, total(status = 'unsure') AS cards_unsure,
                    max(place * (status != 'open')) AS last FROM cards WHERE source = ?"""
        drawn = """SELECT c.id, c.predicted, c.codes FROM draws d JOIN cards c USING (source, place)
                   WHERE source = ? AND d.due <= ? AND c.status = 'settled'"""
        with self.lock:
            found = dict(self._rows(counts, source)[0])
            sample = self._rows(drawn, source, found.pop("last"))
        num_random = len({row["id"] for row in sample})
        right = [set(json.loads(row["codes"])) == set(json.loads(row["predicted"])) for row in sample]
        return Trust(**found, random_cards=num_random, right=share_right(right) if num_random >= _FEWEST else None)


def order_of_review(times: np.ndarray, seed: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Draw a random sample of a file's rows, and put its cards among the others.

    Rows are drawn with replacement, so that cards are drawn with probabilities proportional to their frequency, `times`
    of shape (n,). Every third card of the review is the next one drawn that has no earlier place; the others stay in
    their order. Return the index of the card at each place of the review; and each draw, in order: the place from which
    it counts, and the index of its card.
    """
    cards: dict[int, None] = {}
    draws: list[tuple[int, int]] = []

    def draw() -> Iterator[int]:
        for card in np.random.default_rng(seed).choice(len(times), _DRAWS, p=times / times.sum()).tolist():
            draws.append((len(cards), card))
            yield card

    sample, others = draw(), iter(range(len(times)))
    while len(cards) < len(times):
        turn = itertools.chain(sample, others) if len(cards) % _EVERY == _EVERY - 1 else others
        cards[next(card for card in turn if card not in cards)] = None
    return list(cards), draws


def share_right(sample: Sequence[bool]) -> Estimate:
    """Estimate the share of right rows from those drawn (see `order_of_review`), which are right or not.

    The share of rows drawn with replacement is an unbiased estimate (Hansen and Hurwitz 1943), and binomial, so that
    its interval is Wilson's (1927).
    """
    from scipy.stats import binomtest

    interval = binomtest(sum(sample), len(sample)).proportion_ci(method="wilson")
    return Estimate(mean=sum(sample) / len(sample), low=interval.low, high=interval.high)


def _card(row: sqlite3.Row) -> Card:
    codes = None if row["codes"] is None else json.loads(row["codes"])
    return Card(**dict(row) | {"predicted": json.loads(row["predicted"]), "codes": codes, "confidence": row["conf"]})
