"""OCC1950: three digits, at most two codes a description."""

from __future__ import annotations

import re
from collections.abc import Sequence

from histocoder.formatters.tokens import FIRST_TOKEN

_VALID = re.compile(r"[0-9]{3}")


class Occ1950Codes:
    """OCC1950 codes as blocks of three tokens.

    Examples
    --------
    >>> Occ1950Codes().to_block("970")
    [14, 12, 5]
    """

    name = "occ1950"
    missing_block: list[int] | None = None

    def __init__(self) -> None:
        self.block_size = 3
        self.vocab_size = FIRST_TOKEN + 10

    def problem(self, code: str) -> str | None:
        """Return why `code` does not fit, or None where it does."""
        return None if _VALID.fullmatch(code) else "is not three digits"

    def length(self, code: str) -> int:
        """Return the number of tokens that `code` takes of its block."""
        return len(code)

    def to_block(self, code: str) -> list[int]:
        """Return the `block_size` tokens of a valid code."""
        return [FIRST_TOKEN + int(digit) for digit in code]

    def from_block(self, block: Sequence[int]) -> str | None:
        """Return the code that a block of tokens stands for; None where it stands for none."""
        code = "".join(str(token - FIRST_TOKEN) for token in block)
        return code if min(block) >= FIRST_TOKEN and _VALID.fullmatch(code) else None
