"""Cells as people and spreadsheets write them: codes, and missing ones."""

import re
from collections.abc import Collection, Iterable

from histocoder.formatters import CodeSystem

MISSING_MARKS = frozenset({"NA", "NaN", "nan", "<NA>", "None", "NULL", "null", "N/A", "n/a", "#N/A", "."})
"""Marks of missing values: R writes NA; pandas NaN, nan, <NA> or None; databases NULL; spreadsheets N/A; Stata and SAS
a dot. Lower case "na" and "none" are left out, since people write them as words."""
_KEPT_AS_TEXT = re.compile(r'="(.*)"|\'(.+)')
WHOLE_NUMBER = re.compile(r"(-?[0-9]+)(\.0+)?")
_PRINTED_HISCO = re.compile(r"([0-9])-([0-9]{2})\.([0-9]{2})")
_MONTH = "(jan|feb|mar|mrt|apr|may|mai|maj|mei|jun|jul|aug|sep|oct|okt|nov|dec|dez)"
_SPOILT = {
    "a number": re.compile(r"-?[0-9](\.[0-9]+)?e[+-][0-9]{2,3}", re.IGNORECASE),
    "a date": re.compile(
        rf"[0-9]{{1,2}}-{_MONTH}|{_MONTH}-[0-9]{{2}}|(19|20)[0-9]{{2}}-[01][0-9]-[0-3][0-9]", re.IGNORECASE
    ),
    "an error": re.compile(r"#[A-Z/0]{2,}[!?]", re.IGNORECASE),
}


def read_code(
    cell: str, known: Collection[str] = (), *, has_decimals: bool = False, system: CodeSystem | None = None
) -> str:
    """Return the code in a cell, without blanks and what spreadsheets add; "" where it is missing.

    One of `known` is read as it is. The decimals of whole numbers are omitted unless the codes `has_decimals`. HISCO's
    printed form is written as digits, of a `system` only if that does not fit and these do.

    Examples
    --------
    >>> [read_code(cell) for cell in (' ="02000"', "'02000", "61110.0", "6-11.10", "NA")]
    ['02000', '02000', '61110', '61110', '']
    """
    code = cell.strip()
    if (match := _KEPT_AS_TEXT.fullmatch(code)) is not None:
        code = (match[1] or match[2] or "").strip()
    if code in known:
        return code
    if code in MISSING_MARKS:
        return ""
    if not has_decimals and (match := WHOLE_NUMBER.fullmatch(code)) is not None:
        return match[1]
    if (match := _PRINTED_HISCO.fullmatch(code)) is not None:
        digits = "".join(match.groups())
        if system is None or (system.problem(code) and system.block_size == len(digits)):
            return digits
    return code


def have_decimals(cells: Iterable[str]) -> bool:
    """Return whether decimals belong to the codes of some cells: those of integers alone are a program's."""
    return not all(WHOLE_NUMBER.fullmatch(code) for cell in cells if (code := read_code(cell)))


def spoilt(cell: str) -> str | None:
    """Return what spreadsheets and R have made of a code; None for other cells.

    Examples
    --------
    >>> spoilt("6E+04"), spoilt("1-Nov"), spoilt("#REF!"), spoilt("61110")
    ('a number', 'a date', 'an error', None)
    """
    return next((what for what, form in _SPOILT.items() if form.fullmatch(cell)), None)
