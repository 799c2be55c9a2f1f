"""Cells and headers as people and spreadsheets write them: codes, missing ones, names of columns."""

import difflib
import itertools
import re
import unicodedata
from collections.abc import Collection, Iterable, Sequence

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
FIRST_ROWS = 50  # number of first rows among which the header is
_DESCRIPTIONS = (
    *("occ1", "occ", "occupation", "beruf", "profession", "metier", "yrke", "beroep", "erhverv", "stilling"),
    *("mestiere", "oficio", "ocupacion", "profissao", "description", "title"),
)


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


def plain(name: str) -> str:
    """Return a name without case, accents, blanks at its ends and repeated ones.

    Examples
    --------
    >>> plain(" Métier  (Père) ")
    'metier (pere)'
    """
    letters = unicodedata.normalize("NFKD", name.replace("\ufeff", ""))
    return " ".join("".join(char for char in letters if not unicodedata.combining(char)).casefold().split())


def named(name: str, header: Collection[str]) -> list[str]:
    """Return the columns of a name; if there is none, those whose plain names are its own."""
    return [own for own in header if own == name] or [own for own in header if plain(own) == plain(name)]


def nearest(name: str, header: Collection[str]) -> str | None:
    """Return the most similar name of a column, without blanks around it; for descriptions also a usual one."""
    names = {plain(own): " ".join(own.split()) for own in header}
    if close := difflib.get_close_matches(plain(name), names, n=1, cutoff=0.5):
        return names[close[0]]
    return descriptions_in(names.values()) if name in _DESCRIPTIONS else None


def descriptions_in(header: Collection[str]) -> str | None:
    """Return the column that is likely to hold descriptions, by its name; None if there is none."""
    words = {own: re.findall(r"[^\W_]+", plain(own)) for own in header}
    return next((own for usual in _DESCRIPTIONS for own in header if usual in words[own]), None)


def header_row(rows: Sequence[Sequence[str | None]], columns: Collection[str]) -> int:
    """Return the index of the header, which titles may precede: the fullest row that has all columns.

    If there is none, it is the first row with three quarters as many cells as the fullest, or with all but the first
    above a number, as programs write numbers of rows.
    """
    cells = [[cell for cell in row if cell and cell.strip()] for row in rows]
    wanted = set(map(plain, columns))
    found = [i for i, row in enumerate(cells) if wanted and wanted <= set(map(plain, row))]
    if found:
        return max(found, key=lambda i: len(cells[i]))
    most, firsts = max(map(len, cells)), [(row[0] or "").strip() if row else "" for row in rows]
    is_above_number = [not first and below.isdecimal() for first, below in itertools.pairwise([*firsts, ""])]
    return next(
        i
        for i, row in enumerate(cells)
        if 4 * len(row) >= 3 * most or (0 < len(row) == most - 1 and is_above_number[i])
    )


def below_titles(path: object, unit: str, number: int) -> str:
    """Return a notice that a header is not in the first row."""
    return f"{path}: the header is {unit} {number}; what is above it is ignored."
