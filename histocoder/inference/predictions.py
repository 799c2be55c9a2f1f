"""Codes of descriptions, as arrays and as a table."""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from histocoder.config import ModelConfig

NUM_CANDIDATES = (
    8  # codes of a row that experts beside the decoder propose; the decoder adds its own
)
LEAST = 1e-9  # least probability of an expert, which is not 0 so that none has a veto


class Attribute(NamedTuple):
    """An attribute of n descriptions, such as status, as a model predicts it."""

    labels: tuple[str | None, ...]  # its K categories; None, the first, is none
    probs: np.ndarray  # their probabilities, of shape (n, K); NaN where there is no description

    @property
    def best(self) -> tuple[np.ndarray, np.ndarray]:
        """The most probable category of each description, and its probability, both of shape
        (n,).
        """
        best = np.nan_to_num(self.probs).argmax(1)
        return np.array(self.labels, dtype=object)[best], self.probs.max(1)


class Prediction(NamedTuple):
    """Codes of n descriptions, the first or most probable first.

    In mode full there are no codes, but the probability of each code of the key.
    """

    codes: np.ndarray  # strings of shape (n, width); None where there is none
    probs: np.ndarray  # each code's probability, of shape (n, width); NaN where there is none
    conf: np.ndarray  # confidence in the whole prediction, of shape (n,)
    attributes: Mapping[str, Attribute] = MappingProxyType(
        {}
    )  # the model's, by the names of their columns

    @property
    def arrays(self) -> list[np.ndarray]:
        """All arrays, from which `of` makes a prediction."""
        return [*self[:3], *(attribute.probs for attribute in self.attributes.values())]

    @classmethod
    def of(cls, arrays: Sequence[np.ndarray], config: ModelConfig) -> "Prediction":
        """Return the prediction of these arrays."""
        codes, probs, conf, *rest = arrays
        pairs = zip(config.attributes.items(), rest, strict=True)
        return cls(
            codes,
            probs,
            conf,
            {name: Attribute((None, *labels), own) for (name, labels), own in pairs},
        )

    @classmethod
    def above(cls, codes: np.ndarray, probs: np.ndarray, thresholds: np.ndarray) -> "Prediction":
        """Keep the first code of each row, and others with probabilities above its threshold (n,),
        in place.
        """
        left_out = probs <= thresholds[:, None]
        left_out[:, 0] = False
        codes[left_out], probs[left_out] = None, np.nan
        return cls(codes, probs, probs[:, 0].copy())

    def drop_unsure(self, min_confidence: float) -> None:
        """Make the codes of rows with less `conf` missing, in place."""
        unsure = self.conf < min_confidence
        self.codes[unsure], self.probs[unsure] = None, np.nan

    def frame(self, config: ModelConfig, *, has_alternatives: bool = False) -> pd.DataFrame:
        """Return the columns of `Coder.predict`: codes as in the training data, `prob_1`, `desc_1`,
        …, `conf`.

        Behind them is each attribute, such as `status`, blank where there is none, and its
        probability, `status_prob`.

        If all codes but the first are alternatives to it, as of mode topk in a file, their columns
        begin with `alt_`.
        """
        width = self.codes.shape[1]
        if width < self.probs.shape[1]:
            return pd.DataFrame(self.probs, columns=list(filter(None, config.codes)))
        columns: dict[str, np.ndarray] = {}
        for i, name in enumerate(config.code_columns(width)):
            alt = "alt_" if has_alternatives and i else ""
            columns |= {f"{alt}{name}": self.codes[:, i], f"{alt}prob_{i + 1}": self.probs[:, i]}
            if config.descriptions:
                meanings = [config.descriptions.get(code) for code in self.codes[:, i]]
                columns[f"{alt}desc_{i + 1}"] = np.array(meanings, dtype=object)
        columns["conf"] = self.conf
        for name, attribute in self.attributes.items():
            columns[name], columns[f"{name}_prob"] = attribute.best
        return pd.DataFrame(columns)


def join_rows(
    parts: Iterable[tuple[np.ndarray, Sequence[Any]]], rows: np.ndarray
) -> list[np.ndarray]:
    """Put the arrays of batches, each with the indices of its descriptions, in the order of `rows`
    (n,).

    These are indices of descriptions; -1 stands for a missing one, which gets None or NaN.
    """
    indices, found = zip(*parts, strict=True)
    order = np.concatenate(indices).argsort()
    order = np.append(order, len(order))  # of the missing one, which is the last
    missing = (np.full_like(array, None, shape=(1, *array.shape[1:])) for array in found[0])
    return [np.concatenate(arrays)[order[rows]] for arrays in zip(*found, missing, strict=True)]


def attribute_columns(names: Iterable[str]) -> dict[str, str]:
    """Return the columns of attributes among those of `Prediction.frame` -> their probabilities';
    see `code_columns`.

    Examples
    --------
    >>> attribute_columns(["hisco_1", "prob_1", "conf", "status", "status_prob"])
    {'status': 'status_prob'}
    """
    return {name: prob for name, prob in itertools.pairwise(names) if prob == f"{name}_prob"}


def code_columns(names: Iterable[str]) -> dict[str, str]:
    """Return the columns of codes among those of `Prediction.frame`, with or without prefixes ->
    their probabilities'.

    Examples
    --------
    >>> code_columns(["hisco_1", "prob_1", "desc_1", "conf"])
    {'hisco_1': 'prob_1'}
    """
    pairs = itertools.pairwise(names)
    return {code: prob for code, prob in pairs if re.search(r"prob_[0-9]+$", prob)}
