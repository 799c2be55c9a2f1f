"""Hand-coded descriptions, which keep their codes instead of being coded by a model."""

from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from histocoder.config import SOURCE_COL, PredictOptions
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
    """A dictionary of hand-coded rows: (key of a description, language) to the most frequent set of codes.

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
        self.source_id, self.width = source_id, 1  # width: the maximum number of codes of a row
        self._languages, self._any_language, self._exact = frozenset(languages), any_language, exact
        self._written: dict[tuple[str, ...], tuple[frozenset[str], tuple[str, ...]]] = {}  # each tuple of codes once
        self._langs: set[str] = set()
        self._counts: dict[tuple[str, str, frozenset[str]], tuple[int, tuple[str, ...]]] = {}

    def add(self, examples: Examples, *, only: Collection[str] | None = None) -> None:
        """Add hand-coded rows; with `only`, those of descriptions with these keys."""
        rows, langs = examples.codes.to_numpy(dtype=object).tolist(), self._own(examples.langs)
        self._langs.update(langs)
        for key, lang, row in zip(self.keys(examples.texts), langs, rows, strict=True):
            if only is None or key in only:
                codes = tuple(dict.fromkeys(code for code in row if code is not None))
                one_set, codes = self._written.setdefault(codes, (frozenset(codes), codes))
                count, first = self._counts.get((key, lang, one_set), (0, codes))
                self._counts[key, lang, one_set] = count + 1, first
                self.width = max(self.width, len(codes))

    def find(self, texts: Sequence[str], langs: Sequence[str]) -> list[KnownCodes | None]:
        """Return the answers for n descriptions, whose languages are codes; None for those that are not known.

        If all hand-coded rows are in one language, descriptions of unknown language are taken to be in it.
        """
        only = next(iter(self._langs)) if len(self._langs) == 1 else "unk"
        langs = [only if lang == "unk" else own for lang, own in zip(langs, self._own(langs), strict=True)]
        return [self._answers.get(pair) for pair in zip(self.keys(texts), langs, strict=True)]

    def keys(self, texts: Sequence[str]) -> Sequence[str]:
        """Return the keys of n descriptions."""
        return texts if self._exact else description_keys(texts).tolist()

    def _own(self, langs: Sequence[str]) -> list[str]:
        """Return languages as they are told apart here."""
        if self._any_language:
            return ["unk"] * len(langs)
        own = {lang: Language(lang).among(self._languages) for lang in set(langs)}
        return [own[lang] for lang in langs]

    @property
    def num_contradictory(self) -> int:
        """Number of descriptions whose rows have different sets of codes."""
        return sum(answer.share < 1 for answer in self._answers.values())

    @cached_property
    def _answers(self) -> dict[tuple[str, str], KnownCodes]:
        """Codes of each description, by its key and language; once all rows are added."""
        totals: dict[tuple[str, str], int] = {}
        best: dict[tuple[str, str], tuple[int, tuple[str, ...]]] = {}
        for (key, lang, _), counted in self._counts.items():
            totals[key, lang] = totals.get((key, lang), 0) + counted[0]
            if counted[0] > best.get((key, lang), (0, ()))[0]:
                best[key, lang] = counted
        return {pair: KnownCodes(codes, count / totals[pair]) for pair, (count, codes) in best.items()}

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

        The column `source` is "known" or "model". The probability of a known answer is its share. A known description's
        further codes are not among the alternatives of mode topk.
        """
        answers = self.find(texts, langs)
        is_known = np.array([answer is not None for answer in answers], dtype=bool)
        other = np.flatnonzero(~is_known).tolist()
        others = [texts[row] for row in other], [langs[row] for row in other]
        found = coder.code_distinct(*others, options, progress=progress, cancel=cancel)
        if callable(progress):
            progress(len(texts) - len(other))
        # of all descriptions, without codes where these are the others'
        frame = self._prediction(answers).frame(coder.model.config)
        found = found.take(np.where(is_known, -1, (~is_known).cumsum() - 1))
        coded = found.frame(coder.model.config, has_alternatives=options.mode == "topk")
        names = dict.fromkeys([*frame.columns[:-1], *coded.columns])  # conf last
        for name in coded:
            frame[name] = frame[name].where(is_known, coded[name]) if name in frame else coded[name]
        return frame[[*names]].assign(**{SOURCE_COL: np.where(is_known, KNOWN, MODEL).astype(object)})

    def _prediction(self, answers: Sequence[KnownCodes | None]) -> Prediction:
        codes = np.full((len(answers), self.width), None, dtype=object)
        for row, answer in enumerate(answers):
            if answer is not None:
                codes[row, : len(answer.codes)] = answer.codes
        share = np.array([np.nan if answer is None else answer.share for answer in answers], dtype=float)
        return Prediction(codes, np.where(pd.isna(codes), np.nan, share[:, None]), share)


def training_files(
    path: Path, coder: Coder, rules: LabelRules, *, input_col: str, language_col: str | None
) -> tuple[ExampleFiles, bool]:
    """Return a file of training data, and whether it has a column of languages.

    A column that is missing under the given name is read under that of prepared data, or a usual name of descriptions.
    """
    languages = (language_col or LANG_COL, LANG_COL)
    file = open_table(path, (), optional=(input_col, TEXT_COL, *languages))
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
    )
    return files, lang_col is not None
