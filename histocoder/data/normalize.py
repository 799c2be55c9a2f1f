"""Text normalisation, which a model's config names, so that it is the same in training and in use."""

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

if TYPE_CHECKING:
    import pyarrow as pa

_ENTITY = r"&(#?[0-9A-Za-z]+;)"


def normalize(texts: Sequence[str], how: str) -> list[str]:
    """Normalise descriptions.

    `how` is "none"; "nfc": one Unicode form (NFC) for each character, whether or not its diacritics are code points of
    their own; "lower": NFC, lower case, single blanks between words and none around them; or "lower_ascii": lower case,
    then ASCII ("væver" -> "vaever", "γεωργός" -> "georgos"), as OccCANINE's published models were trained. All decode
    HTML entities; see `without_entities`.

    Examples
    --------
    >>> normalize(["Husmand og Væver"], "lower_ascii")
    ['husmand og vaever']
    """
    texts = [without_entities(text) if "&" in text else text for text in texts]
    if how == "none":
        return texts
    if how == "nfc":
        return [text if text.isascii() else unicodedata.normalize("NFC", text) for text in texts]
    if how == "lower":
        return [" ".join((text if text.isascii() else _lower(text)).lower().split()) for text in texts]
    if how == "lower_ascii":
        return [text if text.isascii() else text.translate(_ASCII) for text in (text.lower() for text in texts)]
    raise UserError(f"Unknown text normalisation {how!r}; choose one of {', '.join(NORMALIZATIONS)}.")


def normalize_column(texts: pa.Array, how: str) -> pa.Array:
    """Normalise an Arrow array of descriptions as `normalize` does; plain ASCII ones are changed all at once."""
    import pyarrow as pa  # here, since exported models run without it
    import pyarrow.compute as pc

    is_other = pc.match_substring(texts, "&")
    if how != "none":
        is_other = pc.or_(is_other, pc.invert(pc.string_is_ascii(texts)))
    if how == "lower":
        trimmed = pc.equal(pc.binary_length(pc.ascii_trim_whitespace(texts)), pc.binary_length(texts))
        is_tidy = pc.and_not(pc.and_(trimmed, pc.ascii_is_printable(texts)), pc.match_substring(texts, "  "))
        is_other = pc.or_(is_other, pc.invert(is_tidy))
    is_other = pc.fill_null(is_other, False)
    others = normalize(texts.filter(is_other).to_pylist(), how)
    plain = texts if how in ("none", "nfc") else pc.ascii_lower(texts)
    return pc.replace_with_mask(plain, is_other, pa.array(others, pa.string()))


def without_entities(text: str) -> str:
    """Decode HTML entities, those that decoding leaves included, so that decoding again changes nothing.

    Examples
    --------
    >>> without_entities("boot &amp; shoe maker"), without_entities("R&D; B&amp;amp;B")
    ('boot & shoe maker', 'R&D; B&B')
    """
    while text != (decoded := re.sub(_ENTITY, _decoded, text)):
        text = decoded
    return text


def decode_entities(column: pa.Array) -> pa.Array:
    """Return descriptions without HTML entities."""
    import pyarrow as pa  # here, since exported models run without it
    import pyarrow.compute as pc

    marked = pc.fill_null(pc.match_substring(column, "&"), False)
    decoded = map(without_entities, column.filter(marked).to_pylist())
    return pc.replace_with_mask(column, marked, pa.array(decoded, pa.string()))


def _decoded(match: re.Match[str]) -> str:
    is_entity = match[1].startswith("#") or match[1] in html5
    return unescape(match[0]) if is_entity else match[0]


def description_keys(texts: Sequence[str]) -> np.ndarray:
    """Return keys of descriptions, of shape (n,), which are equal for spellings of the same description.

    Spellings are the same if they differ only in what a model may not see: case, blanks, Unicode form, and accents and
    letters that ASCII lacks ("lower" and "lower_ascii" of `normalize` together). Data are split, corrected, looked up
    among known descriptions and counted by these keys. `texts` may be an Arrow array.

    Examples
    --------
    >>> description_keys(["Husmand og VÆVER", " husmand\u00a0og vaever"]).tolist()
    ['husmand og vaever', 'husmand og vaever']
    """
    import pyarrow as pa  # here, since exported models run without it
    import pyarrow.compute as pc

    lower = normalize_column(pa.array(texts, pa.string()), "lower")
    others = np.flatnonzero(pc.invert(pc.ascii_is_printable(lower)))
    keys = lower.to_numpy(zero_copy_only=False)
    for row in others.tolist():  # a text of which ASCII has nothing, such as one of emojis, stays as it is
        keys[row] = " ".join(keys[row].translate(_ASCII).lower().split()) or keys[row]
    return keys


class _Transliterations(dict[int, str]):
    """ASCII for each code point, for `str.translate`; looked up when it first occurs."""

    def __missing__(self, code_point: int) -> str:
        from text_unidecode import unidecode

        return self.setdefault(code_point, unidecode(chr(code_point)))


_ASCII = _Transliterations()


def _lower(text: str) -> str:
    """Return a text in lower case, in NFC: a letter may have a form there that its capital lacks."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", text).lower())
