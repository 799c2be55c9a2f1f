"""Texts as token ids."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from histocoder.formatters.tokenizers import CHARACTERS, Tokenizer

UNKNOWN = "unk"  # language of descriptions whose language is unknown or withheld
_LONGEST = 256  # maximum number of characters that a linear expert reads


@dataclass
class TokenizedTexts:
    """Token ids of texts, one behind the other in one array."""

    ids: np.ndarray  # of shape (total,); those of CANINE's tokenizer are CLS, the Unicode code points, SEP
    offsets: np.ndarray  # index of each text's first token, of shape (n + 1,)
    lengths: np.ndarray  # number of tokens of each text, of shape (n,)
    tokenizer: Tokenizer
    num_cut: int  # number of texts that were longer than `max_len`

    def __len__(self) -> int:
        return len(self.lengths)

    def pad(self, rows: np.ndarray, *, max_len: int, num_positions: int | None = None) -> np.ndarray:
        """Pad some texts to one array of shape (len(rows), S); S is by default the length of the longest."""
        lengths = self.lengths[rows]
        num_positions = num_positions or self.tokenizer.num_positions(int(lengths.max()), max_len)
        padded = np.full((len(rows), num_positions), self.tokenizer.pad_id, dtype=np.int32)
        padded[np.arange(num_positions) < lengths[:, None]] = self.ids[ragged(self.offsets[rows], lengths)]
        return padded


def tokenize(texts: Sequence[str], *, max_len: int, tokenizer: Tokenizer = CHARACTERS) -> TokenizedTexts:
    """Tokenise texts, cut to `max_len` tokens, special ones included.

    Examples
    --------
    >>> tokenize(["en[SEP]cook"], max_len=128).ids[:4].tolist()
    [57344, 101, 110, 91]
    """
    ids, lengths, num_cut = tokenizer.token_ids(texts, max_len=max_len)
    return TokenizedTexts(ids, np.concatenate([[0], np.cumsum(lengths)]), lengths, tokenizer, num_cut)


def lower_characters(texts: Sequence[str]) -> np.ndarray:
    """Return the characters of texts in lower case, of shape (n, S), for `LinearExpert`."""
    tokens = tokenize([text.lower() for text in texts], max_len=_LONGEST)
    return tokens.pad(np.arange(len(texts)), max_len=_LONGEST)


def ragged(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the indices start, …, start + length - 1 of each run, one run behind the other."""
    behind = np.cumsum(lengths)
    return np.repeat(starts - (behind - lengths), lengths) + np.arange(behind[-1])
