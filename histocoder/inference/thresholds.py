"""Thresholds of the flat head, by language."""

from collections.abc import Sequence

import numpy as np

from histocoder.config import ALL_LANGUAGES, ModelConfig
from histocoder.data.languages import known_language, same_language


def thresholds_of(config: ModelConfig, langs: Sequence[str], given: float | None = None) -> np.ndarray:
    """Return the threshold of each description, of shape (n,): the given one, its language's, or that of "unk"."""
    own = {lang: _threshold_of(config, lang) if given is None else given for lang in set(langs)}
    return np.array([own[lang] for lang in langs], dtype=np.float32)


def _threshold_of(config: ModelConfig, lang: str) -> float:
    known = same_language(known_language(lang, config.languages), config.thresholds)
    own = config.thresholds.get(known or ALL_LANGUAGES)
    return config.default_threshold if own is None else own
