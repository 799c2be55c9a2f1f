"""Review coded files card by card: each distinct description is a card, and each decision is kept
in SQLite.
"""

import json
import sqlite3
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from pydantic import BaseModel

from histocoder.data.labelled_files import CHECKED_COL
from histocoder.desk.domain.card import (
    Card,
    Codes,
    Conflict,
    Evidence,
    Filter,
    Listing,
    Opinion,
    Source,
    Verdict,
    card_of,
    joint_verdict,
    verdict_of,
)
from histocoder.desk.domain.database import Database
from histocoder.desk.domain.models import Models
from histocoder.desk.domain.trust import Draw, Trust, order_of_review, trust_of
from histocoder.errors import UserError
from histocoder.evaluation import checked_file
from histocoder.evaluation.metrics import CodeAgreement
from histocoder.evaluation.review_file import Columns, in_order_of_worth, open_coded
from histocoder.evaluation.scores import agreement
from histocoder.files import sha256
from histocoder.inference.predictions import code_columns
from histocoder.text.languages import Language
from histocoder.text.normalize import description_keys

CORRECTIONS_FILE = "corrections.csv"
DECISIONS_FILE = "decisions.csv"
_CLAIM_SECONDS = 180.0  # time for which a card that one reviewer was given is not given to another
_MAX_COLUMNS_SHOWN = 12  # of a row, of those before the codes


class Agreement(BaseModel):
    """Agreement of two people on the cards for two of a file."""

    cards: int
    both: int  # number of cards on which both have decided
    disputed: int
    by_digits: list[CodeAgreement]  # of the cards for which both gave codes


class Cards:
    """The cards of a desk in its database; each decision is on disk before its method returns."""

    def __init__(self, path: Path, models: Models, *, double_share: float = 0.0) -> None:
        self._db = Database(path)
        self._models = models
        self._double_share = double_share
        # files of earlier exports on the server; the second one is 1.0.0's
        self._exports = [path.with_name(name) for name in (CORRECTIONS_FILE, DECISIONS_FILE)]
        self._claims: dict[int, tuple[str, float]] = {}  # card -> reviewer, and when
        self.lock = self._db.lock

    def close(self) -> None:
        self._db.close()

    # ---- Files under review ----

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
        digest = sha256(path)
        targets = json.dumps(list(columns.target_cols))
        content = f"{digest} {columns.input_col} {columns.language_col} {targets}"
        for row in self._db.rows("sources_of_content", content=content, digest=digest):
            return self._source(row["id"])

        # the cards, in the order in which they are reviewed, and which of them two people decide on
        seed = int(digest, 16)
        cards = _read_cards(path, columns)
        cards["double"] = np.random.default_rng(seed + 1).random(len(cards)) < self._double_share
        order, draws = order_of_review(cards["times"].to_numpy(), seed)
        cards["place"] = np.argsort(order)

        with self._db.transaction():
            source = self._db.change(
                "add_source",
                name=name,
                content=content,
                at=time.time(),
                targets=targets,
                file=file_id,
                is_sample=is_sample,
            )
            cards["source"] = source
            self._db.change_many("add_card", cards.to_dict("records"))
            for due, card in draws:
                place = int(cards.at[card, "place"])
                self._db.change("add_draw", source=source, due=due, place=place)
            self._carry(source=source)
        return self._source(source)

    def sources(self) -> list[Source]:
        """List the coded files that are under review, the last one first."""
        return [Source(**dict(row)) for row in self._db.rows("sources")]

    def _source(self, source_id: int) -> Source:
        return next(source for source in self.sources() if source.id == source_id)

    def remove(self, source_id: int) -> None:
        """Remove a file from the review: its cards, their other columns and all decisions on them.

        Nothing of it remains in the database. Models that were trained on the decisions keep what
        they have learned.
        """
        if source_id not in [source.id for source in self.sources()]:
            raise KeyError(source_id)
        with self._db.transaction():
            for table in ("decisions", "draws", "cards", "source"):
                self._db.change(f"remove_{table}", source=source_id)
        self._db.forget_deleted()
        for path in self._exports:
            path.unlink(missing_ok=True)

    def remove_file(self, file_id: str) -> None:
        """Remove what was made of a file under Files from the review."""
        for row in self._db.rows("sources_of_file", file=file_id):
            self.remove(row["id"])

    # ---- What reviewers see ----

    def next_cards(self, source_id: int, who: str, *, after: int, count: int) -> list[Evidence]:
        """Return the next open descriptions, the most worth checking first; others do not get them
        for a while.
        """
        now = time.monotonic()
        with self.lock:
            for card_id, (_, since) in list(self._claims.items()):
                if now - since >= _CLAIM_SECONDS:
                    del self._claims[card_id]
            claimed = [card_id for card_id in self._claims if self._claims[card_id][0] != who]
            rows = self._db.rows(
                "next_cards", source=source_id, who=who, after=after, limit=count + len(claimed)
            )
            cards = [card_of(row) for row in rows if row["id"] not in claimed][:count]
            for card in cards:
                self._claims[card.id] = (who, now)
        return self._with_evidence(cards)

    def evidence(self, card_id: int, who: str) -> Evidence:
        """Return a card, as this reviewer may see it, and what helps to judge it."""
        return self._with_evidence([self._seen(self._card(card_id), who)])[0]

    def listing(self, source_id: int, who: str, wanted: Filter) -> Listing:
        """List the cards that a filter finds, as a reviewer may see them, with the titles of their
        codes.
        """
        values = wanted.model_dump() | {"source": source_id}
        with self.lock:
            total = self._db.count("matches", **values)
            cards = [self._seen(card_of(row), who) for row in self._db.rows("matches", **values)]

        # the titles of all codes that the list shows
        codes: set[str] = set()
        for card in cards:
            codes.update(card.predicted, card.codes or ())
            for opinion in card.opinions:
                codes.update(opinion.codes or ())
        titles = {}
        for code in codes & self._models.coding.titles.keys():
            titles[code] = self._models.coding.titles[code]
        return Listing(total=total, cards=cards, titles=titles)

    def _with_evidence(self, cards: list[Card]) -> list[Evidence]:
        if not cards:
            return []
        coding = self._models.coding
        answers = coding.answer([card.text for card in cards], [card.lang for card in cards])
        evidence = []
        for card, answer in zip(cards, answers, strict=True):
            answer_codes = {code.code: code for code in answer.alternatives + answer.codes}
            predicted = [answer_codes.get(code) or coding.titled(code) for code in card.predicted]
            evidence.append(Evidence(card=card, answer=answer, predicted=predicted))
        return evidence

    def _card(self, card_id: int) -> Card:
        """Return a card; raise KeyError where there is none of that number."""
        for row in self._db.rows("card", card=card_id):
            return card_of(row)
        raise KeyError(card_id)

    def _opinions(self, card_id: int) -> dict[str, Codes]:
        """Return who has which opinion on a card for two, the last of each person; not how it was
        settled.
        """
        opinions = {}
        for row in self._db.rows("opinions", card=card_id):
            opinions[row["who"]] = json.loads(row["after"])["codes"]
        return opinions

    def _seen(self, card: Card, who: str) -> Card:
        """Return a card as a reviewer may see it: of a card for two their own opinion alone, or,
        once both have decided, both.
        """
        if not card.double:
            if card.status == "settled":
                actions = self._db.rows("last_action", card=card.id)
                card.carried = any(row["action"] == "carried" for row in actions)
            return card
        opinions = self._opinions(card.id)
        if card.status != "open":
            card.opinions = [Opinion(who=name, codes=codes) for name, codes in opinions.items()]
        elif who in opinions:
            card.codes = opinions[who]
            card.status = "unsure" if card.codes is None else "settled"
            card.deciders = [who]
        return card

    # ---- Decisions ----

    def decide(self, card_id: int, version: int, who: str, codes: Codes) -> Card:
        """Decide on a card; raise Conflict if another reviewer has since that version of it."""
        self._check_targets([card_id])
        if codes is not None:
            codes = self._models.coding.check_codes(codes)
        with self._db.transaction():
            card = self._current(card_id, version, who)
            self._decide(card, who, codes)
        return self._seen(self._card(card_id), who)

    def accept(self, versions: Mapping[int, int], who: str) -> list[Card]:
        """Accept the predicted codes of several cards, each with the version that the reviewer saw;
        all or, if another reviewer has decided on one, none.
        """
        self._check_targets(list(versions))
        with self._db.transaction():
            batch = self._db.rows("last_decision")[0]["id"] + 1
            for card_id, version in versions.items():
                card = self._current(card_id, version, who)
                self._models.coding.check_codes(card.predicted)
                self._decide(card, who, card.predicted, batch=batch)
        return [self._seen(self._card(card_id), who) for card_id in versions]

    def _current(self, card_id: int, version: int, who: str) -> Card:
        """Return a card; raise Conflict if it is not as the reviewer saw it."""
        card = self._card(card_id)
        if card.version != version:
            raise Conflict(self._seen(card, who))
        return card

    def _check_targets(self, cards: Sequence[int]) -> None:
        """Raise a UserError if cards are of a file that was coded in another classification than
        that in use.
        """
        model_targets = list(self._models.coding.coder.model.config.target_cols)
        for row in self._db.rows("targets_of_cards", cards=json.dumps(cards)):
            targets = json.loads(row["targets"])
            if targets != model_targets:
                raise UserError(
                    f"This file was coded with {', '.join(targets)}, and the model in use gives "
                    f"{', '.join(model_targets)}. Switch to a model of this file's codes under "
                    "Models first."
                )

    def _decide(self, card: Card, who: str, codes: Codes, *, batch: int | None = None) -> None:
        action = "changed"
        if codes is None:
            action = "unsure"
        elif set(codes) == set(card.predicted):
            action = "accepted"
        verdict = verdict_of(codes, who)
        if card.double and card.status == "open":
            verdict = joint_verdict(self._opinions(card.id) | {who: codes})
        elif card.double:
            action = "settled"
        self._write(card, verdict, who=who, action=action, codes=codes, batch=batch)

    def undo(self, source_id: int, who: str) -> list[Card]:
        """Undo this reviewer's last decision, or all that were made at once; raise Conflict if
        another has decided on one of the cards since.
        """
        with self._db.transaction():
            decisions = self._db.rows("last_batch", source=source_id, who=who)
            if not decisions:
                raise UserError("There is nothing to undo.")
            for decision in decisions:
                card = self._card(decision["card"])
                if card.deciders and who not in card.deciders:
                    raise Conflict(self._seen(card, who))
            for decision in decisions:
                self._undo(decision, who)
            self._undo_carried({row["batch"] or row["id"] for row in decisions}, who)
        return [self._card(decision["card"]) for decision in decisions]

    def _undo(self, decision: sqlite3.Row, who: str) -> None:
        self._db.change("undo_decision", decision=decision["id"])
        card = self._card(decision["card"])
        if card.double and decision["action"] != "settled":
            verdict = joint_verdict(self._opinions(card.id))
        else:
            verdict = _verdict_before(decision, who)
        self._write(card, verdict, who=who, action="undone", codes=verdict.codes)

    def _undo_carried(self, batches: set[int], who: str) -> None:
        """Open the cards to which decisions that are undone were carried, but for those decided
        again since.
        """
        for row in self._db.rows("carried_from", batches=json.dumps(list(batches))):
            self._db.change("undo_decision", decision=row["id"])
            self._write(self._card(row["card"]), Verdict(), who=who, action="undone", codes=None)

    def _write(
        self,
        card: Card,
        verdict: Verdict,
        *,
        who: str,
        action: str,
        codes: Codes,
        batch: int | None = None,
    ) -> None:
        """Change what is decided on a card, and add the reviewer's own `codes` as a decision."""
        now = time.time()
        is_open = verdict.status == "open"
        waits_for_second = card.double and is_open and card.status == "open"
        self._claims.pop(card.id, None)  # a card for two waits for another reviewer now
        self._db.change(
            "change_card",
            card=card.id,
            is_changed=not waits_for_second,
            status=verdict.status,
            codes=json.dumps(verdict.codes) if verdict.codes else None,
            deciders=None if is_open else json.dumps(verdict.deciders),
            at=None if is_open else verdict.at or now,
        )
        before = {
            "status": card.status,
            "codes": card.codes,
            "deciders": card.deciders,
            "at": card.at,
        }
        self._db.change(
            "add_decision",
            card=card.id,
            who=who,
            at=now,
            action=action,
            before=json.dumps(before),
            after=json.dumps({"status": verdict.status, "codes": codes}),
            batch=batch,
        )
        if verdict.status == "settled" and action != "undone":
            # a decision is on a description: it counts in the other files that have it, too
            self._carry(card=card.id)

    def _carry(self, *, source: int | None = None, card: int | None = None) -> None:
        """Settle the open cards of a source, or with the description of a card, as the last cards
        of the same columns of codes with their descriptions were.

        A decision that is carried belongs to the batch of the one that it comes from, with which it
        is undone.
        """
        before = json.dumps({"status": "open", "codes": None, "deciders": [], "at": None})
        for row in self._db.rows("to_carry", source=source, card=card):
            self._db.change(
                "carry",
                card=row["id"],
                codes=row["codes"],
                deciders=row["deciders"],
                at=row["at"],
            )
            self._db.change(
                "add_decision",
                card=row["id"],
                who=" & ".join(json.loads(row["deciders"])),
                at=row["at"],
                action="carried",
                before=before,
                after=json.dumps({"status": "settled", "codes": json.loads(row["codes"])}),
                batch=row["batch"],
            )

    # ---- What was decided ----

    def settled(self, target_cols: Sequence[str], *, of_sample: bool = False) -> list[Card]:
        """Return the settled cards of all files with these columns of codes, the first decision
        first.

        Decisions on the sample, with which a visitor tries the desk, count only for models
        `of_sample`.
        """
        targets = json.dumps(list(target_cols))
        rows = self._db.rows("settled", targets=targets, of_sample=of_sample)
        return [card_of(row) for row in rows]

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
            codes = tuple(card.codes or ())
            at = _local_time(card.at or 0.0)
            decisions[key, card.lang] = checked_file.DecidedCodes(codes, who=card.who, at=at)
        return decisions

    def decisions(self) -> pd.DataFrame:
        """Return who has decided what, of all files, and what the descriptions are settled as.

        Of cards for two it has those on which both have decided.
        """
        rows = []
        for row in self._db.rows("decisions"):
            decision = dict(row)
            decision["at"] = _local_time(decision["at"])
            decision["codes"] = " & ".join(json.loads(decision["codes"])["codes"] or ())
            decision["settled"] = " & ".join(json.loads(decision["settled"]))
            rows.append(decision)
        names = "file text lang for_two who at action codes status settled".split()
        return pd.DataFrame(rows, columns=names).astype(str)

    def agreement(self, source_id: int) -> Agreement:
        """Return how far two people agree on a file's cards for two."""
        num_both = 0
        num_disputed = 0
        texts: list[str] = []
        first_codes: list[list[str]] = []
        second_codes: list[list[str]] = []
        with self.lock:
            cards = [card_of(row) for row in self._db.rows("cards_for_two", source=source_id)]
            for card in cards:
                num_disputed += card.status == "disputed"
                if card.status == "open":
                    continue
                num_both += 1
                # the coders are told apart by their names, whoever was first
                first, second, *_ = (codes for _, codes in sorted(self._opinions(card.id).items()))
                if first is not None and second is not None:
                    texts.append(card.text)
                    first_codes.append(first)
                    second_codes.append(second)

        by_digits: list[CodeAgreement] = []
        if texts:
            system = self._models.coding.coder.formatter.system
            digits = 0 if system.labels is not None else min(system.block_size - 1, 4)
            by_digits = agreement(
                first_codes, second_codes, texts, digits=digits, separator=system.separator
            )
        return Agreement(
            cards=len(cards), both=num_both, disputed=num_disputed, by_digits=by_digits
        )

    def trust(self, source_id: int) -> Trust:
        """Return how much of a file is settled, and how many of its rows are right."""
        with self.lock:
            progress = dict(self._db.rows("progress", source=source_id)[0])
            rows = self._db.rows("draws", source=source_id)
        draws = [Draw(due=row["due"], card=card_of(row)) for row in rows]
        return trust_of(progress, draws)


def _verdict_before(decision: sqlite3.Row, who: str) -> Verdict:
    """Return what was decided on a card before a decision."""
    before = json.loads(decision["before"])
    deciders = before.get("deciders")
    if deciders is None:  # a record of an earlier version, which joined the names
        names = before.get("by", who)
        deciders = names.split(" & ") if names else []
    return Verdict(before["status"], before["codes"], tuple(deciders), before.get("at"))


def _read_cards(path: Path, columns: Columns) -> pd.DataFrame:
    """Return the distinct descriptions of a coded file, those most worth checking first, as columns
    of cards.
    """
    file = open_coded(path, columns)
    first_code = next(iter(code_columns(file.header)), file.header[-1])
    columns_shown = []
    for name in file.header[: file.header.index(first_code)]:
        is_used = name in (columns.input_col, columns.language_col, "lang")
        if not is_used and file.header.count(name) == 1:
            columns_shown.append(name)
    del columns_shown[_MAX_COLUMNS_SHOWN:]

    rows = in_order_of_worth(file, columns, beside=columns_shown)
    lang_col = rows.columns[1]
    langs = ["unk"] * len(rows)
    if lang_col != CHECKED_COL:
        langs = [str(Language(lang)) for lang in rows[lang_col].fillna("unk")]
    texts = rows[columns.input_col].fillna("").astype(str)
    keys = description_keys(texts.tolist())

    # row by row, since pandas 2.2 makes no records of a frame without columns
    codes = rows[list(columns.target_cols)].fillna("").to_numpy(dtype=object)
    cells = rows[[f"row_{name}" for name in columns_shown]].to_numpy(dtype=object)
    return pd.DataFrame(
        {
            "text": texts,
            "lang": langs,
            "key": [f"{lang} {key}" for lang, key in zip(langs, keys, strict=True)],
            "predicted": [json.dumps([code for code in row if code]) for row in codes],
            "conf": rows["conf"],
            "times": rows["times"],
            "row": [json.dumps(_filled(columns_shown, row)) for row in cells],
        }
    )


def _filled(names: Sequence[str], cells: np.ndarray) -> dict[str, str]:
    return {name: cell for name, cell in zip(names, cells, strict=True) if not pd.isna(cell)}


def _local_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(seconds))
