"""Text normalisation: the same in training and in use, since the model's config names it."""

from __future__ import annotations

from collections.abc import Sequence

from histocoder.errors import UserError

NORMALIZATIONS = ("none", "lower_ascii")


def normalize(texts: Sequence[str], how: str) -> list[str]:
    """Normalise descriptions.

    Parameters
    ----------
    texts : sequence of str
    how : {"none", "lower_ascii"}
        "lower_ascii": lower case, then letters of other alphabets and with diacritics in ASCII ("væver" -> "vaever",
        "γεωργός" -> "georgos"), as OccCANINE's published models were trained.

    Raises
    ------
    UserError
        Where there is no such normalisation.

    Examples
    --------
    >>> normalize(["Husmand og Væver"], "lower_ascii")
    ['husmand og vaever']
    """
    if how == "none":
        return list(texts)
    if how == "lower_ascii":
        from text_unidecode import unidecode

        return [text if text.isascii() else unidecode(text) for text in (text.lower() for text in texts)]
    raise UserError(f"There is no text normalisation {how!r}; there are {', '.join(NORMALIZATIONS)}.")
