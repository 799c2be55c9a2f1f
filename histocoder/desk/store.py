"""What the desk keeps, in SQLite: cards to review, each decision, and the files that were sent in."""

from __future__ import annotations

import itertools
import json
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from pydantic import BaseModel

from histocoder.desk.trust import Trust, estimate

Status = Literal["open", "settled", "unsure"]
_CLAIM_SECONDS = 180.0
"""For which a card that one reviewer was given is not given to another."""
_TABLES = """
CREATE TABLE IF NOT EXISTS sources (id INTEGER PRIMARY KEY, name TEXT, sha256 TEXT UNIQUE, at REAL);
CREATE TABLE IF NOT EXISTS cards (
    id INTEGER PRIMARY KEY, source INTEGER, place INTEGER, text TEXT, lang TEXT, predicted TEXT, conf REAL,
    times INTEGER, version INTEGER DEFAULT 0, status TEXT DEFAULT 'open', codes TEXT, who TEXT, at REAL);
CREATE UNIQUE INDEX IF NOT EXISTS cards_by_place ON cards (source, place);
CREATE INDEX IF NOT EXISTS cards_by_status ON cards (source, status, place);
CREATE TABLE IF NOT EXISTS decisions (
    id INTEGER PRIMARY KEY AUTOINCREMENT, card INTEGER, who TEXT, at REAL, action TEXT, before TEXT, after TEXT,
    undone INTEGER DEFAULT 0);
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY, name TEXT, suffix TEXT, state TEXT, options TEXT, num_rows INTEGER, message TEXT, at REAL);
"""


class Card(BaseModel):
    """A distinct description of a coded file, and what reviewers made of it."""

    id: int
    source: int
    place: int
    """In the queue, from 0."""
    text: str
    lang: str
    times: int
    """Rows it stands for."""
    confidence: float
    predicted: list[str]
    version: int
    """Number of changes so far; a decision names the one that it saw."""
    status: Status
    codes: list[str] | None
    """As decided; None where nothing is."""
    who: str | None
    at: float | None


class Source(BaseModel):
    """A coded file to review."""

    id: int
    name: str
    cards: int
    settled: int


class Conflict(Exception):
    """Somebody else has decided a card in the meantime."""

    def __init__(self, card: Card) -> None:
        super().__init__(f"{card.who} has decided on this description in the meantime.")
        self.card = card


class _Queue(NamedTuple):
    """What does not change of a source's cards, in their order."""

    conf: np.ndarray
    times: np.ndarray


class Store:
    """The desk's database, in a folder of its own; each change is on disk before its method returns.

    Parameters
    ----------
    path : Path
    calibration : sequence of mapping
        The bins of `scores.calibration` that the model's run has measured.
    """

    def __init__(self, path: Path, *, calibration: Sequence[Mapping[str, Any]] = ()) -> None:
        self._calibration = calibration
        self._lock = threading.RLock()
        self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._db.row_factory = sqlite3.Row
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.executescript(_TABLES)
        self._claims: dict[int, tuple[str, float]] = {}  # card -> reviewer, and when
        self._queues: dict[int, _Queue] = {}

    def close(self) -> None:
        """Close the database."""
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

    # Cards

    def source_of(self, sha256: str) -> int | None:
        """Return the source that was made of a file."""
        found = self._rows("SELECT id FROM sources WHERE sha256 = ?", sha256)
        return found[0]["id"] if found else None

    def add_source(self, name: str, sha256: str, cards: pd.DataFrame) -> int:
        """Take in a coded file.

        Parameters
        ----------
        name, sha256 : str
            Of the file.
        cards : DataFrame
            `text`, `lang`, `predicted` (lists of codes), `conf` and `times`, in the order of review.
        """
        rows = zip(*(cards[name] for name in ("text", "lang", "predicted", "conf", "times")), strict=True)
        with self._changing() as db:
            values = (name, sha256, time.time())
            source = db.execute("INSERT INTO sources (name, sha256, at) VALUES (?, ?, ?)", values).lastrowid
            assert source is not None
            db.executemany(
                "INSERT INTO cards (source, place, text, lang, predicted, conf, times) VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    (source, place, text, lang, json.dumps(predicted), float(conf), int(times))
                    for place, (text, lang, predicted, conf, times) in enumerate(rows)
                ),
            )
        return source

    def sources(self) -> list[Source]:
        """Return all sources, the last one first."""
        query = """SELECT s.id, s.name, count(c.id) AS cards, coalesce(sum(c.status = 'settled'), 0) AS settled
                   FROM sources s LEFT JOIN cards c ON c.source = s.id GROUP BY s.id ORDER BY s.id DESC"""
        return [Source(**dict(row)) for row in self._rows(query)]

    def card(self, card: int) -> Card:
        """Return a card; raises KeyError where there is none of that number."""
        found = self._rows("SELECT * FROM cards WHERE id = ?", card)
        if not found:
            raise KeyError(card)
        return _card(found[0])

    def next_cards(self, source: int, who: str, *, after: int = -1, count: int = 5) -> list[Card]:
        """Return the next open cards behind a place of the queue, but for those that another reviewer looks at."""
        query = "SELECT * FROM cards WHERE source = ? AND status = 'open' AND place > ? ORDER BY place LIMIT ?"
        now = time.monotonic()
        with self._lock:
            self._claims = {card: claim for card, claim in self._claims.items() if now - claim[1] < _CLAIM_SECONDS}
            taken = {card for card, (other, _) in self._claims.items() if other != who}
            rows = [row for row in self._rows(query, source, after, count + len(taken)) if row["id"] not in taken]
            self._claims.update({row["id"]: (who, now) for row in rows[:count]})
        return [_card(row) for row in rows[:count]]

    def decide(self, card: int, *, version: int, who: str, codes: Sequence[str] | None) -> Card:
        """Settle a card with codes, or leave it unsure (None).

        Raises
        ------
        KeyError
            Where there is no such card.
        Conflict
            Where it has changed since the version that the reviewer saw.
        """
        with self._changing() as db:
            before = self._seen(card, version)
            status = "unsure" if codes is None else "settled"
            action = status if codes is None else "accepted" if set(codes) == set(before.predicted) else "changed"
            self._write(db, before, who=who, status=status, codes=codes, action=action)
        return self._seen(card)

    def undo(self, source: int, who: str) -> Card | None:
        """Take back a reviewer's last decision; None where there is none.

        Raises
        ------
        Conflict
            Where somebody else has decided on that card since.
        """
        last = """SELECT d.* FROM decisions d JOIN cards c ON c.id = d.card
                  WHERE c.source = ? AND d.who = ? AND d.undone = 0 AND d.action != 'undone'
                  ORDER BY d.id DESC LIMIT 1"""
        later = "SELECT 1 FROM decisions WHERE card = ? AND id > ? AND who != ? AND undone = 0 AND action != 'undone'"
        with self._changing() as db:
            found = self._rows(last, source, who)
            if not found:
                return None
            decision, card = found[0], self._seen(found[0]["card"])
            if self._rows(later, card.id, decision["id"], who):
                raise Conflict(card)
            before = json.loads(decision["before"])
            self._write(db, card, who=who, status=before["status"], codes=before["codes"], action="undone")
            db.execute("UPDATE decisions SET undone = 1 WHERE id = ?", (decision["id"],))
        return self._seen(card.id)

    def changes(self, source: int, *, after: int) -> tuple[int, list[Card]]:
        """Return the number of the last decision, and the cards that were decided on after another."""
        with self._lock:
            last = self._rows("SELECT coalesce(max(id), 0) AS last FROM decisions")[0]["last"]
            query = """SELECT * FROM cards WHERE source = ? AND id IN (SELECT card FROM decisions WHERE id > ?)
                       LIMIT 500"""
            return last, [_card(row) for row in self._rows(query, source, after)]

    def _seen(self, card: int, version: int | None = None) -> Card:
        found = self.card(card)
        if version is not None and found.version != version:
            raise Conflict(found)
        return found

    def _write(
        self, db: sqlite3.Connection, card: Card, *, who: str, status: str, codes: Sequence[str] | None, action: str
    ) -> None:
        now, kept = time.time(), None if codes is None else json.dumps(list(codes))
        is_open = status == "open"
        db.execute(
            "UPDATE cards SET version = version + 1, status = ?, codes = ?, who = ?, at = ? WHERE id = ?",
            (status, kept, None if is_open else who, None if is_open else now, card.id),
        )
        before, after = (json.dumps(state) for state in (_state(card.status, card.codes), _state(status, codes)))
        db.execute(
            "INSERT INTO decisions (card, who, at, action, before, after) VALUES (?, ?, ?, ?, ?, ?)",
            (card.id, who, now, action, before, after),
        )

    def trust(self, source: int) -> Trust:
        """Return how far the source can be trusted by now."""
        with self._lock:
            if source not in self._queues:
                rows = self._rows("SELECT conf, times FROM cards WHERE source = ? ORDER BY place", source)
                conf, times = ([row[name] for row in rows] for name in ("conf", "times"))
                self._queues[source] = _Queue(np.array(conf, dtype=float), np.array(times, dtype=np.int64))
            decided = self._rows(
                "SELECT place, status, predicted, codes FROM cards WHERE source = ? AND status != 'open'", source
            )
            moments = self._rows(
                """SELECT d.who, d.at FROM decisions d JOIN cards c ON c.id = d.card
                   WHERE c.source = ? AND d.action != 'undone' ORDER BY d.who, d.at""",
                source,
            )
        queue = self._queues[source]
        settled, right = np.zeros((2, len(queue.conf)), dtype=bool)
        for row in decided:
            settled[row["place"]] = row["status"] == "settled"
            right[row["place"]] = set(json.loads(row["codes"] or "[]")) == set(json.loads(row["predicted"]))
        gaps = [b["at"] - a["at"] for a, b in itertools.pairwise(moments) if a["who"] == b["who"]]
        num_unsure = sum(row["status"] == "unsure" for row in decided)
        found = {"gaps": gaps, "unsure": num_unsure, "calibration": self._calibration}
        return estimate(queue.conf, queue.times, settled, right, **found)

    def settled(self) -> list[Card]:
        """Return the settled cards of all sources, the last decision first."""
        return [_card(row) for row in self._rows("SELECT * FROM cards WHERE status = 'settled' ORDER BY at DESC")]

    # Files

    def put_file(self, file: str, **values: Any) -> None:
        """Keep what is said of a file."""
        with self._changing() as db:
            db.execute("INSERT OR IGNORE INTO files (id, at) VALUES (?, ?)", (file, time.time()))
            for name, value in values.items():
                db.execute(f"UPDATE files SET {name} = ? WHERE id = ?", (value, file))

    def file(self, file: str) -> dict[str, Any]:
        """Return what is kept of a file; raises KeyError where there is none of that number."""
        found = self._rows("SELECT * FROM files WHERE id = ?", file)
        if not found:
            raise KeyError(file)
        return dict(found[0])

    def files(self) -> list[dict[str, Any]]:
        """Return what is kept of all files, the last one first."""
        return [dict(row) for row in self._rows("SELECT * FROM files ORDER BY at DESC")]

    def drop_file(self, file: str) -> None:
        """Forget a file."""
        with self._changing() as db:
            db.execute("DELETE FROM files WHERE id = ?", (file,))


def _state(status: str, codes: Sequence[str] | None) -> dict[str, Any]:
    return {"status": status, "codes": None if codes is None else list(codes)}


def _card(row: sqlite3.Row) -> Card:
    values = {name: row[name] for name in row.keys() if name not in ("predicted", "codes", "conf")}  # noqa: SIM118
    codes = None if row["codes"] is None else json.loads(row["codes"])
    return Card(**values, confidence=row["conf"], predicted=json.loads(row["predicted"]), codes=codes)
