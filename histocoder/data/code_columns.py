"""Form of the codes of a table: decided once, with the cells of all rows in view."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import pyarrow.compute as pc

from histocoder.config import MAX_TARGET_LEN, check_target_len
from histocoder.data.cells import (
    FEWEST_DIGITS,
    HISCO_DIGITS,
    WHOLE_NUMBER,
    CodeColumn,
    bare,
    has_added_decimals,
    has_digit,
    has_own_decimals,
    has_thousands,
    is_short,
    loose_hisco,
    means_blank_among_numbers,
    number_in,
    separators_in,
    spoilt,
)
from histocoder.formatters import CodeSystem, Formatter, build_formatter
from histocoder.formatters.classifications import hisco_codes
from histocoder.tables.table import Table
from histocoder.text.characters import is_missing

MAX_CODE_LENGTH = 10
"""Maximum number of characters of codes; longer ones are labels."""
MIN_SHARE_WITH_DIGITS = 0.5
"""Share of codes with digits from which on words among them are mistakes."""
SHARE_OF_NEARLY_ALL = 0.9
"""Share of cells that count as nearly all: codes that are numbers, and those that a block holds."""
MIN_SHARE_OF_HISCO = 0.5
"""Share of numbers such as 641-00 that are codes of HISCO, from which on all are."""


def count_cells(tables: Iterable[Table], columns: Sequence[str]) -> Counter[str]:
    """Count the cells of each text in some columns of tables, but for blank ones."""
    counts: Counter[str] = Counter()
    for table in tables:
        for name in columns:
            texts, numbers = pc.value_counts(table.columns[name].drop_null()).flatten()
            counts.update(dict(zip(texts.to_pylist(), numbers.to_pylist(), strict=True)))
    return counts


def count_codes(counts: Mapping[str, int], column: CodeColumn) -> Counter[str]:
    """Count the codes in the cells of a column, for `fit_codes`."""
    codes: Counter[str] = Counter()
    for cell, count in counts.items():
        for code in column.read(cell).codes:
            codes[code] += count
    return codes


def column_of(
    counts: Mapping[str, int],
    *,
    known: Collection[str] = (),
    system: CodeSystem | None = None,
    code_sep: str | None = None,
) -> CodeColumn:
    """Decide how the cells of columns of codes are written, from the number of cells of each text.

    With `known` codes, of a key or a model, these decide whether codes are numbers; so does the
    `system`, if it is HISCO or OCC1950. In a system with a separator, commas separate the tokens
    within a code.
    """
    known = frozenset(known) - {""}
    form = None if system is None or system.name == "general" else system
    has_commas = system is not None and bool(system.separator)
    texts = _texts(counts, known)

    # several codes in one cell are counted each, since each has its own form
    num_digits = _usual_num_digits(Counter(known) or texts)
    separator = code_sep or _separator(texts, known, num_digits, has_commas=has_commas)
    parts: Counter[str] = Counter()
    for text, count in texts.items():
        texts_of_codes = text.split(separator) if separator else [text]
        for part in texts_of_codes:
            parts[part.strip()] += count

    # digits come first: what marks mean depends on them, and spellings on both
    column = CodeColumn(known=known, has_commas=has_commas, separator=separator)
    column = _with_digits(column, Counter(known) or parts, form)
    column = _with_marks(column, parts, may_be_hisco=form is not None)
    return replace(column, spellings=_spellings(column, counts))


def column_of_few(
    counts: Mapping[str, int], *, known: Collection[str], system: CodeSystem
) -> CodeColumn:
    """Return how a few cells are written that a person gives beside the `known` codes of a model,
    from the number of cells of each text.
    """
    column = column_of(counts, known=known, system=system)
    return replace(
        column,
        system=system,
        has_numbers_alone=all(map(WHOLE_NUMBER.fullmatch, column.known)),
        allow_short=any(is_short(code, system) for code in known),
    )


def _texts(counts: Mapping[str, int], known: Collection[str]) -> Counter[str]:
    """Count the texts of cells that are neither blank nor known codes."""
    texts: Counter[str] = Counter()
    for cell, count in counts.items():
        text = bare(cell)
        if text and text not in known and not is_missing(text):
            texts[text] += count
    return texts


def _separator(
    texts: Collection[str], known: Collection[str], num_digits: int, *, has_commas: bool
) -> str:
    """Return the one mark that separates the codes in each cell of several; "" if there is none."""
    marks: set[str] = set()
    for text in texts:
        marks |= separators_in(text, known, num_digits=num_digits)
    if len(marks) != 1 or (has_commas and "," in marks):
        return ""
    return marks.pop()


def _with_digits(
    column: CodeColumn, examples: Mapping[str, int], form: CodeSystem | None
) -> CodeColumn:
    """Return a column that says whether codes have digits, are numbers or have decimals, by
    examples, or by their form.
    """
    num_codes = num_with_digits = num_numbers = num_with_zeros = num_with_decimals = 0
    for text, count in examples.items():
        if means_blank_among_numbers(text) or spoilt(text):
            continue
        num_codes += count
        if has_digit(text):
            number = number_in(text)
            num_with_digits += count
            if number is not None:
                num_numbers += count
                num_with_zeros += count * has_added_decimals(number)
            num_with_decimals += count * has_own_decimals(number or text)

    # a few words among codes with digits, or a few marks among numbers, are mistakes; so are a few
    # decimals among whole numbers that a program wrote with decimals
    are_few = num_with_decimals <= (1 - SHARE_OF_NEARLY_ALL) * num_codes
    has_decimals = num_with_decimals > 0 and not (are_few and num_with_zeros > 0)
    has_digits = num_with_digits > 0 and num_with_digits >= MIN_SHARE_WITH_DIGITS * num_codes
    is_numeric = has_digits and num_numbers >= SHARE_OF_NEARLY_ALL * num_with_digits
    return replace(
        column,
        has_digits=has_digits or form is not None,
        is_numeric=is_numeric or form is not None,
        has_decimals=has_decimals,
        num_digits=_usual_num_digits(examples) if form is None else form.block_size,
    )


def _with_marks(column: CodeColumn, parts: Collection[str], *, may_be_hisco: bool) -> CodeColumn:
    """Return a column that says what marks in its numbers mean, and a lone 0."""
    numbers = set(filter(None, map(number_in, parts)))

    # 641-00 and 6.41.00 are HISCO's 64100, or codes with decimals
    loose_numbers = list(filter(loose_hisco, numbers))
    has_marks = not all(map(WHOLE_NUMBER.fullmatch, loose_numbers))
    hisco_digits = list(filter(None, map(loose_hisco, loose_numbers)))
    has_form = may_be_hisco and column.num_digits == HISCO_DIGITS
    is_hisco = has_marks and _are_hisco(hisco_digits, column.known, has_form=has_form)
    has_loose_decimals = has_marks and not is_hisco and not column.known

    # a lone 0 is a code where codes of zeros, or others of one digit, are
    matches = map(WHOLE_NUMBER.fullmatch, numbers | set(column.known))
    wholes = {match[1] for match in matches if match is not None}
    has_one_digit = any(digit in wholes for digit in "123456789")
    return replace(
        column,
        is_hisco=is_hisco,
        has_decimals=column.has_decimals or has_loose_decimals,
        has_thousands=any(map(has_thousands, numbers)),
        zero_is_code=has_one_digit or "0" * column.num_digits in wholes,
    )


def _are_hisco(codes: Collection[str], known: Collection[str], *, has_form: bool) -> bool:
    """Return whether numbers with marks are HISCO's; `codes` are their digits.

    The form of the data, the codes of a model or, where neither is known, HISCO itself tells.
    """
    if has_form or any(code in known for code in codes):
        return True
    num_hisco = sum(code in hisco_codes() for code in codes)
    return not known and num_hisco >= MIN_SHARE_OF_HISCO * len(codes)


def _usual_num_digits(counts: Mapping[str, int]) -> int:
    """Return the number of digits that nearly all numbers have at most; 0 if there are none."""
    lengths: Counter[int] = Counter()
    for text, count in counts.items():
        number = number_in(text)
        if number is not None and not number.startswith("-"):
            whole_number = WHOLE_NUMBER.fullmatch(number)
            digits = whole_number[1] if whole_number else number
            lengths[sum(map(str.isdigit, digits))] += count
    return _usual_length(lengths)


def _usual_length(counts: Counter[int]) -> int:
    """Return the length that nearly all have at most, from the number of each; 0 if there are
    none.
    """
    num_covered = 0
    for length in sorted(counts):
        num_covered += counts[length]
        if num_covered >= SHARE_OF_NEARLY_ALL * counts.total():
            return length
    return 0


def _usual_code_length(codes: Iterable[str], counts: Mapping[str, int], system: CodeSystem) -> int:
    """Return the length that nearly all codes have at most, but for -1 and the like."""
    lengths: Counter[int] = Counter()
    for code in codes:
        if not code.startswith("-"):
            lengths[system.length(code)] += counts[code]
    return _usual_length(lengths)


def _spellings(column: CodeColumn, counts: Mapping[str, int]) -> dict[str, str]:
    """Return the spelling to use of each code that is written in several ways: the known one, or
    the most frequent.
    """
    codes = Counter(column.known) or count_codes(counts, column)
    by_key: dict[str, list[str]] = {}
    for code, _ in codes.most_common():
        by_key.setdefault(column.spelling_key(code), []).append(code)

    # several known codes of one key are different codes; a table's are spellings of one
    if column.known:
        return {key: spellings[0] for key, spellings in by_key.items() if len(spellings) == 1}
    return {key: spellings[0] for key, spellings in by_key.items() if len(spellings) > 1}


class FittedCodes(NamedTuple):
    """Form of the codes of a table."""

    formatter: Formatter
    allow_short: bool
    """Whether codes that are shorter than the block are right."""


def fit_codes(
    counts: Mapping[str, int], formatter: Formatter, *, are_right: bool, allow_short: bool
) -> FittedCodes:
    """Return the formatter that codes need, by `--block-size auto`, and whether short ones are
    right; it has the number of blocks of `formatter`, and its separator of tokens.

    Codes with digits are written by their characters, in blocks that hold the longest; others are
    labels, which are numbered. Short codes are right, except among numbers that mostly have three
    digits or more, unless `allow_short`. `counts` is the number of cells of each code: if most have
    digits, others are mistakes, as are those among numbers, unless all codes `are_right`, as in a
    key.
    """
    num_blocks = formatter.num_blocks
    has_separator = bool(formatter.system.separator)
    build = partial(
        build_formatter, "general", num_blocks=num_blocks, use_within_block_sep=has_separator
    )
    max_length = MAX_TARGET_LEN if has_separator else MAX_CODE_LENGTH
    system = build(block_size=max_length).system

    # words are labels, unless they are few among codes with digits
    codes = list(counts)
    if not has_separator:
        codes = [code for code in counts if has_digit(code) and system.problem(code) is None]
    num_codes = sum(counts[code] for code in codes)
    least_share = 1 if are_right else MIN_SHARE_WITH_DIGITS
    if num_codes < least_share * sum(counts.values()):
        return FittedCodes(build(labels=sorted(counts)), allow_short)

    # words among numbers are mistakes, whose lengths do not count
    numbers = [code for code in codes if WHOLE_NUMBER.fullmatch(code)]
    num_numbers = sum(counts[code] for code in numbers)
    is_numeric = not has_separator and num_numbers >= SHARE_OF_NEARLY_ALL * num_codes
    if is_numeric and not are_right:
        codes = numbers

    # a block holds the longest code; among numbers that have lost zeros, the usual one
    block_size = max(map(system.length, codes), default=HISCO_DIGITS)
    usual_length = _usual_code_length(codes, counts, system)
    may_lack_zeros = is_numeric and usual_length >= FEWEST_DIGITS
    if may_lack_zeros and not (are_right or allow_short):
        block_size = usual_length
    check_target_len(num_blocks, block_size)
    return FittedCodes(build(block_size=block_size), allow_short or not may_lack_zeros)
