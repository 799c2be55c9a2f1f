"""Codes of descriptions, as arrays and as a table."""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import pandas as pd

from histocoder.config import ModelConfig

NUM_CANDIDATES = 8
"""Codes of a row that the experts beside the decoder propose; the decoder adds its own."""
LEAST = 1e-9
"""Least probability of an expert, which is not 0 so that none has a veto."""


class Attribute(NamedTuple):
    """An attribute of n descriptions, such as status, as a model predicts it."""

    labels: tuple[str | None, ...]  # its K categories; None, the first, is none
    probs: np.ndarray  # their probabilities, of shape (n, K); NaN where there is no description

    @classmethod
    def of(cls, categories: Sequence[str], probs: np.ndarray) -> "Attribute":
        """Return an attribute with these categories, and none before them."""
        return cls((None, *categories), probs)

    @property
    def best(self) -> tuple[np.ndarray, np.ndarray]:
        """The most probable category of each description, and its probability, both of shape
        (n,).
        """
        # Without a description all are NaN, and the category is none.
        best = np.nan_to_num(self.probs).argmax(1)
        return np.array(self.labels, dtype=object)[best], self.probs.max(1)


class Prediction(NamedTuple):
    """Codes of n descriptions, the first or most probable first.

    In mode full there are no codes, but the probability of each code of the key.
    """

    codes: np.ndarray  # strings of shape (n, width); None where there is none
    probs: np.ndarray  # each code's probability, of shape (n, width); NaN where there is none
    conf: np.ndarray  # confidence in the whole prediction, of shape (n,)
    # those of the model, by the names of their columns
    attributes: Mapping[str, Attribute] = MappingProxyType({})

    @classmethod
    def missing(
        cls,
        num_rows: int,
        width: int,
        attributes: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ) -> "Prediction":
        """Return the prediction of rows without a description; see `ModelConfig.attributes`."""
        columns = {}
        for name, labels in attributes.items():
            probs = np.full((num_rows, 1 + len(labels)), np.nan)
            columns[name] = Attribute.of(labels, probs)
        codes = np.full((num_rows, width), None, dtype=object)
        probs = np.full((num_rows, width), np.nan)
        return cls(codes, probs, np.full(num_rows, np.nan), columns)

    @classmethod
    def above(cls, codes: np.ndarray, probs: np.ndarray, thresholds: np.ndarray) -> "Prediction":
        """Keep the first code of each row, and others with probabilities above its threshold (n,),
        in place.
        """
        # A row has one code at least, however unsure.
        left_out = probs <= thresholds[:, None]
        left_out[:, 0] = False
        codes[left_out] = None
        probs[left_out] = np.nan
        return cls(codes, probs, probs[:, 0].copy())

    def write(self, rows: np.ndarray, batch: "Prediction") -> None:
        """Write the prediction of a batch into these rows (B,)."""
        self.codes[rows] = batch.codes
        self.probs[rows] = batch.probs
        self.conf[rows] = batch.conf
        for name, attribute in batch.attributes.items():
            self.attributes[name].probs[rows] = attribute.probs

    def write_known(self, row: int, codes: Sequence[str], share: float) -> None:
        """Write the codes of a hand-coded description, and their share of its rows, into a row."""
        self.codes[row, : len(codes)] = codes
        self.probs[row, : len(codes)] = share
        self.conf[row] = share

    def take(self, rows: np.ndarray) -> "Prediction":
        """Return the prediction of these rows."""
        attributes = {}
        for name, attribute in self.attributes.items():
            attributes[name] = attribute._replace(probs=attribute.probs[rows])
        return Prediction(self.codes[rows], self.probs[rows], self.conf[rows], attributes)

    def drop_unsure(self, min_confidence: float) -> None:
        """Make the codes of rows with less `conf` missing, in place."""
        unsure = self.conf < min_confidence
        self.codes[unsure] = None
        self.probs[unsure] = np.nan

    def frame(self, config: ModelConfig, *, has_alternatives: bool = False) -> pd.DataFrame:
        """Return the columns of `Coder.predict`: codes as in the training data, `prob_1`, `desc_1`,
        …, `conf`.

        Behind them is each attribute, such as `status`, blank where there is none, and its
        probability, `status_prob`.

        If all codes but the first are alternatives to it, as of mode topk in a file, their columns
        begin with `alt_`.
        """
        width = self.codes.shape[1]
        if width < self.probs.shape[1]:  # mode full
            return pd.DataFrame(self.probs, columns=list(filter(None, config.codes)))

        columns: dict[str, np.ndarray] = {}
        for i, name in enumerate(config.code_columns(width)):
            start = ""
            if has_alternatives and i > 0:
                start = "alt_"
            codes = self.codes[:, i]
            columns[f"{start}{name}"] = codes
            columns[f"{start}prob_{i + 1}"] = self.probs[:, i]
            if config.descriptions:
                meanings = np.array(list(map(config.descriptions.get, codes)), dtype=object)
                columns[f"{start}desc_{i + 1}"] = meanings
        columns["conf"] = self.conf

        # The probability follows its category, and by this order `attribute_columns` finds both.
        for name, attribute in self.attributes.items():
            labels, probs = attribute.best
            columns[name] = labels
            columns[f"{name}_prob"] = probs
        return pd.DataFrame(columns)


class RankedPrediction(NamedTuple):
    """Codes of n descriptions, and the codes that all experts propose as the first of each."""

    answer: Prediction
    ranked: Prediction  # without attributes; the most probable first, `conf` is its probability


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
