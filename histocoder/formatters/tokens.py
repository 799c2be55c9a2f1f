"""The tokens that every code system shares."""

UNK, PAD, BOS, EOS, SEP = 0, 1, 2, 3, 4
FIRST_TOKEN = 5
"""The first token of a code's symbol."""

CODE_SEP = "&"
"""Separator of the codes of one description in one string."""

MISSING = "?"
"""Symbol of a missing first code."""
