"""The tokens that every code system shares."""

UNK, PAD, BOS, EOS, SEP = 0, 1, 2, 3, 4
FIRST_TOKEN = 5  # the first token of a code's symbol

CODE_SEP = "&"  # separator of the codes of one description in one string

MISSING = "?"  # symbol of a missing first code
