"""Texts as token ids: one id for each Unicode code point, as CANINE reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from histocoder.model.encoder import trimmed_length

CLS_ID, SEP_ID, PAD_ID = 0xE000, 0xE001, 0
"""CANINE's own, in Unicode's private use area."""
LANG_SEP = "[SEP]"
"""Stands between language and description, as these five characters."""
UNKNOWN = "unk"
"""The language that is not known, or withheld."""


@dataclass
class TokenizedTexts:
    """Token ids of texts, one behind the other in one array; in memory, or mapped from a file."""

    ids: np.ndarray
    """Of shape (total,): CLS, the Unicode code points, SEP; text after text."""
    offsets: np.ndarray
    """Of shape (n + 1,): where each text begins."""
    lengths: np.ndarray
    """Of shape (n,): tokens of each text."""

    def __len__(self) -> int:
        return len(self.lengths)

    def text(self, row: int) -> str:
        """The text of a row, as far as it was kept."""
        ids = self.ids[int(self.offsets[row]) + 1 : int(self.offsets[row + 1]) - 1]
        return ids.astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")

    def pad(self, rows: np.ndarray, *, max_len: int, num_positions: int | None = None) -> np.ndarray:
        """Some texts as one array of shape (len(rows), S), 0 behind each; S is by default `trimmed_length`'s."""
        starts, lengths = self.offsets[rows].astype(np.int64), self.lengths[rows].astype(np.int64)
        num_positions = num_positions or trimmed_length(int(lengths.max()), max_len)
        padded = np.full((len(rows), num_positions), PAD_ID, dtype=np.int32)
        padded[np.arange(num_positions) < lengths[:, None]] = self.ids[_ragged(starts, lengths)]
        return padded


def tokenize(texts: Sequence[str], *, max_len: int) -> TokenizedTexts:
    """Tokenise texts.

    Parameters
    ----------
    texts : sequence of str
    max_len : int
        Tokens of a text at most, CLS and SEP included; the rest is cut off.

    Examples
    --------
    >>> tokenize(["en[SEP]cook"], max_len=128).ids[:4].tolist()
    [57344, 101, 110, 91]
    """
    marked = [f"{chr(CLS_ID)}{text[: max_len - 2]}{chr(SEP_ID)}" for text in texts]
    lengths = np.fromiter(map(len, marked), dtype=np.int64, count=len(marked))
    ids = np.frombuffer("".join(marked).encode("utf-32-le", "surrogatepass"), dtype="<i4")
    return TokenizedTexts(ids, np.concatenate([[0], np.cumsum(lengths)]), lengths)


def join_language(texts: Sequence[str], langs: Sequence[str]) -> list[str]:
    """What the model reads: language, separator, description."""
    return [f"{lang}{LANG_SEP}{text}" for text, lang in zip(texts, langs, strict=True)]


def _ragged(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The indices start, start + 1, …, start + length - 1 of each run, one run behind the other."""
    behind = np.cumsum(lengths)
    return np.repeat(starts - (behind - lengths), lengths) + np.arange(behind[-1])
