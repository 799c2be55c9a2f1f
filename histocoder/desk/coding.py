"""Code a few descriptions, with what helps to judge the codes: alternatives, known answers, nearest neighbours."""

import re
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from pydantic import BaseModel

from histocoder.data.codes import LabelRules, is_short
from histocoder.data.example_files import ExampleFiles
from histocoder.data.languages import NAMES
from histocoder.data.languages import Language as _Language
from histocoder.data.normalize import description_keys
from histocoder.data.prepare import held_out
from histocoder.data.table import fingerprint
from histocoder.desk.neighbours import Neighbours, TrainedRow
from histocoder.errors import UserError
from histocoder.formatters import MISSING
from histocoder.inference.coder import Coder
from histocoder.inference.known import Known
from histocoder.inference.predictions import Prediction

NO_OCCUPATION = "-1"  # HISCO's code for no occupation
_ALTERNATIVES, _LEAST_PROBABILITY = 9, 0.005
_MOST_WAITING = 8
_MATCHES = (r"\b{}\b", r"\b{}", "{}")  # whole words, then beginnings of words, then parts


class Busy(Exception):
    """Too many requests wait for the model already."""


class Turns:
    """A lock that threads get in the order of asking."""

    def __init__(self) -> None:
        self._queue: deque[object] = deque()  # the first has the lock
        self._changed = threading.Condition()

    @property
    def num_waiting(self) -> int:
        return max(len(self._queue) - 1, 0)

    def __enter__(self) -> None:
        ticket = object()
        with self._changed:
            self._queue.append(ticket)
            self._changed.wait_for(lambda: self._queue[0] is ticket)

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._queue.popleft()
            self._changed.notify_all()


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
    similarity: float  # cosine of the encodings


class Answer(BaseModel):
    """Codes of a description, and what helps to judge them."""

    text: str
    lang: str
    codes: list[Code]
    confidence: float | None  # probability of the set of codes
    known: list[Code] | None = None  # codes that people gave this description in the training data
    known_share: float | None = None  # share of its rows that have these codes
    alternatives: list[Code] = []  # other codes, by the experts' combined probability of being the first
    neighbours: list[Neighbour] = []


class Language(BaseModel):
    """A language that the model knows."""

    code: str
    name: str


class CodingDesk:
    """A model, and its training data as evidence.

    `training_data` is the run's `data_train.csv`, which need not exist, `folder` that for its encodings; `model_id`
    identifies the model.
    """

    def __init__(self, coder: Coder, *, training_data: Path, folder: Path, model_id: str) -> None:
        self.coder, self.model_id = coder, model_id
        coder.turn = self._turns = Turns()
        self._titles = coder.model.config.descriptions
        titled = [f"{code} {self._titles.get(code, '')}" for code in coder.codes]
        self._search_texts = dict(zip(coder.codes, description_keys(titled), strict=True))
        self.known: Known | None = None
        self.neighbours: Neighbours | None = None
        if training_data.is_file():
            paths = (training_data, *held_out(training_data.parent))
            rules = LabelRules(allow_short=True, drop_bad=True)
            files = ExampleFiles(paths, coder.model.config.target_cols, coder.formatter, known=coder.codes, rules=rules)
            source = " ".join(map(fingerprint, paths))
            examples = files.read().coded()
            self.known = Known(f"{source} desk", languages=coder.model.config.languages)
            self.known.add(examples)
            self.neighbours = Neighbours(examples, folder, source=f"{source} {model_id}")

    def encode_neighbours(self, stop: threading.Event) -> None:
        """Encode the training data, until `stop` is set."""
        if self.neighbours is not None:
            self.neighbours.encode(self.coder, stop)

    @property
    def languages(self) -> list[Language]:
        """Languages that the model knows; all of them where it does not say."""
        codes = sorted(set(self.coder.model.config.languages) - {"unk"}) or list(NAMES)
        named = [Language(code=code, name=NAMES.get(_Language(code).iso, code)) for code in codes]
        return [Language(code="unk", name="Unknown"), *sorted(named, key=lambda one: one.name)]

    @property
    def no_occupation(self) -> str | None:
        """Code for "no occupation"; None where the classification has none."""
        return NO_OCCUPATION if NO_OCCUPATION in self.coder.codes else None

    def code(self, text: str, probability: float | None = None) -> Code:
        return Code(code=text, title=self._titles.get(text), probability=probability)

    def check_codes(self, codes: Sequence[str]) -> list[str]:
        """Return codes that a person gave, without blanks and repetitions; raise UserError where they do not fit."""
        formatter, system = self.coder.formatter, self.coder.formatter.system
        has_short = any(is_short(code, system) for code in self.coder.codes)
        found = list(dict.fromkeys(filter(None, (code.strip() for code in codes))))
        for code in found:
            problem = "is not a code" if code == MISSING else system.problem(code)
            if problem is None and is_short(code, system) and not has_short:
                problem = f"is shorter than {formatter.block_size} characters; write leading zeros, too"
            if problem:
                raise UserError(f"{code!r} {problem}.")
        if len(found) > formatter.num_blocks:
            raise UserError(f"There are {len(found)} codes; a description has {formatter.num_blocks} at most.")
        return found

    def search(self, query: str, *, limit: int) -> list[Code]:
        """Return the codes whose number begins with the query, then those whose title has all its words."""
        words = description_keys([query])[0].split()
        if not words:
            return []
        found = [code for code in self.coder.codes if code.startswith(words[0])] if len(words) == 1 else []
        for match in _MATCHES:
            patterns = [re.compile(match.format(re.escape(word))) for word in words]
            found += [code for code, text in self._search_texts.items() if all(one.search(text) for one in patterns)]
        return [self.code(code) for code in list(dict.fromkeys(found))[:limit]]

    def answer(self, texts: Sequence[str], langs: Sequence[str], *, evidence: bool = True) -> list[Answer]:
        """Code descriptions; raise `Busy` where too many requests wait for the model."""
        if self._turns.num_waiting > _MOST_WAITING:
            raise Busy
        langs = [_Language(lang).among(self.coder.model.config.languages) for lang in langs]
        coded, ranked, encodings = self.coder.predict_ranked(texts, langs)
        near: list[list[tuple[TrainedRow, float]]] = [[] for _ in texts]
        if evidence and self.neighbours is not None and self.neighbours.is_ready:
            with self._turns:
                near = self.neighbours.find(encodings)
        given = self.known.find(texts, langs) if self.known is not None else [None] * len(texts)
        answers = []
        for row, (text, lang, known, conf) in enumerate(zip(texts, langs, given, coded.conf, strict=True)):
            codes, others = self._codes(coded, row), self._codes(ranked, row)
            own, shares = {one.code for one in codes}, {one.code: one.probability for one in others}
            if self.coder.mode != "combined":  # else they are of the same measure as the alternatives
                codes = [self.code(one.code, shares.get(one.code)) for one in codes]
            alternatives = [
                one for one in others if one.code not in own and (one.probability or 0) >= _LEAST_PROBABILITY
            ]
            answers.append(
                Answer(
                    text=text,
                    lang=lang,
                    codes=codes,
                    confidence=None if np.isnan(conf) else float(conf),
                    known=[self.code(code) for code in known.codes] if known else None,
                    known_share=known.share if known else None,
                    alternatives=alternatives[:_ALTERNATIVES],
                    neighbours=[self._neighbour(*found) for found in near[row]],
                )
            )
        return answers

    def _neighbour(self, row: TrainedRow, similarity: float) -> Neighbour:
        codes = [self.code(code) for code in row.codes]
        return Neighbour(text=row.text, lang=row.lang, codes=codes, similarity=similarity)

    def _codes(self, prediction: Prediction, row: int) -> list[Code]:
        pairs = zip(prediction.codes[row], prediction.probs[row], strict=True)
        return [self.code(code, float(prob)) for code, prob in pairs if code is not None]
