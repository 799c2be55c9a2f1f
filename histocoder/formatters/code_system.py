"""Code systems: codes of HISCO, OCC1950 and others as blocks of tokens."""

import string
from collections.abc import Sequence

# tokens that every code system shares
UNK = 0
PAD = 1
BOS = 2
EOS = 3
SEP = 4
FIRST_TOKEN = 5  # the first token of a code's symbol
CODE_SEP = "&"  # separator of the codes of one description in one string
MISSING = "?"  # symbol of a missing first code
WITHIN_BLOCK_SEP = ","
_NUMBERS = [str(number) for number in range(-999, 1000)]
_PUNCTUATION = [c for c in string.punctuation if c not in CODE_SEP + WITHIN_BLOCK_SEP]
_LETTERS = list(string.ascii_letters)
SYMBOLS = _NUMBERS + _LETTERS + _PUNCTUATION
CHARACTERS = list(string.digits) + _LETTERS + _PUNCTUATION
"""Symbols of codes without a separator: without numbers of several digits a decoder has 21 times
fewer logits.
"""


class CodeSystem:
    """Codes as blocks of `block_size` tokens, one for each symbol; a shorter code is filled up with
    EOS.

    `separator` separates the tokens within a code, so that "1,10,2" is three tokens (as in PSTI);
    by default each character is a token. `special` codes fill a block with their one token, such as
    -1 in HISCO; `form` describes the codes, if all others have `block_size` symbols. `labels` are
    codes of any length and any characters: each is written as its number.

    Examples
    --------
    >>> HISCO.to_block("61110"), HISCO.to_block("-1"), OCC1950.to_block("970")
    ([14, 9, 9, 9, 8], [7, 7, 7, 7, 7], [14, 12, 5])
    >>> CodeSystem("general", 3, SYMBOLS).to_block("A1")
    [2030, 1005, 3]
    >>> CodeSystem("general", 4, SYMBOLS, separator=",").to_block("1,10")
    [1005, 1014, 3, 3]
    """

    def __init__(
        self,
        name: str,
        block_size: int,
        symbols: Sequence[str],
        *,
        separator: str = "",
        special: Sequence[str] = (),
        form: str = "",
        labels: Sequence[str] | None = None,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"a block holds one token or more, not {block_size}")
        self.name = name
        self.block_size = block_size
        self.symbols = list(symbols)
        self.separator = separator
        self.labels = labels
        self.vocab_size = FIRST_TOKEN + len(self.symbols)
        self._special = special
        self._form = form

        # labels are numbers of as many digits as a block has tokens
        self._token_of_symbol = dict(
            zip(self.symbols, range(FIRST_TOKEN, self.vocab_size), strict=True)
        )
        self._number_of_label = {
            label: f"{i:0{block_size}}" for i, label in enumerate(labels or ())
        }
        self._label_of_number = dict(
            zip(self._number_of_label.values(), self._number_of_label, strict=True)
        )
        self.missing_block = self.to_block(MISSING) if MISSING in self._token_of_symbol else None

    def _split(self, code: str) -> list[str]:
        code = self._number_of_label.get(code, code)
        if code in self._special:
            return [code] * self.block_size
        if self.separator:
            return code.split(self.separator)
        return list(code)

    def problem(self, code: str) -> str | None:
        """Return why `code` does not fit, or None if it does, as every label does."""
        if self.labels is not None:
            return None
        symbols = self._split(code)
        unknown = next((symbol for symbol in symbols if symbol not in self._token_of_symbol), None)

        # a form says more than what is wrong with a symbol
        if self._form:
            has_form = unknown is None and len(symbols) == self.block_size
            return None if has_form else f"is not {self._form}"
        if unknown == WITHIN_BLOCK_SEP:
            return "has ',' in it"
        if unknown is not None:
            return (
                f"contains {unknown!r}, neither a number from -999 to 999 nor an ASCII letter "
                "or punctuation"
            )
        if len(symbols) > self.block_size:
            unit = "numbers" if self.separator else "characters"
            return f"is longer than {self.block_size} {unit}"
        return None

    def length(self, code: str) -> int:
        """Return the number of tokens that `code` takes of its block."""
        if self.labels is not None:
            return self.block_size
        return len(self._split(code))

    def to_block(self, code: str) -> list[int]:
        """Return the `block_size` tokens of a valid code."""
        tokens = [self._token_of_symbol[symbol] for symbol in self._split(code)]
        return tokens + [EOS] * (self.block_size - len(tokens))

    def from_block(self, block: Sequence[int]) -> str | None:
        """Return the code of a block of tokens; None if they are no code's, or a missing one's."""
        # a special code fills its block, and a model may get the tokens behind the first one wrong
        tokens = list(block)
        first = tokens[0] - FIRST_TOKEN
        is_special = first >= 0 and self.symbols[first] in self._special
        if is_special:
            tokens = tokens[:1]
        elif EOS in tokens:
            tokens = tokens[: tokens.index(EOS)]
        if not tokens or min(tokens) < FIRST_TOKEN:
            return None

        # numbers of several digits are tokens only where a separator keeps them apart
        symbols = [self.symbols[token - FIRST_TOKEN] for token in tokens]
        if not self.separator and not is_special and any(len(symbol) > 1 for symbol in symbols):
            return None

        code = self.separator.join(symbols)
        if self.labels is not None:
            return self._label_of_number.get(code)
        if code == MISSING or (self._form and self.problem(code)):
            return None
        return code


HISCO = CodeSystem(
    "hisco",
    5,
    ["-3", "-2", "-1", *string.digits],
    special=("-3", "-2", "-1"),
    form="five digits, -1, -2 or -3",
)
OCC1950 = CodeSystem("occ1950", 3, string.digits, form="three digits")
