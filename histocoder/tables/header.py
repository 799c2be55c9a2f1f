"""Headers as people write them: the row that holds it, and the column that a name means."""

import difflib
import re
import unicodedata
from collections.abc import Collection, Sequence

FIRST_ROWS = 50  # number of rows in which the header is looked for
MAX_COLUMNS = 16_384  # largest number of columns, as of Excel
_DESCRIPTION_NAMES = (  # names that people give the column of descriptions, likelier ones first
    "occ1",
    "occ",
    "occupation",
    "beruf",
    "profession",
    "metier",
    "yrke",
    "beroep",
    "erhverv",
    "stilling",
    "mestiere",
    "oficio",
    "ocupacion",
    "profissao",
    "description",
    "title",
)


def plain(name: str) -> str:
    """Return a name without case, accents, blanks at its ends and repeated blanks.

    Examples
    --------
    >>> plain(" Métier  (Père) ")
    'metier (pere)'
    """
    letters = unicodedata.normalize("NFKD", name.replace("\ufeff", ""))
    without_accents = "".join(char for char in letters if not unicodedata.combining(char))
    return " ".join(without_accents.casefold().split())


def named(name: str, header: Collection[str]) -> list[str]:
    """Return the columns of a name; if there is none, those whose plain names are its own."""
    exact = [column for column in header if column == name]
    if exact:
        return exact

    # people write names with other capitals, accents and blanks than a file has
    return [column for column in header if plain(column) == plain(name)]


def nearest(name: str, header: Collection[str]) -> str | None:
    """Return the most similar name of a column, without blanks around it; for descriptions also a
    usual one.
    """
    names = {plain(column): " ".join(column.split()) for column in header}
    matches = difflib.get_close_matches(plain(name), names, n=1, cutoff=0.5)
    if matches:
        return names[matches[0]]
    return descriptions_in(names.values()) if name in _DESCRIPTION_NAMES else None


def descriptions_in(header: Collection[str]) -> str | None:
    """Return the column that is likely to hold descriptions, by its name; None if there is none."""
    words = {column: re.findall(r"[^\W_]+", plain(column)) for column in header}
    for name in _DESCRIPTION_NAMES:
        for column in header:
            if name in words[column]:
                return column
    return None


def header_row(rows: Sequence[Sequence[str | None]], columns: Collection[str]) -> int:
    """Return the index of the header, which titles may precede: the fullest row that has all
    columns.

    If there is none, it is the first row with three quarters as many cells as the fullest, or with
    all but the first above a number, as programs write row numbers.
    """
    cells = [[cell for cell in row if cell and cell.strip()] for row in rows]
    wanted = set(map(plain, columns))
    if wanted:
        complete = [i for i, row in enumerate(cells) if wanted <= set(map(plain, row))]
        if complete:
            return max(complete, key=lambda i: len(cells[i]))

    # titles have fewer cells than the header
    max_cells = max(map(len, cells))
    first_cells = [(row[0] or "").strip() if row else "" for row in rows]
    for i, below in enumerate([*first_cells[1:], ""]):
        num_cells = len(cells[i])
        if num_cells >= 0.75 * max_cells:
            return i

        # row numbers have no name, and a header of two or three cells is too short without it
        is_above_number = first_cells[i] == "" and below.isdecimal()
        if is_above_number and num_cells > 0 and num_cells == max_cells - 1:
            return i
    raise AssertionError("the fullest row is a header")


def below_titles(path: object, unit: str, number: int) -> str:
    """Return a notice that a header is not in the first row."""
    return f"{path}: the header is {unit} {number}; what is above it is ignored."
