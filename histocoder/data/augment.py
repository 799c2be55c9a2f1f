"""Alters descriptions as transcription, spelling and abbreviation do, so that a model learns to look past it."""

from __future__ import annotations

import bisect
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable

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
        items = sorted((word, weight) for word, weight in frequencies.items() if word and weight > 0)
        self.words = [word for word, _ in items]
        self._cumulative = list(itertools.accumulate(weight for _, weight in items))

    @classmethod
    def from_texts(cls, texts: Iterable[str], *, max_words: int = 50_000) -> WordList:
        """Count the words of some texts, and keep the most frequent."""
        counts = Counter(word for text in texts for word in text.split())
        return cls(dict(counts.most_common(max_words)))

    def draw(self, rng: random.Random) -> str:
        """One word; the empty string where there are none."""
        if not self.words:
            return ""
        return self.words[bisect.bisect(self._cumulative, rng.random() * self._cumulative[-1])]


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

    Notes
    -----
    Randomness depends on (seed, epoch, row) alone, whichever process or worker asks.
    """

    def __init__(
        self, words: WordList, *, augmentation_prob: float, num_transformations: int, unk_lang_prob: float
    ) -> None:
        self.augmentation_prob = augmentation_prob if num_transformations else 0.0
        self.num_transformations = num_transformations
        self.unk_lang_prob = unk_lang_prob
        self._words = words
        self._edits: list[Callable[[str, random.Random], str]] = [
            _delete,
            _insert,
            _substitute,
            _neighbour,
            _swap_characters,
            _swap_words,
            self._insert_word,
        ]

    def __call__(self, text: str, lang: str, rng: random.Random) -> tuple[str, str]:
        """Return the description and the language as a model gets to see them this time."""
        if rng.random() < self.unk_lang_prob:
            lang = "unk"
        if rng.random() < self.augmentation_prob:
            for _ in range(rng.randint(1, self.num_transformations)):
                text = rng.choice(self._edits)(text, rng) or text
        return text, lang

    def _insert_word(self, text: str, rng: random.Random) -> str:
        words = text.split(" ")
        words.insert(rng.randint(0, len(words)), self._words.draw(rng))
        return " ".join(words)


def row_rng(seed: int, epoch: int, row: int) -> random.Random:
    """A generator of one row in one epoch."""
    return random.Random((seed << 96) | (epoch << 64) | row)


def _at(text: str, rng: random.Random) -> int:
    return rng.randrange(len(text)) if text else 0


def _delete(text: str, rng: random.Random) -> str:
    i = _at(text, rng)
    return text[:i] + text[i + 1 :]


def _insert(text: str, rng: random.Random) -> str:
    i = rng.randint(0, len(text))
    return text[:i] + rng.choice(_LETTERS) + text[i:]


def _substitute(text: str, rng: random.Random) -> str:
    i = _at(text, rng)
    return text[:i] + rng.choice(_LETTERS) + text[i + 1 :]


def _neighbour(text: str, rng: random.Random) -> str:
    i = _at(text, rng)
    neighbours = _NEIGHBOURS.get(text[i : i + 1].lower())
    return text[:i] + rng.choice(neighbours) + text[i + 1 :] if neighbours else text


def _swap_characters(text: str, rng: random.Random) -> str:
    if len(text) < 2:
        return text
    i = rng.randrange(len(text) - 1)
    return text[:i] + text[i + 1] + text[i] + text[i + 2 :]


def _swap_words(text: str, rng: random.Random) -> str:
    words = text.split(" ")
    if len(words) < 2:
        return text
    i = rng.randrange(len(words) - 1)
    words[i], words[i + 1] = words[i + 1], words[i]
    return " ".join(words)
