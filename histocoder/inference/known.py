"""Hand-coded descriptions, which keep their codes instead of being coded by a model."""

import itertools
from array import array
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from histocoder.config import SOURCE_COL, PredictOptions
from histocoder.config.prediction import names_of_alternatives
from histocoder.data.cells import descriptions_in
from histocoder.data.codes import LabelRules
from histocoder.data.example_files import ExampleFiles
from histocoder.data.examples import LANG_COL, TEXT_COL, Examples
from histocoder.data.languages import Language
from histocoder.data.normalize import description_keys
from histocoder.data.table import open_table
from histocoder.inference.coder import Coder, ShowProgress
from histocoder.inference.predictions import Prediction

KNOWN, MODEL = "known", "model"  # values of the column `source`


class KnownCodes(NamedTuple):
    """Codes of a hand-coded description."""

    codes: tuple[str, ...]  # their most frequent set of codes, in the order in which it was first written
    share: float  # share of the description's rows that have this set


class Known:
    """A dictionary of hand-coded rows: (description, language) to the most frequent set of codes.

    Of equally frequent sets the first in the file counts. Languages that the model does not know are one language,
    unknown, as they are to the model.

    Parameters
    ----------
    source_id : str
        Identifies its source.
    languages : collection of str
        Languages that the model knows; if it is empty, languages are compared by their codes.
    any_language : bool
        Whether rows count for every language, since their own are not given.
    exact : bool
        Whether descriptions are compared letter by letter, instead of by `description_keys`.
    """

    def __init__(
        self, source_id: str = "", *, languages: Collection[str] = (), any_language: bool = False, exact: bool = False
    ) -> None:
        self.source_id = source_id
        self._languages, self._any_language, self._exact = frozenset(languages), any_language, exact
        self._own_languages: set[str] = set()
        self._indices: dict[tuple[str, str], int] = {}  # by key and language
        self._codes: dict[tuple[str, ...], int] = {}  # each tuple of codes once
        self._row_indices, self._row_codes = array("q"), array("q")

    def add(self, examples: Examples, *, only: Collection[str] | None = None) -> None:
        """Add hand-coded rows; with `only`, those of descriptions with these keys."""
        rows = examples.codes.to_numpy(dtype=object).tolist()
        langs = self._language_keys(examples.langs)
        self._own_languages.update(langs)
        for key, lang, row in zip(self.keys(examples.texts), langs, rows, strict=True):
            if only is None or key in only:
                codes = tuple(dict.fromkeys(code for code in row if code is not None))
                index = self._indices.setdefault((key, lang), len(self._indices))
                self._row_indices.append(index)
                self._row_codes.append(self._codes.setdefault(codes, len(self._codes)))

    def find(self, texts: Sequence[str], langs: Sequence[str]) -> list[KnownCodes | None]:
        """Return the answers for n descriptions, whose languages are codes; None for those that are not known."""
        langs = self._language_keys(langs, unknown=self.only_language or "unk")
        indices = map(self._indices.get, zip(self.keys(texts), langs, strict=True))
        return [None if index is None else self._answers[index] for index in indices]

    @property
    def only_language(self) -> str | None:
        """The language of all rows, if they have but one: descriptions of unknown language are taken to be in it."""
        return next(iter(self._own_languages)) if len(self._own_languages) == 1 else None

    def _language_keys(self, langs: Sequence[str], *, unknown: str = "unk") -> list[str]:
        if self._any_language:
            return [""] * len(langs)
        keys = {lang: unknown if lang == "unk" else Language(lang).among(self._languages) for lang in set(langs)}
        return [keys[lang] for lang in langs]

    def keys(self, texts: Sequence[str]) -> Sequence[str]:
        """Return the keys of n descriptions."""
        return texts if self._exact else description_keys(texts).tolist()

    @property
    def num_contradictory(self) -> int:
        """Number of descriptions whose rows have different sets of codes."""
        return sum(answer.share < 1 for answer in self._answers)

    @property
    def width(self) -> int:
        """Maximum number of codes of a row."""
        return max(map(len, self._codes), default=0)

    @cached_property
    def _answers(self) -> list[KnownCodes]:
        """Codes of each description, by its index."""
        written = list(self._codes)
        sets = pd.factorize(pd.Series([frozenset(codes) for codes in written], dtype=object))[0]
        codes = np.array(self._row_codes, dtype=np.int64)
        rows = pd.DataFrame({"index": np.array(self._row_indices, dtype=np.int64), "set": sets[codes], "codes": codes})
        counts = rows.groupby(["index", "set"], sort=False)["codes"].agg(["size", "first"]).reset_index()
        counts["share"] = counts["size"] / counts.groupby("index")["size"].transform("sum")
        best = counts.sort_values("size", ascending=False, kind="stable").drop_duplicates("index").sort_values("index")
        return [KnownCodes(written[i], share) for i, share in zip(best["first"], best["share"], strict=True)]

    def column_names(self, coder: Coder, mode: str | None, *, k: int) -> list[str]:
        own, names = (coder.column_names(mode, k=count) for count in (max(self.width, 1), k))
        names = names_of_alternatives(names) if mode == "topk" else names
        return list(dict.fromkeys([*own[:-1], *names, SOURCE_COL]))

    def code(
        self,
        coder: Coder,
        texts: Sequence[str],
        langs: Sequence[str],
        options: PredictOptions,
        *,
        progress: ShowProgress = False,
        cancel: Callable[[], bool] | None = None,
    ) -> pd.DataFrame:
        """Code distinct descriptions: the known ones as people did, the others by `Coder.code_distinct`.

        The column `source` is "known" or "model". The probability of a known answer is its share. In mode "topk" the
        names of the model's columns, but those of the first code, begin with `alt_`: a known description's further
        codes are not alternatives.
        """
        config, answers = coder.model.config, self.find(texts, langs)
        known = [row for row, answer in enumerate(answers) if answer is not None]
        other = [row for row, answer in enumerate(answers) if answer is None]
        others = [texts[row] for row in other], [langs[row] for row in other]
        found = coder.code_distinct(*others, options, progress=progress, cancel=cancel)
        if callable(progress):
            progress(len(known))
        coded = found.frame(config).set_axis(other)
        if options.mode == "topk":
            coded.columns = names_of_alternatives(coded.columns)
        coded[SOURCE_COL] = MODEL
        if not known:
            return coded
        given = _prediction([answer for answer in answers if answer is not None]).frame(config).set_axis(known)
        given[SOURCE_COL] = KNOWN
        names = list(dict.fromkeys([*given.columns[:-2], *coded.columns]))  # conf and source last
        return pd.concat([frame.reindex(columns=names) for frame in (coded, given)]).sort_index()


def training_files(
    path: Path, coder: Coder, rules: LabelRules, *, input_col: str, language_col: str | None, sheet: str | None = None
) -> tuple[ExampleFiles, bool]:
    """Return a file of training data, and whether it has a column of languages.

    A column that is missing under the given name is read under that of prepared data, or a usual name of descriptions.
    """
    languages = (language_col or LANG_COL, LANG_COL)
    file = open_table(path, (), optional=(input_col, TEXT_COL, *languages), sheet=sheet)
    text_col = next(filter(file.has, (input_col, TEXT_COL)), descriptions_in(file.header) or input_col)
    lang_col = next((name for name in languages if file.has(name)), None)
    files = ExampleFiles(
        (path,),
        coder.model.config.target_cols,
        coder.formatter,
        input_col=text_col,
        language_col=lang_col or LANG_COL,
        language=None if lang_col else "unk",
        known=coder.codes,
        rules=rules,
        sheet=sheet,
    )
    return files, lang_col is not None


def _prediction(answers: Sequence[KnownCodes]) -> Prediction:
    codes = np.array([*itertools.zip_longest(*(answer.codes for answer in answers))], dtype=object).T
    share = np.array([answer.share for answer in answers])
    return Prediction(codes, np.where(pd.isna(codes), np.nan, share[:, None]), share)
