"""Hand-coded descriptions, which keep their codes instead of being coded by a model."""

from collections import Counter
from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from histocoder.data.examples import LANG_COL, TEXT_COL, Examples
from histocoder.data.labelled_files import LabelledFiles
from histocoder.data.labels import LabelRules
from histocoder.formatters import MISSING
from histocoder.inference.coder import Coder
from histocoder.log import log
from histocoder.tables.header import descriptions_in
from histocoder.tables.table import open_table
from histocoder.text.languages import Language
from histocoder.text.normalize import description_keys
from histocoder.text.tokenizers import UNKNOWN


class KnownCodes(NamedTuple):
    """Codes of a hand-coded description."""

    codes: tuple[
        str, ...
    ]  # their most frequent set of codes, in the order first written; none: no occupation
    share: float  # share of the description's rows that have this set


class Known:
    """A dictionary of hand-coded rows: (key of a description, language) to the most frequent set of
    codes.

    Of equally frequent sets the first in the file counts. Languages that the model does not know
    are one language, unknown, as they are to the model; without `languages` that it knows, they are
    compared by their codes. With `any_language` rows count for every language, since their own are
    not given. If `exact`, descriptions are compared letter by letter, instead of by
    `description_keys`.
    """

    def __init__(
        self, *, languages: Collection[str] = (), any_language: bool = False, exact: bool = False
    ) -> None:
        self._languages, self._any_language, self._exact = frozenset(languages), any_language, exact
        self._written: dict[
            frozenset[str], tuple[str, ...]
        ] = {}  # each set of codes as it was first written
        self._langs: set[str] = set()
        self._counts: Counter[tuple[str, str, tuple[str, ...]]] = Counter()

    def add(self, examples: Examples, *, only: Collection[str] | None = None) -> None:
        """Add hand-coded rows; with `only`, those of descriptions with these keys."""
        rows, langs = examples.codes.to_numpy(dtype=object).tolist(), self._own(examples.langs)
        self._langs.update(langs)
        for key, lang, row in zip(self.keys(examples.texts), langs, rows, strict=True):
            if only is None or key in only:
                codes = tuple(dict.fromkeys(code for code in row if code not in (None, MISSING)))
                self._counts[key, lang, self._written.setdefault(frozenset(codes), codes)] += 1

    def find(self, texts: Sequence[str], langs: Sequence[str]) -> list[KnownCodes | None]:
        """Return the answers for n descriptions, whose languages are codes; None for those that are
        not known.

        If all hand-coded rows are in one language, descriptions of unknown language are taken to be
        in it.
        """
        only = next(iter(self._langs)) if len(self._langs) == 1 else UNKNOWN
        langs = [
            only if lang == UNKNOWN else own
            for lang, own in zip(langs, self._own(langs), strict=True)
        ]
        return [self._answers.get(pair) for pair in zip(self.keys(texts), langs, strict=True)]

    def keys(self, texts: Sequence[str]) -> Sequence[str]:
        """Return the keys of n descriptions."""
        return texts if self._exact else description_keys(texts).tolist()

    def _own(self, langs: Sequence[str]) -> list[str]:
        """Return languages as they are told apart here."""
        if self._any_language:
            return [UNKNOWN] * len(langs)
        own = {lang: Language(lang).among(self._languages) for lang in set(langs)}
        return [own[lang] for lang in langs]

    @cached_property
    def _answers(self) -> dict[tuple[str, str], KnownCodes]:
        """Codes of each description, by its key and language; once all rows are added."""
        totals: Counter[tuple[str, str]] = Counter()
        for (key, lang, _), count in self._counts.items():
            totals[key, lang] += count
        answers: dict[tuple[str, str], KnownCodes] = {}
        for (key, lang, codes), count in self._counts.items():
            share = count / totals[key, lang]
            if (key, lang) not in answers or share > answers[key, lang].share:
                answers[key, lang] = KnownCodes(codes, share)
        return answers


def files_of(coder: Coder, *paths: Path, **options: Any) -> LabelledFiles:
    """Return files with codes and attributes of a model; options are other fields of
    `LabelledFiles`.
    """
    own = {
        "target_cols": coder.model.config.target_cols,
        "formatter": coder.formatter,
        "known": coder.codes,
    }
    return LabelledFiles(paths, **{**own, "attribute_cols": tuple(coder.attributes), **options})


def training_files(
    path: Path, coder: Coder, rules: LabelRules, *, input_col: str, language_col: str | None
) -> tuple[LabelledFiles, bool]:
    """Return a file of training data, and whether it has a column of languages.

    A column that is missing under the given name is read under that of prepared data, or a usual
    name of descriptions.
    """
    languages = (language_col or LANG_COL, LANG_COL)
    file = open_table(
        path, (), optional=(input_col, TEXT_COL, *languages, *coder.model.config.target_cols)
    )
    text_col = next(
        filter(file.has, (input_col, TEXT_COL)), descriptions_in(file.header) or input_col
    )
    lang_col = next((name for name in languages if file.has(name)), None)
    if language_col and not lang_col:
        log.info(f"{path} has no column {language_col!r}; its codes apply to all languages.")
    langs = {"language_col": lang_col or LANG_COL, "language": None if lang_col else "unk"}
    opened = {path: file} if file.has(text_col) else {}  # else titles precede the header
    return files_of(
        coder, path, input_col=text_col, rules=rules, opened=opened, **langs
    ), lang_col is not None
