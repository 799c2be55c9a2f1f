"""Code systems, which write a single code in tokens: HISCO, OCC1950, and codes of any other system."""

import re
import string
from collections.abc import Sequence
from typing import ClassVar, TypeAlias

UNK, PAD, BOS, EOS, SEP = 0, 1, 2, 3, 4  # tokens that every code system shares
FIRST_TOKEN = 5  # the first token of a code's symbol
CODE_SEP = "&"  # separator of the codes of one description in one string
MISSING = "?"  # symbol of a missing first code
WITHIN_BLOCK_SEP = ","
_NUMBERS = [str(number) for number in range(-999, 1000)]
_PUNCTUATION = [c for c in string.punctuation if c not in CODE_SEP + WITHIN_BLOCK_SEP]
SYMBOLS = [*_NUMBERS, *string.ascii_letters, *_PUNCTUATION]
CHARACTERS = [*string.digits, *string.ascii_letters, *_PUNCTUATION]
"""Symbols of codes without a separator: without numbers of several digits a decoder has 21 times fewer logits."""


class DigitCodes:
    """Codes of `block_size` digits, a token each; a `special` code fills its block with its one token.

    Errors describe a code by `form`.

    Examples
    --------
    >>> HISCO.to_block("61110")
    [14, 9, 9, 9, 8]
    >>> HISCO.to_block("-1")
    [7, 7, 7, 7, 7]
    >>> OCC1950.to_block("970")
    [14, 12, 5]
    """

    separator = ""
    options: ClassVar[dict[str, list[str]]] = {}
    missing_block: list[int] | None = None

    def __init__(self, name: str, block_size: int, *, special: Sequence[str] = (), form: str) -> None:
        self.name = name
        self.block_size = block_size
        self._special, self._form = special, form
        self._symbols = [*special, *string.digits]
        self.vocab_size = FIRST_TOKEN + len(self._symbols)
        self._valid = re.compile("|".join([*map(re.escape, special), f"[0-9]{{{block_size}}}"]))

    def problem(self, code: str) -> str | None:
        """Return why `code` does not fit, or None if it does."""
        return None if self._valid.fullmatch(code) else f"is not {self._form}"

    def length(self, code: str) -> int:
        """Return the number of tokens that `code` takes of its block."""
        return self.block_size if code in self._special else len(code)

    def to_block(self, code: str) -> list[int]:
        """Return the `block_size` tokens of a valid code."""
        symbols = [code] * self.block_size if code in self._special else code
        return [FIRST_TOKEN + self._symbols.index(symbol) for symbol in symbols]

    def from_block(self, block: Sequence[int]) -> str | None:
        """Return the code of a block of tokens; None if they are no code's."""
        symbols = [self._symbols[token - FIRST_TOKEN] if token >= FIRST_TOKEN else "" for token in block]
        code = symbols[0] if symbols[0] in self._special else "".join(symbols)
        return code if self._valid.fullmatch(code) else None


HISCO = DigitCodes("hisco", 5, special=("-3", "-2", "-1"), form="five digits, -1, -2 or -3")
OCC1950 = DigitCodes("occ1950", 3, form="three digits")


class GeneralCodes:
    """Codes of any system as blocks of `block_size` tokens; a shorter code is filled up with EOS.

    Parameters
    ----------
    block_size : int
        Tokens of the longest code.
    use_within_block_sep : bool
        Whether "," separates the tokens within a code, so that "1,10,2" is three tokens (as in PSTI); else each
        character is a token.
    symbols : sequence of str, optional
        Symbols of the tokens, in place of `SYMBOLS`; some of OccCANINE's models have their own.

    Examples
    --------
    >>> GeneralCodes(block_size=3).to_block("A1")
    [2030, 1005, 3]
    >>> GeneralCodes(block_size=4, use_within_block_sep=True).to_block("1,10")
    [1005, 1014, 3, 3]
    """

    name = "general"

    def __init__(
        self, block_size: int = 5, *, use_within_block_sep: bool = False, symbols: Sequence[str] | None = None
    ) -> None:
        if block_size < 1:
            raise ValueError(f"a block holds one token or more, not {block_size}")
        self.block_size = block_size
        self.separator = WITHIN_BLOCK_SEP if use_within_block_sep else ""
        self._symbols = SYMBOLS if symbols is None else list(symbols)
        self.options = {} if self._symbols == SYMBOLS else {"symbols": self._symbols}
        self._tokens = {symbol: FIRST_TOKEN + i for i, symbol in enumerate(self._symbols)}
        self.vocab_size = FIRST_TOKEN + len(self._symbols)
        self.missing_block: list[int] | None = self.to_block(MISSING) if MISSING in self._tokens else None

    def _split(self, code: str) -> list[str]:
        return code.split(self.separator) if self.separator else list(code)

    def problem(self, code: str) -> str | None:
        """Return why `code` does not fit, or None if it does."""
        symbols = self._split(code)
        unknown = next((s for s in symbols if s not in self._tokens), None)
        if unknown == WITHIN_BLOCK_SEP:
            return "has ',' in it"
        if unknown is not None:
            return (
                f"contains {unknown!r}, which is neither a number from -999 to 999 nor an ASCII letter or punctuation"
            )
        if len(symbols) > self.block_size:
            return f"is longer than {self.block_size} {'numbers' if self.separator else 'characters'}"
        return None

    def length(self, code: str) -> int:
        return len(self._split(code))

    def to_block(self, code: str) -> list[int]:
        tokens = [self._tokens[symbol] for symbol in self._split(code)]
        return tokens + [EOS] * (self.block_size - len(tokens))

    def from_block(self, block: Sequence[int]) -> str | None:
        """Return the code of a block of tokens; None if they are no code's, or a missing one's."""
        tokens = list(block)
        tokens = tokens[: tokens.index(EOS)] if EOS in tokens else tokens
        if not tokens or min(tokens) < FIRST_TOKEN:
            return None
        symbols = [self._symbols[token - FIRST_TOKEN] for token in tokens]
        if not self.separator and any(len(symbol) > 1 for symbol in symbols):
            return None  # numbers of several digits are tokens only where a separator keeps them apart
        code = self.separator.join(symbols)
        return None if code == MISSING else code


class Labels:
    """Codes of any length and any characters, each written as its number, in `block_size` digits.

    There is room for twice as many labels, so that a model can be trained further with new ones behind its own.

    Examples
    --------
    >>> labels = Labels(["craft & trade", "farmer"])
    >>> labels.from_block(labels.to_block("farmer"))
    'farmer'
    """

    name = "general"
    separator = ""

    def __init__(self, labels: Sequence[str], block_size: int | None = None) -> None:
        self.options = {"labels": list(labels)}
        self.block_size = block_size or len(str(2 * len(labels)))
        if len(labels) > 10**self.block_size:
            raise ValueError(f"{len(labels)} labels can't be numbered with {self.block_size} digits")
        self._digits = DigitCodes(self.name, self.block_size, special=(MISSING,), form="a number")
        self._numbers = {MISSING: MISSING} | {label: f"{i:0{self.block_size}}" for i, label in enumerate(labels)}
        self._named = {number: label for label, number in self._numbers.items() if label != MISSING}
        self.vocab_size = self._digits.vocab_size
        self.missing_block: list[int] | None = self.to_block(MISSING)

    def problem(self, code: str) -> str | None:
        """Return None: every label fits."""
        return None

    def length(self, code: str) -> int:
        return self.block_size

    def to_block(self, code: str) -> list[int]:
        return self._digits.to_block(self._numbers[code])

    def from_block(self, block: Sequence[int]) -> str | None:
        """Return the label of a block of tokens; None if they are no label's, or a missing one's."""
        return self._named.get(self._digits.from_block(block) or "")


CodeSystem: TypeAlias = DigitCodes | GeneralCodes | Labels
