"""Alters descriptions as transcription, spelling and abbreviation do, so that a model learns to look past it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import pandas as pd

_KEYBOARD = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
_LETTERS = "".join(sorted("".join(_KEYBOARD)))


def _keyboard_neighbours() -> dict[str, str]:
    place = {key: (row, column) for row, keys in enumerate(_KEYBOARD) for column, key in enumerate(keys)}
    return {
        key: "".join(k for k, (r, c) in place.items() if k != key and abs(r - row) <= 1 and abs(c - column) <= 1)
        for key, (row, column) in place.items()
    }


_NEIGHBOURS = _keyboard_neighbours()


class WordList:
    """Words drawn in proportion to their frequency.

    Parameters
    ----------
    frequencies : dict of str to float
    """

    def __init__(self, frequencies: dict[str, float]) -> None:
        items = sorted((word, weight) for word, weight in frequencies.items() if word and weight > 0) or [("", 1.0)]
        self.words = [word for word, _ in items]
        self._cumulative = np.array(list(itertools.accumulate(weight for _, weight in items)))
        self._lengths = np.array([len(word) for word in self.words])

    @classmethod
    def from_texts(cls, texts: Iterable[str], *, max_words: int = 50_000) -> WordList:
        """Count the words of some texts, and keep the most frequent."""
        counts = Counter(word for text in texts for word in text.split())
        return cls(dict(counts.most_common(max_words)))

    def place(self, draws: np.ndarray) -> np.ndarray:
        """Return the words that numbers in [0, 1) draw, as places in `words`; the empty word where there are none."""
        found = np.searchsorted(self._cumulative, draws * self._cumulative[-1], side="right")
        return np.minimum(found, len(self.words) - 1)

    def lengths(self, draws: np.ndarray) -> np.ndarray:
        """Characters of the words that numbers in [0, 1) draw."""
        return self._lengths[self.place(draws)]


class Noise(NamedTuple):
    """What happens to n rows in an epoch, drawn without a look at their text."""

    withheld: np.ndarray
    """Of shape (n,): whether the language is withheld."""
    num_edits: np.ndarray
    """Of shape (n,)."""
    edits: np.ndarray
    """Kind of each edit, of shape (n, most edits), as are `at` and `what`."""
    at: np.ndarray
    """Where, from 0 (the beginning) to below 1 (the end)."""
    what: np.ndarray
    """Which letter or word, from 0 to below 1."""


class Augmenter:
    """Alters a share of all descriptions by a few random edits.

    Parameters
    ----------
    words : WordList
        What "random word" inserts.
    augmentation_prob : float
        Share of descriptions that are altered.
    num_transformations : int
        A description that is altered gets 1 to this many edits, each one of: delete, insert or substitute a
        character, substitute its neighbour on a keyboard, swap two characters, swap two words, insert a word.
    unk_lang_prob : float
        Share of descriptions whose language is withheld.
    seed : int

    Notes
    -----
    Randomness is a hash of (seed, epoch, row): whichever process or worker asks, and in whichever order, gets the same.
    How long an altered description will be is known without altering it, so that batches can be made of like lengths.
    """

    def __init__(
        self,
        words: WordList,
        *,
        augmentation_prob: float,
        num_transformations: int,
        unk_lang_prob: float,
        seed: int = 0,
    ) -> None:
        self._augmentation_prob = augmentation_prob
        self._num_transformations = num_transformations
        self._unk_lang_prob = unk_lang_prob
        self._seed = seed
        self._words = words
        self._edits: list[Callable[[str, float, float], str]] = [
            _delete,
            _insert,
            _substitute,
            _neighbour,
            _swap_characters,
            _swap_words,
            self._insert_word,
        ]

    def noise(self, rows: np.ndarray, epoch: int) -> Noise:
        """Draw what happens to some rows in an epoch."""
        most = self._num_transformations
        state = _row_hashes(self._seed, epoch, rows)
        withheld, altered, many = _uniforms(state, range(3))
        num_edits = np.where(altered < self._augmentation_prob, np.ceil((1 - many) * most).astype(int), 0)
        edited = num_edits > 0
        drawn = np.zeros((3, most, len(rows)))
        drawn[..., edited] = _uniforms(state[edited], range(3, 3 + 3 * most)).reshape(3, most, -1)
        kind, at, what = drawn.transpose(0, 2, 1)
        return Noise(
            withheld=withheld < self._unk_lang_prob,
            num_edits=num_edits,
            edits=(kind * len(self._edits)).astype(int),
            at=at,
            what=what,
        )

    def lengths(self, noise: Noise, lengths: np.ndarray) -> np.ndarray:
        """Characters of descriptions after their noise, where they have so many before it."""
        lengths = lengths.astype(np.int64)
        rows = noise.num_edits.nonzero()[0]
        for i in range(self._num_transformations):
            rows = rows[noise.num_edits[rows] > i]
            edit = noise.edits[rows, i]
            lengths[rows] += edit == self._edits.index(_insert)
            lengths[rows] -= (edit == self._edits.index(_delete)) & (lengths[rows] > 1)
            longer = rows[edit == self._edits.index(self._insert_word)]
            lengths[longer] += 1 + self._words.lengths(noise.what[longer, i])
        return lengths

    def alter(self, text: str, noise: Noise, row: int) -> str:
        """Return a description after its noise, which is the one at place `row`."""
        for i in range(noise.num_edits[row]):
            edit = self._edits[noise.edits[row, i]]
            text = edit(text, noise.at[row, i], noise.what[row, i]) or text
        return text

    def _insert_word(self, text: str, at: float, what: float) -> str:
        words = text.split(" ")
        words.insert(int(at * (len(words) + 1)), self._words.words[int(self._words.place(np.float64(what)))])
        return " ".join(words)


def _row_hashes(seed: int, epoch: int, rows: np.ndarray) -> np.ndarray:
    """Hash rows, of shape (n,), uint64; pandas hashes integers by the mixing function of SplitMix64."""
    parts = pd.util.hash_array(np.array([seed % 2**64, epoch], dtype=np.uint64))
    run = pd.util.hash_array(parts[:1] + np.uint64(3) * parts[1:])
    return pd.util.hash_array(run + rows.astype(np.uint64))


def _uniforms(state: np.ndarray, draws: range) -> np.ndarray:
    """Numbers from 0 to below 1 of the generators that begin at some states, of shape (number of draws, n).

    SplitMix64 (Steele, Lea and Flood 2014), whose k-th number is a hash of state and k.
    """
    steps = np.arange(draws.start + 1, draws.stop + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    drawn = pd.util.hash_array((state + steps[:, None]).ravel()).reshape(len(steps), -1)
    return (drawn >> np.uint64(11)) * 2.0**-53


def _letter(what: float) -> str:
    return _LETTERS[int(what * len(_LETTERS))]


def _delete(text: str, at: float, _: float) -> str:
    i = int(at * len(text))
    return text[:i] + text[i + 1 :]


def _insert(text: str, at: float, what: float) -> str:
    i = int(at * (len(text) + 1))
    return text[:i] + _letter(what) + text[i:]


def _substitute(text: str, at: float, what: float) -> str:
    i = int(at * len(text))
    return text and text[:i] + _letter(what) + text[i + 1 :]


def _neighbour(text: str, at: float, what: float) -> str:
    i = int(at * len(text))
    neighbours = _NEIGHBOURS.get(text[i : i + 1].lower())
    return text[:i] + neighbours[int(what * len(neighbours))] + text[i + 1 :] if neighbours else text


def _swap_characters(text: str, at: float, _: float) -> str:
    i = int(at * (len(text) - 1))
    return text[:i] + text[i + 1 : i + 2] + text[i : i + 1] + text[i + 2 :]


def _swap_words(text: str, at: float, _: float) -> str:
    words = text.split(" ")
    if len(words) < 2:
        return text
    i = int(at * (len(words) - 1))
    words[i], words[i + 1] = words[i + 1], words[i]
    return " ".join(words)
