"""Review coded files card by card: each distinct description is a card, and each decision is kept
in SQLite.
"""

import json
import math
import re
import sqlite3
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import numpy as np
import pandas as pd
from fastapi import Body, Query, Request
from pydantic import Field

from histocoder.data.labelled_files import CHECKED_COL
from histocoder.desk.domain.card import (
    AND,
    Accepted,
    Card,
    Conflict,
    Decision,
    Evidence,
    Filter,
    Number,
    Source,
    Who,
    user_of,
)
from histocoder.desk.domain.models import Models
from histocoder.desk.domain.trust import FEWEST, Trust, order_of_review, share_right
from histocoder.errors import UserError
from histocoder.evaluation import checked_file
from histocoder.evaluation.review_file import Columns, in_order_of_worth, open_coded
from histocoder.evaluation.scores import agreement
from histocoder.files import sha256
from histocoder.inference.predictions import code_columns
from histocoder.text.languages import Language
from histocoder.text.normalize import description_keys

_CLAIM_SECONDS = 180.0  # time for which a card that one reviewer was given is not given to another
_TABLES = Path(__file__).with_name("tables.sql")
_Codes: TypeAlias = list[str] | None  # of a decision; None: unsure
_MOST_SHOWN = 12  # columns of a row, of those before the codes
CORRECTIONS_FILE, DECISIONS_FILE = "corrections.csv", "decisions.csv"  # the second one of 1.0.0
CARRIED = "carried"  # action of a decision that was made on the same description in another file
_LIVE = "undone = 0 AND action != 'undone'"
_NEW_COLUMNS = {
    "sources": {"file": "TEXT", "sample": "INTEGER DEFAULT 0"},
    "cards": {"key": "TEXT"},
}
_SORTS = {
    "worth": "place",
    "times": "times DESC, place",
    "conf": "conf, place",
    "text": "text, place",
}


class Cards:
    """The cards of a desk in its database; each decision is on disk before its method returns."""

    def __init__(self, path: Path, models: Models, *, double_share: float = 0.0) -> None:
        self._models, self._double_share = models, double_share
        self._exports = [path.with_name(name) for name in (CORRECTIONS_FILE, DECISIONS_FILE)]
        self.lock = threading.RLock()
        self._db = sqlite3.connect(path, check_same_thread=False)
        self._db.row_factory = sqlite3.Row
        self._db.create_function("casefold", 1, str.casefold)  # SQLite's own knows ASCII alone
        self._db.executescript(
            "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA secure_delete = ON;"
        )
        self._add_columns()
        self._db.executescript(_TABLES.read_text(encoding="utf-8"))
        self._add_keys()
        self._claims: dict[int, tuple[str, float]] = {}  # card -> reviewer, and when

    def close(self) -> None:
        with self.lock:
            self._db.close()

    def _add_columns(self) -> None:
        """Give the tables of a desk of 1.0.0 the columns that it lacks."""
        for table, new_columns in _NEW_COLUMNS.items():
            names = {row["name"] for row in self._rows(f"PRAGMA table_info({table})")}
            for name, kind in new_columns.items():
                if names and name not in names:
                    self._db.execute(f"ALTER TABLE {table} ADD COLUMN {name} {kind}")

    def _add_keys(self) -> None:
        """Give cards of a desk of 1.0.0 their keys."""
        rows = self._rows("SELECT id, text, lang FROM cards WHERE key IS NULL")
        keys = _keys([row["text"] for row in rows], [row["lang"] for row in rows])
        with self._db as db:
            ids = (row["id"] for row in rows)
            db.executemany("UPDATE cards SET key = ? WHERE id = ?", zip(keys, ids, strict=True))

    def _rows(self, query: str, *values: Any) -> list[sqlite3.Row]:
        with self.lock:
            return self._db.execute(query, values).fetchall()

    def add_source(
        self,
        path: Path,
        name: str,
        columns: Columns,
        *,
        file_id: str | None = None,
        is_sample: bool = False,
    ) -> Source:
        """Make cards of what `histocoder predict` wrote; return their source.

        They are in the order of `histocoder review`, with a random sample among them; see
        `order_of_review`. A file with the content and the columns of an earlier one has that one's
        source. Descriptions on which people have decided in another file of the same columns of
        codes are settled from the start. `file_id` is the file's under Files, and `is_sample` tells
        that it is the sample to try the desk with.
        """
        digest, targets = sha256(path), json.dumps(list(columns.target_cols))
        key = f"{digest} {columns.input_col} {columns.language_col} {targets}"
        if known := self._rows(
            "SELECT id FROM sources WHERE sha256 IN (?, ?)", key, digest
        ):  # which 1.0.0 has
            return next(source for source in self.sources() if source.id == known[0]["id"])
        file = open_coded(path, columns)
        own = file.header[
            : file.header.index(next(iter(code_columns(file.header)), file.header[-1]))
        ]
        used = (columns.input_col, columns.language_col, "lang")
        beside = [name for name in own if name not in used and own.count(name) == 1][:_MOST_SHOWN]
        cards = in_order_of_worth(file, columns, beside=beside)
        lang_col = cards.columns[1]
        langs = (
            cards[lang_col].fillna("unk").map(Language)
            if lang_col != CHECKED_COL
            else ["unk"] * len(cards)
        )
        codes = cards[list(columns.target_cols)].to_numpy(dtype=object)
        predicted = [
            json.dumps([code for code in row if not pd.isna(code) and code]) for row in codes
        ]
        texts = cards[columns.input_col].fillna("").astype(str)
        # row by row, since pandas 2.2 makes no records of a frame without columns
        cells_beside = cards[[f"row_{name}" for name in beside]].to_numpy(dtype=object)
        rows = []
        for cells in cells_beside:
            filled = {
                name: cell for name, cell in zip(beside, cells, strict=True) if not pd.isna(cell)
            }
            rows.append(json.dumps(filled))
        doubles = np.random.default_rng(int(digest, 16) + 1).random(len(cards)) < self._double_share
        keys = _keys(texts.tolist(), [*langs])
        times = cards["times"].tolist()
        columns_of_cards = (
            texts,
            langs,
            predicted,
            cards["conf"],
            times,
            rows,
            doubles.tolist(),
            keys,
        )
        values = list(zip(*columns_of_cards, strict=True))
        order, draws = order_of_review(cards["times"].to_numpy(), int(digest, 16))
        places = {card: place for place, card in enumerate(order)}
        with self.lock, self._db as db:
            row = (name, key, time.time(), targets, file_id, is_sample)
            added = db.execute(
                (
                    "INSERT INTO sources (name, sha256, at, targets, file, sample) VALUES (?, "
                    "?, ?, ?, ?, ?)"
                ),
                row,
            ).lastrowid
            db.executemany(
                "INSERT INTO cards (source, place, text, lang, predicted, conf, times, "
                "row, double, key) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                ((added, place, *values[card]) for card, place in places.items()),
            )
            db.executemany(
                "INSERT INTO draws VALUES (?, ?, ?)",
                ((added, due, places[card]) for due, card in draws),
            )
            self._carry("c.source = ?", added)
        return next(source for source in self.sources() if source.id == added)

    def _carry(self, which: str, *values: Any) -> None:
        """Settle open cards whose descriptions are settled in the same columns of codes, as the
        last of these cards.

        `which` is a condition on the cards c. Call it within a transaction. A decision that is
        carried belongs to the batch of the one that it comes from, with which it is undone.
        """
        query = f"""SELECT c.id, c.version, c.double, o.codes, o.who, o.at,
                        (SELECT coalesce(d.batch, d.id) FROM decisions d WHERE d.card = o.id AND {_LIVE}
                         ORDER BY d.id DESC LIMIT 1) AS batch
                    FROM cards c JOIN sources s ON s.id = c.source
                    JOIN cards o ON o.id = (
                        SELECT e.id FROM cards e JOIN sources t ON t.id = e.source
                        WHERE e.key = c.key AND e.status = 'settled' AND t.targets = s.targets AND t.sample = s.sample
                        ORDER BY e.at DESC, e.id DESC LIMIT 1)
                    WHERE c.status = 'open' AND {which}"""
        before = json.dumps({"status": "open", "codes": None, "by": None, "at": None})
        for row in self._rows(query, *values):
            after = json.dumps({"status": "settled", "codes": json.loads(row["codes"])})
            self._db.execute(
                "UPDATE cards SET version = version + 1, status = 'settled', codes = ?, "
                "who = ?, at = ?, double = 0 "
                "WHERE id = ?",
                (row["codes"], row["who"], row["at"], row["id"]),
            )
            self._db.execute(
                (
                    "INSERT INTO decisions (card, who, at, action, before, after, batch) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?)"
                ),
                (row["id"], row["who"], row["at"], CARRIED, before, after, row["batch"]),
            )

    def remove(self, source: Number) -> list[Source]:
        """Remove a file from the review: its cards, their other columns and all decisions on them;
        return the others.

        Nothing of it remains in the database. Models that were trained on the decisions keep what
        they have learned.
        """
        with self.lock:
            if not self._rows("SELECT id FROM sources WHERE id = ?", source):
                raise KeyError(source)
            with self._db as db:
                db.execute(
                    "DELETE FROM decisions WHERE card IN (SELECT id FROM cards WHERE source = ?)",
                    (source,),
                )
                for table, column in (("draws", "source"), ("cards", "source"), ("sources", "id")):
                    db.execute(f"DELETE FROM {table} WHERE {column} = ?", (source,))

            # what is deleted stands in free pages, and in the write-ahead log, until both are
            # rewritten
            self._db.execute("VACUUM")
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            for path in self._exports:
                path.unlink(missing_ok=True)
        return self.sources()

    def remove_file(self, file: str) -> None:
        """Remove what was made of a file under Files from the review."""
        for row in self._rows("SELECT id FROM sources WHERE file = ?", file):
            self.remove(row["id"])

    def sources(self) -> list[Source]:
        """List the coded files that are under review, the last one first."""
        query = """SELECT s.id, s.name, s.file, count(c.id) AS cards,
                   coalesce(sum(c.status = 'settled'), 0) AS settled,
                   coalesce(sum(c.status != 'open'), 0) AS decided
                   FROM sources s LEFT JOIN cards c ON c.source = s.id GROUP BY s.id ORDER BY s.id DESC"""
        return [Source(**dict(row)) for row in self._rows(query)]

    def next_cards(
        self,
        request: Request,
        source: Number,
        who: Who = "program",
        after: Number = -1,
        count: Annotated[int, Field(ge=1, le=20)] = 5,
    ) -> list[Evidence]:
        """Return the next open descriptions, the most worth checking first; others do not get them
        for a while.
        """
        who = user_of(request, who)
        query = f"""SELECT * FROM cards c WHERE source = ? AND status = 'open' AND place > ? AND NOT (double AND EXISTS
                    (SELECT 1 FROM decisions d WHERE d.card = c.id AND d.who = ? AND {_LIVE})) ORDER BY place LIMIT ?"""
        now = time.monotonic()
        with self.lock:
            self._claims = {
                card: claim
                for card, claim in self._claims.items()
                if now - claim[1] < _CLAIM_SECONDS
            }
            taken = {card for card, (other, _) in self._claims.items() if other != who}
            rows = [
                row
                for row in self._rows(query, source, after, who, count + len(taken))
                if row["id"] not in taken
            ]
            self._claims.update({row["id"]: (who, now) for row in rows[:count]})
        return self._with_evidence([_card(row) for row in rows[:count]])

    def evidence(self, request: Request, card: Number, who: Who = "program") -> Evidence:
        """Return a card, as this reviewer may see it, and what helps to judge it."""
        return self._with_evidence([self._seen(self._card(card), user_of(request, who))])[0]

    def listing(
        self, request: Request, source: Number, wanted: Annotated[Filter, Query()]
    ) -> dict[str, Any]:
        """List the cards that a filter finds, as a reviewer may see them, with the titles of their
        codes.
        """
        where = """source = ? AND casefold(text) LIKE ? ESCAPE '\\' AND coalesce(codes, predicted) LIKE ? ESCAPE '\\'
                   AND lang LIKE ? AND status LIKE ? AND conf BETWEEN ? AND ?"""
        text, prefix = (
            re.sub(r"([%_\\])", r"\\\1", one) for one in (wanted.q.casefold(), wanted.code)
        )
        given = (
            f"%{text}%",
            f'%"{prefix}%',
            wanted.lang or "%",
            wanted.status or "%",
            wanted.low,
            wanted.high,
        )
        order, who = (
            f"ORDER BY {_SORTS[wanted.sort]} LIMIT ? OFFSET ?",
            user_of(request, wanted.who),
        )
        with self.lock:
            total = self._rows(f"SELECT count(*) AS n FROM cards WHERE {where}", source, *given)[0][
                "n"
            ]
            rows = self._rows(
                f"SELECT * FROM cards WHERE {where} {order}",
                source,
                *given,
                wanted.limit,
                wanted.offset,
            )
            cards = [self._seen(_card(row), who) for row in rows]
        sets = [
            one
            for card in cards
            for one in (card.predicted, card.codes, *(said.codes for said in card.opinions))
        ]
        codes = {code for one in sets for code in one or ()}
        titles = {code: self._models.coding.titled(code).title for code in codes}
        return {
            "total": total,
            "cards": cards,
            "titles": {code: title for code, title in titles.items() if title},
        }

    def _with_evidence(self, cards: list[Card]) -> list[Evidence]:
        texts, langs = [card.text for card in cards], [card.lang for card in cards]
        answers, evidence = self._models.coding.answer(texts, langs) if cards else [], []
        for card, answer in zip(cards, answers, strict=True):
            known = {code.code: code for code in (*answer.codes, *answer.alternatives)}
            predicted = [
                known.get(code) or self._models.coding.titled(code) for code in card.predicted
            ]
            evidence.append(Evidence(card=card, answer=answer, predicted=predicted))
        return evidence

    def _card(self, card: int) -> Card:
        """Return a card; raise KeyError where there is none of that number."""
        found = self._rows("SELECT * FROM cards WHERE id = ?", card)
        if not found:
            raise KeyError(card)
        return _card(found[0])

    def _opinions(self, card: int) -> dict[str, _Codes]:
        """Return who has which opinion on a card for two, the last of each person; not how it was
        settled.
        """
        query = f"""SELECT who, after FROM decisions WHERE card = ? AND {_LIVE}
                    AND action NOT IN ('settled', '{CARRIED}') ORDER BY id"""
        return {row["who"]: json.loads(row["after"])["codes"] for row in self._rows(query, card)}

    def _seen(self, card: Card, who: str) -> Card:
        """Return a card as a reviewer may see it."""
        if card.double:
            return card.seen_by(who, self._opinions(card.id))
        if card.status == "settled":
            query = (
                f"SELECT action FROM decisions WHERE card = ? AND {_LIVE} ORDER BY id DESC LIMIT 1"
            )
            card.carried = any(row["action"] == CARRIED for row in self._rows(query, card.id))
        return card

    def decide(self, request: Request, card: Number, decision: Decision) -> Card:
        """Decide on a card. Status 409: another reviewer has in the meantime; `card` is its present
        state.
        """
        self._check_targets([card])
        codes = None if decision.codes is None else self._models.coding.check_codes(decision.codes)
        return self._decide(card, decision.version, user_of(request, decision.who), codes)

    def accept(self, request: Request, batch: Accepted) -> list[Card]:
        """Accept the predicted codes of several cards, all or, if another reviewer has decided on
        one, none.
        """
        who = user_of(request, batch.who)
        self._check_targets([*batch.cards])
        with self.lock:
            before = [self._card(card) for card in batch.cards]
            for card in before:
                if card.version != batch.cards[card.id]:
                    raise Conflict(self._seen(card, who))
                self._models.coding.check_codes(card.predicted)
            last = self._rows("SELECT coalesce(max(id), 0) AS last FROM decisions")[0]["last"]
            return [
                self._decide(card.id, card.version, who, card.predicted, batch=last + 1)
                for card in before
            ]

    def _check_targets(self, cards: Sequence[int]) -> None:
        """Raise a UserError if cards are of a file that was coded in another classification than
        that in use.
        """
        wanted = list(self._models.coding.coder.model.config.target_cols)
        query = """SELECT DISTINCT s.targets FROM cards c JOIN sources s ON s.id = c.source
                   WHERE c.id IN (SELECT value FROM json_each(?))"""
        for row in self._rows(query, json.dumps(cards)):
            if (own := json.loads(row["targets"])) != wanted:
                raise UserError(
                    f"This file was coded with {', '.join(own)}, and the model in use "
                    f"gives {', '.join(wanted)}. "
                    "Switch to a model of this file's codes under Models first."
                )

    def _decide(
        self, card: int, version: int, who: str, codes: _Codes, *, batch: int | None = None
    ) -> Card:
        with self.lock:
            before = self._card(card)
            if before.version != version:
                raise Conflict(self._seen(before, who))
            action = (
                "unsure"
                if codes is None
                else "accepted"
                if set(codes) == set(before.predicted)
                else "changed"
            )
            status = "unsure" if codes is None else "settled"
            after: dict[str, Any] = {"status": status, "codes": codes, "by": who}
            if before.double and before.status == "open":
                after = Card.together(self._opinions(card) | {who: codes})
            elif before.double:
                action = "settled"
            return self._seen(
                self._write(before, after, who=who, action=action, said=codes, batch=batch), who
            )

    def undo(
        self, request: Request, source: Number, who: Annotated[Who, Body(embed=True)] = "program"
    ) -> list[Card]:
        """Undo this reviewer's last decision, or all that were made at once. Status 409: another
        has decided since.
        """
        who = user_of(request, who)
        mine = f"""SELECT d.* FROM decisions d JOIN cards c ON c.id = d.card WHERE c.source = ? AND d.who = ?
                   AND {_LIVE} AND action != '{CARRIED}'"""
        with self.lock:
            found = self._rows(f"{mine} ORDER BY d.id DESC LIMIT 1", source, who)
            if not found:
                raise UserError("There is nothing to undo.")
            last = (found[0]["id"], found[0]["batch"])
            undone = self._rows(
                f"{mine} AND (d.id = ? OR d.batch = ?) ORDER BY d.id DESC", source, who, *last
            )
            cards = {row["card"]: self._card(row["card"]) for row in undone}
            for card in cards.values():
                if card.who is not None and f"{AND}{who}{AND}" not in f"{AND}{card.who}{AND}":
                    raise Conflict(self._seen(card, who))
            back = []
            for row in undone:
                card, before = cards[row["card"]], json.loads(row["before"])
                self._db.execute("UPDATE decisions SET undone = 1 WHERE id = ?", (row["id"],))
                after: dict[str, Any] = {**before, "by": before.get("by", who)}
                if card.double and row["action"] != "settled":
                    after = Card.together(self._opinions(card.id))
                back.append(self._write(card, after, who=who, action="undone", said=after["codes"]))
            self._undo_carried({row["batch"] or row["id"] for row in undone}, who=who)
        return back

    def _undo_carried(self, batches: set[int], *, who: str) -> None:
        """Open the cards to which decisions that are undone were carried, but for those decided
        again since.
        """
        query = f"""SELECT d.id, d.card FROM decisions d WHERE d.action = '{CARRIED}' AND d.undone = 0
                    AND d.batch IN (SELECT value FROM json_each(?))
                    AND NOT EXISTS (SELECT 1 FROM decisions e WHERE e.card = d.card AND e.id > d.id)"""
        opened = {"status": "open", "codes": None, "by": None}
        for row in self._rows(query, json.dumps([*batches])):
            self._db.execute("UPDATE decisions SET undone = 1 WHERE id = ?", (row["id"],))
            self._write(self._card(row["card"]), opened, who=who, action="undone", said=None)

    def _write(
        self,
        card: Card,
        after: dict[str, Any],
        *,
        who: str,
        action: str,
        said: _Codes,
        batch: int | None = None,
    ) -> Card:
        """Give a card another status, other codes and who decided `by` them, and add what was
        `said` as a decision.
        """
        now, kept, is_open = (
            time.time(),
            after["codes"] and json.dumps(after["codes"]),
            after["status"] == "open",
        )
        before = {"status": card.status, "codes": card.codes, "by": card.who, "at": card.at}
        is_changed = not (
            card.double and is_open and card.status == "open"
        )  # else it waits for a second opinion
        by = (None, None) if is_open else (after["by"], after.get("at") or now)
        decided = {"status": after["status"], "codes": said}
        self._claims.pop(card.id, None)  # a card for two waits for another reviewer now
        with self._db as db:
            db.execute(
                (
                    "UPDATE cards SET version = version + ?, status = ?, codes = ?, who = ?, "
                    "at = ? WHERE id = ?"
                ),
                (is_changed, after["status"], kept, *by, card.id),
            )
            db.execute(
                (
                    "INSERT INTO decisions (card, who, at, action, before, after, batch) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?)"
                ),
                (card.id, who, now, action, json.dumps(before), json.dumps(decided), batch),
            )
            if after["status"] == "settled" and action != "undone":
                # a decision is on a description: it counts in the other files that have it, too
                self._carry(
                    "NOT c.double AND c.key = (SELECT key FROM cards WHERE id = ?)", card.id
                )
        return self._card(card.id)

    def settled(self, target_cols: Sequence[str], *, of_sample: bool = False) -> list[Card]:
        """Return the settled cards of all files with these columns of codes, the first decision
        first.

        Decisions on the sample, with which a visitor tries the desk, count only for models
        `of_sample`.
        """
        query = """SELECT c.* FROM cards c JOIN sources s ON s.id = c.source WHERE c.status = 'settled'
                   AND s.targets = ? AND s.sample <= ? ORDER BY c.at, c.id"""
        return [_card(row) for row in self._rows(query, json.dumps(list(target_cols)), of_sample)]

    def decided(
        self, target_cols: Sequence[str], *, of_sample: bool = False
    ) -> dict[tuple[str, str], checked_file.DecidedCodes]:
        """Return the settled decisions by description and language, the last of each; see
        `settled`.
        """
        cards = self.settled(target_cols, of_sample=of_sample)
        keys = description_keys([card.text for card in cards])
        decisions = {}
        for key, card in zip(keys, cards, strict=True):
            at = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(card.at))
            decisions[key, card.lang] = checked_file.DecidedCodes(
                tuple(card.codes or ()), who=card.who, at=at
            )
        return decisions

    def settled_of(self, source: Number) -> list[Card]:
        """Return the settled cards of a file."""
        return [
            _card(row)
            for row in self._rows(
                "SELECT * FROM cards WHERE source = ? AND status = 'settled'", source
            )
        ]

    def decisions(self) -> pd.DataFrame:
        """Return who has decided what, of all files, and what the descriptions are settled as.

        Of cards for two it has those on which both have decided.
        """
        query = f"""SELECT s.name AS file, c.text, c.lang, c.double AS for_two, d.who, d.at, d.action, d.after AS codes,
                    c.status, coalesce(c.codes, '[]') AS settled FROM decisions d JOIN cards c ON c.id = d.card
                    JOIN sources s ON s.id = c.source WHERE {_LIVE} AND d.action != '{CARRIED}'
                    AND NOT (c.double AND c.status = 'open')
                    ORDER BY s.id, c.place, d.id"""
        with self.lock:
            found = pd.read_sql_query(query, self._db)
        found["codes"] = [" & ".join(json.loads(one)["codes"] or []) for one in found["codes"]]
        found["settled"] = [" & ".join(json.loads(one)) for one in found["settled"]]
        found["at"] = [time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(at)) for at in found["at"]]
        return found.astype(str)

    def agreement(self, source: Number) -> dict[str, Any]:
        """Return how far two people agree on a file's cards for two: their number, and those both
        decided on.
        """
        with self.lock:
            cards = [
                _card(row)
                for row in self._rows("SELECT * FROM cards WHERE source = ? AND double", source)
            ]
            pairs = [
                (card.text, self._opinions(card.id)) for card in cards if card.status != "open"
            ]
        by_name = [(text, *(opinions[who] for who in sorted(opinions))) for text, opinions in pairs]
        decided = [
            (text, one, other)
            for text, one, other, *_ in by_name
            if one is not None and other is not None
        ]
        numbers = {
            "cards": len(cards),
            "both": len(pairs),
            "disputed": sum(one.status == "disputed" for one in cards),
        }
        if not decided:
            return numbers | {"by_digits": []}
        texts, firsts, seconds = zip(*decided, strict=True)
        system = self._models.coding.coder.formatter.system
        digits = 0 if system.labels is not None else min(system.block_size - 1, 4)
        return numbers | {
            "by_digits": agreement(
                firsts, seconds, texts, digits=digits, separator=system.separator
            )
        }

    def trust(self, source: Number) -> Trust:
        """Return how much of a file is settled, and how many of its rows are right.

        The sample ends before the first card drawn that is not decided. Cards for two, which were
        drawn at random as well and take longer, are a sample of their own.
        """
        counts = """SELECT count(*) AS cards, total(times) AS rows, total(times * (status = 'settled')) AS rows_settled,
                    total(status = 'settled') AS cards_settled, total(status = 'unsure') AS cards_unsure,
                    total(status IN ('open', 'disputed')) AS undecided,
                    max(place * (status != 'open')) AS last FROM cards WHERE source = ?"""
        drawn = (
            "SELECT c.*, d.due FROM draws d JOIN cards c USING (source, place) WHERE source = "
            "? ORDER BY d.due"
        )
        with self.lock:
            found, draws = dict(self._rows(counts, source)[0]), self._rows(drawn, source)
        last, undecided, ends = found.pop("last"), found.pop("undecided"), {}
        for row in reversed(draws):
            if row["status"] in ("open", "disputed"):
                ends[row["double"]] = row
        dues = {double: row["due"] for double, row in ends.items()}
        sample = [
            row
            for row in draws
            if row["status"] == "settled" and row["due"] < dues.get(row["double"], math.inf)
        ]
        num_random = len({row["id"] for row in sample})
        right = [
            set(json.loads(row["codes"])) == set(json.loads(row["predicted"])) for row in sample
        ]
        return Trust(
            **found,
            random_cards=num_random,
            skipped=ends[0]["id"] if 0 in ends and ends[0]["place"] < last else None,
            right=share_right(right) if num_random >= FEWEST else None,
            share_right=self._known_share(source)
            if not undecided and found["cards_settled"]
            else None,
        )

    def _known_share(self, source: Number) -> float:
        """Return the share of the settled rows of a file that are right as the model coded them."""
        cards = self.settled_of(source)
        num_right = sum(
            card.times for card in cards if set(card.codes or ()) == set(card.predicted)
        )
        return num_right / sum(card.times for card in cards)


def _card(row: sqlite3.Row) -> Card:
    own = {name: row[name] and json.loads(row[name]) for name in ("predicted", "codes", "row")}
    return Card(**{**dict(row), **own, "confidence": row["conf"]})


def _keys(texts: Sequence[str], langs: Sequence[str]) -> list[str]:
    """Return what cards have in common whose descriptions and languages are the same."""
    return [f"{lang} {key}" for key, lang in zip(description_keys(texts), langs, strict=True)]
