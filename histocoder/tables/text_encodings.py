"""Encodings of text: which one makes words of some bytes, and words that were encoded twice."""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from histocoder.errors import counted, shown

ENCODINGS = {
    "cp1252": "Windows-1252",
    "mac_roman": "Mac",
    "cp850": "DOS",
    "cp1250": "Windows-1250, of Central Europe",
    "iso8859_2": "Latin-2, of Central Europe",
}
"""Encodings that are tried for bytes that are not UTF-8, the most usual first, and what people call
them.
"""
_WESTERN = (
    "åäöéüà",
    "æøåéöäüô",
    "äöüß",
    "éèêàçëîïôûùâœæ",
    "áéíóúñü",
    "áâãàçéêíóôõú",
    "àèéìòù",
    "áæðéíóúýþö",
    "ëéïöüèóêá",
    "àçèéíïòóúü·",
    "äöüõ",
)
_CENTRAL = ("ąćęłńóśźż", "áčďéěíňóřšťúůýž", "áäčďéíľĺňóôŕšťúýž", "áéíóöőúüű", "ăâîșşțţ", "čćđšž")
_COST_CENTRAL = 0.1  # oddness of a letter of these, since files of Western Europe are more usual
_MARKS = "’‘“”„–—…°º§£€·ª«»´`¿¡½¼¾\xa0"
_MARKS_IN_WORDS = "’·´"
_TWICE = re.compile(
    # What first bytes of UTF-8 are misread as, and another of its bytes
    "[ÃÂ√├┬][^\x00-\x7f]|â€|[ÄÅ][^\x00-\x7fÀ-ÿ]"
)
_MISREAD_AS = ("cp1252", "latin-1", "mac_roman", "cp850", "cp437")
_WORD = re.compile(r"[^\s,;|]*[^\x00-\x7f\s,;|][^\s,;|]*|[^\s,;|]*\xa0[^\s,;|]*")


def oddness(words: Iterable[str]) -> float:
    """Return how much of some words no language writes: 0 for none, 1 for a letter that it does not
    have.

    All words are taken to be of the language that fits best. Symbols within words, and capitals
    behind small letters, are odder than letters of other languages.
    """
    # symbols and case are odd in any language, and letters only in some
    odd = 0.0
    letters: list[str] = []
    for word in words:
        for before, char, after in zip(f" {word}", word, f"{word[1:]} ", strict=False):
            if char.isascii():
                continue
            if char.isalpha():
                letters.append(char.lower())
                odd += before.islower() and char.isupper()
                odd += char.islower() and after.isupper()
            elif char in _MARKS_IN_WORDS:
                odd += 0.3
            elif char in _MARKS:
                odd += 2 if before.isalpha() and after.isalpha() else 0.5
            else:
                odd += 3

    # a word may have letters of one language alone
    western = min(sum(letter not in alphabet for letter in letters) for alphabet in _WESTERN)
    central = min(sum(letter not in alphabet for letter in letters) for alphabet in _CENTRAL)
    return odd + min(western, central + _COST_CENTRAL * len(letters))


def guess(words: Collection[bytes]) -> str | None:
    """Return the encoding that makes words of some bytes; None if none does.

    General detectors compare frequencies of letters over pages of prose, and fail on the few words
    of a list: of three to forty words of Scandinavian titles, charset-normalizer finds the encoding
    of less than half.
    """
    scores: dict[str, float] = {}
    for encoding in ENCODINGS:
        try:
            scores[encoding] = oddness(word.decode(encoding) for word in words)
        except UnicodeDecodeError:
            continue

    # Windows-1252 has nearly all bytes, and is so usual that odd words are taken for its own
    best = min(scores, key=lambda encoding: scores[encoding])
    num_characters = sum(byte >= 0x80 for word in words for byte in word)
    return best if "cp1252" in scores or scores[best] <= num_characters / 2 else None


@dataclass(frozen=True)
class Reading:
    """Examples of some bytes as they read in an encoding."""

    encoding: str
    name: str  # what people call it
    examples: list[str]


def readings(words: Collection[bytes], first: str) -> list[Reading]:
    """Return how a few words read in each encoding that has their bytes; `first` is the first."""
    texts: list[Reading] = []
    examples = sorted(words, key=lambda word: (len(word), word))[-3:]
    for encoding in dict.fromkeys([first, *ENCODINGS]):
        try:
            decoded = [word.decode(encoding) for word in examples]
        except UnicodeDecodeError:
            continue
        texts.append(Reading(encoding, ENCODINGS[encoding], decoded))
    return texts


def wide_encoding(head: bytes) -> str | None:
    """Return which UTF-16 or UTF-32 the first bytes of a file are; None if they are neither.

    A byte order mark tells; without one, every other byte of text of Western languages is NUL.
    """
    if head.startswith((b"\xff\xfe\0\0", b"\0\0\xfe\xff")):
        return "utf-32"
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16"

    # the file may end in the middle of a character
    num_characters = len(head) // 2
    for encoding, high, low in (
        ("utf-16-le", head[1::2], head[::2]),
        ("utf-16-be", head[::2], head[1::2]),
    ):
        if num_characters > 1 and high.count(0) > 0.7 * num_characters and not low.count(0):
            return encoding
    return None


def repaired(word: str) -> str | None:
    """Return a word that was UTF-8, was read in another encoding and saved again, as it was; None
    for other words.

    Examples
    --------
    >>> repaired("bÃ¥tuthyrare"), repaired("b√•tuthyrare"), repaired("båtuthyrare")
    ('båtuthyrare', 'båtuthyrare', None)
    """
    for encoding in _MISREAD_AS:
        try:
            text = word.encode(encoding).decode("utf-8")
        except UnicodeError:
            continue
        if text != word and oddness([text]) < oddness([word]):
            return text
    return None


@dataclass
class TwiceEncoded:
    """Counts the words of a text that were encoded twice."""

    count: int = 0
    examples: dict[str, str] = field(default_factory=dict)
    """The first such words, and what they were."""

    def add(self, text: str) -> None:
        if _TWICE.search(text) is None:
            return
        for word in _WORD.findall(text):
            if _TWICE.search(word) and (original := repaired(word)) is not None:
                self.count += 1
                if len(self.examples) < 3:
                    self.examples[word.strip('"')] = original.strip('"')

    def notices(self, path: object) -> list[str]:
        """Return a notice, if there are such words."""
        if not self.count:
            return []
        examples = ", ".join(
            f"{shown(word)} was {shown(original)}" for word, original in self.examples.items()
        )
        return [
            f"{path}: {counted(self.count, 'word was', 'words were')} encoded twice "
            f"({examples}), and nothing is "
            "repaired. Export the table again as UTF-8, and open it as UTF-8."
        ]
