"""Languages, in one table for training and predicting."""

import csv
import difflib
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from histocoder.errors import UserError, shown
from histocoder.text.characters import is_missing
from histocoder.text.tokenizers import UNKNOWN

with Path(__file__).with_name("languages.csv").open(encoding="utf-8", newline="") as file:
    _ROWS = list(csv.DictReader(file))
NAMES = {row["code"]: row["name"] for row in _ROWS}
"""ISO 639-1 code -> English name, without Northern Sami, whose code OccCANINE uses for Swedish."""
_OCCCANINE = {"sv": "se", "de": "ge", "el": "gr"}
"""ISO 639-1 code -> OccCANINE's own, as published weights were trained."""
_ISO = {code: iso for iso, code in _OCCCANINE.items()}
_BY_NAME = {name.casefold(): code for code, name in NAMES.items()} | {"unknown": UNKNOWN}
_OTHER_NAMES = {
    name.casefold(): row["code"] for row in _ROWS for name in row["other_names"].split(";") if name
}
"""Names in the language itself and in others -> ISO 639-1 code; those that mean several languages
are left out.
"""
_LONG_CODES = {code: row["code"] for row in _ROWS for code in row["iso3"].split()}
"""ISO 639-2 and 639-3 code -> ISO 639-1 code."""
# languages of OccCANINE, which messages list as examples
_SAMPLE = "ca da en es fr de el is it nl no pt sv".split()
_NAMED = [f"{code} (or {_OCCCANINE[code]})" if code in _OCCCANINE else code for code in _SAMPLE]
HELP = (
    f"Languages: {', '.join(f'{code} {NAMES[iso]}' for code, iso in zip(_NAMED, _SAMPLE, strict=True))}"
    "; any other by its ISO 639 code; all by their names, in English, their own or others; unk "
    "where it is not known."
)


class Language(str):
    """A language as models are trained with it, made from a code, an alias or a name; compared as a
    value.

    A text that is not a language of the table is only stripped of blanks; a missing one is "unk".

    Examples
    --------
    >>> [Language(text) for text in ("Danish", "EN", "en-GB", "sv", "se", "NA", "plattdeutsch")]
    ['da', 'en', 'en', 'se', 'se', 'unk', 'plattdeutsch']
    >>> [Language(text) for text in ("Deutsch", "Tysk", "deu", "ger", "français", "eng")]
    ['ge', 'ge', 'ge', 'ge', 'fr', 'en']
    """

    __slots__ = ()

    def __new__(cls, text: str = "") -> "Language":
        if isinstance(text, Language):
            return text
        text = text.strip()
        if not text or is_missing(text):
            return super().__new__(cls, UNKNOWN)

        # a name, a code or a locale, such as en-GB
        word = text.casefold()
        code = _BY_NAME.get(word) or _OTHER_NAMES.get(word) or re.split("[-_]", word)[0]
        code = _LONG_CODES.get(code, code)
        language = super().__new__(cls, _OCCCANINE.get(code, code))
        if language.is_known:
            return language
        return super().__new__(cls, text)

    @property
    def iso(self) -> str:
        """ISO 639-1 code."""
        return _ISO.get(self, str(self))

    @property
    def is_known(self) -> bool:
        """Whether it is in the table, or unknown."""
        return self == UNKNOWN or self.iso in NAMES

    def among(self, languages: Collection[str]) -> str:
        """Return a model's own code for the language, "unk" if it is not among those that the model
        knows.

        A model that does not say which ones it knows is given the language itself.

        Examples
        --------
        >>> [Language("Swedish").among(known) for known in (("da", "sv"), ("da", "se"), ("da",), ())]
        ['sv', 'se', 'unk', 'se']
        """
        if not languages:
            return self
        for code in languages:
            if Language(code) == self:
                return code
        return UNKNOWN


def languages_among(langs: Sequence[str], languages: Collection[str]) -> list[str]:
    """Return a model's own codes for languages; see `Language.among`."""
    codes = {lang: Language(lang).among(languages) for lang in set(langs)}
    return [codes[lang] for lang in langs]


def chosen_language(text: str, known: Collection[str] = ()) -> Language:
    """Return the language that is chosen for all descriptions.

    Raises UserError if it is neither in the table nor among a model's, which are `known`.
    """
    language = Language(text)
    if not language.is_known and language not in map(Language, known):
        raise UserError(not_in_table([text]))
    return language


def not_in_table(languages: Collection[str]) -> str:
    """Return a message on languages that are not in the table, with the nearest that are.

    Examples
    --------
    >>> not_in_table(["Englsh"]).partition(".")[0]
    "Languages that histocoder does not know: 'Englsh' (did you mean English, en?)"
    """
    names = list(map(with_nearest, sorted(languages)[:10]))
    if len(languages) > 10:
        names.append("…")
    return (
        f"Languages that histocoder does not know: {', '.join(names)}. Give an ISO 639 code or a "
        "name (docs/configuration.md lists them), and unk where the language is not known."
    )


def own_languages(languages: Collection[str]) -> str:
    """Return a notice on languages of training data that are not in the table; nothing if all
    are.
    """
    unknown = [language for language in languages if not Language(language).is_known]
    if not unknown:
        return ""
    return f"{not_in_table(unknown)} They are trained as languages of their own."


def with_nearest(text: str) -> str:
    """Return a language as messages name it; if it is not in the table, with the nearest that
    is.
    """
    near = difflib.get_close_matches(text.casefold(), _BY_NAME, n=1)
    if Language(text).is_known or not near:
        return shown(text)
    return f"{shown(text)} (did you mean {near[0].title()}, {_BY_NAME[near[0]]}?)"
