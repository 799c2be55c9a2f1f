"""Confidence that holds in other sources than those that a model learned from."""

from collections.abc import Mapping, Sequence
from operator import itemgetter

import numpy as np

from histocoder.config.model import ALL_LANGUAGES
from histocoder.errors import Notice, warn_user
from histocoder.inference.descriptions import Descriptions
from histocoder.inference.predictions import Prediction
from histocoder.text.languages import NAMES, Language

_LEAST_DOUBT = 1e-6  # least probability on either side of odds
MAX_AGREEMENT = 0.88
"""Share of titles that coders of different archives code alike, at most: no confidence is higher."""
MIN_KNOWN_TITLES = 2_000  # of a language, below which a model knows little of it


def with_other_sources(
    prediction: Prediction,
    descriptions: Descriptions,
    scales: Mapping[str, Mapping[str, float]],
) -> Prediction:
    """Return the prediction of each row with the confidence that holds in other sources, and say of
    which languages a model knows little.

    See `elsewhere` for `scales`.
    """
    say_little_known(descriptions.langs, scales)

    # The last language is that of a missing description, whose index is -1.
    langs = np.array([*descriptions.langs, ALL_LANGUAGES], dtype=object)
    conf = elsewhere(prediction.conf, langs[descriptions.rows], scales)
    return prediction._replace(conf=conf)


def elsewhere(
    conf: np.ndarray, langs: Sequence[str], scales: Mapping[str, Mapping[str, float]]
) -> np.ndarray:
    """Return confidences (n,) as they hold in sources that a model did not learn from.

    `scales` has the `slope` and the `intercept` of the log-odds of each language, and of all
    others: where a source was left out of training, they make the confidence in its rows the share
    that is right (Platt 1999), below `MAX_AGREEMENT`.
    """
    rows = [scales.get(lang, scales[ALL_LANGUAGES]) for lang in langs]
    slopes = np.array(list(map(itemgetter("slope"), rows)))
    intercepts = np.array(list(map(itemgetter("intercept"), rows)))

    # scipy has functions for both, and takes a tenth of a program's start to import
    doubtful = np.clip(conf, _LEAST_DOUBT, 1 - _LEAST_DOUBT)
    odds = np.log(doubtful / (1 - doubtful))
    return MAX_AGREEMENT / (1 + np.exp(-(slopes * odds + intercepts)))


def say_little_known(langs: Sequence[str], scales: Mapping[str, Mapping[str, float]]) -> None:
    """Say of which languages a model knows little, if it records how many titles it learned."""
    # A model that does not record the number, such as OccCANINE, says nothing.
    little = []
    for lang in sorted(set(langs)):
        if 0 < scales.get(lang, {}).get("titles", 0) < MIN_KNOWN_TITLES:
            little.append(f"{NAMES.get(Language(lang).iso, lang)} ({lang})")
    if little:
        warn_user(
            Notice(
                f"The model has learned little of {', '.join(little)}, and its confidence there is "
                "low: check more of it, and train a model of your own on what you decide."
            )
        )
