"""The distinct descriptions among those that a user gives, and batches of them as a model reads
them.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import pandas as pd

from histocoder.config import ALL_LANGUAGES, ModelConfig, PredictOptions
from histocoder.data.cells import spoilt
from histocoder.errors import Notice, UserError, shown, warn_user
from histocoder.text import tokenizers
from histocoder.text.characters import is_missing
from histocoder.text.languages import (
    Language,
    chosen_language,
    languages_among,
    not_in_table,
    with_nearest,
)
from histocoder.text.normalize import is_blank_description, normalize

if TYPE_CHECKING:
    import pyarrow as pa

MAX_LENGTH_RATIO = 1.25
"""Ratio of lengths within a batch, if there are enough descriptions."""
_ONE_VALUE = (str, Mapping, pd.DataFrame)  # iterables that are not columns of descriptions

Texts: TypeAlias = "str | Sequence[str | None] | pd.Series | pa.Array"
Langs: TypeAlias = "str | Sequence[str] | pd.Series | pa.Array | None"


class Descriptions(NamedTuple):
    """Distinct descriptions with their languages, and the rows that have them."""

    texts: list[str]
    langs: list[str]  # see `Language`
    rows: np.ndarray  # index of each row's description, of shape (n,); -1 where it is missing

    @classmethod
    def of(cls, texts: Texts, lang: Langs, *, languages: tuple[str, ...]) -> "Descriptions":
        """Return the distinct descriptions of n rows; blank ones are missing.

        Notices name languages other than a model's `languages`, and texts that may not be
        descriptions. A UserError is raised if a value is not text, or one language is given for all
        rows that is neither the model's nor in the table of languages.
        """
        values = _python_values(texts)
        if isinstance(values, _ONE_VALUE) or not isinstance(values, Iterable):
            values = [values]
        values = list(values)

        # One language is of all rows, and has to be one; those of rows may be blank or unknown.
        langs = "unk" if lang is None else _python_values(lang)
        if isinstance(langs, str):
            langs = [chosen_language(langs, languages)] * len(values)
        langs = list(langs)
        if len(langs) != len(values):
            raise UserError(
                f"There are {len(values):,} descriptions, but {len(langs):,} languages."
            )

        # A number is likelier a column of identifiers than a description.
        for value in values:
            if not isinstance(value, str) and pd.isna(value) is not True:
                raise UserError(
                    f"The description {shown(str(value))} is of the type "
                    f"{type(value).__name__}; give strings, such as "
                    "df['occ1'], and None where there is no description."
                )
        return DistinctDescriptions(languages).add(values, langs)

    def part(self, start: int, size: int) -> "Descriptions":
        """Return up to `size` of the distinct descriptions, each with a row."""
        texts = self.texts[start : start + size]
        langs = self.langs[start : start + size]
        return Descriptions(texts, langs, np.arange(len(texts)))


class Inputs(NamedTuple):
    """A batch of distinct descriptions as a model reads them."""

    rows: np.ndarray  # indices of the descriptions, of shape (B,)
    language: str  # whose experts' weights count; "" has no weights of its own
    input_ids: np.ndarray  # see `MixerModel.encode`, of shape (B, S)
    thresholds: np.ndarray  # thresholds of the flat head, of shape (B,)
    characters: np.ndarray | None  # for linear experts, of shape (B, L); None if there are none
    # `end_characters` for the expert of nearest rows, of shape (B, 2); None if there is none
    ends: np.ndarray | None


def _python_values(column: Any) -> Any:
    """Return an Arrow array as a list, and anything else as it is."""
    return column.to_pylist() if hasattr(column, "to_pylist") else column


class DistinctDescriptions:
    """Gives each distinct description of a table's blocks an index, while there is room to remember
    them.

    `languages` are a model's; from `room` descriptions on, new ones are not remembered.
    """

    def __init__(self, languages: tuple[str, ...], *, room: float = math.inf) -> None:
        self._languages = languages
        self._room = room
        self._indices: dict[tuple[object, str], int] = {}
        self._codes: dict[str, Language] = {}  # language as written -> its code

    def add(self, texts: Sequence[object], langs: Sequence[str]) -> Descriptions:
        """Return the new descriptions of a block, the shortest first; their indices follow those
        remembered.
        """
        self._read_languages(set(langs) - self._codes.keys())
        pairs = list(zip(texts, map(self._codes.__getitem__, langs), strict=True))

        # The same text in two languages is two descriptions, since a model reads the language.
        new: list[tuple[str, str]] = []
        for text, lang in set(pairs) - self._indices.keys():
            if isinstance(text, str) and not is_blank_description(text):
                new.append((text, lang))
        new.sort(key=lambda pair: (len(pair[0]), pair))
        new_texts = [text for text, _ in new]
        new_langs = [lang for _, lang in new]
        for text in sorted(set(new_texts)):
            if _may_be_missing(text):
                warn_user(
                    Notice(
                        f"The description {text!r} is coded as a word. If it is a missing one, "
                        "leave it blank."
                    )
                )

        # Where there is no room left, those of this block are forgotten with it.
        indices: dict[tuple[object, str], int] = dict(zip(new, itertools.count(len(self._indices))))
        rows = [self._indices.get(pair, indices.get(pair, -1)) for pair in pairs]
        if len(self._indices) < self._room:
            self._indices |= indices
        return Descriptions(new_texts, new_langs, np.array(rows, dtype=np.int64))

    def _read_languages(self, langs: set[str]) -> None:
        """Read languages that are new; a notice names those that the model, or if it knows all, the
        table lacks.
        """
        languages_of_model = {Language()}.union(map(Language, self._languages))
        strange = []
        for lang in langs:
            code = Language(lang if isinstance(lang, str) else "")
            self._codes[lang] = code
            is_known = code in languages_of_model if self._languages else code.is_known
            if not is_known:
                strange.append(lang)
        if not strange:
            return

        strange.sort()
        message = not_in_table(strange)
        if self._languages:
            message = (
                f"The model does not know the language {', '.join(map(with_nearest, strange))} and "
                f"treats it as unknown (unk); it knows {', '.join(self._languages)}."
            )
        warn_user(Notice(message))


def _may_be_missing(text: str) -> bool:
    """Return whether a text is no description; "None" is one: it says that a person had no
    occupation.
    """
    text = text.strip()
    return text != "None" and (is_missing(text) or (text[0] == "#" and spoilt(text) is not None))


def make_batches(
    descriptions: Descriptions,
    config: ModelConfig,
    tokenizer: tokenizers.Tokenizer,
    options: PredictOptions,
    *,
    at_least: int,
) -> Iterator[Inputs]:
    """Yield distinct descriptions in batches of similar lengths, the shortest first.

    A batch has at least so many descriptions, if there are, even if their lengths differ.
    """
    if not descriptions.texts:
        return
    langs_of_model = languages_among(descriptions.langs, config.languages)
    normalized = normalize(descriptions.texts, config.text_normalization)
    joined = tokenizers.join_language(normalized, langs_of_model)
    tokens = tokenizers.tokenize(joined, max_len=config.max_len, tokenizer=tokenizer)
    if tokens.num_cut:
        limit = f"{config.max_len} {tokenizer.unit}"
        warn_user(
            Notice(f"Descriptions that are longer than {limit}, with the language, are truncated.")
        )

    # A batch is of one language where the experts' weights differ between languages.
    languages = [lang if lang in config.experts_by_language else "" for lang in langs_of_model]
    weighted_langs, weighting = np.unique(languages, return_inverse=True)
    order = np.lexsort((tokens.lengths, weighting))
    weighting = weighting[order]
    lengths = tokens.lengths[order]

    thresholds = thresholds_of(config, descriptions.langs, options.threshold)
    has_linear_expert = config.num_linear_features or config.num_attribute_features
    start = 0
    while start < len(order):
        # A batch is as wide as its longest description, so much longer ones wait for the next.
        last = int(np.searchsorted(weighting, weighting[start], side="right"))
        longest = MAX_LENGTH_RATIO * lengths[start]
        end = start + int(np.searchsorted(lengths[start:last], longest, side="right"))
        end = max(end, start + at_least)
        end = min(end, start + (options.batch_size or at_least), last)
        rows = order[start:end]
        language = str(weighted_langs[weighting[start]])
        start = end

        # Only experts read characters, which take a while to collect.
        ids = tokens.pad(rows, max_len=config.max_len, num_positions=config.pad_to)
        texts = [joined[row] for row in rows]
        characters = tokenizers.lower_characters(texts) if has_linear_expert else None
        ends = tokenizers.end_characters(texts) if config.num_nearest_rows else None
        yield Inputs(rows, language, ids, thresholds[rows], characters, ends)


def thresholds_of(
    config: ModelConfig, langs: Sequence[str], threshold: float | None = None
) -> np.ndarray:
    """Return the threshold of each description, of shape (n,): the one that is given, its
    language's, or the default.
    """
    if threshold is not None:
        return np.full(len(langs), threshold, dtype=np.float32)
    of_model: dict[str, float] = {
        Language(lang): value for lang, value in config.thresholds.items()
    }
    default = of_model.get(ALL_LANGUAGES, config.default_threshold)
    of_langs = {}
    for lang in set(langs):
        known_lang = Language(Language(lang).among(config.languages))
        of_langs[lang] = of_model.get(known_lang, default)
    return np.array([of_langs[lang] for lang in langs], dtype=np.float32)
