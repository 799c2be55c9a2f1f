"""Text normalisation, which a model's config names, so that it is the same in training and in
use.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from html import unescape
from html.entities import html5
from typing import TYPE_CHECKING

import numpy as np

from histocoder.config import NORMALIZATIONS
from histocoder.errors import UserError
from histocoder.text.characters import is_blank, with_plain_letters

if TYPE_CHECKING:
    import pyarrow as pa

_NO_WORD = r"[^\pL\pM\pN]+"
_LAST_CYRILLIC = "\u052f"  # behind Latin and Greek
_SCRIPTS = ("LATIN ", "GREEK ", "CYRILLIC ")  # in names of their other letters
_ENTITY = r"&(#?[0-9A-Za-z]+;)"
_FORMS_WITH_PLAIN_LETTERS = ("nfc2", "lower2", "lower_ascii2")


def normalize(texts: Sequence[str], form: str) -> list[str]:
    """Normalise descriptions.

    `form` is "none"; "nfc": one Unicode form (NFC) for each character, whether or not its diacritics
    are code points of their own; "lower": NFC, lower case, single blanks between words and none
    around them; or "lower_ascii": lower case, then ASCII ("væver" -> "vaever", "γεωργός" ->
    "georgos"), as OccCANINE's published models were trained. "nfc2", "lower2" and "lower_ascii2",
    of new models, first read `with_plain_letters`. All decode HTML entities; see
    `without_entities`.

    Examples
    --------
    >>> normalize(["Husmand og Væver"], "lower_ascii"), normalize(["Hu\u017fmand\u200b"], "lower2")
    (['husmand og vaever'], ['husmand'])
    """
    texts = [without_entities(text) if "&" in text else text for text in texts]
    if form in _FORMS_WITH_PLAIN_LETTERS:
        texts = list(map(with_plain_letters, texts))
        form = form.removesuffix("2")
    if form == "none":
        return texts
    if form == "nfc":
        return [unicodedata.normalize("NFC", text) for text in texts]
    if form == "lower":
        return [" ".join(_lower(text).lower().split()) for text in texts]
    if form == "lower_ascii":
        # most texts are ASCII, and `str.translate` looks up each character in Python
        lower = [text.lower() for text in texts]
        return [text if text.isascii() else text.translate(_ASCII) for text in lower]
    raise UserError(
        f"Unknown text normalisation {form!r}; choose one of {', '.join(NORMALIZATIONS)}."
    )


def normalize_column(texts: pa.Array, form: str) -> pa.Array:
    """Normalise an Arrow array of descriptions as `normalize` does; plain ASCII ones are changed
    all at once.
    """
    import pyarrow as pa  # here, since exported models run without it
    import pyarrow.compute as pc

    # each form leaves most texts as they are, or changes their case alone, which Arrow can do
    needs_python = pc.match_substring(texts, "&")
    if form != "none":
        needs_python = pc.or_(needs_python, pc.invert(pc.string_is_ascii(texts)))
    if form in _FORMS_WITH_PLAIN_LETTERS:
        needs_python = pc.or_(needs_python, pc.invert(pc.ascii_is_printable(texts)))
    if form in ("lower", "lower2"):
        needs_python = pc.or_(needs_python, pc.not_equal(pc.ascii_trim_whitespace(texts), texts))
        needs_python = pc.or_(needs_python, pc.invert(pc.ascii_is_printable(texts)))
        needs_python = pc.or_(needs_python, pc.match_substring(texts, "  "))

    needs_python = pc.fill_null(needs_python, False)
    normalized = normalize(texts.filter(needs_python).to_pylist(), form)
    in_arrow = texts if form in ("none", "nfc", "nfc2") else pc.ascii_lower(texts)
    return pc.replace_with_mask(in_arrow, needs_python, pa.array(normalized, pa.string()))


def without_entities(text: str) -> str:
    """Decode HTML entities, those that decoding leaves included, so that decoding again changes
    nothing.

    Examples
    --------
    >>> without_entities("boot &amp; shoe maker"), without_entities("R&D; B&amp;amp;B")
    ('boot & shoe maker', 'R&D; B&B')
    """
    while text != (decoded := re.sub(_ENTITY, _decode, text)):
        text = decoded
    return text


def is_blank_description(text: str) -> bool:
    """Return whether a description shows nothing, as one does whose only content is an entity of a
    blank.

    Examples
    --------
    >>> is_blank_description("&nbsp;"), is_blank_description("R&D")
    (True, False)
    """
    return is_blank(without_entities(text) if "&" in text else text)


def decode_entities(column: pa.Array) -> pa.Array:
    """Return descriptions without HTML entities."""
    import pyarrow as pa  # here, since exported models run without it
    import pyarrow.compute as pc

    may_have_entity = pc.fill_null(pc.match_substring(column, "&"), False)
    decoded = map(without_entities, column.filter(may_have_entity).to_pylist())
    return pc.replace_with_mask(column, may_have_entity, pa.array(decoded, pa.string()))


def _decode(match: re.Match[str]) -> str:
    # `unescape` alone would also decode names that merely begin like an entity
    if match[1].startswith("#") or match[1] in html5:
        return unescape(match[0])
    return match[0]


def description_keys(texts: Sequence[str]) -> np.ndarray:
    """Return keys of descriptions, of shape (n,), which are equal for spellings of the same
    description.

    A key is a description's words, in their order: `spellings` without punctuation, which delimits
    words; of a description without words, such as a dash, the spelling. Data are split, corrected,
    looked up among known descriptions and counted by these keys. `texts` may be an Arrow array.

    Examples
    --------
    >>> description_keys(["Husmand og VÆVER", " husmand\u00a0og vaever.", "husmand-og (væver)"]).tolist()
    ['husmand og vaever', 'husmand og vaever', 'husmand og vaever']
    """
    import pyarrow as pa  # here, since exported models run without it
    import pyarrow.compute as pc

    spelt = pa.array(spellings(texts), pa.string())
    words = pc.ascii_trim(pc.replace_substring_regex(spelt, _NO_WORD, " "), " ")
    return pc.if_else(pc.equal(words, ""), spelt, words).to_numpy(zero_copy_only=False)


def spellings(texts: Sequence[str]) -> np.ndarray:
    """Return descriptions as models may see them, of shape (n,): in small ASCII letters, with
    single blanks.

    Case, blanks, invisible characters, the Unicode form, accents and letters that ASCII lacks make
    no difference ("lower2" and "lower_ascii2" of `normalize` together). Scripts other than Latin,
    Greek and Cyrillic keep their letters, since different words are the same in ASCII: 教师, a
    teacher, and 教士, a clergyman, are both "jiao shi". `texts` may be an Arrow array.

    Examples
    --------
    >>> spellings(["Husmand og VÆVER", " husmand\u00a0og vaever.", "教师"]).tolist()
    ['husmand og vaever', 'husmand og vaever.', '教师']
    """
    import pyarrow as pa  # here, since exported models run without it
    import pyarrow.compute as pc

    lower = normalize_column(pa.array(texts, pa.string()), "lower2")
    rows = np.flatnonzero(pc.invert(pc.ascii_is_printable(lower)))
    spelt = lower.to_numpy(zero_copy_only=False)

    # a text of which ASCII has nothing, such as one of emojis, stays as it is
    for row in rows.tolist():
        spelt[row] = " ".join(spelt[row].translate(_KEY_LETTERS).lower().split()) or spelt[row]
    return spelt


class _Transliterations(dict[int, str]):
    """ASCII for each code point, for `str.translate`; looked up when it first occurs."""

    def __missing__(self, code_point: int) -> str:
        from text_unidecode import unidecode

        return self.setdefault(code_point, unidecode(chr(code_point)))


class _KeyLetters(dict[int, str]):
    """ASCII for each code point, but letters of scripts that ASCII can't tell apart as they are."""

    def __missing__(self, code_point: int) -> str:
        char = chr(code_point)
        is_letter = unicodedata.category(char)[0] in "LM"  # M: vowels of Indian scripts
        has_ascii = char <= _LAST_CYRILLIC or unicodedata.name(char, "").startswith(_SCRIPTS)
        if is_letter and not has_ascii:
            return self.setdefault(code_point, char)
        return self.setdefault(code_point, _ASCII[code_point])


_ASCII = _Transliterations()
_KEY_LETTERS = _KeyLetters()


def _lower(text: str) -> str:
    """Return a text in lower case, in NFC: a letter may have a form there that its capital
    lacks.
    """
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", text).lower())
