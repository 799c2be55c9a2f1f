"""The outcome of reviews: corrections, decisions, agreement, and how far each file is."""

import json
import time
from collections.abc import Sequence

import pandas as pd
from pydantic import BaseModel

from histocoder.desk.domain.card import Card, card_of, opinions_on
from histocoder.desk.domain.database import Database
from histocoder.desk.domain.models import Models
from histocoder.desk.domain.trust import Draw, Trust, trust_of
from histocoder.evaluation.checked_file import DecidedCodes
from histocoder.evaluation.metrics import CodeAgreement
from histocoder.evaluation.scores import agreement
from histocoder.text.normalize import description_keys


class Agreement(BaseModel):
    """Agreement of two people on the cards for two of a file."""

    cards: int
    both: int  # number of cards on which both have decided
    disputed: int
    by_digits: list[CodeAgreement]  # of the cards for which both gave codes


class Outcome:
    """The outcome of the review of all files."""

    def __init__(self, db: Database, models: Models) -> None:
        self._db = db
        self._models = models

    def settled(self, target_cols: Sequence[str], *, of_sample: bool = False) -> list[Card]:
        """Return the settled cards of all files with these columns of codes, the first decision
        first.

        Decisions on the sample, with which a visitor tries the desk, count only for models
        `of_sample`.
        """
        targets = json.dumps(list(target_cols))
        rows = self._db.rows("settled", targets=targets, of_sample=of_sample)
        return list(map(card_of, rows))

    def decided(
        self, target_cols: Sequence[str], *, of_sample: bool = False
    ) -> dict[tuple[str, str], DecidedCodes]:
        """Return the settled decisions by description and language, the last of each; see
        `settled`.
        """
        cards = self.settled(target_cols, of_sample=of_sample)

        # later cards replace earlier ones with the same description
        keys = description_keys([card.text for card in cards])
        decisions = {}
        for key, card in zip(keys, cards, strict=True):
            codes = tuple(card.codes or ())
            at = _local_time(card.at or 0.0)
            decisions[key, card.lang] = DecidedCodes(codes, who=card.who, at=at)
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

        # codes of the cards on which neither is unsure
        texts: list[str] = []
        first_codes: list[list[str]] = []
        second_codes: list[list[str]] = []
        with self._db.lock:
            cards = list(map(card_of, self._db.rows("cards_for_two", source=source_id)))
            for card in cards:
                num_disputed += card.status == "disputed"
                if card.status == "open":
                    continue
                num_both += 1
                # the coders are told apart by their names, whoever was first
                first, second, *_ = (
                    codes for _, codes in sorted(opinions_on(self._db, card.id).items())
                )
                if first is not None and second is not None:
                    texts.append(card.text)
                    first_codes.append(first)
                    second_codes.append(second)

        # by first digits, too, where codes have any
        by_digits: list[CodeAgreement] = []
        if texts:
            system = self._models.coding.coder.formatter.system
            digits = 0
            if system.labels is None:
                digits = min(system.block_size - 1, 4)
            by_digits = agreement(
                first_codes, second_codes, texts, digits=digits, separator=system.separator
            )
        return Agreement(
            cards=len(cards), both=num_both, disputed=num_disputed, by_digits=by_digits
        )

    def trust(self, source_id: int) -> Trust:
        """Return how much of a file is settled, and how many of its rows are right."""
        with self._db.lock:
            progress = dict(self._db.rows("progress", source=source_id)[0])
            rows = self._db.rows("draws", source=source_id)
        draws = [Draw(due=row["due"], card=card_of(row)) for row in rows]
        return trust_of(progress, draws)


def _local_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(seconds))
