"""Characters that nobody sees, and letters in forms of their own: what is the same text to a
reader.
"""

from __future__ import annotations

import re
import unicodedata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

_FILLERS = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
"""Characters of other categories than controls and format characters that show nothing: fillers,
selectors.
"""
_MISSING_MARKS = frozenset(
    {
        "NA",
        "NaN",
        "nan",
        "NaT",
        "<NA>",
        "None",
        "NULL",
        "null",
        "(null)",
        "\\N",
        "N/A",
        "n/a",
        "#N/A",
        "#NV",
    }
)
"""Marks of missing values: R writes NA; pandas NaN, nan, NaT, <NA> or None; databases NULL or \\N;
spreadsheets N/A. Lower case "na" and "none" are left out, since people write them as words.
"""
_NOTHING = re.compile(r"[-.?_…· ]+")  # as people leave a cell out; Stata and SAS write a dot

_DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212\ufe63\uff0d"
_BLANKS = "\u00a0\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u3000"
_ASCII_MARKS = str.maketrans(
    {
        **dict.fromkeys(_DASHES, "-"),
        **dict.fromkeys(_BLANKS, " "),
        **dict.fromkeys("\u2018\u2019\u201a\u201b\u00b4`", "'"),
        **dict.fromkeys("\u201c\u201d\u201e\u201f\u00ab\u00bb", '"'),
        **{chr(0xFF10 + digit): str(digit) for digit in range(10)},
    }
)
"""Dashes, blanks, quotation marks and digits of one meaning, as ASCII has them."""


class _PlainForms(dict[int, str]):
    """The plain form of each code point, for `str.translate`; looked up when it first occurs."""

    def __missing__(self, code_point: int) -> str:
        char = chr(code_point)
        category = unicodedata.category(char)
        plain = unicodedata.normalize("NFKC", char)
        is_control = category == "Cc" and not char.isspace()
        if category == "Cf" or is_control or _FILLERS.match(char):
            return self.setdefault(code_point, "")

        # a diacritic by itself would become a blank with a diacritic, ŀ a word that ends in l
        ends_word = len(plain) > 1 and (" " in plain or (char.isalpha() and not plain.isalpha()))

        # 1½ is not 11/2, 2² is not 22, and the sign of micro is no Greek letter
        if category == "No" or char == "\u00b5" or ends_word:
            plain = char
        return self.setdefault(code_point, plain)


_PLAIN_FORMS = _PlainForms()


def with_plain_letters(text: str) -> str:
    """Return a text without invisible characters, and with the usual letters in place of
    presentation forms.

    Invisible are format characters (soft hyphens, zero-width characters, marks of direction,
    byte-order marks), controls other than white space, fillers and variation selectors.
    Presentation forms are those that NFKC replaces: long s, ligatures, full-width and superscript
    letters. Numbers that are one sign, such as ½ and ², stay.

    Examples
    --------
    >>> with_plain_letters("\u017fchuh\u00adma\ufb05er"), with_plain_letters("1\u00bd ac. M\u02b3")
    ('schuhmaster', '1½ ac. Mr')
    """
    if text.isascii() and text.isprintable():
        return text
    return text.translate(_PLAIN_FORMS)


def with_ascii_marks(text: str) -> str:
    """Return a text with ASCII's dashes, blanks, quotation marks and digits in place of others."""
    return text.translate(_ASCII_MARKS)


def is_blank(text: str) -> bool:
    """Return whether a text shows nothing: it is empty, or has only white space and invisible
    characters.

    Examples
    --------
    >>> is_blank(" \u200b"), is_blank("-")
    (True, False)
    """
    return not with_plain_letters(text).strip()


def is_missing(text: str) -> bool:
    """Return whether a text, without blanks around it, is a mark of a missing value in any column.

    Examples
    --------
    >>> [text for text in ("NA", "–", "--", "?", "..", "#N/A", "na", "none", "0", "") if is_missing(text)]
    ['NA', '–', '--', '?', '..', '#N/A']
    """
    return text in _MISSING_MARKS or _NOTHING.fullmatch(with_ascii_marks(text)) is not None


def without_blanks(texts: pa.Array) -> pa.Array:
    """Return texts with null in place of blank ones; see `is_blank`."""
    import pyarrow as pa  # here, since exported models run without it
    import pyarrow.compute as pc

    has_visible_ascii = pc.match_substring_regex(texts, "[!-~]")
    may_be_blank = pc.fill_null(pc.invert(has_visible_ascii), False)
    candidates = texts.filter(may_be_blank).to_pylist()
    text_or_null = [None if is_blank(text) else text for text in candidates]
    return pc.replace_with_mask(texts, may_be_blank, pa.array(text_or_null, pa.string()))
