"""The distinct descriptions among those that a user gives, and batches of them as a model reads
them.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import pandas as pd

from histocoder.config import ALL_LANGUAGES, ModelConfig, PredictOptions
from histocoder.data.cells import spoilt
from histocoder.errors import Notice, UserError, shown, warn_user
from histocoder.text import tokenizers
from histocoder.text.characters import is_blank, is_missing
from histocoder.text.languages import Language, chosen_language, not_in_table, with_nearest
from histocoder.text.normalize import normalize

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
        texts_of_rows = _python_values(texts)
        langs_of_rows = "unk" if lang is None else _python_values(lang)
        values: list[object]
        if isinstance(texts_of_rows, _ONE_VALUE) or not isinstance(texts_of_rows, Iterable):
            values = [texts_of_rows]
        else:
            values = list(texts_of_rows)

        if isinstance(langs_of_rows, str):
            langs = [chosen_language(langs_of_rows, languages)] * len(values)
        else:
            langs = list(langs_of_rows)
        if len(langs) != len(values):
            raise UserError(
                f"There are {len(values):,} descriptions, but {len(langs):,} languages."
            )

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
        texts, langs = (values[start : start + size] for values in (self.texts, self.langs))
        return Descriptions(texts, langs, np.arange(len(texts)))


def _python_values(column: Any) -> Any:
    """Return an Arrow array as a list, and anything else as it is."""
    return column.to_pylist() if hasattr(column, "to_pylist") else column


class DistinctDescriptions:
    """Gives each distinct description of a table's blocks an index, while there is room to remember
    them.

    `languages` are a model's; from `room` descriptions on, new ones are not remembered.
    """

    def __init__(self, languages: tuple[str, ...], *, room: float = math.inf) -> None:
        self._languages, self._room = languages, room
        self._indices: dict[tuple[object, str], int] = {}
        self._codes: dict[str, Language] = {}  # language as written -> its code

    def add(self, texts: Sequence[object], langs: Sequence[str]) -> Descriptions:
        """Return the new descriptions of a block, the shortest first; their indices follow those
        remembered.
        """
        self._read_languages(set(langs) - self._codes.keys())
        pairs = [(text, self._codes[lang]) for text, lang in zip(texts, langs, strict=True)]

        new = []
        for text, lang in set(pairs) - self._indices.keys():
            if isinstance(text, str) and not is_blank(text):
                new.append((text, lang))
        new.sort(key=lambda pair: (len(pair[0]), pair))
        new_texts = [text for text, _ in new]
        for text in sorted(set(new_texts)):
            if _may_be_missing(text):
                warn_user(
                    Notice(
                        f"The description {text!r} is coded as a word. If it is a missing one, "
                        "leave it blank."
                    )
                )

        first = len(self._indices)
        indices: dict[tuple[object, str], int] = {
            pair: first + number for number, pair in enumerate(new)
        }
        rows = [self._indices.get(pair, indices.get(pair, -1)) for pair in pairs]
        if len(self._indices) < self._room:
            self._indices |= indices
        return Descriptions(new_texts, [lang for _, lang in new], np.array(rows, dtype=np.int64))

    def _read_languages(self, langs: set[str]) -> None:
        """Read languages that are new; a notice names those that the model, or if it knows all, the
        table lacks.
        """
        for lang in langs:
            self._codes[lang] = Language(lang if isinstance(lang, str) else "")
        languages_of_model = {Language(lang) for lang in self._languages}
        languages_of_model.add(Language())
        strange = []
        for lang in langs:
            code = self._codes[lang]
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
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None, str]]:
    """Yield distinct descriptions as a model reads them, in batches of similar lengths, the
    shortest first.

    These are the indices of a batch (B,), its token ids (B, S), thresholds of the flat head (B,),
    where the model has such experts the characters (B, L) for linear ones, and the
    `end_characters` (B, 2) for that of nearest rows, and the language whose experts' weights count.
    A batch has at least so many descriptions, if there are, even if their lengths differ.
    """
    if not descriptions.texts:
        return
    langs = descriptions.langs
    lang_of_model = {lang: Language(lang).among(config.languages) for lang in set(langs)}
    normalized = normalize(descriptions.texts, config.text_normalization)
    joined = tokenizers.join_language(normalized, [lang_of_model[lang] for lang in langs])
    tokens = tokenizers.tokenize(joined, max_len=config.max_len, tokenizer=tokenizer)
    if tokens.num_cut:
        limit = f"{config.max_len} {tokenizer.unit}"
        warn_user(
            Notice(f"Descriptions that are longer than {limit}, with the language, are truncated.")
        )

    # A batch is of one language where the experts' weights differ between languages.
    weighted_langs = [ALL_LANGUAGES, *config.experts_by_language]
    index_of = {lang: index for index, lang in enumerate(weighted_langs)}
    weighting = np.array([index_of.get(lang_of_model[lang], 0) for lang in langs])
    order = np.lexsort((tokens.lengths, weighting))
    weighting = weighting[order]
    lengths = tokens.lengths[order]

    thresholds = thresholds_of(config, langs, options.threshold)
    has_linear_expert = config.num_linear_features or config.num_attribute_features
    start = 0
    while start < len(order):
        last = int(np.searchsorted(weighting, weighting[start], side="right"))
        longest = MAX_LENGTH_RATIO * lengths[start]
        end = start + int(np.searchsorted(lengths[start:last], longest, side="right"))
        end = max(end, start + at_least)
        end = min(end, start + (options.batch_size or at_least), last)
        rows = order[start:end]
        lang = weighted_langs[weighting[start]]
        start = end

        ids = tokens.pad(rows, max_len=config.max_len, num_positions=config.pad_to)
        characters = None
        ends = None
        if has_linear_expert or config.num_nearest_rows:
            of_rows = [joined[row] for row in rows]
            if has_linear_expert:
                characters = tokenizers.lower_characters(of_rows)
            if config.num_nearest_rows:
                ends = tokenizers.end_characters(of_rows)
        yield rows, ids, thresholds[rows], characters, ends, lang


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
