"""HISCO: five digits, or one of the special codes -1, -2, -3."""

from __future__ import annotations

import re
from collections.abc import Sequence

from histocoder.formatters.tokens import FIRST_TOKEN

_VALID = re.compile(r"-[123]|[0-9]{5}")
SPECIAL = ("-3", "-2", "-1")


class HiscoCodes:
    """HISCO codes as blocks of five tokens; a special code fills its block with its one token.

    Examples
    --------
    >>> HiscoCodes().to_block("61110")
    [14, 9, 9, 9, 8]
    >>> HiscoCodes().to_block("-1")
    [7, 7, 7, 7, 7]
    """

    name = "hisco"
    missing_block: list[int] | None = None

    def __init__(self) -> None:
        self.block_size = 5
        self.symbols = [*SPECIAL, *"0123456789"]
        self.vocab_size = FIRST_TOKEN + len(self.symbols)

    def problem(self, code: str) -> str | None:
        """Return why `code` does not fit, or None where it does."""
        if _VALID.fullmatch(code):
            return None
        return "is not five digits, -1, -2 or -3"

    def length(self, code: str) -> int:
        """Return the number of tokens that `code` takes of its block."""
        return self.block_size if code in SPECIAL else len(code)

    def to_block(self, code: str) -> list[int]:
        """Return the `block_size` tokens of a valid code."""
        if code in SPECIAL:
            return [FIRST_TOKEN + SPECIAL.index(code)] * self.block_size
        return [FIRST_TOKEN + len(SPECIAL) + int(digit) for digit in code]

    def from_block(self, block: Sequence[int]) -> str | None:
        """Return the code that a block of tokens stands for; None where it stands for none."""
        symbols = [self.symbols[t - FIRST_TOKEN] if t >= FIRST_TOKEN else "" for t in block]
        if symbols[0] in SPECIAL:
            return symbols[0]
        code = "".join(symbols)
        return code if _VALID.fullmatch(code) else None
