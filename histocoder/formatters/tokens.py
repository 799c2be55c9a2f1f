"""The tokens that every code system shares."""

UNK, PAD, BOS, EOS, SEP = 0, 1, 2, 3, 4
FIRST_TOKEN = 5
"""The first token that stands for a symbol of a code."""

CODE_SEP = "&"
"""Separates the codes of one description where they stand in one string."""

MISSING = "?"
"""Stands for a missing first code."""
