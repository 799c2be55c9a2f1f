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
        return [text if text.isascii() else text.translate(_ASCII) for text in (text.lower() for text in texts)]
    raise UserError(f"Unknown text normalisation {how!r}; choose one of {', '.join(NORMALIZATIONS)}.")


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

    column = pa.array(texts, pa.string())
    keys = pc.ascii_lower(column).to_numpy(zero_copy_only=False)
    others = np.flatnonzero(pc.match_substring_regex(column, _NOT_PLAIN))
    lower = normalize(column.take(others).to_pylist(), "lower")
    # a text of which ASCII has nothing, such as one of emojis, stays as it is
    keys[others] = [" ".join(text.translate(_ASCII).lower().split()) or text for text in lower]
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
