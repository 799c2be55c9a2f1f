"""Code a few descriptions, with what helps to judge the codes: alternatives, known answers, nearest
neighbours.
"""

import json
import math
import re
import threading
from collections import Counter
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
_MAX_ALTERNATIVES = 9
_MIN_PROBABILITY = 0.005  # of an alternative
_MATCHES = (r"\b{}\b", r"\b{}", "{}")  # whole words, then beginnings of words, then parts
_NUM_NEIGHBOURS = 5
_MAX_SEARCHED = 1_000_000  # descriptions: 1 GB of n-grams


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
    confidence: float | None = None  # probability of the set of codes
    attributes: list[Category] = []
    known: list[Code] | None = None  # codes that people gave this description in the training data
    known_share: float | None = None  # share of its rows that have these codes
    # other codes, by the experts' combined probability of being the first
    alternatives: list[Code] = []
    neighbours: list[Neighbour] = []


class Surety(BaseModel):
    """Share of right answers among those of which a model is surest, by the report of its run."""

    # confidence from which on 95 % are right; None where they never are, or nobody knows
    sure: float | None = None
    # share that is right of what it is surest of, where that is less than 95 %
    most_right: float | None = None
    # whether it was measured on titles of codes, which are easier than descriptions
    of_titles: bool = False
    of_few: bool = False  # whether it was measured on too few descriptions


class NamedLanguage(BaseModel):
    """A language that the model knows."""

    code: str
    name: str


class Coding:
    """A model, and its run's training data as evidence."""

    def __init__(self, coder: Coder, folder: Path, *, name: str) -> None:
        folder = folder.resolve()
        run = run_of(folder)
        self.coder = coder
        self.folder = folder
        self.name = name
        # what is coded by an interrupted server is kept if weights and configuration are the same
        digests = f"{sha256(folder / WEIGHTS_FILE)} {sha256(folder / CONFIG_FILE)}"
        self.model_id = f"{digests} {coder.precision}"
        self.settings = run_settings(run)
        self.surety = surety_of(run)
        self.titles = coder.model.config.descriptions
        self.languages = coder.model.config.languages
        self.target_cols = list(coder.model.config.written_cols)
        self.known: Known | None = None
        self.neighbours: Neighbours | None = None

        # requests take turns, each with one thread, so that files and people wait for each other
        coder.turn = threading.Lock()
        coder.num_workers = 1
        rows = run_rows(run, coder, TRAIN, HELD_OUT)
        if rows is not None:
            examples = rows.coded()
            self.known = Known(languages=self.languages)
            self.known.add(examples)
            self.neighbours = Neighbours(examples)

    def titled(self, code: str, probability: float | None = None) -> Code:
        return Code(code=code, title=self.titles.get(code), probability=probability)

    def check_codes(self, codes: Sequence[str]) -> list[str]:
        """Return codes that a person gave, read as those of tables are; raise UserError where they
        do not fit.
        """
        formatter = self.coder.formatter
        column = column_of_few(Counter(codes), known=self.coder.codes, system=formatter.system)
        checked: list[str] = []
        for code in codes:
            cell = column.read(code)
            if cell.lacks_zeros:
                raise UserError(f"{code!r} {cell.problem}; write leading zeros, too.")
            if cell.problem:
                raise UserError(f"{code!r} {cell.problem}.")
            checked.extend(cell.codes)
        distinct = list(dict.fromkeys(checked))
        if not 1 <= len(distinct) <= formatter.num_blocks:
            raise UserError(
                f"There are {len(distinct)} codes; choose one to {formatter.num_blocks}, or mark "
                "as unsure."
            )
        return distinct

    def search(self, q: str, limit: int) -> list[Code]:
        """Search the classification by code or words of the title; whole words come first."""
        words = description_keys([q])[0].split()
        if not words:
            return []
        matches = []
        if len(words) == 1:
            matches = [code for code in self.coder.codes if code.startswith(words[0])]
        for form in _MATCHES:
            patterns = [re.compile(form.format(re.escape(word))) for word in words]
            for code, text in self._search_texts.items():
                if all(pattern.search(text) for pattern in patterns):
                    matches.append(code)
        return [self.titled(code) for code in list(dict.fromkeys(matches))[:limit]]

    @cached_property
    def _search_texts(self) -> dict[str, str]:
        texts = [f"{code} {self.titles.get(code, '')}" for code in self.coder.codes]
        return dict(zip(self.coder.codes, description_keys(texts), strict=True))

    def answer(self, texts: Sequence[str], langs: Sequence[str]) -> list[Answer]:
        """Code descriptions, and find what helps to judge the codes."""
        langs = [Language(lang).among(self.languages) for lang in langs]
        decoded, ranked = self.coder.predict_ranked(texts, langs)
        answers = []
        for row, text in enumerate(texts):
            answer = Answer(text=text, lang=langs[row], codes=self._codes(decoded, row))
            answers.append(answer)
            conf = float(decoded.conf[row])
            if not math.isnan(conf):
                answer.confidence = conf
            answer.attributes = _categories(decoded, row)
            self._add_alternatives(answer, self._codes(ranked, row))

        # what people gave these descriptions, and like ones, in the training data
        if self.known is not None and self.neighbours is not None:
            known = self.known.find(texts, langs)
            neighbours = self.neighbours.find(texts, self.titled)
            for answer, known_codes, near in zip(answers, known, neighbours, strict=True):
                answer.neighbours = near
                if known_codes is not None:
                    answer.known = [self.titled(code) for code in known_codes.codes]
                    answer.known_share = known_codes.share
        return answers

    def _add_alternatives(self, answer: Answer, ranked: list[Code]) -> None:
        """Add the most probable other codes to an answer, whose codes get probabilities by the same
        measure.
        """
        codes = {code.code for code in answer.codes}
        if self.coder.mode != "combined":  # whose codes have probabilities by this measure
            probabilities = {code.code: code.probability for code in ranked}
            for code in answer.codes:
                code.probability = probabilities.get(code.code)
        for code in ranked:
            if code.code not in codes and (code.probability or 0.0) >= _MIN_PROBABILITY:
                answer.alternatives.append(code)
        del answer.alternatives[_MAX_ALTERNATIVES:]

    def _codes(self, prediction: Prediction, row: int) -> list[Code]:
        codes = []
        for code, prob in zip(prediction.codes[row], prediction.probs[row], strict=True):
            if code is not None:
                codes.append(self.titled(code, float(prob)))
        return codes


def _categories(prediction: Prediction, row: int) -> list[Category]:
    """Return the most probable category of each attribute that a model has learned."""
    categories = []
    for name, attribute in prediction.attributes.items():
        labels, probs = attribute.best
        if not np.isnan(probs[row]):
            prob = float(probs[row])
            categories.append(Category(attribute=name, label=labels[row], probability=prob))
    return categories


def named_languages(codes: Iterable[str]) -> list[NamedLanguage]:
    """Return languages by their names, behind the unknown one."""
    languages = []
    for code in codes:
        name = NAMES.get(Language(code).iso, code)
        languages.append(NamedLanguage(code=code, name=name))
    languages.sort(key=lambda language: language.name)
    return [NamedLanguage(code="unk", name="Unknown"), *languages]


def surety_of(run: Path) -> Surety:
    """Return from which confidence on 95 % of distinct descriptions are right, by the report of a
    run if it has one.
    """
    path = run / METRICS_FILE
    if not path.is_file():
        return Surety()
    metrics = json.loads(path.read_bytes())
    if metrics["num_texts"] < FEW_TEXTS:
        return Surety(of_few=True)
    of_titles = Path(run_settings(run).get("dataset") or "").name == TITLES

    # the curve has the share that is right of the answers whose confidence is at least so high
    curve = metrics["answer"]["production"]
    shares = []
    sure = []
    for right, conf in zip(curve["accuracy"], curve["conf"], strict=True):
        if right is None or conf is None:
            continue
        shares.append(right)
        if right >= TARGET_ACCURACY:
            sure.append(conf)
    if sure:
        return Surety(sure=min(sure), of_titles=of_titles)
    return Surety(most_right=max(shares, default=None), of_titles=of_titles)


class Neighbours:
    """Exact search of the training data's distinct descriptions, at most a million, by cosine of
    character n-grams.
    """

    def __init__(self, examples: Examples) -> None:
        rows = pd.DataFrame(
            {"text": examples.texts, "lang": examples.langs, "codes": code_sets(examples.codes)}
        )
        rows["key"] = description_keys(examples.texts)
        rows = rows.drop_duplicates(["key", "lang", "codes"], keep="last")
        self._rows = rows.head(_MAX_SEARCHED)
        self._vectorizer = TfidfVectorizer(
            analyzer="char_wb", ngram_range=(2, 4), sublinear_tf=True
        )
        features = self._vectorizer.fit_transform(self._rows["key"])
        num_neighbours = min(_NUM_NEIGHBOURS, len(self._rows))
        self._search = NearestNeighbors(n_neighbors=num_neighbours, metric="cosine").fit(features)

    def find(self, texts: Sequence[str], titled: Callable[[str], Code]) -> list[list[Neighbour]]:
        """Return the descriptions nearest to each text; none for one that has no n-grams in common
        with any.
        """
        features = self._vectorizer.transform(description_keys(texts))
        distances, indices = self._search.kneighbors(features)
        neighbours = []
        for row in range(len(texts)):
            near = self._rows.iloc[indices[row][distances[row] < 1]]
            neighbours.append(
                [
                    Neighbour(
                        text=example.text,
                        lang=example.lang,
                        codes=list(map(titled, example.codes)),
                        similarity=1 - distance,
                    )
                    for example, distance in zip(near.itertuples(), distances[row], strict=False)
                ]
            )
        return neighbours
