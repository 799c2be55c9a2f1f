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
from histocoder.text.languages import languages_among
from histocoder.text.normalize import description_keys
from histocoder.text.tokenizers import UNKNOWN


class KnownCodes(NamedTuple):
    """Codes of a hand-coded description."""

    # the most frequent set of codes, in the order first written; none: no occupation
    codes: tuple[str, ...]
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
        self._languages = frozenset(languages)
        self._any_language = any_language
        self._exact = exact
        self._langs: set[str] = set()
        # each set of codes as it was first written
        self._written: dict[frozenset[str], tuple[str, ...]] = {}
        # (key, language, codes) -> number of rows
        self._counts: Counter[tuple[str, str, tuple[str, ...]]] = Counter()

    def add(self, examples: Examples, *, only: Collection[str] | None = None) -> None:
        """Add hand-coded rows; with `only`, those of descriptions with these keys."""
        keys = self.keys(examples.texts)
        langs = self._distinguished(examples.langs)
        rows = examples.codes.to_numpy(dtype=object).tolist()
        self._langs.update(langs)
        for key, lang, row in zip(keys, langs, rows, strict=True):
            if only is not None and key not in only:
                continue
            distinct = dict.fromkeys(row)
            for blank in (None, MISSING):
                distinct.pop(blank, None)

            # The same codes in another order are the same set.
            codes = self._written.setdefault(frozenset(distinct), tuple(distinct))
            self._counts[key, lang, codes] += 1

    def find(self, texts: Sequence[str], langs: Sequence[str]) -> list[KnownCodes | None]:
        """Return the answers for n descriptions, whose languages are codes; None for those that are
        not known.

        If all hand-coded rows are in one language, descriptions of unknown language are taken to be
        in it.
        """
        default = UNKNOWN
        if len(self._langs) == 1:
            (default,) = self._langs

        # A stated language that the model does not know is not taken to be that one.
        answers = []
        distinguished = self._distinguished(langs)
        for key, lang, lang_here in zip(self.keys(texts), langs, distinguished, strict=True):
            answers.append(self._answers.get((key, default if lang == UNKNOWN else lang_here)))
        return answers

    def keys(self, texts: Sequence[str]) -> Sequence[str]:
        """Return the keys of n descriptions."""
        return texts if self._exact else description_keys(texts).tolist()

    def _distinguished(self, langs: Sequence[str]) -> list[str]:
        """Return languages as they are told apart here."""
        if self._any_language:
            return [UNKNOWN] * len(langs)
        return languages_among(langs, self._languages)

    @cached_property
    def _answers(self) -> dict[tuple[str, str], KnownCodes]:
        """Codes of each description, by its key and language; once all rows are added."""
        totals: Counter[tuple[str, str]] = Counter()
        for (key, lang, _), count in self._counts.items():
            totals[key, lang] += count

        # Sets come in the order of the file, so that the first of equally frequent ones stays.
        answers: dict[tuple[str, str], KnownCodes] = {}
        for (key, lang, codes), count in self._counts.items():
            share = count / totals[key, lang]
            if (key, lang) not in answers or share > answers[key, lang].share:
                answers[key, lang] = KnownCodes(codes, share)
        return answers


def files_of(
    coder: Coder, *paths: Path, target_cols: tuple[str, ...] | None = None, **options: Any
) -> LabelledFiles:
    """Return files with codes and attributes of a model, by default in the columns that it writes;
    options are other fields of `LabelledFiles`.
    """
    return LabelledFiles(
        paths,
        target_cols=target_cols or coder.model.config.written_cols,
        formatter=coder.formatter,
        known=coder.codes,
        attribute_cols=tuple(coder.attributes),
        **options,
    )


def training_files(
    path: Path, coder: Coder, rules: LabelRules, *, input_col: str, language_col: str | None
) -> tuple[LabelledFiles, bool]:
    """Return a file of training data, and whether it has a column of languages.

    A column that is missing under the given name is read under that of prepared data, or a usual
    name of descriptions.
    """
    lang_cols = (language_col or LANG_COL, LANG_COL)
    target_cols = coder.model.config.written_cols
    table = open_table(path, (), optional=(input_col, TEXT_COL, *lang_cols, *target_cols))
    text_col = descriptions_in(table.header) or input_col
    for name in (TEXT_COL, input_col):
        if table.has(name):
            text_col = name
    lang_col = table.first_of(lang_cols)
    if language_col and not lang_col:
        log.info(f"{path} has no column {language_col!r}; its codes apply to all languages.")

    opened = {}
    if table.has(text_col):  # else titles precede the header
        opened[path] = table
    files = files_of(
        coder,
        path,
        input_col=text_col,
        rules=rules,
        opened=opened,
        language_col=lang_col or LANG_COL,
        language=None if lang_col else "unk",
    )
    return files, lang_col is not None
