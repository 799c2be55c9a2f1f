"""Review coded files card by card; each decision is kept in SQLite."""

import json
import sqlite3
import time
from collections.abc import Mapping, Sequence

from histocoder.desk.domain.card import (
    Card,
    Codes,
    Conflict,
    Evidence,
    Filter,
    Listing,
    Opinion,
    Verdict,
    card_of,
    joint_verdict,
    opinions_on,
    verdict_of,
)
from histocoder.desk.domain.database import Database
from histocoder.desk.domain.models import Models
from histocoder.desk.domain.sources import carry
from histocoder.errors import UserError

_CLAIM_SECONDS = 180.0  # time for which a card that one reviewer was given is not given to another


class Cards:
    """The cards of a desk in its database; each decision is on disk before its method returns."""

    def __init__(self, db: Database, models: Models) -> None:
        self._db = db
        self._models = models
        self._claims: dict[int, tuple[str, float]] = {}  # card -> reviewer, and when

    # ---- What reviewers see ----

    def next_cards(self, source_id: int, who: str, *, after: int, count: int) -> list[Evidence]:
        """Return the next open descriptions, the most worth checking first; others do not get them
        for a while.
        """
        now = time.monotonic()
        with self._db.lock:
            # a reviewer who has gone does not keep their cards
            for card_id, (_, since) in list(self._claims.items()):
                if now - since >= _CLAIM_SECONDS:
                    del self._claims[card_id]

            # as many more rows as others have before them, so that enough are left
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
        with self._db.lock:
            total = self._db.count("matches", **values)
            cards = [self._seen(card_of(row), who) for row in self._db.rows("matches", **values)]

        # the titles of all codes that the list shows
        codes: set[str] = set()
        for card in cards:
            codes.update(card.predicted, card.codes or ())
            for opinion in card.opinions:
                codes.update(opinion.codes or ())
        all_titles = self._models.coding.titles
        titles = {code: all_titles[code] for code in codes & all_titles.keys()}
        return Listing(total=total, cards=cards, titles=titles)

    def _with_evidence(self, cards: list[Card]) -> list[Evidence]:
        if not cards:
            return []
        coding = self._models.coding
        answers = coding.answer([card.text for card in cards], [card.lang for card in cards])

        # codes that the answer has, too, have its probabilities
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

    def _seen(self, card: Card, who: str) -> Card:
        """Return a card as a reviewer may see it: of a card for two their own opinion alone, or,
        once both have decided, both.
        """
        if not card.double:
            card.carried = self._is_carried(card)
            return card
        opinions = opinions_on(self._db, card.id)
        if card.status != "open":
            card.opinions = [Opinion(who=name, codes=codes) for name, codes in opinions.items()]
        elif who in opinions:
            card.codes = opinions[who]
            card.status = "unsure" if card.codes is None else "settled"
            card.deciders = [who]
        return card

    def _is_carried(self, card: Card) -> bool:
        """Return whether the decision on a card is one on the same description elsewhere."""
        return any(
            row["action"] == "carried" for row in self._db.rows("last_on_card", card=card.id)
        )

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
            # all versions first, since a decision changes the other spellings of its description
            for card_id, version in versions.items():
                self._current(card_id, version, who)

            # a batch has the number of its first decision
            batch = self._db.rows("last_decision")[0]["id"] + 1
            for card_id in versions:
                card = self._card(card_id)
                self._models.coding.check_codes(card.predicted)
                self._decide(card, who, card.predicted, batch=batch)
        return [self._seen(self._card(card_id), who) for card_id in versions]

    def _current(self, card_id: int, version: int, who: str) -> Card:
        """Return a card; raise Conflict if it is not as the reviewer saw it.

        A reviewer who has decided on another spelling of its description is not in conflict with
        that decision of their own.
        """
        card = self._card(card_id)
        is_own = who in card.deciders and self._is_carried(card)
        if card.version != version and not is_own:
            raise Conflict(self._seen(card, who))
        return card

    def _check_targets(self, cards: Sequence[int]) -> None:
        """Raise a UserError if cards are of a file that was coded in another classification than
        that in use.
        """
        model_targets = self._models.coding.target_cols
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

        # the first two decisions on a card for two are opinions; a third one settles a dispute
        verdict = verdict_of(codes, who)
        if card.double and card.status == "open":
            verdict = joint_verdict(opinions_on(self._db, card.id) | {who: codes})
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

            # all or none, if somebody has decided on one of the cards since
            for decision in decisions:
                card = self._card(decision["card"])
                if card.deciders and who not in card.deciders:
                    raise Conflict(self._seen(card, who))
            for decision in decisions:
                carried = self._db.rows("carried_from", card=decision["card"])
                self._undo(decision, who)
                self._undo_carried(carried, who)
        return [self._card(decision["card"]) for decision in decisions]

    def _undo(self, decision: sqlite3.Row, who: str) -> None:
        self._db.change("undo_decision", decision=decision["id"])
        card = self._card(decision["card"])
        if card.double and decision["action"] != "settled":
            verdict = joint_verdict(opinions_on(self._db, card.id))
        else:
            verdict = _verdict_before(decision, who)
        self._write(card, verdict, who=who, action="undone", codes=verdict.codes)

    def _undo_carried(self, carried: Sequence[sqlite3.Row], who: str) -> None:
        """Undo decisions that were carried, the last one first.

        A card that was decided on again since keeps that decision; to undo it as well does not
        bring back the one that was carried.
        """
        for decision in carried:
            last_decision = self._db.rows("last_on_card", card=decision["card"])[0]
            if last_decision["id"] == decision["id"]:
                self._undo(decision, who)
            else:
                self._db.change("undo_decision", decision=decision["id"])
                self._db.change(
                    "change_before",
                    card=decision["card"],
                    decision=decision["id"],
                    before=decision["before"],
                )

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
        self._claims.pop(card.id, None)  # a card for two waits for another reviewer now

        # a first opinion on a card for two changes nothing that others see
        waits_for_second = card.double and is_open and card.status == "open"
        self._db.change(
            "change_card",
            card=card.id,
            is_changed=not waits_for_second,
            status=verdict.status,
            codes=verdict.codes and json.dumps(verdict.codes),
            deciders=None if is_open else json.dumps(verdict.deciders),
            at=None if is_open else verdict.at or now,
        )

        # what `undo` goes back to, and what the reviewer said
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

        # a decision is on a description: it counts in the other files that have it, too
        if verdict.status in ("settled", "unsure") and action != "undone":
            carry(self._db, card=card.id)


def _verdict_before(decision: sqlite3.Row, who: str) -> Verdict:
    """Return what was decided on a card before a decision."""
    before = json.loads(decision["before"])
    deciders = before.get("deciders")
    if deciders is None:  # a record of an earlier version, which joined the names
        names = before.get("by", who)
        deciders = names.split(" & ") if names else []
    return Verdict(before["status"], before["codes"], tuple(deciders), before.get("at"))
