"""Code a few descriptions, with what helps to judge the codes: alternatives, known answers, nearest
neighbours.
"""

import json
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
from pydantic import BaseModel
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.neighbors import NearestNeighbors

from histocoder.checkpoints.model_files import CONFIG_FILE, WEIGHTS_FILE
from histocoder.checkpoints.run_files import METRICS_FILE
from histocoder.checkpoints.run_folder import run_of, run_settings
from histocoder.data.code_columns import column_of_few
from histocoder.data.examples import HELD_OUT, TRAIN, Examples
from histocoder.desk.domain.sample import TITLES
from histocoder.errors import UserError
from histocoder.evaluation.baselines import run_rows
from histocoder.evaluation.scores import code_sets
from histocoder.evaluation.summary import FEW_TEXTS, TARGET_ACCURACY
from histocoder.files import sha256
from histocoder.inference.coder import Coder
from histocoder.inference.known import Known
from histocoder.inference.predictions import Prediction
from histocoder.text.languages import NAMES, Language
from histocoder.text.normalize import description_keys

NO_OCCUPATION = "-1"  # HISCO's code for no occupation
_ALTERNATIVES, _LEAST_PROBABILITY = 9, 0.005
_MATCHES = (r"\b{}\b", r"\b{}", "{}")  # whole words, then beginnings of words, then parts
_NEIGHBOURS = 5
_MOST_SEARCHED = 1_000_000  # number of descriptions: 1 GB of n-grams


class Code(BaseModel):
    """A code, and its meaning."""

    code: str
    title: str | None = None
    probability: float | None = None  # by all experts together


class Neighbour(BaseModel):
    """A description of the training data."""

    text: str
    lang: str
    codes: list[Code]
    similarity: float  # cosine of their n-grams


class Category(BaseModel):
    """The most probable category of an attribute, such as status."""

    attribute: str
    label: str | None  # None: none
    probability: float


class Answer(BaseModel):
    """Codes of a description, and what helps to judge them."""

    text: str
    lang: str
    codes: list[Code]
    confidence: float | None  # probability of the set of codes
    attributes: list[Category] = []
    known: list[Code] | None = None  # codes that people gave this description in the training data
    known_share: float | None = None  # share of its rows that have these codes
    alternatives: list[
        Code
    ] = []  # other codes, by the experts' combined probability of being the first
    neighbours: list[Neighbour] = []


class Surety(BaseModel):
    """Share of right answers among those of which a model is surest, by the report of its run."""

    sure: float | None = (
        None  # confidence from which on 95 % are right; None where they never are, or nobody knows
    )
    most_right: float | None = (
        None  # share that is right of what it is surest of, where that is less than 95 %
    )
    of_titles: bool = (
        False  # whether it was measured on titles of codes, which are easier than descriptions
    )
    of_few: bool = False  # whether it was measured on too few descriptions


class NamedLanguage(BaseModel):
    """A language that the model knows."""

    code: str
    name: str


class Coding:
    """A model, and its run's training data as evidence."""

    def __init__(self, coder: Coder, folder: Path, *, name: str) -> None:
        self.coder, self.folder, self.name, run = coder, folder, name, run_of(folder)
        self.model_id = (
            f"{sha256(folder / WEIGHTS_FILE)} {sha256(folder / CONFIG_FILE)} {coder.precision}"
        )
        self.settings = run_settings(run)
        self.surety = surety_of(run)
        coder.turn, coder.num_workers = threading.Lock(), 1
        self.titles = coder.model.config.descriptions
        self.known: Known | None = None
        self.neighbours: Neighbours | None = None
        rows = run_rows(run, coder, TRAIN, HELD_OUT)
        if rows is not None:
            examples = rows.coded()
            self.known = Known(languages=coder.model.config.languages)
            self.known.add(examples)
            self.neighbours = Neighbours(examples)

    def titled(self, code: str, probability: float | None = None) -> Code:
        return Code(code=code, title=self.titles.get(code), probability=probability)

    def check_codes(self, codes: Sequence[str]) -> list[str]:
        """Return codes that a person gave, read as those of tables are; raise UserError where they
        do not fit.
        """
        formatter = self.coder.formatter
        column = column_of_few(codes, known=self.coder.codes, system=formatter.system)
        cells = [column.read(code) for code in codes]
        for code, cell in zip(codes, cells, strict=True):
            if cell.is_short:
                raise UserError(f"{code!r} {cell.problem}; write leading zeros, too.")
            if cell.problem:
                raise UserError(f"{code!r} {cell.problem}.")
        found = list(dict.fromkeys(code for cell in cells for code in cell.codes))
        if not 1 <= len(found) <= formatter.num_blocks:
            raise UserError(
                f"There are {len(found)} codes; choose one to {formatter.num_blocks}, or "
                "mark as unsure."
            )
        return found

    def search(self, q: str, limit: int) -> list[Code]:
        """Search the classification by code or words of the title; whole words come first."""
        words = description_keys([q])[0].split()
        if not words:
            return []
        found = (
            [code for code in self.coder.codes if code.startswith(words[0])]
            if len(words) == 1
            else []
        )
        for match in _MATCHES:
            patterns = [re.compile(match.format(re.escape(word))) for word in words]
            found += [
                code
                for code, text in self._search_texts.items()
                if all(one.search(text) for one in patterns)
            ]
        return [self.titled(code) for code in list(dict.fromkeys(found))[:limit]]

    @cached_property
    def _search_texts(self) -> dict[str, str]:
        titled = [f"{code} {self.titles.get(code, '')}" for code in self.coder.codes]
        return dict(zip(self.coder.codes, description_keys(titled), strict=True))

    def answer(self, texts: Sequence[str], langs: Sequence[str]) -> list[Answer]:
        """Code descriptions, and find what helps to judge the codes."""
        langs = [Language(lang).among(self.coder.model.config.languages) for lang in langs]
        coded, ranked = self.coder.predict_ranked(texts, langs)
        near = self.neighbours.find(texts, self.titled) if self.neighbours else [[] for _ in texts]
        given = self.known.find(texts, langs) if self.known is not None else [None] * len(texts)
        answers = []
        for row, (text, lang, known, conf) in enumerate(
            zip(texts, langs, given, coded.conf, strict=True)
        ):
            codes, others = self._codes(coded, row), self._codes(ranked, row)
            own, shares = {one.code for one in codes}, {one.code: one.probability for one in others}
            if (
                self.coder.mode != "combined"
            ):  # else they are of the same measure as the alternatives
                codes = [self.titled(one.code, shares.get(one.code)) for one in codes]
            best = {
                name: [part[row] for part in one.best] for name, one in coded.attributes.items()
            }
            likely = [
                one
                for one in others
                if one.code not in own and (one.probability or 0) >= _LEAST_PROBABILITY
            ]
            answers.append(
                Answer(
                    text=text,
                    lang=lang,
                    codes=codes,
                    confidence=None if np.isnan(conf) else float(conf),
                    attributes=[
                        Category(attribute=name, label=label, probability=float(prob))
                        for name, (label, prob) in best.items()
                        if not np.isnan(prob)
                    ],
                    known=[self.titled(code) for code in known.codes] if known else None,
                    known_share=known.share if known else None,
                    alternatives=likely[:_ALTERNATIVES],
                    neighbours=near[row],
                )
            )
        return answers

    def _codes(self, prediction: Prediction, row: int) -> list[Code]:
        pairs = zip(prediction.codes[row], prediction.probs[row], strict=True)
        return [self.titled(code, float(prob)) for code, prob in pairs if code is not None]


def named_languages(codes: Iterable[str]) -> list[NamedLanguage]:
    """Return languages by their names, behind the unknown one."""
    named = [NamedLanguage(code=code, name=NAMES.get(Language(code).iso, code)) for code in codes]
    return [NamedLanguage(code="unk", name="Unknown"), *sorted(named, key=lambda one: one.name)]


def surety_of(run: Path) -> Surety:
    """Return from which confidence on 95 % of distinct descriptions are right, by the report of a
    run if it has one.
    """
    path = run / METRICS_FILE
    if not path.is_file():
        return Surety()
    metrics = json.loads(path.read_bytes())
    curve = metrics["answer"]["production"]
    if metrics["num_texts"] < FEW_TEXTS:
        return Surety(of_few=True)
    of_titles = Path(run_settings(run).get("dataset") or "").name == TITLES

    # the curve has the share that is right of the answers whose confidence is at least so high
    pairs = zip(curve["accuracy"], curve["conf"], strict=True)
    points = [(right, conf) for right, conf in pairs if right is not None and conf is not None]
    enough = [conf for right, conf in points if right >= TARGET_ACCURACY]
    if enough:
        return Surety(sure=min(enough), of_titles=of_titles)
    most_right = max((right for right, _ in points), default=None)
    return Surety(most_right=most_right, of_titles=of_titles)


class Neighbours:
    """Exact search of the training data's distinct descriptions, at most a million, by cosine of
    character n-grams.
    """

    def __init__(self, examples: Examples) -> None:
        rows = pd.DataFrame(
            {"text": examples.texts, "lang": examples.langs, "codes": code_sets(examples.codes)}
        )
        rows["key"] = description_keys(examples.texts)
        self._rows = rows.drop_duplicates(["key", "lang", "codes"], keep="last").head(
            _MOST_SEARCHED
        )
        self._vectorizer = TfidfVectorizer(
            analyzer="char_wb", ngram_range=(2, 4), sublinear_tf=True
        )
        features = self._vectorizer.fit_transform(self._rows["key"])
        self._search = NearestNeighbors(
            n_neighbors=min(_NEIGHBOURS, len(self._rows)), metric="cosine"
        ).fit(features)

    def find(self, texts: Sequence[str], titled: Callable[[str], Code]) -> list[list[Neighbour]]:
        """Return the descriptions nearest to each text; none for one that has no n-grams in common
        with any.
        """
        distances, indices = self._search.kneighbors(
            self._vectorizer.transform(description_keys(texts))
        )
        return [
            [
                Neighbour(
                    text=row.text,
                    lang=row.lang,
                    codes=[*map(titled, row.codes)],
                    similarity=1 - distance,
                )
                for row, distance in zip(self._rows.iloc[near].itertuples(), far, strict=True)
                if distance < 1
            ]
            for near, far in zip(indices, distances, strict=True)
        ]
