"""Descriptions as what a model reads, in batches of similar lengths, and the thresholds of their languages."""

from collections.abc import Iterator, Sequence

import numpy as np

from histocoder.config import ALL_LANGUAGES, ModelConfig
from histocoder.data.languages import Language
from histocoder.data.normalize import normalize
from histocoder.errors import CountedNotice, warn_user
from histocoder.formatters.tokenizers import Tokenizer, join_language, lower_characters, tokenize

_LIKE = 1.25  # maximum ratio of lengths within a batch, if there are enough descriptions


def readings(
    texts: Sequence[str],
    langs: Sequence[str],
    config: ModelConfig,
    tokenizer: Tokenizer,
    *,
    at_least: int,
    at_most: int,
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray | None]]:
    """Yield descriptions in batches of similar lengths, the shortest first.

    Parameters
    ----------
    texts, langs : sequence of str, of n
        Descriptions, and their languages; see `Language`.
    config : ModelConfig
    tokenizer : Tokenizer
    at_least, at_most : int
        Number of descriptions of a batch; at least so many, if there are, even if their lengths differ.

    Yields
    ------
    rows : ndarray of int, of shape (B,)
        Indices of the batch's descriptions.
    ids : ndarray of int, of shape (B, S)
        Token ids.
    characters : ndarray of int, of shape (B, L), or None
        Characters for the linear expert, if the model has one.
    """
    own = {lang: Language(lang).among(config.languages) for lang in set(langs)}
    joined = join_language(normalize(texts, config.text_normalization), [own[lang] for lang in langs])
    tokens = tokenize(joined, max_len=config.max_len, tokenizer=tokenizer)
    if tokens.num_cut:
        limit = f"longer than {config.max_len} {tokenizer.unit}."
        one = f"description is truncated: with the language it is {limit}"
        many = f"descriptions are truncated: with the language they are {limit}"
        warn_user(CountedNotice(tokens.num_cut, one, many))
    order = np.argsort(tokens.lengths, kind="stable")
    lengths, start = tokens.lengths[order], 0
    while start < len(order):
        alike = int(np.searchsorted(lengths, _LIKE * lengths[start], side="right"))
        rows = order[start : min(max(alike, start + at_least), start + at_most)]
        ids = tokens.pad(rows, max_len=config.max_len, num_positions=config.pad_to)
        characters = lower_characters([joined[row] for row in rows]) if config.num_linear_features else None
        yield rows, ids, characters
        start += len(rows)


def thresholds_of(config: ModelConfig, langs: Sequence[str], given: float | None = None) -> np.ndarray:
    """Return the threshold of each description, of shape (n,): the given one, its language's, or that of "unk"."""
    if given is not None:
        return np.full(len(langs), given, dtype=np.float32)
    own: dict[str, float] = {Language(lang): threshold for lang, threshold in config.thresholds.items()}
    default = own.get(ALL_LANGUAGES, config.default_threshold)
    found = {lang: own.get(Language(Language(lang).among(config.languages)), default) for lang in set(langs)}
    return np.array([found[lang] for lang in langs], dtype=np.float32)
