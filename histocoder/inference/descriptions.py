"""The distinct descriptions among those that a user gives."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from histocoder.data.cells import MISSING_MARKS, spoilt
from histocoder.data.languages import (
    Language,
    chosen_language,
    not_in_table,
    with_nearest,
)
from histocoder.errors import Notice, UserError, shown, warn_user

_MARKS = MISSING_MARKS - {"None"}
"""Marks of missing values that are no descriptions: "None" says that a person had no occupation."""


class UnknownLanguageWarning(Notice):
    """Some languages are unknown to the model; to histocoder, if the model does not say which ones it knows."""

    def __init__(self, languages: Sequence[str], known: Sequence[str]) -> None:
        super().__init__(
            f"The model does not know the language {', '.join(map(with_nearest, languages))} and treats it as unknown "
            f"(unk); it knows {', '.join(known)}."
            if known
            else not_in_table(languages)
        )


class Descriptions(NamedTuple):
    """Distinct descriptions with their languages, and the rows that have them."""

    texts: list[str]
    langs: list[str]
    """Languages; see `Language`."""
    rows: np.ndarray
    """Index of each row's description, of shape (n,); -1 where it is missing."""

    @classmethod
    def of(
        cls,
        texts: str | Sequence[str | None] | pd.Series,
        lang: str | Sequence[str] | pd.Series,
        *,
        languages: tuple[str, ...],
    ) -> Descriptions:
        """Return the distinct descriptions of n rows; blank ones are missing.

        Notices name languages other than a model's `languages`, and texts that may not be descriptions. A UserError is
        raised if a value is not text, or one language is given for all rows that is neither the model's nor in the
        table of languages.
        """
        if not isinstance(texts, str | Iterable):
            raise UserError(
                f"Descriptions are of the type {type(texts).__name__}; give a string, or a list of strings."
            )
        values: list[object] = [texts] if isinstance(texts, str) else list(texts)
        langs = [chosen_language(lang, languages)] * len(values) if isinstance(lang, str) else list(lang)
        if len(langs) != len(values):
            raise UserError(f"There are {len(values):,} descriptions, but {len(langs):,} languages.")
        strange = next((value for value in values if not isinstance(value, str) and pd.isna(value) is not True), None)
        if strange is not None:
            raise UserError(
                f"The description {shown(str(strange))} is of the type {type(strange).__name__}; give strings, and "
                "None where there is no description."
            )
        return DistinctDescriptions(languages).add(values, langs)


class DistinctDescriptions:
    """Gives each distinct description of a table's blocks an index, while there is room to remember them.

    `languages` are a model's; from `room` descriptions on, new ones are not remembered.
    """

    def __init__(self, languages: tuple[str, ...], *, room: float = math.inf) -> None:
        self._languages, self._room = languages, room
        self._indices: dict[tuple[object, str], int] = {}
        self._codes: dict[str, str] = {}  # language as written -> its code

    def add(self, texts: Sequence[object], langs: Sequence[str]) -> Descriptions:
        """Return the new descriptions of a block, the shortest first; their indices follow those remembered."""
        self._read_languages(set(langs) - self._codes.keys())
        pairs = [(text, self._codes[lang]) for text, lang in zip(texts, langs, strict=True)]
        unseen = set(pairs) - self._indices.keys()
        new = sorted(
            ((text, lang) for text, lang in unseen if isinstance(text, str) and text.strip()),
            key=lambda pair: (len(pair[0]), pair),
        )
        indices: dict[tuple[object, str], int] = {pair: len(self._indices) + i for i, pair in enumerate(new)}
        rows = np.array([self._indices.get(pair, indices.get(pair, -1)) for pair in pairs], dtype=np.int64)
        _check([text for text, _ in new], is_first=not self._indices)
        if len(self._indices) < self._room:
            self._indices |= indices
        return Descriptions([text for text, _ in new], [lang for _, lang in new], rows)

    def _read_languages(self, langs: set[str]) -> None:
        """Read languages that are new; a notice names those that the model does not know."""
        codes = {lang: Language(lang if isinstance(lang, str) else "") for lang in langs}
        known = {*map(Language, self._languages), Language()}
        is_strange = (lambda code: code not in known) if self._languages else (lambda code: not code.is_known)
        if strange := sorted(lang for lang, code in codes.items() if is_strange(code)):
            warn_user(UnknownLanguageWarning(strange, self._languages))
        self._codes |= codes


def _check(texts: Sequence[str], *, is_first: bool) -> None:
    """Name texts that are probably no descriptions in notices."""
    for text in sorted({text for text in texts if text in _MARKS or spoilt(text) == "an error"}):
        warn_user(Notice(f"The description {text!r} is coded as a word. If it means a missing one, leave it blank."))
    if is_first and 2 * sum(map(bool, map(re.compile(r"[0-9\s]+").fullmatch, texts))) > len(texts) > 1:
        warn_user(Notice("Most descriptions are numbers. Check that their column is the right one."))
