"""Text normalisation: the same in training and in use, since the model's config names it."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from histocoder.config import NORMALIZATIONS
from histocoder.errors import UserError

DEFAULT_NORMALIZATION = "nfc"
"""Of new models; imported ones keep their own."""


def normalize(texts: Sequence[str], how: str) -> list[str]:
    """Normalise descriptions.

    Parameters
    ----------
    texts : sequence of str
    how : {"none", "nfc", "lower", "lower_ascii"}
        "nfc": one Unicode form (NFC) for each character, so that "ä" is the same with its diaeresis as a code point of
        its own. "lower": NFC, lower case, single blanks between words and none around them. "lower_ascii": lower case,
        then letters of other alphabets and with diacritics in ASCII ("væver" -> "vaever", "γεωργός" -> "georgos"), as
        OccCANINE's published models were trained.

    Raises
    ------
    UserError
        If the normalisation is unknown.

    Examples
    --------
    >>> normalize(["Husmand og Væver"], "lower_ascii")
    ['husmand og vaever']
    """
    if how == "none":
        return list(texts)
    if how == "nfc":
        return [_nfc(text) for text in texts]
    if how == "lower":  # NFC again, since a letter in lower case may have a form that its capital lacks
        return [_nfc(" ".join(_nfc(text).lower().split())) for text in texts]
    if how == "lower_ascii":
        from text_unidecode import unidecode

        return [text if text.isascii() else unidecode(text) for text in (text.lower() for text in texts)]
    raise UserError(f"Unknown text normalisation {how!r}; choose one of {', '.join(NORMALIZATIONS)}.")


def folded(texts: Sequence[str]) -> list[str]:
    """Keys of descriptions, equal for those that differ only in case, blanks or Unicode form: what counts as one text
    where data are split, and where texts are looked up among those trained on.
    """
    return normalize(texts, "lower")


def fold(text: str) -> str:
    """Fold case, blanks and Unicode normal form of a description, by which hand-coded descriptions are found.

    Unlike `folded` it treats letters that differ in upper case only, such as ß and ss, as the same.

    Examples
    --------
    >>> fold("  Wine and\\u00a0SPIRIT  merchant ")
    'wine and spirit merchant'
    """
    return " ".join(unicodedata.normalize("NFC", unicodedata.normalize("NFC", text).casefold()).split())


def _nfc(text: str) -> str:
    return text if text.isascii() else unicodedata.normalize("NFC", text)
