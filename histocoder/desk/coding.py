"""Code a few descriptions, with what helps to judge the codes: alternatives, known answers, nearest neighbours."""

import hashlib
import re
import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
from fastapi import HTTPException
from pydantic import BaseModel, Field
from sklearn.neighbors import NearestNeighbors
from sklearn.preprocessing import normalize

from histocoder.data.codes import is_short
from histocoder.data.examples import HELD_OUT, TRAIN, Examples
from histocoder.data.languages import NAMES, Language, chosen_language
from histocoder.data.normalize import description_keys
from histocoder.errors import UserError
from histocoder.evaluation.baselines import run_rows
from histocoder.files import replacing
from histocoder.formatters import MISSING
from histocoder.inference.coder import Coder
from histocoder.inference.known import Known
from histocoder.inference.predictions import Prediction

NO_OCCUPATION = "-1"  # HISCO's code for no occupation
_ALTERNATIVES, _LEAST_PROBABILITY = 9, 0.005
_MOST_REQUESTS = 9  # number of requests at the model: one is answered, the others wait
_MATCHES = (r"\b{}\b", r"\b{}", "{}")  # whole words, then beginnings of words, then parts
_NEIGHBOURS = 5
_MOST_SEARCHED = 1_000_000  # number of descriptions: 1 GB of the n-gram encoder's encodings
_ENCODED_AT_ONCE = 256


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


class NamedLanguage(BaseModel):
    """A language that the model knows."""

    code: str
    name: str


class CodeRequest(BaseModel):
    """Descriptions to code."""

    texts: Annotated[list[Annotated[str, Field(max_length=2000)]], Field(min_length=1, max_length=1000)]
    lang: Annotated[str, Field(max_length=100)] = "unk"
    evidence: bool = True  # whether to search the nearest descriptions of the training data


class Coding:
    """A model, and its run's training data as evidence; `folder` keeps their encodings."""

    def __init__(self, coder: Coder, *, run: Path, folder: Path, model_id: str) -> None:
        self.coder, self.model_id = coder, model_id
        coder.turn = threading.Lock()
        self._requests = threading.BoundedSemaphore(_MOST_REQUESTS)
        self._titles = coder.model.config.descriptions
        self.known: Known | None = None
        self.neighbours: Neighbours | None = None
        rows = run_rows(run, coder, TRAIN, HELD_OUT)
        if rows is not None:
            examples = rows.coded()
            hashes = pd.util.hash_pandas_object(examples.codes.assign(text=examples.texts, lang=examples.langs))
            source = hashlib.sha256(hashes.to_numpy().tobytes()).hexdigest()
            self.known = Known(languages=coder.model.config.languages)
            self.known.add(examples)
            self.neighbours = Neighbours(examples, folder, source=f"{source} {model_id}")

    @property
    def languages(self) -> list[NamedLanguage]:
        """Languages that the model knows; all of them where it does not say."""
        codes = sorted(set(self.coder.model.config.languages) - {"unk"}) or list(NAMES)
        named = [NamedLanguage(code=code, name=NAMES.get(Language(code).iso, code)) for code in codes]
        return [NamedLanguage(code="unk", name="Unknown"), *sorted(named, key=lambda one: one.name)]

    @property
    def no_occupation(self) -> Code | None:
        """Code for "no occupation"; None where the classification has none."""
        return self.titled(NO_OCCUPATION) if NO_OCCUPATION in self.coder.codes else None

    def titled(self, code: str, probability: float | None = None) -> Code:
        return Code(code=code, title=self._titles.get(code), probability=probability)

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
        if not 1 <= len(found) <= formatter.num_blocks:
            raise UserError(f"There are {len(found)} codes; choose one to {formatter.num_blocks}, or mark as unsure.")
        return found

    def search(
        self, q: Annotated[str, Field(max_length=200)], limit: Annotated[int, Field(ge=1, le=100)] = 20
    ) -> list[Code]:
        """Search the classification by code or words of the title; whole words come first."""
        words = description_keys([q])[0].split()
        if not words:
            return []
        found = [code for code in self.coder.codes if code.startswith(words[0])] if len(words) == 1 else []
        for match in _MATCHES:
            patterns = [re.compile(match.format(re.escape(word))) for word in words]
            found += [code for code, text in self._search_texts.items() if all(one.search(text) for one in patterns)]
        return [self.titled(code) for code in list(dict.fromkeys(found))[:limit]]

    @cached_property
    def _search_texts(self) -> dict[str, str]:
        titled = [f"{code} {self._titles.get(code, '')}" for code in self.coder.codes]
        return dict(zip(self.coder.codes, description_keys(titled), strict=True))

    def code(self, wanted: CodeRequest) -> list[Answer]:
        """Code descriptions; blank ones get no codes. Status 429: too many requests wait for the model."""
        lang = chosen_language(wanted.lang, self.coder.model.config.languages)
        return self.answer(wanted.texts, [lang] * len(wanted.texts), evidence=wanted.evidence)

    def answer(self, texts: Sequence[str], langs: Sequence[str], *, evidence: bool = True) -> list[Answer]:
        """Code descriptions; raise status 429 where too many requests wait for the model."""
        if not self._requests.acquire(blocking=False):
            raise HTTPException(429, "The model is busy. Try again in a moment.")
        try:
            langs = [Language(lang).among(self.coder.model.config.languages) for lang in langs]
            coded, ranked, encodings = self.coder.predict_ranked(texts, langs)
            near: list[list[Neighbour]] = [[] for _ in texts]
            if evidence and self.neighbours is not None:
                near = self.neighbours.find(encodings, self.titled)
        finally:
            self._requests.release()
        given = self.known.find(texts, langs) if self.known is not None else [None] * len(texts)
        answers = []
        for row, (text, lang, known, conf) in enumerate(zip(texts, langs, given, coded.conf, strict=True)):
            codes, others = self._codes(coded, row), self._codes(ranked, row)
            own, shares = {one.code for one in codes}, {one.code: one.probability for one in others}
            if self.coder.mode != "combined":  # else they are of the same measure as the alternatives
                codes = [self.titled(one.code, shares.get(one.code)) for one in codes]
            likely = [one for one in others if one.code not in own and (one.probability or 0) >= _LEAST_PROBABILITY]
            answers.append(
                Answer(
                    text=text,
                    lang=lang,
                    codes=codes,
                    confidence=None if np.isnan(conf) else float(conf),
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


class Neighbours:
    """Exact search of the training data's distinct descriptions by the cosine of their encodings.

    If there are more than a million, the most frequent are searched. Their encodings are kept in a file in `folder`;
    `source` identifies the data and the model.
    """

    def __init__(self, examples: Examples, folder: Path, *, source: str) -> None:
        codes = [tuple(code for code in row if code is not None) for row in examples.codes.to_numpy(dtype=object)]
        rows = pd.DataFrame({"text": examples.texts, "lang": examples.langs, "codes": codes})
        by = [pd.Series(description_keys(examples.texts)), "lang", "codes"]
        rows["times"] = rows.groupby(by)["text"].transform("size")
        distinct = rows[~rows.assign(text=by[0]).duplicated(keep="last")]
        self._total = len(distinct)
        self._rows = distinct.sort_values("times", ascending=False, kind="stable").head(_MOST_SEARCHED)
        self._path = folder / f"neighbours-{hashlib.sha256(source.encode()).hexdigest()[:16]}.npy"
        self._search: NearestNeighbors | None = None
        self._num_encoded = 0

    def describe(self) -> str:
        """Describe which descriptions are searched."""
        number = f"{len(self._rows):,}"
        if len(self._rows) < self._total:
            number = f"the {number} most frequent of {self._total:,}"
        state = "" if self._search else f"; {self._num_encoded / len(self._rows):.0%} are encoded"
        return f"exact search among {number} descriptions of the training data{state}"

    def encode(self, coder: Coder, stop: threading.Event) -> None:
        """Encode the descriptions, or find them encoded in the file."""
        if not self._path.is_file():
            encodings = np.empty((len(self._rows), coder.model.encoder.config.hidden_size), np.float32)
            for start in range(0, len(self._rows), _ENCODED_AT_ONCE):
                if stop.is_set():
                    return
                some = self._rows.iloc[start : start + _ENCODED_AT_ONCE]
                encodings[start : start + len(some)] = normalize(coder.embed(some["text"], some["lang"]))
                self._num_encoded += len(some)
            for earlier in self._path.parent.glob("neighbours*.np[yz]"):
                earlier.unlink()
            with replacing(self._path) as temporary, temporary.open("wb") as file:
                np.save(file, encodings)
        # of vectors of length 1, the nearest by distance are those by cosine
        search = NearestNeighbors(n_neighbors=min(_NEIGHBOURS, len(self._rows)), algorithm="brute")
        self._search = search.fit(np.load(self._path, mmap_mode="r"))

    def find(self, encodings: np.ndarray, titled: Callable[[str], Code]) -> list[list[Neighbour]]:
        """Return the descriptions nearest to encodings of shape (n, hidden); none for NaN, or until all are encoded."""
        found: list[list[Neighbour]] = [[] for _ in encodings]
        is_real = ~np.isnan(encodings).any(1)
        if self._search is None or not is_real.any():
            return found
        distances, indices = self._search.kneighbors(normalize(encodings[is_real]))
        similarities = 1 - distances**2 / 2
        for row, near, similar in zip(np.flatnonzero(is_real), indices, similarities, strict=True):
            rows = self._rows.iloc[near].assign(similarity=similar).to_dict("records")
            found[row] = [Neighbour(**{**one, "codes": [*map(titled, one["codes"])]}) for one in rows]
        return found
