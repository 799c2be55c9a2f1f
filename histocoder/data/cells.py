"""Cells of columns of codes, as people and programs write them: one function says what a cell
is.
"""

import re
import unicodedata
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from histocoder.formatters import MISSING, CodeSystem
from histocoder.text.characters import is_missing, with_ascii_marks

_MISSING_AMONG_NUMBERS = frozenset(
    {
        "na",
        "n/a",
        "n.a.",
        "n.a",
        "none",
        "no",
        "null",
        "nan",
        "nil",
        "missing",
        "blank",
        "x",
        "xx",
        "xxx",
        # German and Dutch for n/a
        "k.a.",
        "k.a",
        "n.v.t.",
        "nvt",
    }
)
"""Words, in lower case, that mean no code where codes have digits; where codes are words they may
be codes.
"""

_FORMULA = re.compile(r'="(.*)"|=(-?[0-9].*)')  # as spreadsheets keep digits as text
_QUOTED = re.compile(r"""(["'])(.*)\1""")
_KEPT_AS_TEXT = re.compile(r"'(-?[0-9=].*)")
# a number, and signs around it that are not its own
_EDGES = re.compile(r"[^\w-]*(-? ?[0-9](?:.*[0-9])?)[^\w-]*")

WHOLE_NUMBER = re.compile(r"(-?[0-9]+)([.,]0+)?")
_ZERO = re.compile(r"0([.,]0+)?")
# decimals that belong to a code
_FRACTION = re.compile(r"-?[0-9]+[.,][0-9]+|[A-Za-z]\w*[.,][0-9]+")
_THOUSANDS = re.compile(r"-?[0-9]{1,3}([.,' ])[0-9]{3}(\1[0-9]{3})*")
_PRINTED_HISCO = re.compile(r"([0-9])-([0-9]{2})\.([0-9]{2})")
_LOOSE_HISCO = re.compile(r"([0-9])[-. ]?([0-9]{2})[-.,]([0-9]{2})")
_PART = r"(?:-[0-9]|[0-9]{3,}|[0-9]-[0-9]{2}\.[0-9]{2})"
_SEVERAL_CODES = re.compile(rf"{_PART}([\s;,/|&+]+{_PART})+")

_DECIMAL = re.compile(r"-?[0-9]+\.[0-9]+(e[+-]?[0-9]+)?", re.IGNORECASE)
_MONTH = "(jan|feb|mar|mrt|apr|may|mai|maj|mei|jun|jul|aug|sep|oct|okt|nov|dec|dez)"
_SPOILT = {
    "a number": re.compile(r"-?[0-9](\.[0-9]+)?e[+-][0-9]{2,3}", re.IGNORECASE),
    "a date": re.compile(
        rf"[0-9]{{1,2}}-{_MONTH}|{_MONTH}-[0-9]{{2}}|(19|20)[0-9]{{2}}-[01][0-9]-[0-3][0-9]",
        re.IGNORECASE,
    ),
    "an error": re.compile(r"#[A-Z/0]{2,}[!?]", re.IGNORECASE),
}

HISCO_DIGITS = 5
FEWEST_DIGITS = 3
"""Fewest digits of codes whose zeros may be lost; shorter ones, such as HISCLASS's, have none."""
# kinds of `Cell.change`
BLANK = "blank"
"""A mark that means no code is read as a blank cell."""
FORMATTED = "formatted"
"""Signs that a program has added are left out."""
PADDED = "padded"
"""Leading zeros are restored."""
RESPELT = "respelt"
"""The code is written as other cells write it."""
SPLIT = "split"
"""Several codes are separated."""
MAYBE_BLANK = "maybe"
"""The text is taken as a code, and may mean no code."""


class Cell(NamedTuple):
    """Content of a cell of codes: none, one or several; or it is damaged, and has a `problem`."""

    codes: tuple[str, ...] = ()
    change: str = ""
    """`BLANK`, `FORMATTED`, `PADDED`, `RESPELT`, `SPLIT` or `MAYBE_BLANK`; "": as it stands."""
    problem: str = ""
    """Why the cell can't be used; its code is kept if that is because leading zeros may be lost."""

    @property
    def lacks_zeros(self) -> bool:
        """Whether leading zeros of the code may be lost."""
        return bool(self.problem and self.codes)


def bare(cell: str) -> str:
    """Return what is in a cell without what programs put around it; dashes, blanks and marks are
    those of ASCII.

    Examples
    --------
    >>> [bare(cell) for cell in (' ="02000"', "’02000", "“farmer”", "\u22121", "\ufeff61110\u00a0", "'t Hof")]
    ['02000', '02000', 'farmer', '-1', '61110', "'t Hof"]
    """
    text = cell.strip()
    if not text.isascii():
        text = with_ascii_marks(_visible(text)).strip()
    if text.startswith("=") and (match := _FORMULA.fullmatch(text)) is not None:
        text = (match[1] or match[2] or "").strip()
    if (match := _QUOTED.fullmatch(text)) is not None:
        text = match[2].strip()
    if (match := _KEPT_AS_TEXT.fullmatch(text)) is not None:
        text = match[1]
    return text


def _visible(text: str) -> str:
    """Return a text without invisible characters, such as soft hyphens."""
    return "".join(char for char in text if unicodedata.category(char) != "Cf").strip()


def has_digit(text: str) -> bool:
    """Return whether a digit is in a text."""
    return any(map(str.isdigit, text))


def spoilt(cell: str) -> str | None:
    """Return what spreadsheets and R have made of a code; None for other cells.

    Examples
    --------
    >>> spoilt("6E+04"), spoilt("1-Nov"), spoilt("#REF!"), spoilt("61110")
    ('a number', 'a date', 'an error', None)
    """
    return next((what for what, form in _SPOILT.items() if form.fullmatch(cell)), None)


def number_in(text: str) -> str | None:
    """Return the number that a bare text is, without signs around it that are not its own; None if
    it is none.

    Marks of decimals and of thousands, and HISCO's in printed form, are left as they are.

    Examples
    --------
    >>> [number_in(text) for text in ("61110.", "*6-11.10", "61.110", "- 1", "12a", "farmer")]
    ['61110', '6-11.10', '61.110', '-1', None, None]
    """
    match = _EDGES.fullmatch(text)
    if match is None:
        return None
    number = match[1].replace("- ", "-")
    forms = (WHOLE_NUMBER, _THOUSANDS, _PRINTED_HISCO, _LOOSE_HISCO, _FRACTION)
    if any(form.fullmatch(number) for form in forms):
        return number
    return None


def has_own_decimals(number: str) -> bool:
    """Return whether a cell has decimals that belong to its code, unlike those that programs add to
    whole numbers.
    """
    forms = (WHOLE_NUMBER, _THOUSANDS, _LOOSE_HISCO)
    is_whole = any(form.fullmatch(number) for form in forms)
    return not is_whole and _FRACTION.fullmatch(number) is not None


def has_added_decimals(number: str) -> bool:
    """Return whether a number is a whole one that a program has written with decimals."""
    match = WHOLE_NUMBER.fullmatch(number)
    return match is not None and match[2] is not None


def loose_hisco(number: str) -> str | None:
    """Return the digits of a number such as 641-00, 6.41.00 or 641.20, which may be HISCO's; None
    for others.
    """
    match = _LOOSE_HISCO.fullmatch(number)
    if match is None:
        return None
    return "".join(match.groups())


def has_thousands(number: str) -> bool:
    """Return whether a number has marks of thousands, and can't be a whole number with decimals."""
    return _THOUSANDS.fullmatch(number) is not None and not WHOLE_NUMBER.fullmatch(number)


def means_blank_among_numbers(text: str) -> bool:
    """Return whether a bare text means no code where codes have digits."""
    return text.casefold() in _MISSING_AMONG_NUMBERS


def separators_in(text: str, known: Collection[str], *, num_digits: int) -> set[str]:
    """Return the marks between the codes of a bare text that holds several numbers, or `known`
    codes; none of other texts.

    Three digits on both sides of a mark are one number with a mark of thousands, unless codes have
    three `num_digits`.
    """
    if _SEVERAL_CODES.fullmatch(text) and (num_digits == 3 or not _THOUSANDS.fullmatch(text)):
        marks = re.sub(_PART, "", text)
        return set(marks.replace(" ", "")) or {" "}
    separators = set()
    for mark in set(";/|&+,").intersection(text):
        if all(part.strip() in known for part in text.split(mark)):
            separators.add(mark)
    return separators


def is_short(code: str, system: CodeSystem) -> bool:
    """Return whether a code does not fill its block, as if it had lost zeros; -1 and the like never
    do.
    """
    return (
        not code.startswith("-")
        and code not in ("", MISSING)
        and system.length(code) < system.block_size
    )


@dataclass(frozen=True)
class CodeColumn:
    """Rules by which the cells of columns of codes are read; `column_of` decides them with all
    cells in view.
    """

    known: Collection[str] = ()
    """Codes that are read as they are, whatever they look like."""
    has_key: bool = False
    """Whether `known` are the codes of a key, beside which there are no others."""
    system: CodeSystem | None = None
    """Codes that fit; None: any."""
    has_digits: bool = False
    """Whether codes have digits, so that words are no codes."""
    is_numeric: bool = False
    """Whether codes are numbers, so that signs around them are not theirs."""
    has_numbers_alone: bool = False
    """Whether all codes are numbers, so that another text is a mistake, even one with digits."""
    num_digits: int = 0
    """Usual number of digits of numbers."""
    has_decimals: bool = False
    """Whether decimals belong to codes."""
    has_commas: bool = False
    """Whether commas separate the tokens within a code."""
    has_thousands: bool = False
    """Whether some numbers have marks of thousands."""
    is_hisco: bool = False
    """Whether 641-00, 6.41.00 and 641.00 are HISCO's 64100."""
    zero_is_code: bool = False
    """Whether a lone 0 is a code, although codes have more digits."""
    separator: str = ""
    """Separator of several codes in one cell."""
    spellings: Mapping[str, str] = field(default_factory=dict)
    """`spelling_key` of a code -> the spelling to use."""
    zero_pad: bool = False
    """Whether codes of digits get leading zeros up to the block size."""
    allow_short: bool = False
    """Whether codes of digits may be shorter than the block."""

    def read(self, cell: str) -> Cell:
        """Return what a cell holds.

        Examples
        --------
        >>> column = CodeColumn(has_digits=True, is_numeric=True, num_digits=5, separator="/")
        >>> [column.read(cell).codes for cell in ('="02000"', "61110,0", "6-11.10", "61110*", "-", "0", "58340/61110")]
        [('02000',), ('61110',), ('61110',), ('61110',), (), (), ('58340', '61110')]
        >>> column.read("61.110").problem
        'has a mark of thousands'
        """
        text = cell.strip()
        if text in self.known:
            return Cell((text,))

        # what a program has put around a known code is not the code's
        plain = bare(text)
        if plain in self.known:
            return Cell((plain,), FORMATTED)
        if not self.separator or self.separator not in plain:
            return self._read_one(plain, text)

        # one damaged code is the problem of the whole cell
        parts = [self._read_one(part.strip()) for part in plain.split(self.separator)]
        for part in parts:
            if part.problem:
                return part
        codes = tuple(dict.fromkeys(code for part in parts for code in part.codes))
        return Cell(codes, SPLIT if len(codes) > 1 else FORMATTED)

    def spelling_key(self, code: str) -> str:
        """Return what spellings of a code have in common: they differ in case and blanks; 02 is 2
        if codes are short.

        Examples
        --------
        >>> CodeColumn().spelling_key("Craft  worker"), CodeColumn(num_digits=2).spelling_key("02")
        ('craft worker', '2')
        """
        folded = " ".join(code.casefold().split())
        has_zeros = folded.isdecimal() and self.num_digits < FEWEST_DIGITS
        if not has_zeros:
            return folded
        return folded.lstrip("0") or "0"

    def _read_one(self, plain: str, text: str | None = None) -> Cell:
        """Return what a bare text without separators holds.

        `text` is the cell as it is written; None for one of the codes of a cell that has several.
        """
        if self._is_blank(plain):
            return Cell(change=BLANK)
        code = self._code(plain)
        change = ""
        if text is not None:
            code = _with_marks_of(text, code)
            if code != text:
                change = FORMATTED

        # of several changes the last one is reported, since it matters most
        spelling = self.spellings.get(self.spelling_key(code), code)
        if spelling != code:
            code = spelling
            change = RESPELT
        if self.zero_pad and self.system is not None and self._may_lack_zeros(code):
            code = code.zfill(self.system.block_size)
            change = PADDED
        if not change and means_blank_among_numbers(code) and code not in self.known:
            change = MAYBE_BLANK

        # a code that may have lost zeros is kept, so that an error can suggest to restore them
        problem = self._problem(code, plain)
        if problem is None:
            return Cell((code,), change)
        if self._may_lack_zeros(code) and not self.allow_short:
            return Cell((code,), problem=problem)
        return Cell(problem=problem)

    def _is_blank(self, plain: str) -> bool:
        """Return whether a bare text means that there is no code."""
        if plain == "" or is_missing(plain):
            return True
        if self.has_digits and means_blank_among_numbers(plain):
            return True
        has_long_codes = self.is_numeric and self.num_digits >= FEWEST_DIGITS
        return has_long_codes and not self.zero_is_code and _ZERO.fullmatch(plain) is not None

    def _code(self, plain: str) -> str:
        """Return the code in a bare text: without decimals and signs that are not its own."""
        number = number_in(plain) if self.is_numeric else plain
        if number is None:
            return plain
        if number in self.known:
            return number

        # HISCO's codes in printed form, where the number is not a code as it stands
        form = _LOOSE_HISCO if self.is_hisco else _PRINTED_HISCO
        match = form.fullmatch(number)
        system = self.system
        may_be_hisco = system is None or (
            system.block_size == HISCO_DIGITS and system.problem(number) is not None
        )
        if match is not None and may_be_hisco:
            return "".join(match.groups())

        # whole numbers that a program wrote with decimals
        whole_number = WHOLE_NUMBER.fullmatch(number)
        has_mark_of_thousands = self.has_thousands and _THOUSANDS.fullmatch(number)
        separates_tokens = self.has_commas and "," in number
        if self.has_decimals or has_mark_of_thousands or separates_tokens or whole_number is None:
            return number
        return whole_number[1]

    def _may_lack_zeros(self, code: str) -> bool:
        """Return whether a code is a number that does not fill its block."""
        is_number = code.isascii() and code.isdigit()
        return is_number and self.system is not None and is_short(code, self.system)

    def _problem(self, code: str, plain: str) -> str | None:
        """Return why a code does not fit; None if it does."""
        system = self.system
        if code in self.known:
            return None
        if self.is_numeric and not self.has_decimals and _THOUSANDS.fullmatch(code):
            return "has a mark of thousands"
        if system is not None and is_short(code, system) and not self.allow_short:
            return f"has fewer than {system.block_size} characters"

        # what a spreadsheet has made of a code
        problem = None if system is None else system.problem(code)
        change = spoilt(code)
        if problem is not None and _DECIMAL.fullmatch(code):
            change = "a number"
        if change is not None:
            return (
                f"looks like a code that a spreadsheet has turned into {change}; save the column "
                "as text"
            )

        # several codes without the separator of the column
        if _SEVERAL_CODES.fullmatch(plain):
            return (
                "holds several codes; put each in a column of its own, or name what separates them "
                "(--code-sep)"
            )
        has_long_numbers = self.is_numeric and self.num_digits >= FEWEST_DIGITS
        if problem is None and has_long_numbers and not has_digit(code):
            problem = "has no digits, unlike most codes"
        if problem is None and self.has_numbers_alone and not WHOLE_NUMBER.fullmatch(code):
            problem = "is not a number, unlike all codes of the model"
        if problem is None and self.has_key:
            problem = "is not in the key"
        return problem


def _with_marks_of(text: str, code: str) -> str:
    """Return a cell's code with the marks of its writer if it is a word; `bare` has written them as
    those of ASCII, by which it reads numbers.
    """
    is_quoted = _QUOTED.fullmatch(with_ascii_marks(text)) is not None
    if has_digit(code) or is_quoted:
        return code
    return _visible(text)


_ANY_COLUMN = CodeColumn()


def read_code(cell: str, column: CodeColumn = _ANY_COLUMN) -> str:
    """Return the one code or category in a cell, without what programs add; "" where it is missing.

    A cell that holds none, such as an error of a spreadsheet, is left as it is.

    Examples
    --------
    >>> [read_code(cell) for cell in (' ="02000"', "'02000", "61110.0", "6-11.10", "NA")]
    ['02000', '02000', '61110', '61110', '']
    """
    content = column.read(cell)
    if content.problem:
        return bare(cell)
    return "".join(content.codes)
