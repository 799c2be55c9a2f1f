"""Bring coded files under review: each distinct description is a card."""

import json
import time
from pathlib import Path

import numpy as np
import pandas as pd

from histocoder.data.labelled_files import CHECKED_COL
from histocoder.desk.domain.card import Source
from histocoder.desk.domain.database import Database
from histocoder.desk.domain.trust import order_of_review
from histocoder.errors import UserError
from histocoder.evaluation.review_file import Columns, in_order_of_worth, open_coded
from histocoder.files import sha256
from histocoder.inference.predictions import code_columns
from histocoder.text.languages import Language
from histocoder.text.normalize import description_keys

CORRECTIONS_FILE = "corrections.csv"
DECISIONS_FILE = "decisions.csv"
_MAX_COLUMNS_SHOWN = 12  # of a row, of those before the codes


class Sources:
    """The coded files under review; two people decide on a share of each one's cards."""

    def __init__(self, folder: Path, db: Database, *, double_share: float) -> None:
        self._folder = folder
        self._db = db
        self._double_share = double_share

    def add(
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

        Raises UserError if no row has codes, as where all descriptions are blank.
        """
        digest = sha256(path)
        targets = json.dumps(list(columns.target_cols))
        content = f"{digest} {columns.input_col} {columns.language_col} {targets}"
        for row in self._db.rows("sources_of_content", content=content, digest=digest):
            return self._source(row["id"])

        # the cards, in the order in which they are reviewed, and which of them two people decide on
        seed = int(digest, 16)
        cards = _read_cards(path, columns)
        if cards.empty:
            raise UserError(
                f"No row of {name} has codes: code the file again with the column that holds its "
                "descriptions."
            )
        cards["double"] = np.random.default_rng(seed + 1).random(len(cards)) < self._double_share
        order, draws = order_of_review(cards["times"].to_numpy(), seed)
        cards["place"] = np.argsort(order)

        # the source with all its cards, or nothing of it
        with self._db.transaction():
            # another request may have added it while this one read its cards
            for row in self._db.rows("sources_of_content", content=content, digest=digest):
                return self._source(row["id"])
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
            carry(self._db, source=source)
        return self._source(source)

    def all(self) -> list[Source]:
        """List the coded files that are under review, the last one first."""
        return [Source(**dict(row)) for row in self._db.rows("sources")]

    def _source(self, source_id: int) -> Source:
        """Return a source; raise KeyError where there is none of that number."""
        sources = {source.id: source for source in self.all()}
        return sources[source_id]

    def remove(self, source_id: int) -> None:
        """Remove a file from the review: its cards, their other columns and all decisions on them.

        Nothing of it remains in the database. Models that were trained on the decisions keep what
        they have learned.
        """
        self._source(source_id)  # raises an error if there is none
        with self._db.transaction():
            for table in ("decisions", "draws", "cards", "source"):
                self._db.change(f"remove_{table}", source=source_id)
        self._db.forget_deleted()
        # files of earlier exports on the server; the second one is 1.0.0's
        for name in (CORRECTIONS_FILE, DECISIONS_FILE):
            (self._folder / name).unlink(missing_ok=True)

    def remove_file(self, file_id: str) -> None:
        """Remove what was made of a file under Files from the review."""
        for row in self._db.rows("sources_of_file", file=file_id):
            self.remove(row["id"])


def carry(db: Database, *, source: int | None = None, card: int | None = None) -> None:
    """Carry decisions to the cards of a source, or with the description of a card, from the last
    cards of the same columns of codes with their descriptions.

    Cards on which somebody has decided keep that decision. Being unsure is carried to cards alone
    that an earlier decision was carried to. A decision that is carried belongs to the batch of the
    one that it comes from, with which it is undone.
    """
    for row in db.rows("to_carry", source=source, card=card):
        codes = json.loads(row["codes"] or "null")
        db.change(
            "carry",
            card=row["id"],
            status=row["status"],
            codes=row["codes"],
            deciders=row["deciders"],
            at=row["at"],
        )
        db.change(
            "add_decision",
            card=row["id"],
            who=" & ".join(json.loads(row["deciders"])),
            at=row["at"],
            action="carried",
            before=row["before"],
            after=json.dumps({"status": row["status"], "codes": codes}),
            batch=row["batch"],
        )


def _read_cards(path: Path, columns: Columns) -> pd.DataFrame:
    """Return the distinct descriptions of a coded file, those most worth checking first, as columns
    of cards.
    """
    file = open_coded(path, columns)

    # what stands before the codes helps to judge them: age, place, and whatever else a table has
    first_code = next(iter(code_columns(file.header)), file.header[-1])
    columns_shown = []
    for name in file.header[: file.header.index(first_code)]:
        is_used = name in (columns.input_col, columns.language_col, "lang")
        if not is_used and file.header.count(name) == 1:
            columns_shown.append(name)
    del columns_shown[_MAX_COLUMNS_SHOWN:]

    # languages as the model reads them; of a file without languages they are unknown
    table = in_order_of_worth(file, columns, beside=columns_shown)
    lang_col = table.columns[1]
    langs = ["unk"] * len(table)
    if lang_col != CHECKED_COL:
        langs = [str(Language(lang)) for lang in table[lang_col].fillna("unk")]
    texts = table[columns.input_col].fillna("").astype(str)
    keys = description_keys(texts.tolist())

    # lists and mappings are JSON in the database
    predicted = []
    beside = []
    for cells in table.fillna("").to_dict("records"):
        codes = [cells[name] for name in columns.target_cols if cells[name]]
        predicted.append(json.dumps(codes))
        shown = {name: cells[f"row_{name}"] for name in columns_shown if cells[f"row_{name}"]}
        beside.append(json.dumps(shown))
    cards = pd.DataFrame({"text": texts, "lang": langs, "predicted": predicted, "row": beside})
    cards["key"] = [f"{lang} {key}" for lang, key in zip(langs, keys, strict=True)]
    cards["conf"] = table["conf"]
    cards["times"] = table["times"]
    return cards
