"""Codes of any system: numbers, ASCII letters and punctuation, in blocks of a size of one's own."""

from __future__ import annotations

import string
from collections.abc import Sequence

from histocoder.formatters.tokens import CODE_SEP, EOS, FIRST_TOKEN, MISSING

WITHIN_BLOCK_SEP = ","
_NUMBERS = [str(number) for number in range(-999, 1000)]
_PUNCTUATION = [c for c in string.punctuation if c not in CODE_SEP + WITHIN_BLOCK_SEP]
SYMBOLS = [*_NUMBERS, *string.ascii_letters, *_PUNCTUATION]
CHARACTERS = [*string.digits, *string.ascii_letters, *_PUNCTUATION]
"""Those that are tokens where no separator keeps longer ones apart: 21 times fewer logits for a decoder to compute."""


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
        What tokens stand for, in place of `SYMBOLS`, as some models of OccCANINE's have it.

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
        self.use_within_block_sep = use_within_block_sep
        self.own_symbols = None if symbols is None or list(symbols) == SYMBOLS else list(symbols)
        self.symbols = self.own_symbols or SYMBOLS
        self._tokens = {symbol: FIRST_TOKEN + i for i, symbol in enumerate(self.symbols)}
        self.vocab_size = FIRST_TOKEN + len(self.symbols)
        self.missing_block: list[int] | None = self.to_block(MISSING) if MISSING in self._tokens else None

    def _split(self, code: str) -> list[str]:
        return code.split(WITHIN_BLOCK_SEP) if self.use_within_block_sep else list(code)

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
            return f"has {len(symbols)} tokens, more than the block size of {self.block_size}"
        return None

    def length(self, code: str) -> int:
        """Return the number of tokens that `code` takes of its block."""
        return len(self._split(code))

    def to_block(self, code: str) -> list[int]:
        """Return the `block_size` tokens of a valid code."""
        tokens = [self._tokens[symbol] for symbol in self._split(code)]
        return tokens + [EOS] * (self.block_size - len(tokens))

    def from_block(self, block: Sequence[int]) -> str | None:
        """Return the code that a block of tokens stands for; None where it stands for none, or for a missing one."""
        tokens = list(block)
        tokens = tokens[: tokens.index(EOS)] if EOS in tokens else tokens
        if not tokens or min(tokens) < FIRST_TOKEN:
            return None
        symbols = [self.symbols[token - FIRST_TOKEN] for token in tokens]
        if not self.use_within_block_sep and any(len(symbol) > 1 for symbol in symbols):
            return None  # numbers of several digits are tokens only where a separator keeps them apart
        code = (WITHIN_BLOCK_SEP if self.use_within_block_sep else "").join(symbols)
        return None if code == MISSING else code
