"""Codes as spreadsheets and statistics programs write them."""

import re

MISSING_MARKS = frozenset({"NA", "NaN", "nan", "<NA>", "None", "NULL", "null", "N/A", "n/a", "#N/A", "."})
"""Marks of missing values: R writes NA; pandas NaN, nan, <NA> or None; databases NULL; spreadsheets N/A; Stata and SAS
a dot. Lower case "na" and "none" are left out, since people write them as words."""
MOST_DIGITS = 2**53  # largest integer up to which doubles tell all integers apart
_KEPT_AS_TEXT = re.compile(r'="(.*)"|\'(.+)')
_WHOLE = re.compile(r"(-?[0-9]+)\.0+")
_PRINTED_HISCO = re.compile(r"([0-9])-([0-9]{2})\.([0-9]{2})")
_MONTH = "(jan|feb|mar|mrt|apr|may|mai|maj|mei|jun|jul|aug|sep|oct|okt|nov|dec|dez)"
_SPOILT = {
    "a number": re.compile(r"-?[0-9](\.[0-9]+)?e[+-][0-9]{2,3}", re.IGNORECASE),
    "a date": re.compile(
        rf"[0-9]{{1,2}}-{_MONTH}|{_MONTH}-[0-9]{{2}}|(19|20)[0-9]{{2}}-[01][0-9]-[0-3][0-9]", re.IGNORECASE
    ),
    "an error": re.compile(r"#[A-Z/0]{2,}[!?]"),
}
_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?")


def bare(cell: str) -> str:
    """Strip a cell of blanks, and of the marks that keep a spreadsheet from reading it as a number.

    Examples
    --------
    >>> bare('="02000"'), bare("'02000 ")
    ('02000', '02000')
    """
    cell = cell.strip()
    match = _KEPT_AS_TEXT.fullmatch(cell)
    return cell if match is None else (match[1] or match[2] or "").strip()


def whole_number(cell: str) -> str | None:
    """Return the digits of a whole number with decimals, such as "61110.0"; None for other cells."""
    match = _WHOLE.fullmatch(cell)
    return match and match[1]


def is_integer(cell: str) -> bool:
    """Return whether a cell is an integer, with decimals or without."""
    return re.fullmatch(r"-?[0-9]+", whole_number(cell) or cell) is not None


def printed_hisco(cell: str) -> str | None:
    """Return the five digits of a HISCO code in its printed form, such as "6-11.10"; None for other cells."""
    match = _PRINTED_HISCO.fullmatch(cell)
    return match and "".join(match.groups())


def looks_like_a_number(cell: str) -> bool:
    """Return whether a cell is a number with decimals or an exponent."""
    return not cell.lstrip("+-").isdigit() and _NUMBER.fullmatch(cell) is not None


def spoilt(cell: str) -> str | None:
    """Return what spreadsheets and R have made of a code; None for other cells.

    Examples
    --------
    >>> spoilt("6E+04"), spoilt("1-Nov"), spoilt("#REF!"), spoilt("61110")
    ('a number', 'a date', 'an error', None)
    """
    return next((what for what, form in _SPOILT.items() if form.fullmatch(cell)), None)
