"""Keep in SQLite the cards to review, each decision, and the files that were sent in."""

import itertools
import json
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
from pydantic import BaseModel, Field

from histocoder.data.example_files import CHECKED_COL
from histocoder.desk.trust import Trust, estimate, order_of_review
from histocoder.evaluation.review import Columns, in_order_of_worth, open_coded
from histocoder.files import sha256

Status = Literal["open", "settled", "unsure"]
Number = Annotated[int, Field(ge=-1, lt=2**63)]  # of a row, as SQLite can hold it
_CLAIM_SECONDS = 180.0  # time for which a card that one reviewer was given is not given to another
_CHANGES_AT_ONCE = 500
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
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY, name TEXT, suffix TEXT, state TEXT, options TEXT, num_rows INTEGER, message TEXT, at REAL);
"""


class Card(BaseModel):
    """A distinct description of a coded file, and the reviewers' decision on it."""

    id: int
    source: int
    place: int  # position in the queue, from 0
    text: str
    lang: str
    times: int  # number of rows with this description
    confidence: float
    predicted: list[str]
    version: int  # number of changes so far; a decision names the one that it saw
    status: Status
    codes: list[str] | None  # codes that were decided on; None where none were
    who: str | None
    at: float | None


class Source(BaseModel):
    """A coded file to review."""

    id: int
    name: str
    cards: int
    settled: int


class Changes(BaseModel):
    """Cards that reviewers have decided on."""

    last: int  # number of the last decision, from which to ask next time
    cards: list[Card]


class Conflict(Exception):
    """Another reviewer has decided on a card in the meantime."""

    def __init__(self, card: Card) -> None:
        super().__init__(f"{card.who} has decided on this description in the meantime.")
        self.card = card


class Store:
    """The desk's database; each change is on disk before its method returns."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.RLock()
        self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._db.row_factory = sqlite3.Row
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.executescript(_TABLES)
        self._claims: dict[int, tuple[str, float]] = {}  # card -> reviewer, and when
        self._queues: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}  # source -> times, worth and draws

    def close(self) -> None:
        with self._lock:
            self._db.close()

    @contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        """Change several things or none."""
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    def _rows(self, query: str, *values: Any) -> list[sqlite3.Row]:
        with self._lock:
            return self._db.execute(query, values).fetchall()

    def _row(self, query: str, key: int | str) -> sqlite3.Row:
        """Return the only row of a query; raise a KeyError if there is none."""
        found = self._rows(query, key)
        if not found:
            raise KeyError(key)
        return found[0]

    # Cards

    def add_source(self, path: Path, name: str, columns: Columns) -> int:
        """Make cards of what `histocoder predict` wrote; return their source.

        They are in the order of `histocoder review`, with a random sample among them; see `order_of_review`. A file
        with the content of an earlier one has that one's source.
        """
        digest = sha256(path)
        if found := self._rows("SELECT id FROM sources WHERE sha256 = ?", digest):
            return found[0]["id"]
        cards = in_order_of_worth(open_coded(path, columns), columns)
        lang_col = cards.columns[1]
        langs = cards[lang_col].fillna("unk").astype(str) if lang_col != CHECKED_COL else itertools.repeat("unk")
        codes = cards[list(columns.target_cols)].to_numpy(dtype=object)
        predicted = (json.dumps([code for code in row if not pd.isna(code) and code]) for row in codes)
        fields = (cards[columns.input_col].fillna("").astype(str), langs, predicted, cards["conf"], cards["times"])
        values = list(zip(*fields, strict=False))
        order, draws = order_of_review(cards["times"].to_numpy(), int(digest, 16)) if values else ([], [])
        places = {card: place for place, card in enumerate(order)}
        with self._changing() as db:
            insert = "INSERT INTO sources (name, sha256, at) VALUES (?, ?, ?)"
            source = db.execute(insert, (name, digest, time.time())).lastrowid
            assert source is not None
            db.executemany(
                "INSERT INTO cards (source, place, text, lang, predicted, conf, times) VALUES (?, ?, ?, ?, ?, ?, ?)",
                ((source, place, *values[card]) for card, place in places.items()),
            )
            db.executemany("INSERT INTO draws VALUES (?, ?, ?)", ((source, due, places[card]) for due, card in draws))
        return source

    def sources(self) -> list[Source]:
        """Return all sources, the last one first."""
        query = """SELECT s.id, s.name, count(c.id) AS cards, coalesce(sum(c.status = 'settled'), 0) AS settled
                   FROM sources s LEFT JOIN cards c ON c.source = s.id GROUP BY s.id ORDER BY s.id DESC"""
        return [Source(**dict(row)) for row in self._rows(query)]

    def card(self, card: int) -> Card:
        """Return a card; raise KeyError where there is none of that number."""
        return _card(self._row("SELECT * FROM cards WHERE id = ?", card))

    def next_cards(self, source: int, who: str, *, after: int, count: int) -> list[Card]:
        """Return the next open cards after a place of the queue, without those that another reviewer looks at."""
        query = "SELECT * FROM cards WHERE source = ? AND status = 'open' AND place > ? ORDER BY place LIMIT ?"
        now = time.monotonic()
        with self._lock:
            self._claims = {card: claim for card, claim in self._claims.items() if now - claim[1] < _CLAIM_SECONDS}
            taken = {card for card, (other, _) in self._claims.items() if other != who}
            rows = [row for row in self._rows(query, source, after, count + len(taken)) if row["id"] not in taken]
            self._claims.update({row["id"]: (who, now) for row in rows[:count]})
        return [_card(row) for row in rows[:count]]

    def decide(self, card: int, *, version: int, who: str, codes: list[str] | None) -> Card:
        """Settle a card with codes, or leave it unsure (None); raise a `Conflict` if it has changed since a version."""
        with self._changing() as db:
            before = self.card(card)
            if before.version != version:
                raise Conflict(before)
            status = "unsure" if codes is None else "settled"
            action = status if codes is None else "accepted" if set(codes) == set(before.predicted) else "changed"
            self._write(db, before, who=who, status=status, codes=codes, action=action)
        return self.card(card)

    def undo(self, source: int, who: str) -> Card | None:
        """Take back a reviewer's last decision, if any; raise a `Conflict` if somebody else has decided since."""
        last = """SELECT d.* FROM decisions d JOIN cards c ON c.id = d.card
                  WHERE c.source = ? AND d.who = ? AND d.undone = 0 AND d.action != 'undone'
                  ORDER BY d.id DESC LIMIT 1"""
        later = "SELECT 1 FROM decisions WHERE card = ? AND id > ? AND who != ? AND undone = 0 AND action != 'undone'"
        with self._changing() as db:
            found = self._rows(last, source, who)
            if not found:
                return None
            decision, card = found[0], self.card(found[0]["card"])
            if self._rows(later, card.id, decision["id"], who):
                raise Conflict(card)
            before = json.loads(decision["before"])
            self._write(db, card, who=who, status=before["status"], codes=before["codes"], action="undone")
            db.execute("UPDATE decisions SET undone = 1 WHERE id = ?", (decision["id"],))
        return self.card(card.id)

    def changes(self, source: Number, after: Number = 0) -> Changes:
        """Return the cards of the decisions that follow number `after`, a limited number of them at once."""
        with self._lock:
            query = "SELECT max(id) AS last FROM (SELECT id FROM decisions WHERE id > ? ORDER BY id LIMIT ?)"
            last = self._rows(query, after, _CHANGES_AT_ONCE)[0]["last"]
            if last is None:
                last = self._rows("SELECT coalesce(max(id), 0) AS last FROM decisions")[0]["last"]
            query = """SELECT * FROM cards WHERE source = ? AND id IN
                       (SELECT card FROM decisions WHERE id > ? AND id <= ?)"""
            return Changes(last=last, cards=[_card(row) for row in self._rows(query, source, after, last)])

    def _write(
        self, db: sqlite3.Connection, card: Card, *, who: str, status: str, codes: list[str] | None, action: str
    ) -> None:
        """Change a card, and add the decision."""
        now, kept = time.time(), None if codes is None else json.dumps(codes)
        by = (None, None) if status == "open" else (who, now)
        before, after = {"status": card.status, "codes": card.codes}, {"status": status, "codes": codes}
        db.execute(
            "UPDATE cards SET version = version + 1, status = ?, codes = ?, who = ?, at = ? WHERE id = ?",
            (status, kept, *by, card.id),
        )
        db.execute(
            "INSERT INTO decisions (card, who, at, action, before, after) VALUES (?, ?, ?, ?, ?, ?)",
            (card.id, who, now, action, json.dumps(before), json.dumps(after)),
        )

    def trust(self, source: Number) -> Trust:
        """Return how much of a file is settled, and how many of the other rows are right."""
        with self._lock:
            if source not in self._queues:
                queue = "SELECT times, times * (1 - conf) FROM cards WHERE source = ? ORDER BY place"
                times, worth = np.array([*map(tuple, self._rows(queue, source))]).reshape(-1, 2).T
                draws = [*map(tuple, self._rows("SELECT due, place FROM draws WHERE source = ?", source))]
                self._queues[source] = times.astype(int), worth, np.array(draws, dtype=int).reshape(-1, 2)
            query = "SELECT place, predicted, codes FROM cards WHERE source = ? AND status IN ('settled', 'unsure')"
            decided = [(row["place"], row["predicted"], row["codes"]) for row in self._rows(query, source)]
        return estimate(
            *self._queues[source],
            right={place: set(json.loads(codes)) == set(json.loads(own)) for place, own, codes in decided if codes},
            unsure=[place for place, _, codes in decided if not codes],
        )

    def settled(self) -> list[Card]:
        """Return the settled cards of all sources, the last decision first."""
        return [_card(row) for row in self._rows("SELECT * FROM cards WHERE status = 'settled' ORDER BY at DESC")]

    # Files

    def put_file(self, file: str, **values: Any) -> None:
        with self._changing() as db:
            db.execute("INSERT OR IGNORE INTO files (id, at) VALUES (?, ?)", (file, time.time()))
            for name, value in values.items():
                db.execute(f"UPDATE files SET {name} = ? WHERE id = ?", (value, file))

    def file(self, file: str) -> dict[str, Any]:
        """Return the stored values of a file; raise KeyError where there is none of that number."""
        return dict(self._row("SELECT * FROM files WHERE id = ?", file))

    def files(self) -> list[dict[str, Any]]:
        """Return the stored values of all files, the last one first."""
        return [dict(row) for row in self._rows("SELECT * FROM files ORDER BY at DESC")]

    def drop_file(self, file: str) -> None:
        with self._changing() as db:
            db.execute("DELETE FROM files WHERE id = ?", (file,))


def _card(row: sqlite3.Row) -> Card:
    values = dict(row)
    values["predicted"] = json.loads(values["predicted"])
    values["codes"] = None if values["codes"] is None else json.loads(values["codes"])
    return Card(**values, confidence=values["conf"])
