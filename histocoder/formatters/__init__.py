"""Codes as strings and as blocks of tokens, for HISCO, OCC1950 and other systems.

Imports no other part but `errors` and `config`.
"""

from histocoder.formatters.code_system import (
    BOS,
    CHARACTERS,
    CODE_SEP,
    EOS,
    FIRST_TOKEN,
    HISCO,
    MISSING,
    OCC1950,
    PAD,
    SEP,
    SYMBOLS,
    UNK,
    WITHIN_BLOCK_SEP,
    CodeSystem,
)
from histocoder.formatters.formatter import Formatter, build_formatter

__all__ = [
    "BOS",
    "CHARACTERS",
    "CODE_SEP",
    "EOS",
    "FIRST_TOKEN",
    "HISCO",
    "MISSING",
    "OCC1950",
    "PAD",
    "SEP",
    "SYMBOLS",
    "UNK",
    "WITHIN_BLOCK_SEP",
    "CodeSystem",
    "Formatter",
    "build_formatter",
]
