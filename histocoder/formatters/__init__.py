"""Columns of codes <-> arrays of token blocks, for HISCO, OCC1950 and other systems."""

import string
from collections.abc import Sequence
from typing import Any

import numpy as np

UNK, PAD, BOS, EOS, SEP = 0, 1, 2, 3, 4  # tokens that every code system shares
FIRST_TOKEN = 5  # the first token of a code's symbol
CODE_SEP = "&"  # separator of the codes of one description in one string
MISSING = "?"  # symbol of a missing first code
WITHIN_BLOCK_SEP = ","
_NUMBERS = [str(number) for number in range(-999, 1000)]
_PUNCTUATION = [c for c in string.punctuation if c not in CODE_SEP + WITHIN_BLOCK_SEP]
SYMBOLS = [*_NUMBERS, *string.ascii_letters, *_PUNCTUATION]
CHARACTERS = [*string.digits, *string.ascii_letters, *_PUNCTUATION]
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
        self.name, self.block_size, self.separator, self.labels = (
            name,
            block_size,
            separator,
            labels,
        )
        self.symbols, self._special, self._form = list(symbols), special, form
        self._tokens = {symbol: FIRST_TOKEN + i for i, symbol in enumerate(self.symbols)}
        self.vocab_size = FIRST_TOKEN + len(self.symbols)
        numbers = {label: f"{i:0{block_size}}" for i, label in enumerate(labels or ())}
        self._written, self._read = numbers, {number: label for label, number in numbers.items()}
        self.missing_block = self.to_block(MISSING) if MISSING in self._tokens else None

    def _split(self, code: str) -> list[str]:
        code = self._written.get(code, code)
        if code in self._special:
            return [code] * self.block_size
        return code.split(self.separator) if self.separator else list(code)

    def problem(self, code: str) -> str | None:
        """Return why `code` does not fit, or None if it does, as every label does."""
        if self.labels is not None:
            return None
        symbols = self._split(code)
        unknown = next((s for s in symbols if s not in self._tokens), None)
        if self._form:
            return (
                f"is not {self._form}"
                if unknown is not None or len(symbols) != self.block_size
                else None
            )
        if unknown == WITHIN_BLOCK_SEP:
            return "has ',' in it"
        if unknown is not None:
            return (
                f"contains {unknown!r}, neither a number from -999 to 999 nor an ASCII letter "
                "or punctuation"
            )
        if len(symbols) > self.block_size:
            return (
                f"is longer than {self.block_size} {'numbers' if self.separator else 'characters'}"
            )
        return None

    def length(self, code: str) -> int:
        """Return the number of tokens that `code` takes of its block."""
        return self.block_size if self.labels is not None else len(self._split(code))

    def to_block(self, code: str) -> list[int]:
        """Return the `block_size` tokens of a valid code."""
        tokens = [self._tokens[symbol] for symbol in self._split(code)]
        return tokens + [EOS] * (self.block_size - len(tokens))

    def from_block(self, block: Sequence[int]) -> str | None:
        """Return the code of a block of tokens; None if they are no code's, or a missing one's."""
        first = self.symbols[block[0] - FIRST_TOKEN] if block[0] >= FIRST_TOKEN else ""
        if first in self._special:
            symbols = [first]
        else:
            tokens = list(block)
            tokens = tokens[: tokens.index(EOS)] if EOS in tokens else tokens
            if not tokens or min(tokens) < FIRST_TOKEN:
                return None
            symbols = [self.symbols[token - FIRST_TOKEN] for token in tokens]
            if not self.separator and any(len(symbol) > 1 for symbol in symbols):
                # Numbers of several digits are tokens only where a separator keeps them apart
                return None
        code = self.separator.join(symbols)
        if self.labels is not None:
            return self._read.get(code)
        return None if code == MISSING or (self._form and self.problem(code)) else code


HISCO = CodeSystem(
    "hisco",
    5,
    ["-3", "-2", "-1", *string.digits],
    special=("-3", "-2", "-1"),
    form="five digits, -1, -2 or -3",
)
OCC1950 = CodeSystem("occ1950", 3, string.digits, form="three digits")


class Formatter:
    """Turns code strings into target sequences and back, a column at a time.

    A target is BOS, then `num_blocks` blocks of `block_size` tokens, a code each, then EOS; unused
    blocks are all PAD.

    Examples
    --------
    >>> formatter = build_formatter("occ1950", num_blocks=2)
    >>> formatter.encode(["970&100"])
    array([[ 2, 14, 12,  5,  6,  5,  5,  3]], dtype=int16)
    >>> formatter.decode(formatter.encode(["100"])).tolist()
    [['100', None]]
    """

    def __init__(self, system: CodeSystem, *, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a description holds one code or more, not {num_blocks}")
        self.system, self.num_blocks = system, num_blocks
        self.name, self.block_size, self.vocab_size = (
            system.name,
            system.block_size,
            system.vocab_size,
        )
        self.target_len = 2 + num_blocks * system.block_size

    def to_config(self) -> dict[str, Any]:
        """Return the arguments that `build_formatter` builds the same formatter from."""
        system = self.system
        form = {"name": self.name, "num_blocks": self.num_blocks, "block_size": self.block_size}
        form["use_within_block_sep"] = bool(system.separator)
        if system.labels is not None:
            return {**form, "labels": list(system.labels)}
        return (
            form
            if self.name != "general" or system.symbols == SYMBOLS
            else {**form, "symbols": system.symbols}
        )

    def without_numbers(self) -> "Formatter":
        """Return a formatter of the same codes without tokens that they never need: numbers of
        several digits.
        """
        if self.system.symbols != SYMBOLS or self.system.separator:
            return self
        return build_formatter(
            "general", num_blocks=self.num_blocks, block_size=self.block_size, symbols=CHARACTERS
        )

    def missing_token(self, codes: Sequence[str]) -> int | None:
        """Return the token that a row without codes begins with; None if one of `codes` does, or
        all rows have some.
        """
        block = self.system.missing_block
        return (
            None if block is None or any(code.startswith(MISSING) for code in codes) else block[0]
        )

    def encode(self, codes: Sequence[str | None]) -> np.ndarray:
        """Encode n descriptions' codes, with "&" between them, as int16 of shape (n, 2 + num_blocks
        * block_size).

        Raise a ValueError if a code does not fit, or a description has more than `num_blocks`
        codes.
        """
        targets = np.full((len(codes), self.target_len), PAD, dtype=np.int16)
        targets[:, 0], targets[:, -1] = BOS, EOS
        nothing = [] if self.system.missing_block is None else [MISSING]
        for row, text in enumerate(codes):
            blocks = self.blocks(nothing if text is None else text.split(CODE_SEP))
            if len(blocks) > self.num_blocks:
                raise ValueError(
                    f"a description has {len(blocks)} codes, more than the {self.num_blocks} blocks"
                )
            targets[row, 1 : 1 + blocks.size] = blocks.ravel()
        return targets

    def blocks(self, codes: Sequence[str]) -> np.ndarray:
        """Return the tokens of some codes, of shape (n, block_size); raise ValueError for one that
        does not fit.
        """
        for code in codes:
            if (problem := self.system.problem(code)) is not None:
                raise ValueError(f"the code {code!r} {problem}")
        return np.array([self.system.to_block(code) for code in codes], dtype=np.int16).reshape(
            -1, self.block_size
        )

    def decode(self, targets: np.ndarray) -> np.ndarray:
        """Decode target sequences (n, 2 + num_blocks * block_size), with or without EOS, into codes
        (n, num_blocks).

        A code is None for an unused block, a missing code, and tokens of no code.
        """
        flat = np.asarray(targets)[:, 1 : 1 + self.num_blocks * self.block_size].reshape(
            -1, self.block_size
        )
        flat = np.where(flat < self.vocab_size, flat, UNK)  # a model may have tokens to spare
        distinct, index = np.unique(flat, axis=0, return_inverse=True)
        codes = np.empty(len(distinct), dtype=object)
        codes[:] = [self.system.from_block(block) for block in distinct.tolist()]
        return codes[index.ravel()].reshape(-1, self.num_blocks)


def build_formatter(
    name: str,
    *,
    num_blocks: int,
    block_size: int | None = None,
    use_within_block_sep: bool = False,
    symbols: Sequence[str] | None = None,
    labels: Sequence[str] | None = None,
) -> Formatter:
    """Build a formatter by its name: hisco, occ1950 or general, which OccCANINE calls gpf.

    The largest number of codes of one description is `num_blocks`. The other arguments are for the
    general formatter: see `CodeSystem`; `symbols` replace `SYMBOLS`, since some of OccCANINE's
    models have their own. By default there is room for twice as many `labels`, so that a model can
    be trained further with new ones behind its own.
    """
    if name not in ("hisco", "occ1950", "general", "gpf"):
        raise ValueError(f"no formatter {name!r}; there are hisco, occ1950 and general")
    if name in ("hisco", "occ1950"):
        system = HISCO if name == "hisco" else OCC1950
    elif labels is not None:
        block_size = block_size or len(str(2 * len(labels)))
        if len(labels) > 10**block_size:
            raise ValueError(f"{len(labels)} labels can't be numbered with {block_size} digits")
        system = CodeSystem(
            "general", block_size, [MISSING, *string.digits], special=(MISSING,), labels=labels
        )
    else:
        separator = WITHIN_BLOCK_SEP if use_within_block_sep else ""
        system = CodeSystem("general", block_size or 5, symbols or SYMBOLS, separator=separator)
    return Formatter(system, num_blocks=num_blocks)
