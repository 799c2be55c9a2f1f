"""Texts as token ids, one behind the other in one array."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from histocoder.config import LANG_SEP
from histocoder.tokenizers import CHARACTERS, Tokenizer

UNKNOWN = "unk"
"""The language that is not known, or withheld."""
_LONGEST = 256
"""Characters that a linear expert reads."""


@dataclass
class TokenizedTexts:
    """Token ids of texts, one behind the other in one array."""

    ids: np.ndarray
    """Of shape (total,): by CANINE's tokenizer CLS, the Unicode code points, SEP; text after text."""
    offsets: np.ndarray
    """Of shape (n + 1,): where each text begins."""
    lengths: np.ndarray
    """Of shape (n,): tokens of each text."""
    tokenizer: Tokenizer = CHARACTERS
    """That made them."""
    num_cut: int = 0
    """Texts that were longer; counted by `tokenize`."""

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
    """Tokenise texts.

    Parameters
    ----------
    texts : sequence of str
        See `join_language`.
    max_len : int
        Tokens of a text at most, special ones included; the rest is cut off.
    tokenizer : Tokenizer
        By default CANINE's.

    Examples
    --------
    >>> tokenize(["en[SEP]cook"], max_len=128).ids[:4].tolist()
    [57344, 101, 110, 91]
    """
    ids, lengths, num_cut = tokenizer.token_ids(texts, max_len=max_len)
    return TokenizedTexts(ids, np.concatenate([[0], np.cumsum(lengths)]), lengths, tokenizer, num_cut)


def join_language(texts: Sequence[str], langs: Sequence[str]) -> list[str]:
    """Return what the model reads: language, separator, description."""
    return [f"{lang}{LANG_SEP}{text}" for text, lang in zip(texts, langs, strict=True)]


def lower_characters(texts: Sequence[str]) -> np.ndarray:
    """Texts in lower case as characters, an array of shape (n, S), for `LinearExpert`."""
    tokens = tokenize([text.lower() for text in texts], max_len=_LONGEST)
    return tokens.pad(np.arange(len(texts)), max_len=_LONGEST)


def ragged(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the indices start, start + 1, …, start + length - 1 of each run, one run behind the other."""
    behind = np.cumsum(lengths)
    return np.repeat(starts - (behind - lengths), lengths) + np.arange(behind[-1])
