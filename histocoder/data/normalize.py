"""Text normalisation, which a model's config names, so that it is the same in training and in use."""

import unicodedata
from collections.abc import Sequence

import numpy as np

from histocoder.config import NORMALIZATIONS
from histocoder.errors import UserError

DEFAULT_NORMALIZATION = "nfc"  # normalisation of new models; imported ones keep their own
_NOT_PLAIN = r"[^ -~]|^ |  | $"  # texts in which "lower" changes more than the case of ASCII letters


def normalize(texts: Sequence[str], how: str) -> list[str]:
    """Normalise descriptions.

    `how` is "none"; "nfc": one Unicode form (NFC) for each character, whether or not its diacritics are code points of
    their own; "lower": NFC, lower case, single blanks between words and none around them; or "lower_ascii": lower case,
    then ASCII ("væver" -> "vaever", "γεωργός" -> "georgos"), as OccCANINE's published models were trained.

    Examples
    --------
    >>> normalize(["Husmand og Væver"], "lower_ascii")
    ['husmand og vaever']
    """
    if how == "none":
        return list(texts)
    if how == "nfc":
        return [text if text.isascii() else unicodedata.normalize("NFC", text) for text in texts]
    if how == "lower":
        return [" ".join((text if text.isascii() else _lower(text)).lower().split()) for text in texts]
    if how == "lower_ascii":
        from text_unidecode import unidecode

        return [text if text.isascii() else unidecode(text) for text in (text.lower() for text in texts)]
    raise UserError(f"Unknown text normalisation {how!r}; choose one of {', '.join(NORMALIZATIONS)}.")


def folded(texts: Sequence[str]) -> np.ndarray:
    """Return keys of descriptions, of shape (n,), equal for those that differ only in case, blanks or Unicode form.

    Data are split, and looked up among those trained on, by these keys: descriptions, which may be an Arrow array,
    normalised with "lower".
    """
    import pyarrow as pa  # here, since exported models run without it
    import pyarrow.compute as pc

    column = pa.array(texts, pa.string())
    keys = pc.ascii_lower(column).to_numpy(zero_copy_only=False)
    others = np.flatnonzero(pc.match_substring_regex(column, _NOT_PLAIN))
    keys[others] = normalize(column.take(others).to_pylist(), "lower")
    return keys


def fold(text: str) -> str:
    """Return a key of a description, by which hand-coded descriptions are found.

    Unlike `folded` it takes letters that are the same in upper case, such as ß and ss, as the same.

    Examples
    --------
    >>> fold("  Wine and\\u00a0SPIRIT  merchant ")
    'wine and spirit merchant'
    """
    return " ".join(unicodedata.normalize("NFC", unicodedata.normalize("NFC", text).casefold()).split())


def _lower(text: str) -> str:
    """Return a text in lower case, in NFC: a letter may have a form there that its capital lacks."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", text).lower())
