"""Groups of HISCO and OCC1950, and titles in words of this project's own."""

import csv
from collections.abc import Collection
from functools import cache
from pathlib import Path

GROUPS = Path(__file__).with_name("groups.csv")
HISCO_TITLES = Path(__file__).with_name("titles.csv")
"""Titles of HISCO's codes."""
LEXICON = Path(__file__).with_name("lexicon.csv")
"""More of them, with words for people in a household, spellings and abbreviations."""
_DIGITS = {"unit": 3, "minor": 2}  # of HISCO's groups; a major group may have several first digits
_MIN_SHARE_OF_HISCO = 0.9  # least share of codes in groups of HISCO


@cache
def hisco_codes() -> frozenset[str]:
    """Return the codes of HISCO that have titles."""
    with HISCO_TITLES.open(encoding="utf-8", newline="") as file:
        return frozenset(row["hisco"] for row in csv.DictReader(file))


def is_of_hisco_or_occ1950(code: str) -> bool:
    """Return whether a code is in a unit group of HISCO, or in OCC1950.

    Examples
    --------
    >>> [is_of_hisco_or_occ1950(code) for code in ("01110", "055", "00009", "0055")]
    [True, True, False, False]
    """
    group = None
    if len(code) == 5:
        group, _ = group_of("hisco", "unit", code)
    if len(code) == 3:
        group, _ = group_of("occ1950", "major", code)
    return group is not None


@cache
def _titles(system: str) -> dict[str, str]:
    """Return the titles of groups, and of HISCO's most usual codes."""
    with GROUPS.open(encoding="utf-8", newline="") as file:
        return {
            row["code"]: row["title"] for row in csv.DictReader(file) if row["system"] == system
        }


@cache
def group_of(system: str, level: str, code: str) -> tuple[str | None, str | None]:
    """Return the number and the title of the group of a code on a level; None if there is none."""
    titles = _titles(system)
    group = None

    # groups of OCC1950 are ranges of codes, such as 100-123; those of HISCO are the first digits
    if system == "occ1950" and code.isdecimal():
        for code_range in titles:
            first, last = code_range.split("-")
            if int(first) <= int(code) <= int(last):
                group = code_range
    elif code.isdecimal() and len(code) == 5 and code[:2] in titles:
        if level == "major":
            group = next(digits for digits in titles if code[0] in digits.split("/"))
        elif code[: _DIGITS[level]] in titles or code[2] == "0":  # such as 610, any farmers
            group = code[: _DIGITS[level]]
    if group is None:
        return None, None
    return group, titles.get(group) or f"{titles[group[:2]]} (minor group)"


def titles_of(codes: Collection[str]) -> dict[str, str]:
    """Return the titles of codes if they are HISCO's: their own, else their groups', marked as
    such.

    Examples
    --------
    >>> titles_of(["61110", "78390", "61000"])
    {'61110': 'farmer', '78390': 'cigarette makers (unit group)', '61000': 'farmers (minor group)'}
    """
    titles_of_codes: dict[str, str] = {}
    if not are_hisco(codes):
        return titles_of_codes

    # a title of the code itself says more than its group's
    hisco_titles = _titles("hisco")
    for code in codes:
        group, title = group_of("hisco", "unit", code)
        if group in hisco_titles:
            title = f"{title} (unit group)"
        title = hisco_titles.get(code) or title
        if title is not None:
            titles_of_codes[code] = title
    return titles_of_codes


def are_hisco(codes: Collection[str]) -> bool:
    """Return whether nearly all codes of occupations are in groups of HISCO."""
    # -1 and the like are no occupations
    occupations = [code for code in codes if not code.startswith("-")]
    num_hisco = sum(group_of("hisco", "unit", code)[0] is not None for code in occupations)
    return len(occupations) > 0 and num_hisco >= _MIN_SHARE_OF_HISCO * len(occupations)
