"""Noise in descriptions, as from transcription, spelling and abbreviation, which a model learns to
ignore.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd

from histocoder.errors import UserError, shown
from histocoder.tables.table import open_table
from histocoder.text.normalize import normalize

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_NEIGHBOURS = dict(
    pair.split(":")
    for row in (
        "q:was w:qeasd e:wrsdf r:etdfg t:ryfgh y:tughj u:yihjk i:uojkl o:ipkl p:ol",
        "a:qwszx s:qweadzxc d:wersfxcv f:ertdgcvb g:rtyfhvbn h:tyugjbnm j:yuihknm k:uiojlm l:iopk",
        "z:asx x:asdzc c:sdfxv v:dfgcb b:fghvn n:ghjbm m:hjkn",
    )
    for pair in row.split()
)
"""Letter -> the letters beside it on a keyboard."""


class WordList:
    """Words that are drawn in proportion to their frequencies."""

    def __init__(self, frequencies: dict[str, float]) -> None:
        items = sorted(
            (word, weight) for word, weight in frequencies.items() if word and weight > 0
        )
        if not items:
            items = [("", 1.0)]
        self.words = [word for word, _ in items]
        self._cumulative = np.array(list(itertools.accumulate(weight for _, weight in items)))
        self._lengths = np.array([len(word) for word in self.words])

    @classmethod
    def from_texts(cls, texts: Iterable[str], *, max_words: int = 50_000) -> "WordList":
        """Count the words of some texts, and keep the most frequent."""
        counts = Counter(word for text in texts for word in text.split())
        return cls(dict(counts.most_common(max_words)))

    @classmethod
    def read(cls, path: str, text_normalization: str) -> "WordList":
        """Read words, to be normalised, and their frequencies from a CSV file with the columns
        `word` and `freq`.
        """
        table = open_table(path, ("word", "freq")).read(("word", "freq"))
        words = table.columns["word"].fill_null("").to_pylist()

        # the first cell that is not a number is named with its place
        cells = table.columns["freq"].fill_null("").to_pandas()
        counts = pd.to_numeric(cells, errors="coerce").to_numpy(float)
        rows = np.flatnonzero(~np.isfinite(counts))
        if len(rows):
            place = f"{table.file.unit} {table.lines(rows[:1])[0]}"
            cell = shown(cells[rows[0]])
            raise UserError(f"--fn-word-freq {path}, {place}, freq: {cell} is not a number.")
        return cls(dict(zip(normalize(words, text_normalization), counts.tolist(), strict=True)))

    def index(self, draws: np.ndarray) -> np.ndarray:
        """Map numbers in [0, 1) to indices into `words`."""
        index = np.searchsorted(self._cumulative, draws * self._cumulative[-1], side="right")
        return np.minimum(index, len(self.words) - 1)

    def lengths(self, draws: np.ndarray) -> np.ndarray:
        """Map numbers in [0, 1) to the lengths of the words that they draw."""
        return self._lengths[self.index(draws)]


def _letter(draw: float) -> str:
    return _LETTERS[int(draw * len(_LETTERS))]


def _delete(text: str, at: float, draw: float, words: WordList) -> str:
    i = int(at * len(text))
    return text[:i] + text[i + 1 :]


def _insert(text: str, at: float, draw: float, words: WordList) -> str:
    i = int(at * (len(text) + 1))
    return text[:i] + _letter(draw) + text[i:]


def _substitute(text: str, at: float, draw: float, words: WordList) -> str:
    if not text:
        return text
    i = int(at * len(text))
    return text[:i] + _letter(draw) + text[i + 1 :]


def _neighbour(text: str, at: float, draw: float, words: WordList) -> str:
    i = int(at * len(text))
    neighbours = _NEIGHBOURS.get(text[i : i + 1].lower())
    if neighbours is None:
        return text
    return text[:i] + neighbours[int(draw * len(neighbours))] + text[i + 1 :]


def _swap_characters(text: str, at: float, draw: float, words: WordList) -> str:
    i = int(at * (len(text) - 1))
    return text[:i] + text[i + 1 : i + 2] + text[i : i + 1] + text[i + 2 :]


def _swap_words(text: str, at: float, draw: float, words: WordList) -> str:
    parts = text.split(" ")
    if len(parts) < 2:
        return text
    i = int(at * (len(parts) - 1))
    parts[i], parts[i + 1] = parts[i + 1], parts[i]
    return " ".join(parts)


def _insert_word(text: str, at: float, draw: float, words: WordList) -> str:
    parts = text.split(" ")
    word = words.words[int(words.index(np.float64(draw)))]
    parts.insert(int(at * (len(parts) + 1)), word)
    return " ".join(parts)


class _Edit(NamedTuple):
    """A kind of edit; one that would leave nothing of a text is not made."""

    apply: Callable[[str, float, float, WordList], str]
    """Function of a text, the edit's `at` and its draw (see `Noise`), and the words to insert."""
    num_added: int
    """Number of characters by which it makes a text longer, without the word that it inserts."""
    adds_word: bool = False


_EDITS = [
    _Edit(_delete, -1),
    _Edit(_insert, 1),
    _Edit(_substitute, 0),
    _Edit(_neighbour, 0),
    _Edit(_swap_characters, 0),
    _Edit(_swap_words, 0),
    _Edit(_insert_word, 1, adds_word=True),  # and a blank
]
_NUM_ADDED = np.array([edit.num_added for edit in _EDITS])
_ADDS_WORD = np.array([edit.adds_word for edit in _EDITS])


class Noise(NamedTuple):
    """Random numbers that say how n rows are altered in an epoch."""

    withheld: np.ndarray
    """Whether each row's language is withheld, of shape (n,)."""
    num_edits: np.ndarray
    """Number of edits of each row, of shape (n,)."""
    edits: np.ndarray
    """Index of each edit in `_EDITS`, of shape (n, num_transformations), as are `at` and `draws`."""
    at: np.ndarray
    """Position of each edit in its text, from 0 (the beginning) to below 1 (the end)."""
    draws: np.ndarray
    """Number that chooses the letter or word of each edit, from 0 to below 1."""


@dataclass(frozen=True)
class Augmenter:
    """Alters a share of all descriptions by a few random edits.

    Randomness is a hash of (seed, epoch, row): every process and worker draws the same, in any
    order. The length of an altered description is known without altering it, so that batches can be
    made of like lengths.
    """

    words: WordList
    """Words to insert."""
    augmentation_prob: float
    """Share of descriptions that are altered."""
    num_transformations: int
    """Largest number of edits of a description; each number from 1 is equally likely."""
    unk_lang_prob: float
    """Share of descriptions whose language is withheld."""
    seed: int = 0

    def noise(self, rows: np.ndarray, epoch: int) -> Noise:
        """Draw the noise of some rows in an epoch."""
        # a generator for each row; pandas hashes integers by the mixing function of SplitMix64
        seed_and_epoch = np.array([self.seed % 2**64, epoch], dtype=np.uint64)
        hashes = pd.util.hash_array(seed_and_epoch)
        epoch_state = pd.util.hash_array(hashes[:1] + np.uint64(3) * hashes[1:])
        state = pd.util.hash_array(epoch_state + rows.astype(np.uint64))

        # three draws for each row: whether its language is withheld, whether it is altered, and by
        # how many edits
        withheld, altered, number = _uniforms(state, range(3))
        max_edits = self.num_transformations
        num_edits = np.ceil((1 - number) * max_edits).astype(int)
        num_edits = np.where(altered < self.augmentation_prob, num_edits, 0)

        # three draws for each edit of a row that is altered
        is_altered = num_edits > 0
        edit_draws = np.zeros((3, max_edits, len(rows)))
        drawn = _uniforms(state[is_altered], range(3, 3 + 3 * max_edits))
        edit_draws[..., is_altered] = drawn.reshape(3, max_edits, is_altered.sum())
        kind, at, draw = edit_draws.transpose(0, 2, 1)
        return Noise(
            withheld=withheld < self.unk_lang_prob,
            num_edits=num_edits,
            edits=(kind * len(_EDITS)).astype(int),
            at=at,
            draws=draw,
        )

    def lengths(self, noise: Noise, lengths: np.ndarray) -> np.ndarray:
        """Return the lengths in characters of descriptions after their noise, given those
        before.
        """
        lengths = lengths.astype(np.int64)
        rows = np.flatnonzero(noise.num_edits)
        for i in range(self.num_transformations):
            rows = rows[noise.num_edits[rows] > i]
            edits = noise.edits[rows, i]
            altered = lengths[rows] + _NUM_ADDED[edits]
            adds_word = _ADDS_WORD[edits]
            altered[adds_word] += self.words.lengths(noise.draws[rows[adds_word], i])

            # an edit that would leave nothing is not made
            is_made = altered > 0
            lengths[rows[is_made]] = altered[is_made]
        return lengths

    def alter(self, text: str, noise: Noise, row: int) -> str:
        """Apply the edits of one row of the noise to a description."""
        for i in range(noise.num_edits[row]):
            edit = _EDITS[noise.edits[row, i]]
            # an edit that would leave nothing is not made
            text = edit.apply(text, noise.at[row, i], noise.draws[row, i], self.words) or text
        return text


def _uniforms(state: np.ndarray, draws: range) -> np.ndarray:
    """Draw numbers from 0 to below 1 from generators in some states, of shape (number of draws, n).

    The generator is SplitMix64 (Steele, Lea and Flood 2014), whose k-th number is a hash of state
    and k.
    """
    steps = np.arange(draws.start + 1, draws.stop + 1, dtype=np.uint64) * np.uint64(
        0x9E3779B97F4A7C15
    )
    drawn = pd.util.hash_array((state + steps[:, None]).ravel()).reshape(len(steps), len(state))
    return (drawn >> np.uint64(11)) * 2.0**-53
