"""The formatter: columns of codes to target sequences of tokens and back."""

import string
from collections.abc import Sequence
from typing import Any

import numpy as np

from histocoder.formatters.code_system import (
    BOS,
    CHARACTERS,
    CODE_SEP,
    EOS,
    HISCO,
    MISSING,
    OCC1950,
    PAD,
    SYMBOLS,
    UNK,
    WITHIN_BLOCK_SEP,
    CodeSystem,
)


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
        self.system = system
        self.num_blocks = num_blocks
        self.name = system.name
        self.block_size = system.block_size
        self.vocab_size = system.vocab_size
        self.target_len = 2 + num_blocks * system.block_size

    def to_config(self) -> dict[str, Any]:
        """Return the arguments that `build_formatter` builds the same formatter from."""
        system = self.system
        config: dict[str, Any] = {
            "name": self.name,
            "num_blocks": self.num_blocks,
            "block_size": self.block_size,
            "use_within_block_sep": bool(system.separator),
        }
        if system.labels is not None:
            config["labels"] = list(system.labels)
        elif self.name == "general" and system.symbols != SYMBOLS:
            config["symbols"] = system.symbols
        return config

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
        # labels are numbered, so that none of them begins with the token
        block = self.system.missing_block
        are_written = self.system.labels is None
        if block is None or (are_written and any(code.startswith(MISSING) for code in codes)):
            return None
        return block[0]

    def encode(self, codes: Sequence[str | None]) -> np.ndarray:
        """Encode n descriptions' codes, with "&" between them, as int16 of shape (n, 2 + num_blocks
        * block_size).

        Raise a ValueError if a code does not fit, or a description has more than `num_blocks`
        codes.
        """
        targets = np.full((len(codes), self.target_len), PAD, dtype=np.int16)
        targets[:, 0] = BOS
        targets[:, -1] = EOS

        # a row without codes has a block that says so, or all blocks unused
        missing_codes: list[str] = []
        if self.system.missing_block is not None:
            missing_codes = [MISSING]
        for row, text in enumerate(codes):
            blocks = self.blocks(missing_codes if text is None else text.split(CODE_SEP))
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
            problem = self.system.problem(code)
            if problem is not None:
                raise ValueError(f"the code {code!r} {problem}")
        blocks = [self.system.to_block(code) for code in codes]
        return np.array(blocks, dtype=np.int16).reshape(-1, self.block_size)

    def decode(self, targets: np.ndarray) -> np.ndarray:
        """Decode target sequences (n, 2 + num_blocks * block_size), with or without EOS, into codes
        (n, num_blocks).

        A code is None for an unused block, a missing code, and tokens of no code.
        """
        without_ends = np.asarray(targets)[:, 1 : 1 + self.num_blocks * self.block_size]
        blocks = without_ends.reshape(-1, self.block_size)

        # a model may have tokens to spare
        blocks = np.where(blocks < self.vocab_size, blocks, UNK)

        # many descriptions have the same code, and each is read once
        distinct, index = np.unique(blocks, axis=0, return_inverse=True)
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
    if name == "hisco":
        system = HISCO
    elif name == "occ1950":
        system = OCC1950
    elif name not in ("general", "gpf"):
        raise ValueError(f"no formatter {name!r}; there are hisco, occ1950 and general")
    elif labels is not None:
        # a model's block can't grow, but new labels can be added to it
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
