"""The distinct descriptions among those that a user gives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from histocoder.data.cells import MISSING_MARKS, spoilt
from histocoder.data.languages import (
    chosen_language,
    is_language,
    language_code,
    not_in_table,
    same_language,
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
        self.languages, self.known = tuple(languages), tuple(known)


class Descriptions(NamedTuple):
    """Descriptions with their languages, each once, and the rows that have them."""

    distinct: pd.DataFrame  # columns `text` and `lang`
    place: np.ndarray  # index of each row's description among the distinct ones; -1 where it is missing
    index: pd.Index  # index of the rows

    @classmethod
    def of(
        cls,
        texts: str | Sequence[str | None] | pd.Series,
        lang: str | Sequence[str] | pd.Series,
        *,
        languages: tuple[str, ...],
    ) -> Descriptions:
        """Return the descriptions of n rows; blank ones are missing.

        Languages are those that a model knows, under its own codes; others are replaced by "unk", with a warning. If
        the model does not say, all are kept, with a warning about those that are not in histocoder's table. One for all
        descriptions that is in neither raises a UserError. Marks of missing values are words here, with a warning.
        """
        if not isinstance(texts, str | Iterable):
            raise UserError(
                f"Descriptions are of the type {type(texts).__name__}; give a string, or a list of strings."
            )
        series = (
            texts if isinstance(texts, pd.Series) else pd.Series([texts] if isinstance(texts, str) else list(texts))
        )
        values = series.to_numpy(dtype=object)
        if isinstance(lang, str):
            lang = [chosen_language(lang, languages)] * len(values)
        langs = np.asarray(lang, dtype=object)
        if len(langs) != len(values):
            raise UserError(f"There are {len(values):,} descriptions, but {len(langs):,} languages.")
        langs = _known(langs, languages)
        strange = next((value for value in values if not isinstance(value, str) and pd.isna(value) is not True), None)
        if strange is not None:
            raise UserError(
                f"The description {shown(str(strange))} is of the type {type(strange).__name__}; give strings, and "
                "None where there is no description."
            )
        missing = np.array([not isinstance(text, str) or not text.strip() for text in values], dtype=bool)
        pairs = pd.DataFrame({"text": values, "lang": langs})
        place = np.full(len(pairs), -1)
        present = pairs[~missing]
        place[~missing] = present.groupby(["text", "lang"], sort=False).ngroup().to_numpy()
        distinct = present.drop_duplicates().reset_index(drop=True)
        for text in sorted(t for t in set(distinct["text"]) if t in _MARKS or spoilt(t) == "an error"):
            warn_user(
                Notice(f"The description {text!r} is coded as a word. If it means a missing one, leave it blank.")
            )
        if 2 * distinct["text"].str.fullmatch(r"[0-9\s]+").sum() > len(distinct) > 1:
            warn_user(Notice("Most descriptions are numbers. Check that their column is the right one."))
        return cls(distinct, place, series.index)

    def spread(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Return each row's of the distinct descriptions' rows, after which comes that of a missing one."""
        return frame.iloc[self.place].set_axis(self.index)


def _known(langs: np.ndarray, languages: tuple[str, ...]) -> np.ndarray:
    """Return a model's codes of languages, and "unk" in place of others, with a warning."""
    langs = np.where(pd.isna(langs), "unk", langs)
    known = (*languages, "unk")
    codes = {lang: same_language(lang, known) if languages else language_code(lang) for lang in set(langs.tolist())}
    strange = sorted(lang for lang, code in codes.items() if code is None or not (languages or is_language(code)))
    if strange:
        warn_user(UnknownLanguageWarning(strange, languages))
    return np.array([codes[lang] or "unk" for lang in langs.tolist()], dtype=object)
