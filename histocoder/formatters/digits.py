"""Codes of digits: HISCO (five, or one of the special codes -1, -2, -3) and OCC1950 (three)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from histocoder.formatters.tokens import FIRST_TOKEN


class DigitCodes:
    """Codes of a fixed number of digits, a token each; a special code fills its block with its one token.

    Parameters
    ----------
    name : str
    block_size : int
        Digits of a code.
    special : sequence of str
        Codes that are not of digits alone.
    form : str
        Says in an error what a code is.

    Examples
    --------
    >>> HISCO.to_block("61110")
    [14, 9, 9, 9, 8]
    >>> HISCO.to_block("-1")
    [7, 7, 7, 7, 7]
    >>> OCC1950.to_block("970")
    [14, 12, 5]
    """

    missing_block: list[int] | None = None

    def __init__(self, name: str, block_size: int, *, special: Sequence[str] = (), form: str) -> None:
        self.name = name
        self.block_size = block_size
        self._special, self._form = special, form
        self._symbols = [*special, *"0123456789"]
        self.vocab_size = FIRST_TOKEN + len(self._symbols)
        self._valid = re.compile("|".join([*special, f"[0-9]{{{block_size}}}"]))

    def problem(self, code: str) -> str | None:
        """Return why `code` does not fit, or None where it does."""
        return None if self._valid.fullmatch(code) else f"is not {self._form}"

    def length(self, code: str) -> int:
        """Return the number of tokens that `code` takes of its block."""
        return self.block_size if code in self._special else len(code)

    def to_block(self, code: str) -> list[int]:
        """Return the `block_size` tokens of a valid code."""
        symbols = [code] * self.block_size if code in self._special else code
        return [FIRST_TOKEN + self._symbols.index(symbol) for symbol in symbols]

    def from_block(self, block: Sequence[int]) -> str | None:
        """Return the code that a block of tokens stands for; None where it stands for none."""
        symbols = [self._symbols[token - FIRST_TOKEN] if token >= FIRST_TOKEN else "" for token in block]
        code = symbols[0] if symbols[0] in self._special else "".join(symbols)
        return code if self._valid.fullmatch(code) else None


HISCO = DigitCodes("hisco", 5, special=("-3", "-2", "-1"), form="five digits, -1, -2 or -3")
OCC1950 = DigitCodes("occ1950", 3, form="three digits")
